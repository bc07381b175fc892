// One task's score for any choice of units. Sums are held in fp64 and changed by the units that were switched: a switch costs one
// unit's share, and what is switched there and back is as it was, to rounding that is nine digits below the shares' own.

import { accuracy, gained, halfWidth } from "./intervals.js";
import { classified, retrieved, voted } from "./ranks.js";

const PAUSE = 25; // ms of work between two chances for the page

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
    if (facts.kind === "retrieval" || facts.kind === "knn") this.squares.left = squared(left);
    if (facts.kind === "knn") this.squares.right = squared(right);
    this.now = this.#empty();
    this.all = null;
  }

  #empty() {
    const of = { on: new Uint8Array(this.units), total: new Float64Array(this.rows * this.columns), norms: {} };
    for (const side of Object.keys(this.squares)) of.norms[side] = new Float64Array(this.part[side].shape[1]);
    return of;
  }

  // All units, in pieces that leave the page alive; then the first score.
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
    this.now = copied(all);
    return this;
  }

  // Which units are on: (U,) of zeros and ones; null where none is.
  set(on) {
    const apart = (other) => on.reduce((sum, value, u) => sum + (value !== other[u] ? 1 : 0), 0);
    const count = on.reduce((a, b) => a + b, 0);
    const from = apart(this.now.on);
    // From all or from none where that is nearer, so that "all on" is exactly what it was at first.
    if (this.units - count < from) this.now = copied(this.all);
    else if (count < from) this.now = this.#empty();
    for (let u = 0; u < this.units; u++) if (on[u] !== this.now.on[u]) this.#add(this.now, u, on[u] ? 1 : -1);
    if (!count) return null;
    const right = this.#right(this.now);
    return { ...this.#score(right), gain: this.#gain(right) };
  }

  // A unit alone, and all the others without it.
  aloneAndWithout(u) {
    const alone = this.#empty(), without = copied(this.all);
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
    if (kind === "zeroshot") return classified(of.total, part.labels.values, this.columns);
    if (kind === "knn") return voted(of.total, part.labels.values, part.bank_labels.values, facts, sizes);
    return retrieved(of.total, part.owner.values, this.rows, facts.k, sizes.left);
  }

  #groups() {
    const { kind, metric, facts } = this.facts;
    if (kind === "pairs" && facts.average === "macro") return [this.part.kinds.values, facts.kinds.length];
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
    if (this.facts.kind !== "retrieval") return gained(right, this.allRight, ...this.#groups());
    const ours = this.#recalled(right), all = this.#recalled(this.allRight), value = ours.value - all.value;
    const half = halfWidth(ours.influence.map((one, i) => one - all.influence[i]));
    return { value, low: value - half, high: value + half };
  }

  // The mean of both directions, and what each image with its texts does to it.
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

function copied({ on, total, norms }) {
  return { on: on.slice(), total: total.slice(), norms: Object.fromEntries(Object.entries(norms).map(([side, of]) => [side, of.slice()])) };
}

// (U, n, d) to the squared norms (U, n).
function squared({ shape, values }) {
  const [units, n, d] = shape, found = new Float64Array(units * n);
  for (let i = 0; i < found.length; i++) for (let k = 0; k < d; k++) found[i] += values[i * d + k] ** 2;
  return found;
}
