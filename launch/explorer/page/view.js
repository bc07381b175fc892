// One image and one slot in sight, and looking for slots.

import { Heat } from "./heat.js";
import { setAll } from "./marks.js";
import { slotFacts } from "./panel.js";
import { captions, gallery, grid } from "./parts.js";
import { at, page, side, tell, tried } from "./sight.js";
import { ask, attentionOf, floats, pictureOf } from "./source.js";
import { percent } from "./table.js";

let resting = 0;
export function focus(slot) {
  page.slot = slot;
  const { choice } = side();
  at("slot-title").textContent = `Slot ${slot}`;
  at("name").value = choice.names[slot] ?? "";
  at("note").value = choice.notes[slot] ?? "";
  clearTimeout(resting);
  resting = setTimeout(detail, 120); // do not compute scores for each slot while an arrow key is held down
}

export function detail() {
  const { slot, part, query } = page, found = part?.get(slot);
  slotFacts(at("slot-facts"), slot, page.attention, page.weights, side().tasks, found && {
    text: `Share of “${query}”: ${percent(found.score)} % (uniform: ${percent(1 / side().facts.count)} %). The images most similar to this text in this slot:`,
    images: found.best.map((image) => ({ picture: pictureOf(image), words: gallery.images[image].caption || gallery.images[image].key })),
  });
}

export function look(image) {
  page.image = image;
  captions.clear();
  const { id } = side().facts;
  const gone = () => page.image !== image || side().facts.id !== id; // somebody has gone on
  return tried(async () => {
    const picture = new Image();
    picture.src = pictureOf(image);
    try {
      const [attention] = await Promise.all([attentionOf(id, image), picture.decode()]);
      if (!gone()) shown(picture, attention);
    } catch (error) {
      if (gone()) return;
      shown(null, null);
      gallery.forget(); // a second click tries again
      throw error;
    }
  });
}

function shown(picture, attention) {
  page.attention = attention;
  const maps = attention?.maps ? floats(attention.maps) : null;
  page.weights = attention?.weights ? floats(attention.weights) : null;
  const cosine = attention?.cosine ? floats(attention.cosine) : null;
  page.heat = picture && maps ? new Heat(picture, attention, maps) : null;
  paintHeat();
  page.shown = (slot) => [page.heat && `peak ${percent(page.heat.peak(slot))} %`, cosine && `cosine ${cosine[slot].toFixed(2)}`].filter(Boolean).join(", ");
  lines();
  at("picture-words").textContent = picture ? words(attention) : "";
  detail();
}

export function paintHeat() {
  grid.heat(page.heat, at("own-scale").checked);
}

function words(attention) {
  const { caption, key } = gallery.images[page.image];
  const title = `“${caption || key}”. `;
  if (!attention) return `${title}The attention for this image is not part of this saved page.`;
  if (!page.heat) return `${title}These ${side().facts.units} have no attention.`;
  const uniform = percent(1 / (page.heat.side * page.heat.side));
  return `${title}Colours remain where a slot attends; a line encloses half of its attention, unless that covers more than a third of the image. Peak: the largest share of attention on one patch (uniform: ${uniform} %). Attention shows where a slot takes its information from, not how it uses it.`;
}

export function lines() {
  grid.facts((slot) => [page.part && `${percent(page.part.get(slot).score)} % of the query`, page.shown?.(slot)].filter(Boolean).join("; "));
}

export function showAll() {
  page.part = null;
  at("query").value = "";
  grid.order(null);
  lines();
  detail();
}

export async function search() {
  const query = at("query").value.trim(), one = side();
  if (!query) return showAll();
  if (at("search-by").value === "name") {
    const { names, notes } = one.choice, like = query.toLowerCase();
    const found = [...one.choice.on.keys()].filter((slot) => `${names[slot] ?? ""}\n${notes[slot] ?? ""}`.toLowerCase().includes(like) || String(slot) === query);
    page.part = null;
    grid.order(found.length ? found : null);
    tell(`${found.length} of ${one.facts.count} slots have “${query}” in their name or note.`);
  } else {
    const { found } = await ask(`search/${one.facts.id}`, { text: query });
    if (one !== side()) return;
    page.part = new Map(found.map((one) => [one.slot, one]));
    page.query = query;
    grid.order(found.map((one) => one.slot));
    const [best] = found, { caption, key } = gallery.images[best.best[0]];
    tell(`Slot ${best.slot} distinguishes images of “${query}” most: ${percent(best.score)} % of the difference to other images (uniform: ${percent(1 / one.facts.count)} %). Its best image: “${caption || key}”.`);
    lines();
    focus(best.slot);
    grid.reveal(best.slot);
    return;
  }
  lines();
  detail();
}

export async function bestAlone() {
  const one = side(), number = Number(at("top-task").value), score = one.tasks[number], k = Number(at("top-k").value) || 1;
  if (!score) throw new Error("The scores are not there yet.");
  tell("Scoring every slot alone …");
  const alone = [];
  for (let slot = 0; slot < one.facts.count; slot++) {
    alone.push(score.aloneAndWithout(slot).alone);
    if (slot % 4 === 3) await new Promise((done) => setTimeout(done));
  }
  if (!page.sides.includes(one)) return;
  const best = [...alone.keys()].sort((a, b) => alone[b] - alone[a] || a - b).slice(0, Math.min(Math.max(1, k), alone.length));
  setAll((_, slot) => best.includes(slot), one);
  tell(`The ${best.length} best alone on ${score.facts.name} are on${page.sides.length > 1 ? ` in ${one.facts.label}` : ""}.`);
}
