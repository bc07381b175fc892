// State of the page, its status line and its errors.

import { element } from "./listbox.js";

export const byId = (id) => document.getElementById(id);

// sides: checkpoints, each {facts, choice, tasks}; now: number of the one whose slots are shown; slot, image: current ones; heat, large:
// attention drawn small and large; part: a slot's share of the query.
export const page = { sides: [], rows: [], now: 0, slot: 0, image: -1, attention: null, weights: null, heat: null, large: null, part: null, query: "" };

export const currentSide = () => page.sides[page.now];

export function showStatus(text) {
  byId("status").textContent = text;
}

// Called when a user does something else.
export function clearError() {
  byId("error").hidden = true;
}

// Show an error until the user does something else; actions: [[text, function]].
export function showError(error, actions = []) {
  showStatus("");
  byId("error").hidden = false;
  byId("error-text").textContent = error.message;
  byId("error-actions").replaceChildren(...[...actions, ["Close", () => {}]].map(([text, act]) => {
    const button = element("button", { type: "button", text });
    button.addEventListener("click", () => {
      clearError();
      reportErrors(act);
    });
    return button;
  }));
}

export async function reportErrors(work) {
  try {
    await work();
  } catch (error) {
    showError(error);
  }
}
