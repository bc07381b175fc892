// Saving: to the server's file, to the person's own disk, and the whole page as one file.

import { ask, post } from "./source.js";

export async function saved(id, choice, over) {
  choice.written(await ask(`save/${id}`, { ...choice.told(), over }));
}

// From a page without a server: the file that the server would have written.
export function downloaded(facts, choice) {
  const { chosen, names, notes, looked_at } = choice.told();
  const selection = {
    schema: 1, sparo: "selection", checkpoint: facts.weights, label: facts.label, units: facts.units, count: facts.count,
    method: "hand", classifier_slots: facts.classifier_slots, chosen, looked_at, names, notes,
  };
  offered(new Blob([`${JSON.stringify(selection, null, 1)}\n`], { type: "application/json" }), "selection.json");
}

export async function savedAsOne(page) {
  const state = { sides: page.sides.map(({ choice, facts }) => ({ ...choice.told(), id: facts.id })), image: page.image };
  const response = await post("one-file", JSON.stringify(state));
  offered(await response.blob(), "slots.html");
  return "slots.html holds what you see; it opens without a server.";
}

function offered(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
