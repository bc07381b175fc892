// The scores of all tasks: a bar for the current checkpoint, and a table for one checkpoint or two.

import { element } from "./listbox.js";

export const percent = (value) => (100 * value).toFixed(1);
function signed(value) {
  const size = Math.abs(100 * value).toFixed(1);
  return (Number(size) === 0 ? "" : value < 0 ? "−" : "+") + size;
}

// One line per task: the score, and its change against all slots, in colour only if the interval excludes zero.
export class ScoreBar {
  constructor(home) {
    this.home = home;
  }

  show(tasks) {
    this.items = tasks.map((task) => element("li", { title: `${task.metric}, n = ${task.n}` }, element("span", { class: "task", text: `${task.name}${someImages(task)}` }), " ", element("strong", { text: "…" })));
    this.home.replaceChildren(...this.items);
  }

  // score: undefined if this checkpoint has no such task or it is not ready, null if no slot is on; all: every slot is on
  set(row, score, all) {
    const item = this.items[row], [task] = item.children, gain = score && !all ? score.gain : null;
    const sign = gain && gain.low > 0 ? "better" : gain && gain.high < 0 ? "worse" : "";
    const value = score ? percent(score.value) : score === null ? "–" : "…";
    const key = `${value} ${sign} ${gain ? intervalText(gain, signed) : ""}`;
    if (item.dataset.shown === key) return; // screen readers repeat what is replaced
    item.dataset.shown = key;
    item.className = sign;
    const change = gain ? [" ", element("span", { class: "change", text: `${{ better: "▲ ", worse: "▼ " }[sign] ?? ""}${signed(gain.value)}` }), " ", element("span", { class: "interval", text: `(${intervalText(gain, signed)})` })] : [];
    item.replaceChildren(task, " ", element("strong", { text: value }), ...change);
  }
}

export class ScoreTable {
  constructor(home) {
    this.home = home;
  }

  // names: labels of the checkpoints; tasks: [{name, kind, metric, n, images, of}], those of the first checkpoint first
  show(names, tasks) {
    const heads = ["task", "score", "n"].map((text) => element("th", { text, scope: "col" }));
    for (let i = 0; i < names.length; i++) for (const text of ["all", "chosen", "change"]) heads.push(element("th", { text, scope: "col", class: "number" }));
    heads.push(element("th", { text: "0 to 100 per cent", scope: "col" }));
    const above = element("tr", {}, element("td", { colspan: 3 }), ...names.map((text) => element("th", { text, scope: "colgroup", colspan: 3 })), element("td"));
    const body = element("tbody");
    this.plots = [];
    this.cells = tasks.map((task) => {
      const row = element("tr", {}, element("th", { text: task.name, scope: "row" }), element("td", { text: task.metric }), element("td", { text: `${task.n.toLocaleString("en")}${someImages(task)}`, class: "number" }));
      const cells = names.map(() => ["all", "chosen", "change"].map((what) => element("td", { class: `number ${what}`, text: "…" })));
      this.plots.push(new Points(2 * names.length));
      row.append(...cells.flat(), element("td", {}, this.plots.at(-1).svg));
      row.dataset.task = task.name;
      body.append(row);
      return cells;
    });
    this.home.replaceChildren(element("table", {}, element("thead", {}, ...(names.length > 1 ? [above] : []), element("tr", {}, ...heads)), body));
  }

  whole(task, side, score) {
    setCell(this.cells[task][side][0], percent(score.value), intervalText(score, percent));
    this.plots[task].set(2 * side, score);
  }

  chosen(task, side, score) {
    const [, chosen, change] = this.cells[task][side];
    this.plots[task].set(2 * side + 1, score);
    if (score === null) {
      setCell(chosen, "–", "nothing is on");
      setCell(change, "–", "");
      return;
    }
    setCell(chosen, percent(score.value), intervalText(score, percent));
    setCell(change, signed(score.gain.value), intervalText(score.gain, signed));
  }

  absent(task, side) {
    for (const cell of this.cells[task][side]) setCell(cell, "–", "");
  }
}

// Points with intervals, one below the other, for eyes only: the cells next to them have the numbers. Even rows are all slots.
class Points {
  constructor(rows) {
    this.svg = svgElement("svg", { class: "plot", viewBox: `-2 0 104 ${7 + 7 * rows}`, "aria-hidden": "true" });
    this.svg.append(svgElement("line", { class: "axis", x1: 0, x2: 100, y1: 4 + 7 * rows, y2: 4 + 7 * rows }));
    this.marks = Array.from({ length: rows }, (_, row) => {
      const y = 5 + 7 * row, name = row % 2 ? "chosen" : "all";
      const marks = [svgElement("line", { class: name, y1: y, y2: y }), svgElement("circle", { class: name, cy: y, r: 2 })];
      this.svg.append(...marks);
      return marks;
    });
    for (let row = 0; row < rows; row++) this.set(row, null);
  }

  // score: null hides the point
  set(row, score) {
    const [line, circle] = this.marks[row];
    for (const mark of [line, circle]) mark.style.display = score ? "" : "none";
    if (!score) return;
    line.setAttribute("x1", 100 * score.low);
    line.setAttribute("x2", 100 * score.high);
    circle.setAttribute("cx", 100 * score.value);
  }
}

function svgElement(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Say so if scores use some of a task's images only.
const someImages = ({ images, of }) => (images < of ? ` (${images.toLocaleString("en")} of ${of.toLocaleString("en")} images)` : "");

const intervalText = (score, as) => `${as(score.low)} to ${as(score.high)}`;

function setCell(cell, value, rest) {
  const now = `${value} ${rest}`;
  if (cell.dataset.now === now) return; // screen readers repeat what is replaced
  cell.dataset.now = now;
  cell.replaceChildren(element("span", { class: "value", text: value }), " ", element("span", { class: "interval", text: rest }));
}
