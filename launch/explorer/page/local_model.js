// The model in the browser, by onnxruntime: answers of the server for a page without one.

import { floats, readAsset } from "./binary.js";
import { decodeImage, modelPixels } from "./pixels.js";
import { Tokenizer } from "./tokenizer.js";

const RUNTIME = "ort.wasm.bundle.min.mjs", BINARY = "ort-wasm-simd-threaded.wasm";
const NUM_BEST = 10, NUM_EXAMPLES = 6, NUM_ALIKE = 8, DIFFERENT = 0.25; // as in launch/explorer/opened.py

export class LocalModel {
  // facts: {image, text, units, slots: whether the units are slots, dimension}, with parts of onnx.json; vectors: (n, U, d) as base64
  constructor(facts, vectors) {
    this.facts = facts;
    this.units = facts.units;
    const values = floats(vectors), length = this.units * facts.dimension;
    this.vectors = Array.from({ length: values.length / length }, (_, i) => values.subarray(i * length, (i + 1) * length));
    this.own = []; // images of the user: {url, caption, pixels, box}
    this.sessions = {};
  }

  // Add a user's image; returns what the server would.
  async add(file, name, caption) {
    let decoded;
    try {
      decoded = await decodeImage(file);
    } catch (error) {
      throw new Error(`${name}: ${error instanceof RangeError ? error.message : "is not an image that this browser can read."}`);
    }
    const { size, resize } = this.facts.image;
    this.own.push({ url: URL.createObjectURL(file), caption, ...modelPixels(decoded, size, resize) });
    return { image: this.vectors.length + this.own.length - 1, key: name, caption, own: true };
  }

  // Return the address of a user's image; undefined for an image of the page.
  urlOf(image) {
    return this.own[image - this.vectors.length]?.url;
  }

  async attention(image) {
    const { caption, box } = this.own[image - this.vectors.length], { encoding, attention } = await this.#encoded(image);
    const answer = { maps: null, words: [], box };
    if (!attention || !this.facts.slots) return answer;
    const tokens = attention.length / this.units, { prefix } = this.facts.image, side = Math.round(Math.sqrt(tokens - prefix));
    const maps = new Float32Array(this.units * side * side);
    for (let u = 0; u < this.units; u++) maps.set(attention.subarray(u * tokens + prefix, (u + 1) * tokens), u * side * side);
    Object.assign(answer, { maps, side });
    if (!this.facts.text || !caption) return answer;
    const text = await this.#text(caption), words = this.tokenizer.words(text.ids);
    if (!text.attention) return answer;
    const weights = new Float32Array(this.units * words.length);
    for (let u = 0; u < this.units; u++) {
      let at = u * text.ids.length;
      for (const [w, [, pieces]] of words.entries()) for (let i = 0; i < pieces; i++) weights[u * words.length + w] += text.attention[at++];
    }
    const cosine = Float32Array.from({ length: this.units }, (_, u) => this.#cosine(encoding, text.encoding, (unit) => unit === u));
    return Object.assign(answer, { words: words.map(([word]) => word), weights, cosine });
  }

  // Rank units by their share of what distinguishes the images that fit a text best from the mean of all, as Side.search.
  async search(text) {
    const nothing = (await this.#text("")).encoding, n = this.vectors.length;
    const query = (await this.#text(text)).encoding.map((value, i) => value - nothing[i]);
    const shares = this.vectors.map((vector) => Float32Array.from({ length: this.units }, (_, u) => this.#dot(vector, query, u)));
    const total = shares.map((values) => values.reduce((a, b) => a + b, 0));
    const falling = (values) => [...values.keys()].sort((a, b) => values[b] - values[a] || a - b);
    const top = falling(total).slice(0, Math.min(NUM_BEST, Math.max(1, Math.floor(n / 2))));
    const part = Array.from({ length: this.units }, (_, u) => top.reduce((sum, i) => sum + shares[i][u], 0) / top.length - shares.reduce((sum, values) => sum + values[u], 0) / n);
    const whole = Math.max(part.reduce((a, b) => a + b, 0), 1e-12);
    const best = (u) => falling(shares.map((values) => values[u])).slice(0, NUM_EXAMPLES);
    return { found: falling(part).map((slot) => ({ slot, score: part[slot] / whole, best: best(slot) })) };
  }

  async captions(image, texts) {
    const vector = await this.#vector(image), shares = new Float32Array(texts.length * this.units);
    for (const [i, text] of texts.entries()) {
      const { encoding } = await this.#text(text);
      for (let u = 0; u < this.units; u++) shares[i * this.units + u] = this.#dot(vector, encoding, u);
    }
    return { shares, squares: Float32Array.from({ length: this.units }, (_, u) => this.#dot(vector, vector, u)) };
  }

  async alike(image, slots) {
    const query = await this.#vector(image), chosen = new Set(slots);
    const matches = this.vectors.map((vector, number) => ({
      image: number, alike: this.#cosine(vector, query, (u) => chosen.has(u)), rest: this.#cosine(vector, query, (u) => !chosen.has(u)),
    })).filter((match) => match.image !== image);
    const score = ({ alike, rest }) => alike - DIFFERENT * Math.max(rest, 0);
    return { matches: matches.sort((a, b) => score(b) - score(a)).slice(0, NUM_ALIKE) };
  }

  async #vector(image) {
    return this.vectors[image] ?? (await this.#encoded(image)).encoding;
  }

  async #encoded(image) {
    const own = this.own[image - this.vectors.length], { size, input } = this.facts.image;
    own.encoded ??= await this.#run("image", (ort) => ({ [input]: new ort.Tensor("uint8", own.pixels, [1, 3, size, size]) }));
    return own.encoded;
  }

  async #text(caption) {
    const { context_length: length, input } = this.facts.text;
    this.tokenizer ??= new Tokenizer(JSON.parse(new TextDecoder().decode(await readAsset("tokenizer.json"))), length);
    const ids = this.tokenizer.encode(caption), padded = new BigInt64Array(length);
    ids.forEach((id, i) => (padded[i] = BigInt(id)));
    const outputs = await this.#run("text", (ort) => ({ [input]: new ort.Tensor("int64", padded, [1, length]) }));
    if (!outputs.attention || !this.facts.slots) return { ids, encoding: outputs.encoding };
    const attention = new Float32Array(this.units * ids.length);
    for (let u = 0; u < this.units; u++) attention.set(outputs.attention.subarray(u * length, u * length + ids.length), u * ids.length);
    return { ids, encoding: outputs.encoding, attention };
  }

  async #run(name, feeds) {
    this.runtime ??= loadRuntime();
    const ort = await this.runtime;
    this.sessions[name] ??= readAsset(`${name}.onnx`).then((data) => ort.InferenceSession.create(data, { executionProviders: ["wasm"] }));
    const session = await this.sessions[name];
    // One run at a time, because a session is not reentrant.
    const outputs = await (this.running = (this.running ?? Promise.resolve()).then(() => session.run(feeds(ort))));
    return { encoding: outputs.encoding.data, attention: outputs.attention?.data };
  }

  #dot(a, b, unit) {
    const { dimension } = this.facts;
    let sum = 0;
    for (let i = unit * dimension; i < (unit + 1) * dimension; i++) sum += a[i] * b[i];
    return sum;
  }

  #cosine(a, b, has) {
    let dot = 0, first = 0, second = 0;
    for (let u = 0; u < this.units; u++) {
      if (!has(u)) continue;
      dot += this.#dot(a, b, u);
      first += this.#dot(a, a, u);
      second += this.#dot(b, b, u);
    }
    return dot / Math.max(Math.sqrt(first * second), 1e-12);
  }
}

async function loadRuntime() {
  const code = URL.createObjectURL(new Blob([await readAsset(RUNTIME)], { type: "text/javascript" }));
  const ort = await import(code);
  ort.env.wasm.numThreads = 1; // threads need headers that few web servers send
  ort.env.wasm.wasmBinary = await readAsset(BINARY);
  return ort;
}
