// Switches, names and notes of a checkpoint, with undo. Unsaved changes survive a reload of the tab.

import { offline } from "./requests.js";

export class Selection {
  // given: the selection that a page saved as one file contains
  constructor(facts, given = null) {
    this.facts = facts;
    const { selection, count } = facts;
    this.saved = { ...selection };
    this.on = new Uint8Array(count);
    this.names = {};
    this.notes = {};
    this.looked = new Set();
    this.undone = [];
    this.done = [];
    this.take(selection);
    const draft = this.#draft();
    if (given) {
      this.take(given);
      this.saved = { ...selection, ...given, made_on: this.sameAsSaved() ? selection.made_on : null };
    }
    this.restored = Boolean(draft);
    if (draft) this.take(draft);
  }

  // Read a selection from a file, a draft or a page. Without a selection, all slots are on.
  take({ chosen, names, notes, looked_at: looked, revision }) {
    this.on.fill(chosen ? 0 : 1);
    for (const slot of chosen ?? []) this.on[slot] = 1;
    this.names = { ...names };
    this.notes = { ...notes };
    this.looked = new Set(looked ?? []);
    if (revision !== undefined) this.revision = revision;
  }

  get chosen() {
    return [...this.on.keys()].filter((slot) => this.on[slot]);
  }

  // Remember the data whose scores were visible while slots were switched.
  switched(tasks) {
    for (const task of tasks) for (const data of task.data) this.looked.add(data);
    this.keep();
  }

  // Call before the switches change, so that the change can be undone.
  remember() {
    this.done.push(this.on.slice());
    this.undone = [];
  }

  // Undo or redo; returns whether there was anything to do.
  travel(from, to) {
    if (!from.length) return false;
    to.push(this.on.slice());
    this.on.set(from.pop());
    return true;
  }

  toJson() {
    const { chosen, names, notes, revision } = this;
    return { chosen, names, notes, revision, looked_at: [...this.looked] };
  }

  // Describe whether the selection was made on a task's data.
  share(task) {
    if (this.on.every((value) => value)) return "all";
    if (task.data.some((data) => this.looked.has(data))) return "same data";
    const made = this.sameAsSaved() ? this.saved.made_on : null;
    if (made && task.data.includes(made.data)) return made.share === "half" ? "half of it is the same data" : "same data";
    return made && made.data ? "other data" : "unknown data";
  }

  sameAsSaved() {
    const before = this.saved.chosen;
    const now = this.chosen;
    return Boolean(before) && before.length === now.length && before.every((slot, i) => slot === now[i]);
  }

  get dirty() {
    const same = (a, b) => JSON.stringify(Object.entries(a).sort()) === JSON.stringify(Object.entries(b ?? {}).sort());
    const chosen = this.saved.chosen ? this.sameAsSaved() : this.on.every((value) => value);
    return !chosen || !same(this.names, this.saved.names) || !same(this.notes, this.saved.notes);
  }

  keep() {
    try {
      if (this.dirty) sessionStorage.setItem(this.#key(), JSON.stringify(this.toJson()));
      else sessionStorage.removeItem(this.#key());
    } catch {
      // without storage, leaving the page still asks first
    }
  }

  // Mark the selection as saved as it was sent; later changes remain unsaved.
  markSaved(selection) {
    this.saved = { ...selection };
    this.revision = selection.revision;
    this.keep();
  }

  // Replace the selection by that of the file.
  reread(selection) {
    this.take(selection);
    this.markSaved(selection);
  }

  #key() {
    return `sparo ${offline ? location.pathname : ""} ${this.facts.weights} ${this.facts.units} ${this.facts.count} ${this.facts.selection.path}`;
  }

  #draft() {
    try {
      const found = JSON.parse(sessionStorage.getItem(this.#key()));
      return found && found.chosen.every((slot) => slot < this.facts.count) ? found : null;
    } catch {
      return null;
    }
  }
}
