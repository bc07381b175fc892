// Image files to the pixels that the model gets, as in evals/encoders/pixels.py: the shorter side is resized by Pillow's bicubic filter for
// 8 bits, with the same integer arithmetic, and the centre is cut out.

const BITS = 22; // precision of Pillow's coefficients
const MAX_PIXELS = 89_478_485; // Pillow's limit

// Return {width, height, data}: RGBA, upright, transparent parts on white. Throws if the browser cannot read it, or if it has more pixels than
// Python accepts; browsers draw larger images as black.
export async function decodeImage(file) {
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  const { width, height } = bitmap;
  if (width * height > MAX_PIXELS) throw new RangeError(`too many pixels, got ${width} x ${height}. Reduce it to 89 million.`);
  const canvas = new OffscreenCanvas(width, height), brush = canvas.getContext("2d", { willReadFrequently: true });
  brush.fillStyle = "#fff";
  brush.fillRect(0, 0, width, height);
  brush.drawImage(bitmap, 0, 0);
  return { width, height, data: brush.getImageData(0, 0, width, height).data };
}

// Return (3, size, size) uint8, and the crop as shares of width and height: [left, top, right, bottom].
export function modelPixels({ width, height, data }, size, resize) {
  const short = Math.min(width, height), scale = (side) => (side === short ? resize : Math.trunc((resize * side) / short));
  const wide = scale(width), high = scale(height);
  const left = roundHalfEven((wide - size) / 2), top = roundHalfEven((high - size) / 2);
  const rows = resample(data, width, height, wide); // columns first, as in Pillow
  const pixels = new Uint8Array(3 * size * size), weights = coefficients(height, high);
  for (let y = 0; y < size; y++) {
    const { first, values } = weights(y + top);
    for (let x = 0; x < size; x++) {
      for (let channel = 0; channel < 3; channel++) {
        let sum = 2 ** (BITS - 1);
        for (let i = 0; i < values.length; i++) sum += values[i] * rows[((first + i) * wide + x + left) * 3 + channel];
        pixels[(channel * size + y) * size + x] = clip(sum);
      }
    }
  }
  const side = (short * size) / resize;
  const box = [(width - side) / 2 / width, (height - side) / 2 / height, (width + side) / 2 / width, (height + side) / 2 / height];
  return { pixels, box };
}

// RGBA (height, width) to RGB (height, wide), bicubic along rows.
function resample(data, width, height, wide) {
  const out = new Uint8Array(height * wide * 3), weights = coefficients(width, wide);
  for (let x = 0; x < wide; x++) {
    const { first, values } = weights(x);
    for (let y = 0; y < height; y++) {
      for (let channel = 0; channel < 3; channel++) {
        let sum = 2 ** (BITS - 1);
        for (let i = 0; i < values.length; i++) sum += values[i] * data[(y * width + first + i) * 4 + channel];
        out[(y * wide + x) * 3 + channel] = clip(sum);
      }
    }
  }
  return out;
}

// Return a function from an output position to the first input position and integer weights.
function coefficients(from, to) {
  const scale = from / to, stretch = Math.max(scale, 1), support = 2 * stretch;
  return (at) => {
    const centre = (at + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5)), end = Math.min(from, Math.trunc(centre + support + 0.5));
    const values = Array.from({ length: end - first }, (_, i) => bicubic((i + first - centre + 0.5) / stretch));
    const total = values.reduce((a, b) => a + b, 0);
    return { first, values: values.map((value) => Math.trunc((value / total) * 2 ** BITS + (value < 0 ? -0.5 : 0.5))) };
  };
}

function bicubic(value) {
  const x = Math.abs(value), a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

const clip = (sum) => Math.min(255, Math.max(0, Math.floor(sum / 2 ** BITS)));

function roundHalfEven(value) {
  const low = Math.floor(value);
  return value - low === 0.5 ? low + (low % 2) : Math.round(value);
}
