// A task's score for any selection of units. Sums are fp64 and updated by the units that were switched, so a switch costs as much as one
// unit. Switching a unit off and on changes sums by rounding only, nine digits below the values.

import { accuracy, accuracyGain, halfWidth } from "./intervals.js";
import { classificationHits, knnHits, questionHits, retrievalHits } from "./hits.js";

const PAUSE = 25; // ms of work before the page may react

export class TaskScores {
  constructor(facts, buffer) {
    this.facts = facts;
    this.part = {};
    for (const { name, dtype, shape, offset } of facts.layout) {
      const size = shape.reduce((a, b) => a * b, 1);
      this.part[name] = { shape, values: dtype === "f" ? new Float32Array(buffer, offset, size) : new Int32Array(buffer, offset, size) };
    }
    const { left, right } = this.part;
    this.units = left.shape[0];
    this.rows = left.shape[1];
    this.columns = right ? right.shape[1] : 1;
    this.depth = right ? left.shape[2] : 1;
    this.squares = {};
    if (facts.kind === "retrieval" || facts.kind === "knn") this.squares.left = squaredNorms(left);
    if (facts.kind === "knn") this.squares.right = squaredNorms(right);
    this.now = this.#empty();
    this.all = null;
  }

  #empty() {
    const of = { on: new Uint8Array(this.units), total: new Float64Array(this.rows * this.columns), norms: {} };
    for (const side of Object.keys(this.squares)) of.norms[side] = new Float64Array(this.part[side].shape[1]);
    return of;
  }

  // Sum over all units, with pauses in which the page reacts, and compute the first score.
  async prepare() {
    const all = this.#empty();
    let since = performance.now();
    for (let u = 0; u < this.units; u++) {
      this.#add(all, u, 1);
      if (performance.now() - since < PAUSE) continue;
      await new Promise((done) => setTimeout(done));
      since = performance.now();
    }
    this.all = all;
    this.allRight = this.#right(all);
    this.whole = this.#score(this.allRight);
    this.now = copySums(all);
    return this;
  }

  // Score the units that are on, (U,) of zeros and ones; null if none is.
  set(on) {
    const apart = (other) => on.reduce((sum, value, u) => sum + (value !== other[u] ? 1 : 0), 0);
    const count = on.reduce((a, b) => a + b, 0);
    const from = apart(this.now.on);
    // Start from all or from none if that takes fewer switches, so that "all on" is exact.
    if (this.units - count < from) this.now = copySums(this.all);
    else if (count < from) this.now = this.#empty();
    for (let u = 0; u < this.units; u++) if (on[u] !== this.now.on[u]) this.#add(this.now, u, on[u] ? 1 : -1);
    if (!count) return null;
    const right = this.#right(this.now);
    return { ...this.#score(right), gain: this.#gain(right) };
  }

  // Score a unit alone, and all others without it.
  aloneAndWithout(u) {
    const alone = this.#empty(), without = copySums(this.all);
    this.#add(alone, u, 1);
    this.#add(without, u, -1);
    return { alone: this.#score(this.#right(alone)).value, without: this.units > 1 ? this.#score(this.#right(without)).value : null };
  }

  #add(of, u, sign) {
    of.on[u] = sign > 0 ? 1 : 0;
    const { total } = of, n = this.rows, m = this.columns, d = this.depth;
    for (const [side, table] of Object.entries(this.squares)) {
      const norms = of.norms[side], own = table.subarray(u * norms.length);
      for (let i = 0; i < norms.length; i++) norms[i] += sign * own[i];
    }
    const left = this.part.left.values;
    if (!this.part.right) {
      for (let i = 0, at = u * n; i < n; i++) total[i] += sign * left[at + i];
      return;
    }
    const right = this.part.right.values;
    for (let i = 0; i < n; i++) {
      const a = (u * n + i) * d;
      for (let j = 0; j < m; j++) {
        let sum = 0;
        for (let k = 0, b = (u * m + j) * d; k < d; k++) sum += left[a + k] * right[b + k];
        total[i * m + j] += sign * sum;
      }
    }
  }

  #right(of) {
    const { kind, facts } = this.facts, { part } = this;
    const sizes = {};
    for (const [side, norms] of Object.entries(of.norms)) sizes[side] = norms.map((value) => 1 / Math.max(Math.sqrt(Math.max(value, 0)), 1e-12));
    if (kind === "pairs") return Uint8Array.from(of.total, (value) => (value > 0 ? 1 : 0));
    if (kind === "questions") return questionHits(of.total, part.tie.values, facts.comparisons);
    if (kind === "zeroshot") return classificationHits(of.total, part.labels.values, this.columns);
    if (kind === "knn") {
      const groups = part.groups && { own: part.groups.values, bank: part.bank_groups.values };
      return knnHits(of.total, part.labels.values, part.bank_labels.values, facts, sizes, groups);
    }
    return retrievalHits(of.total, part.owner.values, this.rows, facts.k, sizes.left);
  }

  #groups() {
    const { kind, metric, facts } = this.facts;
    if (facts.average === "macro") return [this.part.kinds.values, facts.kinds.length];
    if (kind === "questions") return [new Int32Array(this.rows / facts.comparisons), 1];
    if (metric === "mean_per_class_recall") return [this.part.labels.values, this.columns];
    return [new Int32Array(this.rows), 1];
  }

  #score(right) {
    if (this.facts.kind !== "retrieval") return accuracy(right, ...this.#groups());
    const { value, influence } = this.#recalled(right);
    const half = halfWidth(influence);
    return { value, low: Math.max(0, value - half), high: Math.min(1, value + half) };
  }

  #gain(right) {
    if (this.facts.kind !== "retrieval") return accuracyGain(right, this.allRight, ...this.#groups());
    const ours = this.#recalled(right), all = this.#recalled(this.allRight), value = ours.value - all.value;
    const half = halfWidth(ours.influence.map((one, i) => one - all.influence[i]));
    return { value, low: value - half, high: value + half };
  }

  // Return the mean of both directions, and the influence of each image with its texts on it.
  #recalled({ texted, pictured }) {
    const owner = this.part.owner.values, own = new Float64Array(this.rows), hits = new Float64Array(this.rows);
    for (let j = 0; j < owner.length; j++) {
      own[owner[j]] += 1;
      hits[owner[j]] += pictured[j];
    }
    const asked = own.reduce((sum, count) => sum + (count > 0 ? 1 : 0), 0);
    const text = texted.reduce((a, b) => a + b, 0) / asked, image = hits.reduce((a, b) => a + b, 0) / owner.length;
    const influence = hits.map((hit, i) => (own[i] > 0
      ? ((texted[i] - text) * this.rows) / asked / 2 + ((hit - image * own[i]) * this.rows) / owner.length / 2 : 0));
    return { value: (text + image) / 2, influence };
  }
}

function copySums({ on, total, norms }) {
  return { on: on.slice(), total: total.slice(), norms: Object.fromEntries(Object.entries(norms).map(([side, of]) => [side, of.slice()])) };
}

// Convert (U, n, d) to squared norms (U, n).
function squaredNorms({ shape, values }) {
  const [units, n, d] = shape, found = new Float64Array(units * n);
  for (let i = 0; i < found.length; i++) for (let k = 0; k < d; k++) found[i] += values[i * d + k] ** 2;
  return found;
}
