// A list of boxes that is walked with arrow keys: one of them can be reached by Tab, the others from it.

export class Boxes {
  constructor(list, onFocus) {
    this.list = list;
    this.onFocus = onFocus;
    list.addEventListener("keydown", (event) => this.#key(event));
    list.addEventListener("focusin", (event) => this.#focused(event.target.closest("[role=option]")));
  }

  get options() {
    return [...this.list.children].filter((box) => !box.hidden);
  }

  // Where Tab goes: the box that was last in use, or the first.
  settle() {
    const { options } = this;
    const current = options.find((box) => box.tabIndex === 0) ?? options[0];
    for (const box of this.list.children) box.tabIndex = box === current ? 0 : -1;
  }

  #focused(box) {
    if (!box) return;
    for (const other of this.list.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    box.tabIndex = 0;
    this.onFocus(box);
  }

  #key(event) {
    const { options } = this, at = options.indexOf(document.activeElement);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const top = options[0].offsetTop;
    const wide = Math.max(1, options.filter((box) => box.offsetTop === top).length);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + wide, ArrowUp: at - wide, Home: 0, End: options.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    options[Math.min(Math.max(to, 0), options.length - 1)].focus();
  }
}

// Text of others is text: nothing on this page is ever made by reading HTML.
export function made(tag, facts = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (name === "class") found.className = value;
    else if (name === "text") found.textContent = value;
    else found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}
