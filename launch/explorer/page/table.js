// The scores of all tasks, for one checkpoint or two.

import { made } from "./boxes.js";

export const percent = (value) => (100 * value).toFixed(1);
function signed(value) {
  const size = Math.abs(100 * value).toFixed(1);
  return (Number(size) === 0 ? "" : value < 0 ? "−" : "+") + size;
}

export class ScoreTable {
  constructor(home) {
    this.home = home;
  }

  // names: of the checkpoints; tasks: [{name, kind, metric, n, images, of}], the first checkpoint's, then what only others have.
  show(names, tasks) {
    const heads = ["task", "score", "n"].map((text) => made("th", { text, scope: "col" }));
    for (const _ of names) for (const text of ["all", "chosen", "change"]) heads.push(made("th", { text, scope: "col", class: "number" }));
    const above = made("tr", {}, made("td", { colspan: 3 }), ...names.map((text) => made("th", { text, scope: "colgroup", colspan: 3 })));
    const body = made("tbody");
    this.cells = tasks.map((task) => {
      const some = task.images < task.of ? ` (${task.images.toLocaleString("en")} of ${task.of.toLocaleString("en")} images)` : "";
      const row = made("tr", {}, made("th", { text: task.name, scope: "row" }), made("td", { text: task.metric }), made("td", { text: `${task.n.toLocaleString("en")}${some}`, class: "number" }));
      const cells = names.map(() => ["all", "chosen", "change"].map((what) => made("td", { class: `number ${what}`, text: "…" })));
      row.append(...cells.flat());
      row.dataset.task = task.name;
      body.append(row);
      return cells;
    });
    this.home.replaceChildren(made("table", {}, made("thead", {}, ...(names.length > 1 ? [above] : []), made("tr", {}, ...heads)), body));
  }

  whole(task, side, score) {
    written(this.cells[task][side][0], percent(score.value), between(score, percent));
  }

  chosen(task, side, score) {
    const [, chosen, change] = this.cells[task][side];
    if (score === null) {
      written(chosen, "–", "nothing is on");
      written(change, "–", "");
      return;
    }
    written(chosen, percent(score.value), between(score, percent));
    written(change, signed(score.gain.value), between(score.gain, signed));
  }

  absent(task, side) {
    for (const cell of this.cells[task][side]) written(cell, "–", "");
  }
}

const between = (score, as) => `${as(score.low)} to ${as(score.high)}`;

function written(cell, value, rest) {
  const now = `${value} ${rest}`;
  if (cell.dataset.now === now) return; // what did not change is not read aloud again
  cell.dataset.now = now;
  cell.replaceChildren(made("span", { class: "value", text: value }), " ", made("span", { class: "between", text: rest }));
}
