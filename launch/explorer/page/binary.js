// Base64, and files that a page without a server contains or finds next to it.

export function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// Return fp32 values from base64, or values that were computed here unchanged.
export function floats(value) {
  return value instanceof Float32Array ? value : new Float32Array(bytes(value).buffer);
}

// Return a file as bytes: contained in the page, compressed, or next to it.
export async function readAsset(name) {
  const holder = document.getElementById(`asset-${name}`);
  if (holder) return new Response(new Blob([bytes(holder.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  let response;
  try {
    response = await fetch(name);
  } catch {
    throw new Error(`${name}: cannot be read. Open this folder through a web server, for example python3 -m http.server.`);
  }
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}. Copy the whole folder that sparo wrote.`);
  return response.arrayBuffer();
}
