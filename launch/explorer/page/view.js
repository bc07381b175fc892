// The current image, the current slot, and search.

import { floats } from "./binary.js";
import { resetEdit } from "./edit.js";
import { Heat } from "./heat.js";
import { element } from "./listbox.js";
import { byId, currentSide, page, reportErrors, showStatus } from "./page_state.js";
import { slotFacts } from "./panel.js";
import { fetchAttention, pictureUrl, searchText, similarImages } from "./requests.js";
import { setAll } from "./switches.js";
import { percent } from "./table.js";
import { captions, gallery, grid } from "./widgets.js";

const SMALL = 112, LARGE = 360; // pixels of pictures
const MARKERS = ["[start]", "[end]"];

let resting = 0, drawing = 0;

export function focus(slot) {
  page.slot = slot;
  resetEdit();
  const { choice } = currentSide();
  byId("slot-title").textContent = `Slot ${slot}`;
  grid.mark(slot);
  byId("name").value = choice.names[slot] ?? "";
  byId("note").value = choice.notes[slot] ?? "";
  drawLarge(slot);
  clearTimeout(resting);
  resting = setTimeout(showSlotFacts, 120); // do not compute scores for each slot while an arrow key is held down
}

// Draw a slot's attention large, and its share of each word of the caption.
export function drawLarge(slot = page.slot) {
  cancelAnimationFrame(drawing);
  drawing = requestAnimationFrame(() => {
    byId("large-view").hidden = !page.large;
    if (!page.large) return;
    byId("slot-title").textContent = slot === page.slot ? `Slot ${slot}` : `Slot ${slot}, preview`;
    const canvas = byId("large"), name = currentSide().choice.names[slot];
    page.large.draw(canvas, slot, byId("own-scale").checked);
    canvas.setAttribute("aria-label", `Attention of slot ${slot} over the image`);
    const peak = percent(page.large.peak(slot)), uniform = percent(1 / page.large.side ** 2);
    byId("large-title").textContent = `Slot ${slot}${name ? ` (${name})` : ""}: at most ${peak} % of its attention on one patch (uniform: ${uniform} %).`;
    byId("large-caption").replaceChildren(...shadedCaption(slot));
  });
}

function shadedCaption(slot) {
  const { words } = page.attention, shaded = [];
  if (!page.weights) return [gallery.images[page.image].caption];
  for (const [i, word] of words.entries()) {
    if (MARKERS.includes(word)) continue;
    const share = page.weights[slot * words.length + i];
    if (shaded.length && !/^[,.;:!?]+$/.test(word)) shaded.push(" ");
    shaded.push(share < 0.1 ? word : element("mark", { class: `w${Math.min(5, 1 + Math.floor(5 * share))}`, text: word, title: `${percent(share)} %` }));
  }
  return shaded;
}

export function showSlotFacts() {
  const { slot, part, query } = page, hit = part?.get(slot);
  slotFacts(byId("slot-facts"), slot, currentSide().tasks, hit && {
    text: `Share of “${query}”: ${percent(hit.score)} % (uniform: ${percent(1 / currentSide().facts.count)} %). Images that match this text best in this slot:`,
    images: hit.best.map((image) => ({ picture: pictureUrl(image), words: gallery.images[image].caption || gallery.images[image].key })),
  });
}

export function openImage(image) {
  page.image = image;
  resetEdit();
  captions.clear();
  byId("alike-found").replaceChildren();
  const { id } = currentSide().facts;
  const outdated = () => page.image !== image || currentSide().facts.id !== id; // the user has opened another one since
  return reportErrors(async () => {
    const picture = new Image();
    picture.src = pictureUrl(image);
    try {
      const [attention] = await Promise.all([fetchAttention(id, image), picture.decode()]);
      if (!outdated()) showAttention(picture, attention);
    } catch (error) {
      if (outdated()) return;
      showAttention(null, null);
      gallery.forget(); // a second click tries again
      throw error;
    }
  });
}

function showAttention(picture, attention) {
  page.attention = attention;
  const maps = attention?.maps ? floats(attention.maps) : null;
  page.weights = attention?.weights ? floats(attention.weights) : null;
  const cosine = attention?.cosine ? floats(attention.cosine) : null;
  const heat = (size) => (picture && maps ? new Heat(picture, attention, maps, size) : null);
  page.heat = heat(SMALL);
  page.large = heat(LARGE);
  paintHeat();
  page.shown = (slot) => [page.heat && `peak ${percent(page.heat.peak(slot))} %`, cosine && `cosine ${cosine[slot].toFixed(2)}`].filter(Boolean).join(", ");
  showFacts();
  byId("picture-words").textContent = picture ? pictureText(attention) : "";
  showSlotFacts();
}

export function paintHeat() {
  grid.heat(page.heat, byId("own-scale").checked);
  drawLarge();
}

function pictureText(attention) {
  const { caption, key } = gallery.images[page.image];
  const title = `“${caption || key}”. `;
  if (!attention) return `${title}The attention for this image is not part of this saved page.`;
  if (!page.heat) return `${title}These ${currentSide().facts.units} have no attention.`;
  return `${title}Colours remain where a slot attends; a line encloses half of its attention if that fits into a quarter of the image. Attention shows where a slot takes its information from, not how it uses it.`;
}

export function showFacts() {
  grid.facts((slot) => [page.part && `${percent(page.part.get(slot).score)} % of the query`, page.shown?.(slot)].filter(Boolean).join("; "));
}

export function showAll() {
  page.part = null;
  byId("query").value = "";
  showStatus("");
  grid.order(null);
  showFacts();
  showSlotFacts();
}

export async function search() {
  const query = byId("query").value.trim(), one = currentSide();
  if (!query) return showAll();
  if (byId("search-by").value === "name") {
    const { names, notes } = one.choice, like = query.toLowerCase();
    const slots = [...one.choice.on.keys()].filter((slot) => `${names[slot] ?? ""}\n${notes[slot] ?? ""}`.toLowerCase().includes(like) || String(slot) === query);
    page.part = null;
    grid.order(slots.length ? slots : null);
    showStatus(`${slots.length} of ${one.facts.count} slots have “${query}” in their name or note.`);
  } else {
    showStatus("Searching …"); // the model may still be loading
    const { found: hits } = await searchText(one.facts.id, query);
    if (one !== currentSide()) return;
    page.part = new Map(hits.map((hit) => [hit.slot, hit]));
    page.query = query;
    grid.order(hits.map((hit) => hit.slot));
    const [best] = hits, uniform = percent(1 / one.facts.count);
    const unknown = gallery.images.some(({ caption }) => caption?.toLowerCase().includes(query.toLowerCase())) ? "" : ` No caption of these images contains “${query}”.`;
    showStatus(`Slot ${best.slot} fits “${query}” best: of what sets matching images apart, ${percent(best.score)} % is in this slot (uniform: ${uniform} %).${unknown} The image is its best match.`);
    gallery.choose(best.best[0]);
    showFacts();
    focus(best.slot);
    grid.reveal(best.slot);
    return;
  }
  showFacts();
  showSlotFacts();
}

// Find images that are like the current one in the current slot, or in the slots that are on.
export async function findAlike() {
  if (page.image < 0) throw new Error("Choose an image first.");
  const one = currentSide(), { image, slot } = page;
  const slots = byId("alike-slots").value === "on" ? one.choice.chosen : [slot];
  if (!slots.length) throw new Error("All slots are off. Switch on at least one.");
  const { matches } = await similarImages(one.facts.id, image, slots);
  if (one !== currentSide() || image !== page.image) return;
  byId("alike-found").replaceChildren(...matches.map(({ image: number, alike, rest }) => {
    const { caption, key } = gallery.images[number], words = `${caption || key}: cosine ${alike.toFixed(2)} in these slots, ${rest.toFixed(2)} in the others`;
    const button = element("button", { type: "button", class: "picture", title: words }, element("img", { src: pictureUrl(number), alt: words, width: 72, height: 72 }));
    button.addEventListener("click", () => gallery.choose(number));
    return button;
  }));
}

export async function selectBest() {
  const one = currentSide(), number = Number(byId("top-task").value), score = one.tasks[number], k = Number(byId("top-k").value) || 1;
  if (!score) throw new Error("The scores are still being computed. Try again in a moment.");
  showStatus("Scoring every slot alone …");
  const alone = [];
  for (let slot = 0; slot < one.facts.count; slot++) {
    alone.push(score.aloneAndWithout(slot).alone);
    if (slot % 4 === 3) await new Promise((done) => setTimeout(done));
  }
  if (!page.sides.includes(one)) return;
  const best = [...alone.keys()].sort((a, b) => alone[b] - alone[a] || a - b).slice(0, Math.min(Math.max(1, k), alone.length));
  setAll((_, slot) => best.includes(slot), one);
  showStatus(`The ${best.length} best alone on ${score.facts.name} are on${page.sides.length > 1 ? ` in ${one.facts.label}` : ""}.`);
}
