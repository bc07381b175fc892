// The slots of the current checkpoint as boxes.

import { element, Listbox } from "./listbox.js";

export class SlotGrid {
  constructor(list) {
    this.list = list;
    this.onToggle = this.onFocus = this.onHover = () => {};
    this.boxes = new Listbox(list, (box) => this.onFocus(Number(box.dataset.slot)));
    list.addEventListener("click", (event) => {
      const box = event.target.closest("[role=option]");
      if (!box) return;
      box.focus();
      if (event.target.closest(".switch")) this.onToggle(Number(box.dataset.slot));
    });
    list.addEventListener("pointerover", (event) => {
      const box = event.target.closest("[role=option]");
      if (box) this.onHover(Number(box.dataset.slot));
    });
    list.addEventListener("pointerleave", () => this.onHover(null));
    list.addEventListener("keydown", (event) => {
      if (event.key !== " " || !document.activeElement?.dataset.slot) return;
      event.preventDefault();
      this.onToggle(Number(document.activeElement.dataset.slot));
    });
  }

  // Create a box per slot.
  show(count) {
    this.list.replaceChildren(...Array.from({ length: count }, (_, slot) => {
      const head = element("span", { class: "head" }, element("span", { class: "number", text: String(slot) }), element("span", { class: "switch" }));
      return element("div", { role: "option", "data-slot": slot, tabindex: -1 },
        head, element("canvas", { "aria-hidden": "true", height: 1 }), element("span", { class: "name", dir: "auto" }), element("span", { class: "fact" }));
    }));
    this.boxes.settle();
  }

  box(slot) {
    return this.list.querySelector(`[data-slot="${slot}"]`);
  }

  // Update switches and names.
  paint(choice) {
    for (const box of this.list.children) {
      const slot = Number(box.dataset.slot), on = Boolean(choice.on[slot]);
      box.setAttribute("aria-selected", String(on));
      box.querySelector(".switch").textContent = on ? "on" : "off";
      box.querySelector(".name").textContent = choice.names[slot] ?? "";
    }
  }

  switch(slot, on) {
    const box = this.box(slot);
    box.setAttribute("aria-selected", String(on));
    box.querySelector(".switch").textContent = on ? "on" : "off";
  }

  // Mark the slot whose details are shown.
  mark(slot) {
    for (const box of this.list.querySelectorAll(".current")) box.classList.remove("current");
    this.box(slot)?.classList.add("current");
  }

  // Scroll to a slot, which Tab then reaches first.
  reveal(slot) {
    for (const box of this.list.children) box.tabIndex = Number(box.dataset.slot) === slot ? 0 : -1;
    this.box(slot).scrollIntoView({ block: "nearest" });
  }

  // Set the line below each slot's name.
  facts(of) {
    for (const box of this.list.children) box.querySelector(".fact").textContent = of(Number(box.dataset.slot));
  }

  // Draw the attention; hide the pictures if there is none.
  heat(heat, own) {
    for (const box of this.list.children) {
      const canvas = box.querySelector("canvas");
      canvas.hidden = !heat;
      if (heat) heat.draw(canvas, Number(box.dataset.slot), own);
    }
  }

  // Show only these slots in this order; null: all by number.
  order(slots) {
    const shown = new Set(slots ?? []);
    const boxes = [...this.list.children].sort((a, b) => a.dataset.slot - b.dataset.slot);
    for (const box of boxes) box.hidden = Boolean(slots) && !shown.has(Number(box.dataset.slot));
    const first = (slots ?? []).map((slot) => boxes[slot]);
    this.list.replaceChildren(...first, ...boxes.filter((box) => !first.includes(box)));
    this.boxes.settle();
  }
}
