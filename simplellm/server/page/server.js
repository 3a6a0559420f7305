// What the page asks of its server, and how the server's streams are read.

// The name of all requests of this page: /live tells by it which of the engine's are ours.
const PAGE = `page-${[...crypto.getRandomValues(new Uint8Array(12))]
  .map((byte) => byte.toString(16).padStart(2, "0"))
  .join("")}`;
let authorization = null; // kept here and nowhere else

/** Send this key from now on; a header carries its bytes, a character for each. */
export function useKey(key) {
  authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
}

/** What the server answers instead, with its status and its own words. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * The response to a GET, or to a POST of `body`. Throws a Refusal, an AbortError if
 * `signal` says so, or an Error if the server can't be reached.
 */
export async function ask(path, { body, signal } = {}) {
  const headers = { "x-request-id": PAGE };
  if (authorization) headers.authorization = authorization;
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal };
  const response = await connected(
    fetch(path, body ? { ...options, body: JSON.stringify(body) } : options),
  );
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const words = told?.error?.message ?? `status ${response.status}`;
  throw new Refusal(response.status, words);
}

/** What a promise of the network brings; browsers' words for its failures say little. */
async function connected(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The connection to the server broke off.");
  }
}

/** The data of a response's events until [DONE]. Throws if they end before it. */
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let waiting = "";
  for (;;) {
    const { value, done } = await connected(reader.read());
    if (done) throw new Error("The server ended the stream early.");
    const blocks = (waiting + decoder.decode(value, { stream: true })).split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((one) => one.startsWith("data: "));
      const data = line?.slice("data: ".length);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
