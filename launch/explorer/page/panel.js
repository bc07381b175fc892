// One slot: its name and note, what it reads in the caption, and what it does alone; and captions of the image in sight.

import { made } from "./boxes.js";
import { percent } from "./table.js";

// found: of a query, {text, images: [{picture, words}]}.
export function slotFacts(home, slot, attention, weights, scores, query) {
  const found = [];
  if (weights) {
    const words = attention.words.map((word, i) => ({ word, share: weights[slot * attention.words.length + i] }));
    const most = words.sort((a, b) => b.share - a.share).slice(0, 4).map(({ word, share }) => `${word} ${percent(share)} %`);
    found.push(made("h3", { text: "Words of the caption it attends to" }), made("p", { class: "words", dir: "auto", text: most.join(", ") }));
  }
  const rows = scores.map((score) => {
    if (!score) return null;
    const { alone, without } = score.aloneAndWithout(slot);
    return made("tr", {}, made("th", { scope: "row", text: score.facts.name }), made("td", { class: "number", text: percent(alone) }),
      made("td", { class: "number", text: without === null ? "–" : percent(without) }));
  }).filter(Boolean);
  if (rows.length) {
    const heads = ["task", "alone", "all others"].map((text) => made("th", { scope: "col", text }));
    found.push(made("h3", { text: "Scores" }), made("table", {}, made("thead", {}, made("tr", {}, ...heads)), made("tbody", {}, ...rows)));
  }
  if (query) {
    const pictures = query.images.map(({ picture, words }) => made("img", { src: picture, alt: words, title: words, loading: "lazy", width: 72, height: 72 }));
    found.push(made("p", { class: "note", text: query.text }), made("div", { class: "bar" }, ...pictures));
  }
  home.replaceChildren(...found);
}

// How well captions fit an image, by all slots and by those that are on.
export class Captions {
  constructor(home) {
    this.home = home;
    this.texts = [];
  }

  clear() {
    this.texts = [];
    this.home.replaceChildren();
  }

  show(texts, shares, squares, on) {
    Object.assign(this, { texts, shares, squares });
    this.paint(on);
  }

  paint(on) {
    if (!this.texts.length) return;
    const every = on.map(() => 1), all = this.#similar(every), chosen = on.some((value) => value) ? this.#similar(on) : null;
    const best = (values) => values.indexOf(Math.max(...values));
    const rows = this.texts.map((text, i) => made("tr", {}, made("th", { scope: "row", text, dir: "auto" }),
      made("td", { class: "number", text: all[i].toFixed(3) + (best(all) === i ? " best" : "") }),
      made("td", { class: "number", text: chosen ? chosen[i].toFixed(3) + (best(chosen) === i ? " best" : "") : "–" })));
    const heads = ["caption", "cosine, all", "chosen"].map((text) => made("th", { scope: "col", text }));
    this.home.replaceChildren(made("table", {}, made("thead", {}, made("tr", {}, ...heads)), made("tbody", {}, ...rows)));
  }

  #similar(on) {
    const units = on.length;
    let square = 0;
    for (let u = 0; u < units; u++) square += on[u] * this.squares[u];
    return this.texts.map((_, i) => {
      let sum = 0;
      for (let u = 0; u < units; u++) sum += on[u] * this.shares[i * units + u];
      return sum / Math.max(Math.sqrt(square), 1e-12);
    });
  }
}
