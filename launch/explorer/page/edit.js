// Edits of the current slot, drawn by the server's model while a slider moves.

import { byId, clearError, currentSide, page, reportErrors } from "./page_state.js";
import { offline, post } from "./requests.js";

const SLIDERS = { "edit-x": 0, "edit-y": 0, "edit-scale": 1 };

let running = false, again = false;

export function startEditing() {
  byId("edit").addEventListener("input", () => reportErrors(draw));
  byId("edit").addEventListener("submit", (event) => event.preventDefault());
}

// Show the edits that the model supports, and return to the unedited slot.
export function resetEdit() {
  const edits = offline ? [] : currentSide().facts.edits;
  byId("edit").hidden = !edits.length;
  for (const [id, value] of Object.entries(SLIDERS)) {
    byId(id).value = value;
    byId(id).closest("label").hidden = !edits.includes(id === "edit-scale" ? "scale" : "move");
  }
  byId("edit-delete").checked = false;
  byId("edited").hidden = true;
}

// Draw the newest edit; sliders send more events than the model can draw.
async function draw() {
  if (page.image < 0) throw new Error("Choose an image first.");
  if (running) {
    again = true;
    return;
  }
  running = true;
  try {
    do {
      again = false;
      await drawOnce();
    } while (again);
  } finally {
    running = false;
  }
}

async function drawOnce() {
  const { image, slot } = page, { id } = currentSide().facts;
  const [dx, dy, scale] = Object.keys(SLIDERS).map((name) => Number(byId(name).value));
  const body = { image, slot, move: [dx, dy], scale, delete: byId("edit-delete").checked };
  const picture = await (await post(`edit/${id}`, JSON.stringify(body))).blob();
  if (page.image !== image || page.slot !== slot) return;
  clearError();
  URL.revokeObjectURL(byId("edited").src);
  byId("edited").src = URL.createObjectURL(picture);
  byId("edited").hidden = false;
}
