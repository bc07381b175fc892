// The images: some of a task's, which are fetched as they come into sight, and a person's own.

import { Boxes, made } from "./boxes.js";
import { pictureOf } from "./source.js";

export class Gallery {
  constructor(list) {
    this.list = list;
    this.onChoose = () => {};
    this.boxes = new Boxes(list, (box) => this.choose(Number(box.dataset.image)));
    this.chosen = -1;
    list.addEventListener("click", (event) => {
      const box = event.target.closest("[role=option]");
      box?.focus();
      if (box) this.choose(Number(box.dataset.image)); // where it had the focus already
    });
  }

  show(images) {
    this.images = images;
    this.list.replaceChildren(...images.map((image, number) => this.#box(image, number)));
    this.boxes.settle();
  }

  // A person's own goes first.
  add(image, number) {
    this.images[number] = image;
    this.list.prepend(this.#box(image, number));
    this.list.scrollTop = 0;
    this.choose(number);
  }

  choose(number) {
    if (number === this.chosen) return;
    this.chosen = number;
    for (const box of this.list.children) {
      const here = Number(box.dataset.image) === number;
      box.setAttribute("aria-selected", String(here));
      box.tabIndex = here ? 0 : -1;
    }
    this.onChoose(number);
  }

  // The image in sight is as if it had not been chosen.
  forget() {
    this.chosen = -1;
  }

  #box({ key, caption }, number) {
    const picture = made("img", { src: pictureOf(number), alt: "", loading: "lazy", width: 80, height: 80 });
    return made("div", { role: "option", "data-image": number, "aria-selected": "false", tabindex: -1 }, picture,
      made("span", { text: caption || key, dir: "auto" }));
  }
}
