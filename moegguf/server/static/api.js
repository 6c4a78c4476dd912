// Requests to this server: JSON, NDJSON streams, snapshots of a model, and the API key when the server requires one.

const KEY = "moegguf.key";
const SNAPSHOTS_PER_S = 8; // many, because a small model may answer in less than a second
const PAUSE_MS = 1000; // milliseconds between the end of a connection and the next attempt to connect

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
  document.dispatchEvent(new Event("key-kept"));
}

/** Sends a request to `path` and returns the response. Throws ApiError if the server is not reachable or replies with
 *  an error status. A file is sent unchanged as the body, any other body as JSON. */
export async function request(path, { body, signal, method = body ? "POST" : "GET" } = {}) {
  const key = sessionStorage.getItem(KEY), headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const isFile = body instanceof Blob;
  if (body && !isFile) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, signal, body: isFile ? body : body && JSON.stringify(body), cache: "no-store" }).catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError(0, "The server is not reachable.");
  });
  if (response.ok) return response;
  if (response.status === 401) document.dispatchEvent(new Event("key-needed"));
  const { error } = await response.json().catch(() => ({}));
  throw new ApiError(response.status, error?.message ?? error ?? `The server replies ${response.status}.`);
}

export async function json(path, options) {
  return (await request(path, options)).json();
}

/** Yields the objects of an NDJSON response as they arrive. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ApiError(0, "The connection to the server was lost.");
      });
      const parts = (rest + (done ? "\n" : value)).split("\n");
      rest = parts.pop();
      for (const part of parts) if (part.trim()) yield JSON.parse(part);
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The stream of snapshots of one model. When a connection ends, the stream connects again. After status 401 it waits
 *  until the user has entered a key or the page is shown again. It stops while the page is hidden. `onLine(line)` is
 *  called for each object, and `onLost(error)` when a connection fails. */
export class Live {
  constructor({ onLine, onLost }) {
    Object.assign(this, { onLine, onLost });
    for (const kind of ["visibilitychange", "key-kept"]) document.addEventListener(kind, () => this.watch(this.model));
  }

  watch(model) {
    this.model = model;
    this.abort?.abort();
    this.abort = new AbortController();
    if (model && !document.hidden) this.run(this.abort.signal);
  }

  async run(signal) {
    while (!signal.aborted) {
      try {
        const response = await request(`live?model=${encodeURIComponent(this.model)}&per_s=${SNAPSHOTS_PER_S}`, { signal });
        for await (const line of lines(response)) {
          if (signal.aborted) return;
          this.onLine(line);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.onLost(error);
        if (error.status === 401) return; // another attempt without the key would fail, too
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }
}

/** Returns the bytes of a base64 text. */
export function bytes(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}
