// Where everything comes from: the server, or the page itself where it was saved as one file.

const holder = document.getElementById("held");
export const held = holder ? JSON.parse(holder.textContent) : null;

export class Refused extends Error {
  constructor(text, changed) {
    super(text);
    this.changed = changed; // the file was written by somebody else
  }
}

async function answered(request) {
  let response;
  try {
    response = await request;
  } catch {
    throw new Refused("The server does not answer. Is sparo slots explore still running?", false);
  }
  if (response.ok) return response;
  const text = await response.text();
  let told = { error: text };
  try {
    told = JSON.parse(text);
  } catch {
    // not ours: shown as it is
  }
  throw new Refused(told.error || `${response.status} ${response.statusText}`, Boolean(told.changed));
}

export async function post(path, body) {
  return answered(fetch(path, { method: "POST", headers: { "x-sparo": "explore" }, body }));
}

export async function ask(path, given) {
  return (await post(path, JSON.stringify(given))).json();
}

export async function factsOf() {
  return held ? held.facts : (await answered(fetch("facts"))).json();
}

export async function taskOf(side, number) {
  if (held) return bytes(held.tasks[`${side}/${number}`]).buffer;
  return (await answered(fetch(`task/${side}/${number}`))).arrayBuffer();
}

// Null where the page is one file and nobody looked at the image before it was saved.
export async function attentionOf(side, image) {
  if (held) return held.attention[`${side}/${image}`] ?? null;
  return (await answered(fetch(`attention/${side}/${image}`))).json();
}

export function pictureOf(number) {
  return held ? `data:image/jpeg;base64,${held.pictures[number]}` : `image/${number}`;
}

export function floats(text) {
  return new Float32Array(bytes(text).buffer);
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
