// The page: what is in sight, and what happens when somebody presses something.

import { made } from "./boxes.js";
import { bestAlone, detail, focus, look, paintHeat, search, showAll } from "./looking.js";
import { painted, prepare, scored, setAll, shared, toggle } from "./marks.js";
import { captions, gallery, grid, table } from "./parts.js";
import { downloaded, saved, savedAsOne } from "./saving.js";
import { at, page, quiet, side, tell, tried, trouble } from "./sight.js";
import { ask, factsOf, floats, held, post } from "./source.js";
import { Choice } from "./state.js";

async function open(facts) {
  const before = page.sides[1];
  if (before?.choice.dirty && !confirm(`${before.facts.label} has unsaved changes. Close it anyway?`)) return null;
  const number = page.sides.length ? 1 : 0;
  const opened = { facts, choice: new Choice(facts, held?.state.sides[number]), tasks: facts.tasks.map(() => null) };
  page.sides[number] = opened;
  const [first] = page.sides;
  const names = page.sides.map((one) => one.facts.label);
  const others = page.sides.slice(1).flatMap((one) => one.facts.tasks);
  page.rows = [...first.facts.tasks, ...others.filter((task) => !first.facts.tasks.some((own) => own.name === task.name))];
  at("title").textContent = `Slots of ${names.join(" and ")}`;
  document.title = at("title").textContent;
  table.show(names, page.rows);
  if (!page.rows.length) at("scores").replaceChildren(made("p", { text: "None of the tasks can be scored slot by slot. You can still look at slots, name them and save a selection." }));
  at("top").hidden = !page.rows.length;
  at("sides").hidden = page.sides.length < 2;
  at("sides").replaceChildren(made("legend", { text: "Slots of" }), ...page.sides.map((one, index) => {
    const button = made("input", { type: "radio", name: "side", value: index });
    button.addEventListener("change", () => see(index));
    return made("label", {}, button, ` ${one.facts.label} `);
  }));
  if (opened.choice.restored) tell("Unsaved changes of this tab are back.");
  if (facts.selection.error) trouble(new Error(facts.selection.error), conflict(opened));
  return opened;
}

function see(index) {
  page.now = index;
  page.part = null;
  at("query").value = "";
  const { facts, choice } = side();
  grid.show(facts.count);
  grid.paint(choice);
  at("top-k").max = facts.count;
  at("top-k").value = Math.max(1, Math.floor(facts.count / 2));
  at("top-task").replaceChildren(...facts.tasks.map((task, number) => made("option", { value: number, text: task.name })));
  const lone = held ? "this is a saved page" : "this model reads no text";
  const [byText] = at("search-by").options;
  byText.disabled = Boolean(held) || !facts.reads;
  if (byText.disabled) at("search-by").value = "name";
  byText.text = byText.disabled ? `text (${lone})` : "text, through the text tower";
  at("captions").hidden = Boolean(held) || !facts.reads;
  captions.clear();
  focus(Math.min(page.slot, facts.count - 1));
  shared();
  if (page.image >= 0) look(page.image);
  at("sides").querySelectorAll("input").forEach((button, number) => (button.checked = number === index));
}

function submitted(id, work) {
  at(id).addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = at(id).querySelector("button:not([type])");
    if (button.disabled) return; // it is being done
    button.disabled = true;
    quiet();
    await tried(work);
    button.disabled = false;
  });
}

function save(one = side(), over = false) {
  const { choice, facts } = one;
  if (!choice.chosen.length) return trouble(new Error("All slots are off. Switch on at least one to save a selection."));
  if (held) {
    downloaded(facts, choice);
    return tell("selection.json is in the browser's downloads.");
  }
  const count = choice.chosen.length;
  return saved(facts.id, choice, over).then(
    () => {
      quiet();
      tell(`Saved to ${choice.saved.path}: ${count} of ${facts.count}. Score it: sparo eval ${facts.label} --slots ${choice.saved.path}`);
      if (one === side()) shared();
    },
    (error) => trouble(error, error.changed ? conflict(one) : []),
  );
}

// The two ways out, for the checkpoint whose file it is, whatever is in sight by then.
const conflict = (one) => [["Read it again", () => reread(one)], ["Write over it", () => save(one, true)]];

async function reread(one) {
  one.choice.reread(await ask(`read/${one.facts.id}`, {}));
  painted(one);
  scored(page.sides.indexOf(one));
  if (one === side()) focus(page.slot);
  tell(`${one.choice.saved.path} was read again.`);
}

function listen() {
  at("save").addEventListener("click", () => save());
  at("all").addEventListener("click", () => setAll(() => true));
  at("none").addEventListener("click", () => setAll(() => false));
  at("invert").addEventListener("click", () => setAll((value) => !value));
  at("clear").addEventListener("click", showAll);
  at("own-scale").addEventListener("change", paintHeat);
  at("one-file").addEventListener("click", () => tried(() => savedAsOne(page).then(tell)));
  submitted("search", search);
  submitted("top", bestAlone);
  submitted("compare", async () => {
    tell("Opening …");
    const opened = await open(await ask("compare", { checkpoint: at("compare-with").value }));
    tell(opened ? `${opened.facts.label} is open.` : "");
    if (!opened) return;
    see(1);
    prepare(opened).catch(trouble);
  });
  submitted("own", async () => {
    const { files } = at("own-image");
    if (!files.length) throw new Error("Choose an image first.");
    await addOwn(files);
    at("own").reset();
  });
  if (!held) listenToFiles();
  submitted("captions", async () => {
    const texts = at("captions-text").value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (page.image < 0) throw new Error("Choose an image first.");
    const one = side(), { image } = page;
    const { shares, squares } = await ask(`captions/${one.facts.id}`, { image, captions: texts });
    if (one === side() && image === page.image) captions.show(texts, floats(shares), floats(squares), one.choice.on);
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
    if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return; // Enter may end a composition
    if (grid.box(page.slot).hidden) showAll();
    grid.box(page.slot).focus();
  });
  document.addEventListener("keydown", keys);
  document.addEventListener("prepared", detail);
  window.addEventListener("beforeunload", (event) => {
    if (page.sides.some(({ choice }) => choice.dirty)) event.preventDefault();
  });
}

// One after the other: the server limits what it reads at once, and the first refusal ends the list.
async function addOwn(files) {
  for (const file of files) {
    const facts = new URLSearchParams({ name: file.name, caption: at("own-caption").value });
    const added = await (await post(`own?${facts}`, file)).json();
    gallery.add(added, added.image);
  }
}

// Images that are dropped on the page, or pasted.
function listenToFiles() {
  const take = (event, files) => {
    if (!files.length) return;
    event.preventDefault(); // or the browser would open the file
    quiet();
    tried(() => addOwn(files)); // the server refuses what is not an image
  };
  document.addEventListener("dragover", (event) => {
    if ([...event.dataTransfer.types].includes("Files")) event.preventDefault();
  });
  document.addEventListener("drop", (event) => take(event, event.dataTransfer.files));
  document.addEventListener("paste", (event) => {
    const { target, clipboardData } = event;
    // Text from an office program comes with an image of itself.
    const typed = target.closest("input, textarea") && [...clipboardData.types].includes("text/plain");
    if (!typed) take(event, clipboardData.files);
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
