// Sorting and filters of a leaderboard. Without scripts, the page is a plain table.
"use strict";

const table = document.querySelector("table"), body = table.tBodies[0], rows = [...body.rows];
const heads = [...table.tHead.rows[0].cells];
const field = (name) => document.getElementById(name);

// Return what a cell is sorted by: its number, otherwise its text; undefined for none.
function valueOf(row, column) {
  const cell = row.cells[column];
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  const text = cell.textContent.trim();
  return text === "–" || text === "" ? undefined : text;
}

function sortBy(column) {
  const head = heads[column], down = head.ariaSort ? head.ariaSort === "ascending" : column > 0;
  for (const other of heads) other.removeAttribute("aria-sort");
  head.ariaSort = down ? "descending" : "ascending";
  const sorted = rows.map((row) => [valueOf(row, column), row]).sort(([a], [b]) => {
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined); // always at the end
    const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    return down ? -order : order;
  });
  body.append(...sorted.map(([, row]) => row));
}

function filter() {
  const name = field("name").value.toLowerCase(), data = field("data").value, most = field("size").valueAsNumber;
  let shown = 0;
  for (const row of rows) {
    const size = row.dataset.parameters === "" ? NaN : Number(row.dataset.parameters) / 1e6;
    const fits = row.cells[0].textContent.toLowerCase().includes(name) && (!data || row.dataset.data === data) && (Number.isNaN(most) || size <= most);
    row.hidden = !fits;
    shown += fits ? 1 : 0;
  }
  field("shown").textContent = `${shown} of ${rows.length}`;
}

heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => sortBy(column)));
for (const name of ["name", "data", "size"]) field(name).addEventListener("input", filter);
document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
document.querySelector("form").hidden = false;
filter();
