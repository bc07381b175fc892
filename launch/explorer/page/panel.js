// Facts about one slot: its scores alone, its share of a query; and captions of the current image.

import { element } from "./listbox.js";
import { percent } from "./table.js";

// query: {text, images: [{picture, words}]}
export function slotFacts(home, slot, scores, query) {
  const parts = [];
  const rows = scores.map((score) => {
    if (!score) return null;
    const { alone, without } = score.aloneAndWithout(slot);
    return element("tr", {}, element("th", { scope: "row", text: score.facts.name }), element("td", { class: "number", text: percent(alone) }),
      element("td", { class: "number", text: without === null ? "–" : percent(without) }));
  }).filter(Boolean);
  if (rows.length) {
    const heads = ["task", "alone", "all others"].map((text) => element("th", { scope: "col", text }));
    parts.push(element("h3", { text: "Scores" }), element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
  }
  if (query) {
    const pictures = query.images.map(({ picture, words }) => element("img", { src: picture, alt: words, title: words, loading: "lazy", width: 72, height: 72 }));
    parts.push(element("p", { class: "note", text: query.text }), element("div", { class: "bar" }, ...pictures));
  }
  home.replaceChildren(...parts);
}

// Similarity of captions and an image, with all slots and with those that are on.
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
    const rows = this.texts.map((text, i) => element("tr", {}, element("th", { scope: "row", text, dir: "auto" }),
      element("td", { class: "number", text: all[i].toFixed(3) + (best(all) === i ? " best" : "") }),
      element("td", { class: "number", text: chosen ? chosen[i].toFixed(3) + (best(chosen) === i ? " best" : "") : "–" })));
    const heads = ["caption", "cosine, all", "chosen"].map((text) => element("th", { scope: "col", text }));
    this.home.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
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
