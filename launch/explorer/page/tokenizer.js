// CLIP's tokenizer from tokenizer.json: byte pairs of lower-case words. Like ftfy, it replaces curly quotes, ligatures and full-width letters;
// it does not repair broken characters, HTML entities and control codes.

const WORDS = /'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+/giu;
const MAX_WORD = 256; // characters; merging takes quadratic time

export class Tokenizer {
  constructor(content, contextLength) {
    this.vocabulary = new Map(Object.entries(content.model.vocab));
    this.ranks = new Map(content.model.merges.map((pair, rank) => [Array.isArray(pair) ? pair.join(" ") : pair, rank]));
    this.contextLength = contextLength;
    [this.start, this.end] = content.added_tokens.map((token) => token.id);
    this.letters = byteLetters();
    this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
    this.pieces = new Map([...this.vocabulary].map(([piece, id]) => [id, piece]));
  }

  // Return the ids of a caption, with start and end, cut to the context length.
  encode(caption) {
    const text = plain(caption).replace(/\s+/gu, " ").trim().toLowerCase();
    const ids = [];
    for (const [word] of text.matchAll(WORDS)) {
      if (ids.length >= this.contextLength - 2) break;
      if (word.length > MAX_WORD) throw new Error(`a word with more than ${MAX_WORD} characters`);
      ids.push(...this.#wordIds(word));
    }
    return [this.start, ...ids.slice(0, this.contextLength - 2), this.end];
  }

  // Return the words of ids with their number of ids: [["[start]", 1], ["cube", 1], …].
  words(ids) {
    const words = [];
    let begin = 0;
    for (const [i, id] of ids.entries()) {
      const piece = this.pieces.get(id) ?? "", special = { [this.start]: "[start]", [this.end]: "[end]" }[id];
      const ends = special || piece.endsWith("</w>") || [this.start, this.end].includes(ids[i + 1]);
      if (!ends) continue;
      words.push([special ?? this.#decode(ids.slice(begin, i + 1)), i + 1 - begin]);
      begin = i + 1;
    }
    return words;
  }

  #decode(ids) {
    const letters = [...ids.map((id) => this.pieces.get(id) ?? "").join("").replaceAll("</w>", "")];
    return new TextDecoder().decode(Uint8Array.from(letters, (letter) => this.bytes.get(letter) ?? 63)).trim();
  }

  #wordIds(word) {
    const parts = [...new TextEncoder().encode(word)].map((byte) => this.letters[byte]);
    parts[parts.length - 1] += "</w>";
    for (;;) {
      let best = Infinity;
      for (let i = 0; i + 1 < parts.length; i++) best = Math.min(best, this.ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity);
      if (best === Infinity) return parts.map((part) => this.vocabulary.get(part));
      for (let i = 0; i + 1 < parts.length; i++) {
        if (this.ranks.get(`${parts[i]} ${parts[i + 1]}`) === best) parts.splice(i, 2, parts[i] + parts[i + 1]);
      }
    }
  }
}

function plain(caption) {
  return caption.replace(/[\u02bc\u2018-\u201b]/gu, "'").replace(/[\u201c-\u201f]/gu, '"')
    .replace(/[\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb06\u3000\uff01-\uffef]/gu, (letter) => letter.normalize("NFKC"))
    .normalize("NFC");
}

// Return the letter that stands for each byte: printable ones themselves, others from U+0100 on.
function byteLetters() {
  const printable = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : next++));
}
