// What is switched on, named and noted, for each checkpoint that is open; unsaved changes outlive a reload of the tab.

import { held } from "./source.js";

export class Choice {
  // given: what a page that was saved as one file holds in place of the selection's file.
  constructor(facts, given = null) {
    this.facts = facts;
    const { selection, count } = facts;
    this.saved = { ...selection };
    this.on = new Uint8Array(count);
    this.names = {};
    this.notes = {};
    this.looked = new Set();
    this.take(selection);
    const draft = this.#draft();
    if (given) {
      this.take(given);
      this.saved = { ...selection, ...given, made_on: this.sameAsSaved() ? selection.made_on : null };
    }
    this.restored = Boolean(draft);
    if (draft) this.take(draft);
  }

  // As a file, a draft or a page holds it; no choice at all is all of them.
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

  // Scores that are in sight while somebody switches are no longer those of other data.
  switched(tasks) {
    for (const task of tasks) for (const data of task.data) this.looked.add(data);
    this.keep();
  }

  told() {
    const { chosen, names, notes, revision } = this;
    return { chosen, names, notes, revision, looked_at: [...this.looked] };
  }

  // In words: what the choice has to do with a task's data.
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
      if (this.dirty) sessionStorage.setItem(this.#key(), JSON.stringify(this.told()));
      else sessionStorage.removeItem(this.#key());
    } catch {
      // a browser that keeps nothing: leaving the page asks first all the same
    }
  }

  // Saved as it was when it was sent; what has changed since is still unsaved.
  written(selection) {
    this.saved = { ...selection };
    this.revision = selection.revision;
    this.keep();
  }

  // The file's in place of what is here.
  reread(selection) {
    this.take(selection);
    this.written(selection);
  }

  #key() {
    return `sparo ${held ? location.pathname : ""} ${this.facts.weights} ${this.facts.units} ${this.facts.count} ${this.facts.selection.path}`;
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
