// The list of shortcuts, and the tour for a first visit.

import { byId } from "./page_state.js";
import { offline } from "./requests.js";

const STEPS = [
  ["images", "Choose an image. You can also drop your own images on this page, or paste one."],
  ["slots", "Each box is a slot. Images keep their colours where the slot attends. Click a box to see it large, and the words of the caption to which it attends."],
  ["search", "Type what you look for, for example “red”. The slot that distinguishes images of it most comes first."],
  ["score-bar", "Switch slots off and see which scores change. Save the selection to use it in sparo eval."],
];
const VISITED = "sparo explorer visited";

let step = 0;

export function startGuide() {
  byId("show-shortcuts").addEventListener("click", showShortcuts);
  byId("close-shortcuts").addEventListener("click", () => byId("shortcuts").close());
  byId("next-step").addEventListener("click", () => showStep(step + 1));
  byId("end-tour").addEventListener("click", () => showStep(STEPS.length));
  byId("start-tour").addEventListener("click", () => {
    byId("shortcuts").close();
    showStep(0);
  });
  if (!offline && !visited()) showStep(0);
}

export function showShortcuts() {
  if (!byId("shortcuts").open) byId("shortcuts").showModal();
}

function showStep(number) {
  step = number;
  for (const [id] of STEPS) byId(id).classList.remove("tour-target");
  byId("tour").hidden = number >= STEPS.length;
  if (number >= STEPS.length) {
    remember();
    return;
  }
  const [id, text] = STEPS[number];
  byId(id).classList.add("tour-target");
  byId("tour-title").textContent = `Tour, ${number + 1} of ${STEPS.length}`;
  byId("tour-text").textContent = text;
  byId("next-step").textContent = number === STEPS.length - 1 ? "Done" : "Next";
}

function visited() {
  try {
    return localStorage.getItem(VISITED) !== null;
  } catch {
    return true; // without storage, the tour would start at every visit
  }
}

function remember() {
  try {
    localStorage.setItem(VISITED, "yes");
  } catch {
    // see visited
  }
}
