// What is in sight, and words to whoever sits before it.

import { made } from "./boxes.js";

export const at = (id) => document.getElementById(id);

// sides: checkpoints, each {facts, choice, tasks}; now: the one whose slots are shown; slot, image: in use; part: of a query, by slot.
export const page = { sides: [], rows: [], now: 0, slot: 0, image: -1, attention: null, weights: null, heat: null, part: null, query: "" };

export const side = () => page.sides[page.now];

export function tell(text) {
  at("told").textContent = text;
}

// What was wrong is over once something else is done.
export function quiet() {
  at("trouble").hidden = true;
}

// An error stays until something else is done; ways: [[text, function]].
export function trouble(error, ways = []) {
  tell("");
  at("trouble").hidden = false;
  at("trouble-text").textContent = error.message;
  at("trouble-ways").replaceChildren(...[...ways, ["Close", () => {}]].map(([text, act]) => {
    const button = made("button", { type: "button", text });
    button.addEventListener("click", () => {
      quiet();
      tried(act);
    });
    return button;
  }));
}

export async function tried(work) {
  try {
    await work();
  } catch (error) {
    trouble(error);
  }
}
