// The page: what is in sight, and what happens when somebody presses something.

import { made } from "./boxes.js";
import { bestAlone, detail, focus, lines, look, search } from "./looking.js";
import { prepare, scored, setAll, shared, toggle } from "./marks.js";
import { captions, gallery, grid, table } from "./parts.js";
import { downloaded, saved, savedAsOne } from "./saving.js";
import { at, page, side, tell, tried, trouble } from "./sight.js";
import { ask, factsOf, floats, held, post } from "./source.js";
import { Choice } from "./state.js";

async function open(facts) {
  const opened = { facts, choice: new Choice(facts), tasks: facts.tasks.map(() => null) };
  page.sides[page.sides.length ? 1 : 0] = opened;
  if (held) opened.choice.take(held.state.sides[page.sides.length - 1]);
  const [first] = page.sides;
  const names = page.sides.map((one) => one.facts.label);
  const others = page.sides.slice(1).flatMap((one) => one.facts.tasks);
  page.rows = [...first.facts.tasks, ...others.filter((task) => !first.facts.tasks.some((own) => own.name === task.name))];
  at("title").textContent = `Slots of ${names.join(" and ")}`;
  document.title = at("title").textContent;
  table.show(names, page.rows);
  const own = page.sides.indexOf(opened);
  if (opened.choice.restored) tell("Unsaved changes of this tab are back.");
  return { opened, own };
}

function see(index) {
  page.now = index;
  page.part = null;
  const { facts, choice } = side();
  grid.show(facts.count);
  grid.paint(choice);
  at("top-k").max = facts.count;
  at("top-k").value = Math.max(1, Math.floor(facts.count / 2));
  at("top-task").replaceChildren(...facts.tasks.map((task, number) => made("option", { value: number, text: task.name })));
  const lone = held ? "this is a saved page" : "this model reads no text";
  const byText = at("search-by").options[1];
  byText.disabled = Boolean(held) || !facts.reads;
  byText.text = byText.disabled ? `text (${lone})` : "text, through the text tower";
  at("captions").hidden = Boolean(held) || !facts.reads;
  captions.clear();
  focus(Math.min(page.slot, facts.count - 1));
  shared();
  if (page.image >= 0) tried(() => look(page.image));
  at("sides").hidden = page.sides.length < 2;
  const radios = page.sides.map((one, number) => {
    const button = made("input", { type: "radio", name: "side", value: number });
    button.checked = number === index;
    button.addEventListener("change", () => see(number));
    const label = made("label", {}, button);
    label.append(` ${one.facts.label} `);
    return label;
  });
  at("sides").replaceChildren(made("legend", { text: "Slots of" }), ...radios);
}

function submitted(id, work) {
  at(id).addEventListener("submit", (event) => {
    event.preventDefault();
    tried(work);
  });
}

function save(over = false) {
  const { choice, facts } = side();
  if (!choice.chosen.length) return trouble(new Error("Nothing is on: a selection keeps one slot at least."));
  if (held) return downloaded(facts, choice);
  return saved(facts.id, choice, over).then(
    () => {
      at("trouble").hidden = true;
      grid.paint(choice);
      tell(`Saved to ${choice.saved.path}: ${choice.chosen.length} of ${facts.count}. Score it: sparo eval ${facts.label} --slots ${choice.saved.path}`);
    },
    (error) => trouble(error, error.changed ? [["Read it again", reread], ["Write over it", () => save(true)]] : []),
  );
}

async function reread() {
  const { choice, facts } = side();
  choice.written(await ask(`read/${facts.id}`, {}));
  grid.paint(choice);
  focus(page.slot);
  scored(page.now);
  tell(`${choice.saved.path} was read again.`);
}

function listen() {
  at("save").addEventListener("click", () => save());
  at("all").addEventListener("click", () => setAll(() => true));
  at("none").addEventListener("click", () => setAll(() => false));
  at("invert").addEventListener("click", () => setAll((value) => !value));
  at("clear").addEventListener("click", () => {
    page.part = null;
    at("query").value = "";
    grid.order(null);
    lines();
  });
  at("one-file").addEventListener("click", () => tried(() => savedAsOne(page).then(tell)));
  submitted("search", search);
  submitted("top", bestAlone);
  submitted("compare", async () => {
    tell("Opening …");
    const facts = await ask("compare", { checkpoint: at("compare-with").value });
    const found = await open(facts);
    see(found.own);
    tell(`${facts.label} is open.`);
    await prepare(found);
  });
  submitted("own", async () => {
    const file = at("own-image").files[0];
    if (!file) throw new Error("Choose an image first.");
    const facts = new URLSearchParams({ name: file.name, caption: at("own-caption").value });
    const added = await (await post(`own?${facts}`, file)).json();
    gallery.add(added, added.image);
  });
  submitted("captions", async () => {
    const texts = at("captions-text").value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (page.image < 0) throw new Error("Choose an image first.");
    const { shares, squares } = await ask(`captions/${side().facts.id}`, { image: page.image, captions: texts });
    captions.show(texts, floats(shares), floats(squares), side().choice.on);
  });
  for (const [id, key] of [["name", "names"], ["note", "notes"]]) {
    at(id).addEventListener("input", () => {
      const { choice } = side(), text = at(id).value.trim();
      if (text) choice[key][page.slot] = text;
      else delete choice[key][page.slot];
      choice.keep();
      grid.box(page.slot).querySelector(".name").textContent = choice.names[page.slot] ?? "";
    });
  }
  at("name").addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") grid.box(page.slot).focus();
  });
  document.addEventListener("keydown", keys);
  document.addEventListener("prepared", detail);
  window.addEventListener("beforeunload", (event) => {
    if (!held && page.sides.some(({ choice }) => choice.dirty)) event.preventDefault();
  });
}

function keys(event) {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "s") {
    event.preventDefault();
    save();
    return;
  }
  const typing = event.target.closest("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const field = { n: "name", "/": "query" }[event.key];
  if (!field) return;
  event.preventDefault();
  at(field).focus();
  at(field).select();
}

async function begin() {
  const facts = await factsOf();
  page.colours = facts.colours;
  Object.assign(grid, { onToggle: toggle, onFocus: focus });
  gallery.onChoose = look;
  listen();
  if (held) for (const id of ["compare", "own", "one-file"]) at(id).hidden = true;
  gallery.show(facts.images);
  const opened = [];
  for (const one of facts.sides) opened.push(await open(one));
  see(0);
  gallery.choose(held?.state.image ?? 0);
  for (const one of opened) await prepare(one);
  document.body.dataset.ready = "yes";
}

tried(begin);
