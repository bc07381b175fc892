// Attention over an image: grey below, a slot's share of attention above it where the model looked.

const SIDE = 112; // pixels of a canvas's longest side

export class Heat {
  constructor(image, attention, maps, colours) {
    const scale = SIDE / Math.max(image.naturalWidth, image.naturalHeight);
    this.width = Math.max(1, Math.round(image.naturalWidth * scale));
    this.height = Math.max(1, Math.round(image.naturalHeight * scale));
    this.image = image;
    this.colours = colours;
    this.side = attention?.side ?? 0;
    this.maps = maps;
    const box = attention?.box ?? [0, 0, 1, 1];
    this.box = [box[0] * this.width, box[1] * this.height, (box[2] - box[0]) * this.width, (box[3] - box[1]) * this.height];
    this.small = document.createElement("canvas");
    this.small.width = this.small.height = Math.max(1, this.side);
  }

  // The share of its attention that a slot gives to the patch it looks at most.
  peak(slot) {
    const cells = this.side * this.side;
    return this.maps.subarray(slot * cells, (slot + 1) * cells).reduce((a, b) => Math.max(a, b), 0);
  }

  draw(canvas, slot) {
    canvas.width = this.width;
    canvas.height = this.height;
    const brush = canvas.getContext("2d");
    if (!this.maps) {
      brush.drawImage(this.image, 0, 0, this.width, this.height);
      return;
    }
    brush.filter = "grayscale(1) brightness(0.25)"; // what the model did not see stays dark
    brush.drawImage(this.image, 0, 0, this.width, this.height);
    brush.save();
    brush.beginPath();
    brush.rect(...this.box);
    brush.clip();
    brush.filter = "grayscale(1) brightness(0.4)";
    brush.drawImage(this.image, 0, 0, this.width, this.height);
    brush.filter = "none";
    brush.globalCompositeOperation = "lighter";
    brush.globalAlpha = 0.6;
    brush.drawImage(this.#coloured(slot), ...this.box);
    brush.restore();
  }

  #coloured(slot) {
    const cells = this.side * this.side, brush = this.small.getContext("2d"), peak = Math.max(this.peak(slot), 1e-12);
    const pixels = brush.createImageData(this.side, this.side);
    for (let i = 0; i < cells; i++) {
      const colour = this.colours[Math.round((255 * this.maps[slot * cells + i]) / peak)];
      pixels.data.set([...colour, 255], 4 * i);
    }
    brush.putImageData(pixels, 0, 0);
    return this.small;
  }
}
