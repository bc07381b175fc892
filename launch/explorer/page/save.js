// Saving: the selection through the server or as a download, and the whole page as one file.

import { post, postJson } from "./requests.js";

export async function saveSelection(id, choice, over) {
  choice.markSaved(await postJson(`save/${id}`, { ...choice.toJson(), over }));
}

// Without a server: download the file that the server would have written.
export function downloadSelection(facts, choice) {
  const { chosen, names, notes, looked_at } = choice.toJson();
  const selection = {
    schema: 1, sparo: "selection", checkpoint: facts.weights, label: facts.label, units: facts.units, count: facts.count,
    method: "hand", classifier_slots: facts.classifier_slots, chosen, looked_at, names, notes,
  };
  offerDownload(new Blob([`${JSON.stringify(selection, null, 1)}\n`], { type: "application/json" }), "selection.json");
}

export async function saveOffline(page) {
  const state = { sides: page.sides.map(({ choice, facts }) => ({ ...choice.toJson(), id: facts.id })), image: page.image };
  const response = await post("one-file", JSON.stringify(state));
  offerDownload(await response.blob(), "slots.html");
  return "slots.html holds what you see; it opens without a server.";
}

function offerDownload(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
