// List of images: the user's own first, then images of a task, which load when they scroll into view.

import { element, Listbox } from "./listbox.js";
import { pictureUrl } from "./requests.js";

const MAX_CAPTION = 60; // characters below an image

export class Gallery {
  constructor(list) {
    this.list = list;
    this.onChoose = () => {};
    this.boxes = new Listbox(list, (box) => this.choose(Number(box.dataset.image)));
    this.chosen = -1;
    list.addEventListener("click", (event) => {
      const box = event.target.closest("[role=option]");
      box?.focus();
      if (box) this.choose(Number(box.dataset.image)); // a second click on the focused box
    });
  }

  show(images) {
    this.images = images;
    this.list.replaceChildren(...images.map((image, number) => this.#box(image, number)));
    this.boxes.settle();
  }

  // Add a user's own image in front.
  add(image, number) {
    this.images[number] = image;
    this.list.prepend(this.#box(image, number));
    this.list.scrollTop = 0;
    this.choose(number);
  }

  choose(number) {
    if (number === this.chosen) return;
    this.chosen = number;
    for (const box of this.list.querySelectorAll("[aria-selected=true], [tabindex='0']")) {
      box.setAttribute("aria-selected", "false");
      box.tabIndex = -1;
    }
    const box = this.list.querySelector(`[data-image="${number}"]`);
    box.setAttribute("aria-selected", "true");
    box.tabIndex = 0;
    const list = this.list.getBoundingClientRect(), place = box.getBoundingClientRect();
    if (place.top < list.top || place.bottom > list.bottom) this.list.scrollTop += place.top - list.top; // the list only, not the page
    this.onChoose(number);
  }

  // Let a second click open the current image again.
  forget() {
    this.chosen = -1;
  }

  #box({ key, caption }, number) {
    const picture = element("img", { src: pictureUrl(number), alt: "", loading: "lazy", width: 80, height: 80 });
    return element("div", { role: "option", "data-image": number, "aria-selected": "false", tabindex: -1 }, picture,
      element("span", { text: shortened(caption || key), dir: "auto" }));
  }
}

// Cut a long caption after a word.
function shortened(text) {
  if (text.length <= MAX_CAPTION) return text;
  const words = text.slice(0, MAX_CAPTION).match(/^.*(?=\s)/s)?.[0] ?? text.slice(0, MAX_CAPTION); // scripts without spaces
  return `${words.trimEnd()} …`;
}
