// A list of boxes with arrow keys: Tab reaches one box, and arrow keys reach the others from it.

export class Listbox {
  constructor(list, onFocus) {
    this.list = list;
    this.onFocus = onFocus;
    list.addEventListener("keydown", (event) => this.#key(event));
    list.addEventListener("focusin", (event) => this.#focused(event.target.closest("[role=option]")));
  }

  get options() {
    return [...this.list.children].filter((box) => !box.hidden);
  }

  // Let Tab reach the box that had the focus last, or the first.
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
    const second = options.findIndex((box) => box.offsetTop > options[0].offsetTop); // first box of the second row
    const wide = second > 0 ? second : options.length;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + wide, ArrowUp: at - wide, Home: 0, End: options.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    options[Math.min(Math.max(to, 0), options.length - 1)].focus();
  }
}

// Create an element. Foreign text is set as text; the page never parses HTML.
export function element(tag, facts = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (name === "class") found.className = value;
    else if (name === "text") found.textContent = value;
    else found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}
