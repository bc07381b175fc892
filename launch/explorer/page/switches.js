// Switches, and the scores that follow them.

import { captions, grid, table } from "./parts.js";
import { TaskScores } from "./scores.js";
import { at, page, quiet, side } from "./sight.js";
import { taskOf } from "./source.js";

// Fetch a checkpoint's arrays and score all of its slots; the page is alive meanwhile.
export async function prepare(opened) {
  for (const [number, facts] of opened.facts.tasks.entries()) {
    opened.tasks[number] = await new TaskScores(facts, await taskOf(opened.facts.id, number)).prepare();
    if (!page.sides.includes(opened)) return; // another was opened in its place
    for (const index of page.sides.keys()) scored(index);
  }
  document.dispatchEvent(new Event("prepared"));
}

export function scored(index) {
  const { choice, tasks, facts } = page.sides[index];
  for (const [row, { name }] of page.rows.entries()) {
    const number = facts.tasks.findIndex((task) => task.name === name);
    if (number < 0) table.absent(row, index);
    else if (tasks[number]) {
      table.whole(row, index, tasks[number].whole);
      table.chosen(row, index, tasks[number].set(choice.on));
    }
  }
  if (index === page.now) shared();
}

export function shared() {
  const { choice, facts } = side();
  const count = choice.chosen.length;
  const groups = grouped(facts.tasks, choice);
  const told = [...groups].filter(([share]) => share !== "all").map(([share, tasks]) => `${share} for ${tasks.map((task) => task.name).join(", ")}`);
  const warned = [...groups.keys()].some((share) => share.includes("same")) ? " On data that it was chosen on a gain is too good: sparo slots select holds data out." : "";
  const renormed = facts.classifier_slots === "renorm" ? " Class vectors' slots are brought to one norm here; sparo eval takes them as they are, and its zero-shot scores are others." : "";
  const words = told.length ? ` What the choice was made on: ${told.join("; ")}.${warned}` : "";
  at("share").textContent = `${count} of ${facts.count} ${facts.units} are on.${words}${renormed}`;
  at("save").disabled = count === 0;
}

function grouped(tasks, choice) {
  const found = new Map();
  for (const task of tasks) found.set(choice.share(task), [...(found.get(choice.share(task)) ?? []), task]);
  return found;
}

function changed(one) {
  quiet();
  one.choice.switched(one.facts.tasks);
  scored(page.sides.indexOf(one));
  if (one === side()) captions.paint(one.choice.on);
}

export function toggle(slot) {
  const one = side(), { on } = one.choice;
  on[slot] = on[slot] ? 0 : 1;
  grid.switch(slot, Boolean(on[slot]));
  changed(one);
}

// one: the checkpoint that is meant, which may be out of sight by now.
export function setAll(of, one = side()) {
  const { choice } = one;
  choice.on.forEach((value, slot) => (choice.on[slot] = of(value, slot) ? 1 : 0));
  painted(one);
  changed(one);
}

export function painted(one) {
  if (one === side()) grid.paint(one.choice);
}
