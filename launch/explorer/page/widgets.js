// The parts of the page, one of each; main.js says what they do when they are used.

import { Gallery } from "./gallery.js";
import { Grid } from "./grid.js";
import { Captions } from "./panel.js";
import { at } from "./sight.js";
import { ScoreTable } from "./table.js";

export const table = new ScoreTable(at("scores"));
export const captions = new Captions(at("captions-found"));
export const grid = new Grid(at("slots"));
export const gallery = new Gallery(at("images"));
