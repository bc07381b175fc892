// Requests to the server. A page that was saved as one file has no server, and contains the answers.

const offlineData = document.getElementById("offline-data");
export const offline = offlineData ? JSON.parse(offlineData.textContent) : null;

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

// Null if the page is one file and the image was not opened before it was saved.
export async function fetchAttention(side, image) {
  if (offline) return offline.attention[`${side}/${image}`] ?? null;
  return (await checkResponse(fetch(`attention/${side}/${image}`))).json();
}

export function pictureUrl(number) {
  return offline ? `data:image/jpeg;base64,${offline.pictures[number]}` : `image/${number}`;
}

export function floats(text) {
  return new Float32Array(bytes(text).buffer);
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
