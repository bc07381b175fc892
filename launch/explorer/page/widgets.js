// The widgets of the page. main.js connects them.

import { Gallery } from "./gallery.js";
import { SlotGrid } from "./grid.js";
import { Captions } from "./panel.js";
import { byId } from "./page_state.js";
import { ScoreBar, ScoreTable } from "./table.js";

export const scoreBar = new ScoreBar(byId("score-bar"));
export const table = new ScoreTable(byId("scores"));
export const captions = new Captions(byId("captions-found"));
export const grid = new SlotGrid(byId("slots"));
export const gallery = new Gallery(byId("images"));
