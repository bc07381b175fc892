// Attention over an image, drawn as in evals/slots/overlay.py: attended pixels keep their colours, others become grey and dim,
// and a line encloses half of the attention.

const DIMMED = 0.4, LIFT = 20, OUTSIDE = 0.15, SMALLEST_PART = 0.05;

export class Heat {
  // size: pixels of the longer side
  constructor(image, attention, maps, size) {
    const scale = size / Math.max(image.naturalWidth, image.naturalHeight);
    this.width = Math.max(1, Math.round(image.naturalWidth * scale));
    this.height = Math.max(1, Math.round(image.naturalHeight * scale));
    this.side = attention?.side ?? 0;
    this.maps = maps;
    const [left, top, right, bottom] = attention?.box ?? [0, 0, 1, 1];
    this.box = { left: left * this.width, top: top * this.height, right: right * this.width, bottom: bottom * this.height };
    this.pixels = this.#read(image);
    this.strongest = maps?.reduce((a, b) => Math.max(a, b), 0) ?? 0;
  }

  // Return the largest share of a slot's attention on one patch.
  peak(slot) {
    return this.#cells(slot).reduce((a, b) => Math.max(a, b), 0);
  }

  // own: scale each slot to its own peak, instead of all to the strongest.
  draw(canvas, slot, own) {
    canvas.width = this.width;
    canvas.height = this.height;
    const brush = canvas.getContext("2d"), out = brush.createImageData(this.width, this.height);
    const levels = this.#levels(slot, Math.max(own ? this.peak(slot) : this.strongest, 1e-12));
    const line = contour(levels, this.width);
    for (let i = 0; i < levels.length; i++) {
      const [red, green, blue] = this.pixels.subarray(4 * i, 4 * i + 3);
      const grey = 0.299 * red + 0.587 * green + 0.114 * blue, level = levels[i], share = Math.sqrt(Math.max(level, 0));
      const rest = (1 - share) * (DIMMED * grey + LIFT);
      const colour = level < 0 ? [OUTSIDE * grey, OUTSIDE * grey, OUTSIDE * grey]
        : line[i] ? [255, 255, 255] : [share * red + rest, share * green + rest, share * blue + rest];
      out.data.set([...colour, 255], 4 * i);
    }
    brush.putImageData(out, 0, 0);
  }

  #cells(slot) {
    const cells = this.side * this.side;
    return this.maps.subarray(slot * cells, (slot + 1) * cells);
  }

  #read(image) {
    const canvas = document.createElement("canvas");
    canvas.width = this.width;
    canvas.height = this.height;
    const brush = canvas.getContext("2d");
    brush.drawImage(image, 0, 0, this.width, this.height);
    return brush.getImageData(0, 0, this.width, this.height).data;
  }

  // Return the attention at every pixel, bilinear, as a share of `scale`, at most 1; below 0 outside of the model's crop.
  #levels(slot, scale) {
    const { left, top, right, bottom } = this.box, { side, width, height } = this;
    const cells = this.#cells(slot), levels = new Float32Array(width * height).fill(-1);
    const place = (at, begin, end) => {
      const exact = Math.min(Math.max(((at + 0.5 - begin) / (end - begin)) * side - 0.5, 0), side - 1), low = Math.floor(exact);
      return [low, Math.min(low + 1, side - 1), exact - low];
    };
    const inside = (at, begin, end) => at + 0.5 >= begin && at + 0.5 <= end;
    for (let y = 0; y < height; y++) {
      if (!inside(y, top, bottom)) continue;
      const [row, next, down] = place(y, top, bottom);
      for (let x = 0; x < width; x++) {
        if (!inside(x, left, right)) continue;
        const [column, after, along] = place(x, left, right);
        const upper = cells[row * side + column] * (1 - along) + cells[row * side + after] * along;
        const lower = cells[next * side + column] * (1 - along) + cells[next * side + after] * along;
        levels[y * width + x] = Math.min(1, (upper * (1 - down) + lower * down) / scale);
      }
    }
    return levels;
  }
}

// Return the border pixels of the smallest region with half of the attention, without parts of less than 5 % of its pixels; none if the
// region covers more than a quarter.
function contour(levels, width) {
  const line = new Uint8Array(levels.length), falling = levels.filter((level) => level >= 0).sort().reverse();
  const total = falling.reduce((a, b) => a + b, 0);
  if (!falling.length || total <= 0) return line;
  let sum = 0, last = 0;
  while (last < falling.length - 1 && (sum += falling[last]) < total / 2) last++;
  const area = falling.filter((level) => level >= falling[last]).length;
  if (area > falling.length / 4) return line;
  const inside = largeParts(levels.map((level) => Number(level >= falling[last])), width, SMALLEST_PART * area);
  const height = levels.length / width;
  for (let i = 0; i < levels.length; i++) {
    if (!inside[i]) continue;
    const x = i % width, y = Math.floor(i / width);
    line[i] = Number((x > 0 && !inside[i - 1]) || (x < width - 1 && !inside[i + 1]) || (y > 0 && !inside[i - width]) || (y < height - 1 && !inside[i + width]));
  }
  return line;
}

// Return the connected parts of a region that have at least `smallest` pixels.
function largeParts(region, width, smallest) {
  const left = Uint8Array.from(region), large = new Uint8Array(region.length);
  for (let first = 0; first < left.length; first++) {
    if (!left[first]) continue;
    const part = [first];
    left[first] = 0;
    for (let next = 0; next < part.length; next++) {
      const i = part[next], x = i % width;
      for (const j of [x > 0 ? i - 1 : -1, x < width - 1 ? i + 1 : -1, i - width, i + width]) {
        if (!left[j]) continue;
        left[j] = 0;
        part.push(j);
      }
    }
    if (part.length >= smallest) for (const i of part) large[i] = 1;
  }
  return large;
}
