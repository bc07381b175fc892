// Entry point of the page: opens checkpoints and connects buttons, forms and keys.

import { floats } from "./binary.js";
import { startEditing } from "./edit.js";
import { showShortcuts, startGuide } from "./guide.js";
import { element } from "./listbox.js";
import { byId, clearError, currentSide, page, reportErrors, showError, showStatus } from "./page_state.js";
import { addImage, compareCaptions, fetchFacts, hasModel, offline, postJson } from "./requests.js";
import { downloadSelection, saveOffline, saveSelection } from "./save.js";
import { Selection } from "./selection.js";
import { paintSwitches, prepare, redo, setAll, toggle, undo, updateScores, updateShare } from "./switches.js";
import { drawLarge, findAlike, focus, openImage, paintHeat, search, selectBest, showAll, showSlotFacts } from "./view.js";
import { captions, gallery, grid, scoreBar, table } from "./widgets.js";

async function open(facts) {
  const before = page.sides[1];
  if (before?.choice.dirty && !confirm(`${before.facts.label} has unsaved changes. Close it anyway?`)) return null;
  const number = page.sides.length ? 1 : 0;
  const opened = { facts, choice: new Selection(facts, offline?.state.sides[number]), tasks: facts.tasks.map(() => null) };
  page.sides[number] = opened;
  const [first] = page.sides;
  const names = page.sides.map((one) => one.facts.label);
  const others = page.sides.slice(1).flatMap((one) => one.facts.tasks);
  page.rows = [...first.facts.tasks, ...others.filter((task) => !first.facts.tasks.some((own) => own.name === task.name))];
  byId("title").textContent = `Slots of ${names.join(" and ")}`;
  document.title = byId("title").textContent;
  table.show(names, page.rows);
  scoreBar.show(page.rows);
  if (!page.rows.length) byId("scores").replaceChildren(element("p", { text: "None of the tasks can be scored slot by slot. You can still look at slots, name them and save a selection." }));
  byId("all-scores").open = !page.rows.length;
  byId("top").hidden = !page.rows.length;
  byId("sides").hidden = page.sides.length < 2;
  byId("sides").replaceChildren(element("legend", { text: "Slots of" }), ...page.sides.map((one, index) => {
    const button = element("input", { type: "radio", name: "side", value: index });
    button.addEventListener("change", () => showSide(index));
    return element("label", {}, button, ` ${one.facts.label} `);
  }));
  if (opened.choice.restored) showStatus("Unsaved changes of this tab are back.");
  if (facts.selection.error) showError(new Error(facts.selection.error), conflict(opened));
  return opened;
}

function showSide(index) {
  page.now = index;
  page.part = null;
  byId("query").value = "";
  const { facts, choice } = currentSide();
  grid.show(facts.count);
  grid.paint(choice);
  byId("top-k").max = facts.count;
  byId("top-k").value = Math.max(1, Math.floor(facts.count / 2));
  byId("top-task").replaceChildren(...facts.tasks.map((task, number) => element("option", { value: number, text: task.name })));
  const why = hasModel ? "this model reads no text" : "this is a saved page";
  const [byText] = byId("search-by").options;
  byText.disabled = !hasModel || !facts.reads;
  if (byText.disabled) byId("search-by").value = "name";
  byText.text = byText.disabled ? `text (${why})` : "text, through the text tower";
  byId("captions").hidden = !hasModel || !facts.reads;
  captions.clear();
  focus(Math.min(page.slot, facts.count - 1));
  updateScores(index);
  if (page.image >= 0) openImage(page.image);
  byId("sides").querySelectorAll("input").forEach((button, number) => (button.checked = number === index));
}

function onSubmit(id, work) {
  byId(id).addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = byId(id).querySelector("button:not([type])");
    if (button.disabled) return; // it is running
    button.disabled = true;
    clearError();
    await reportErrors(work);
    button.disabled = false;
  });
}

function save(one = currentSide(), over = false) {
  const { choice, facts } = one;
  if (!choice.chosen.length) return showError(new Error("All slots are off. Switch on at least one to save a selection."));
  if (offline) {
    downloadSelection(facts, choice);
    return showStatus("selection.json is in the browser's downloads.");
  }
  const count = choice.chosen.length;
  return saveSelection(facts.id, choice, over).then(
    () => {
      clearError();
      showStatus(`Saved to ${choice.saved.path}: ${count} of ${facts.count}. Score it: sparo eval ${facts.label} --slots ${choice.saved.path}`);
      if (one === currentSide()) updateShare();
    },
    (error) => showError(error, error.changed ? conflict(one) : []),
  );
}

// Two ways to resolve a conflict, for the checkpoint whose file it is, even if another one is current by then.
const conflict = (one) => [["Read it again", () => reread(one)], ["Write over it", () => save(one, true)]];

async function reread(one) {
  one.choice.reread(await postJson(`read/${one.facts.id}`, {}));
  paintSwitches(one);
  updateScores(page.sides.indexOf(one));
  if (one === currentSide()) focus(page.slot);
  showStatus(`${one.choice.saved.path} was read again.`);
}

function addListeners() {
  byId("undo").addEventListener("click", undo);
  byId("redo").addEventListener("click", redo);
  byId("save").addEventListener("click", () => save());
  byId("all").addEventListener("click", () => setAll(() => true));
  byId("none").addEventListener("click", () => setAll(() => false));
  byId("invert").addEventListener("click", () => setAll((value) => !value));
  byId("clear").addEventListener("click", showAll);
  byId("own-scale").addEventListener("change", paintHeat);
  byId("one-file").addEventListener("click", () => reportErrors(() => saveOffline(page).then(showStatus)));
  onSubmit("search", search);
  onSubmit("top", selectBest);
  onSubmit("alike", findAlike);
  onSubmit("compare", async () => {
    showStatus("Opening …");
    const opened = await open(await postJson("compare", { checkpoint: byId("compare-with").value }));
    showStatus(opened ? `${opened.facts.label} is open.` : "");
    if (!opened) return;
    showSide(1);
    prepare(opened).catch(showError);
  });
  onSubmit("own", async () => {
    const { files } = byId("own-image");
    if (!files.length) throw new Error("Choose an image first.");
    await addOwn(files);
    byId("own").reset();
  });
  if (hasModel) listenToFiles();
  onSubmit("captions", async () => {
    const texts = byId("captions-text").value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (page.image < 0) throw new Error("Choose an image first.");
    const one = currentSide(), { image } = page;
    const { shares, squares } = await compareCaptions(one.facts.id, image, texts);
    if (one === currentSide() && image === page.image) captions.show(texts, floats(shares), floats(squares), one.choice.on);
  });
  for (const [id, key] of [["name", "names"], ["note", "notes"]]) {
    byId(id).addEventListener("input", () => {
      const { choice } = currentSide(), text = byId(id).value.trim();
      if (text) choice[key][page.slot] = text;
      else delete choice[key][page.slot];
      choice.keep();
      grid.box(page.slot).querySelector(".name").textContent = choice.names[page.slot] ?? "";
    });
  }
  byId("name").addEventListener("keydown", (event) => {
    if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return; // Enter may end a composition
    if (grid.box(page.slot).hidden) showAll();
    grid.box(page.slot).focus();
  });
  document.addEventListener("keydown", onKey);
  document.addEventListener("prepared", showSlotFacts);
  window.addEventListener("beforeunload", (event) => {
    if (page.sides.some(({ choice }) => choice.dirty)) event.preventDefault();
  });
}

// One after the other, because the server limits concurrent uploads. The first refusal ends the list.
async function addOwn(files) {
  for (const file of files) {
    const added = await addImage(file, byId("own-caption").value);
    gallery.add(added, added.image);
  }
  showStatus(files.length === 1 ? `Added ${files[0].name}.` : `Added ${files.length} images.`);
}

// Add images that are dropped on the page or pasted.
function listenToFiles() {
  const take = (event, files) => {
    if (!files.length) return;
    event.preventDefault(); // or the browser would open the file
    clearError();
    reportErrors(() => addOwn(files)); // the server refuses what is not an image
  };
  document.addEventListener("dragover", (event) => {
    if ([...event.dataTransfer.types].includes("Files")) event.preventDefault();
  });
  document.addEventListener("drop", (event) => take(event, event.dataTransfer.files));
  document.addEventListener("paste", (event) => {
    const { target, clipboardData } = event;
    // Office programs copy text together with an image of it.
    const typed = target.closest("input, textarea") && [...clipboardData.types].includes("text/plain");
    if (!typed) take(event, clipboardData.files);
  });
}

function onKey(event) {
  const key = event.key.toLowerCase(), control = event.ctrlKey || event.metaKey;
  const typing = event.target.closest("input:not([type=checkbox], [type=radio]), textarea, select");
  if (control && key === "s") {
    event.preventDefault();
    save();
    return;
  }
  if (control && !typing && (key === "z" || key === "y")) {
    event.preventDefault();
    if (key === "y" || event.shiftKey) redo();
    else undo();
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (key === "?") showShortcuts();
  const field = { n: "name", "/": "query" }[event.key];
  if (!field) return;
  event.preventDefault();
  byId(field).focus();
  byId(field).select();
}

async function start() {
  const facts = await fetchFacts();
  Object.assign(grid, { onToggle: toggle, onFocus: focus, onHover: (slot) => drawLarge(slot ?? page.slot) });
  gallery.onChoose = openImage;
  addListeners();
  if (offline) for (const id of ["compare", "one-file"]) byId(id).hidden = true;
  if (!hasModel) for (const id of ["own", "alike"]) byId(id).hidden = true;
  gallery.show(facts.images);
  byId("runs").replaceChildren(...(facts.runs ?? []).map((run) => element("option", { value: run })));
  startGuide();
  startEditing();
  const opened = [];
  for (const one of facts.sides) opened.push(await open(one));
  showSide(0);
  gallery.choose(offline?.state.image ?? 0);
  for (const one of opened) await prepare(one);
  document.body.dataset.ready = "yes";
}

reportErrors(start);
