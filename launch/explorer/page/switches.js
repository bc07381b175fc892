// Switches, and the scores that follow them.

import { byId, clearError, currentSide, page, showStatus } from "./page_state.js";
import { fetchTask } from "./requests.js";
import { TaskScores } from "./scores.js";
import { captions, grid, scoreBar, table } from "./widgets.js";

// Fetch a checkpoint's arrays and score all of its slots; the page stays responsive.
export async function prepare(opened) {
  for (const [number, facts] of opened.facts.tasks.entries()) {
    opened.tasks[number] = await new TaskScores(facts, await fetchTask(opened.facts.id, number)).prepare();
    if (!page.sides.includes(opened)) return; // another was opened in its place
    for (const index of page.sides.keys()) updateScores(index);
  }
  document.dispatchEvent(new Event("prepared"));
}

export function updateScores(index) {
  const { choice, tasks, facts } = page.sides[index];
  for (const [row, { name }] of page.rows.entries()) {
    const number = facts.tasks.findIndex((task) => task.name === name);
    const score = tasks[number]?.set(choice.on);
    if (number < 0) table.absent(row, index);
    else if (tasks[number]) {
      table.whole(row, index, tasks[number].whole);
      table.chosen(row, index, score);
    }
    if (index === page.now) scoreBar.set(row, number < 0 ? undefined : score, choice.on.every(Boolean));
  }
  if (index === page.now) updateShare();
}

export function updateShare() {
  const { choice, facts } = currentSide();
  const count = choice.chosen.length;
  const renorm = facts.classifier_slots === "renorm" ? " Slots of class vectors are normalised here; sparo eval does not normalise them, so its zero-shot scores differ." : "";
  byId("share").textContent = `${count} of ${facts.count} ${facts.units} are on.${provenance(facts.tasks, choice)}${renorm}`;
  byId("save").disabled = count === 0;
  byId("undo").disabled = !choice.done.length;
  byId("redo").disabled = !choice.undone.length;
}

// Say on which data the selection was made, because gains on this data are overestimated.
function provenance(tasks, choice) {
  const sentences = {
    "same data": (names) => `The selection was made on the data of ${names}, so gains there are overestimated. (The command “sparo slots select” holds data out.)`,
    "half of it is the same data": (names) => `The selection was made on half of the data of ${names}, so gains there are overestimated.`,
    "other data": (names) => `The selection was made on other data than that of ${names}.`,
    "unknown data": (names) => `It is unknown whether the selection was made on the data of ${names}.`,
  };
  return Object.entries(sentences).map(([share, sentence]) => {
    const names = tasks.filter((task) => choice.share(task) === share).map((task) => task.name);
    return names.length ? ` ${sentence(names.join(", "))}` : "";
  }).join("");
}

function onSwitched(one) {
  clearError();
  one.choice.switched(one.facts.tasks);
  updateScores(page.sides.indexOf(one));
  if (one === currentSide()) captions.paint(one.choice.on);
}

export function toggle(slot) {
  const one = currentSide(), { on } = one.choice;
  one.choice.remember();
  on[slot] = on[slot] ? 0 : 1;
  grid.switch(slot, Boolean(on[slot]));
  onSwitched(one);
}

// one: the checkpoint, which may no longer be the current one.
export function setAll(of, one = currentSide()) {
  const { choice } = one;
  choice.remember();
  showStatus("");
  choice.on.forEach((value, slot) => (choice.on[slot] = of(value, slot) ? 1 : 0));
  paintSwitches(one);
  onSwitched(one);
}

export const undo = () => travel("Undone", ({ choice }) => choice.travel(choice.done, choice.undone));
export const redo = () => travel("Done again", ({ choice }) => choice.travel(choice.undone, choice.done));

function travel(word, move) {
  const one = currentSide(), before = one.choice.on.slice();
  if (!move(one)) return;
  paintSwitches(one);
  onSwitched(one);
  const slots = [...before.keys()].filter((slot) => before[slot] !== one.choice.on[slot]);
  showStatus(`${word}: ${slots.length === 1 ? `slot ${slots[0]}` : `${slots.length} slots`}.`);
}

export function paintSwitches(one) {
  if (one === currentSide()) grid.paint(one.choice);
}
