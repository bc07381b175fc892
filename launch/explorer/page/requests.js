// Requests to the server. A page without a server contains answers, and may contain the model.

import { bytes } from "./binary.js";
import { LocalModel } from "./local_model.js";

const offlineData = document.getElementById("offline-data");
export const offline = offlineData ? JSON.parse(offlineData.textContent) : null;
const local = offline?.model ? new LocalModel(offline.model, offline.vectors) : null;
export const hasModel = !offline || Boolean(local);

export class RequestError extends Error {
  constructor(text, changed) {
    super(text);
    this.changed = changed; // another tab or program has written the file
  }
}

async function checkResponse(request) {
  let response;
  try {
    response = await request;
  } catch {
    throw new RequestError("The server does not answer. Is sparo slots explore still running?", false);
  }
  if (response.ok) return response;
  const text = await response.text();
  let body = { error: text };
  try {
    body = JSON.parse(text);
  } catch {
    // not an answer of the explorer, for example a proxy's page
  }
  throw new RequestError(body.error || `${response.status} ${response.statusText}`, Boolean(body.changed));
}

export async function post(path, body) {
  return checkResponse(fetch(path, { method: "POST", headers: { "x-sparo": "explore" }, body }));
}

export async function postJson(path, given) {
  return (await post(path, JSON.stringify(given))).json();
}

export async function fetchFacts() {
  return offline ? offline.facts : (await checkResponse(fetch("facts"))).json();
}

export async function fetchTask(side, number) {
  if (offline) return bytes(offline.tasks[`${side}/${number}`]).buffer;
  return (await checkResponse(fetch(`task/${side}/${number}`))).arrayBuffer();
}

// Return null if the page has no server and no model, and the image was not opened before it was saved.
export async function fetchAttention(side, image) {
  if (!offline) return (await checkResponse(fetch(`attention/${side}/${image}`))).json();
  return offline.attention[`${side}/${image}`] ?? (local?.urlOf(image) ? local.attention(image) : null);
}

export function pictureUrl(number) {
  if (!offline) return `image/${number}`;
  return local?.urlOf(number) ?? `data:image/jpeg;base64,${offline.pictures[number]}`;
}

// Add a user's image; returns its number, key and caption.
export async function addImage(file, caption) {
  if (local) return local.add(file, file.name, caption);
  return (await post(`own?${new URLSearchParams({ name: file.name, caption })}`, file)).json();
}

// Ask the model, in the server or in this page.
export const searchText = (side, text) => (local ? local.search(text) : postJson(`search/${side}`, { text }));
export const compareCaptions = (side, image, texts) => (local ? local.captions(image, texts) : postJson(`captions/${side}`, { image, captions: texts }));
export const similarImages = (side, image, slots) => (local ? local.alike(image, slots) : postJson(`alike/${side}`, { image, slots }));
