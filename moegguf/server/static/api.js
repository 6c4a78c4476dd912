// Requests to this server: JSON, NDJSON streams, and the API key when the server requires one.

const KEY = "moegguf.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** The response of `path`; throws ApiError with the server's message. A body is sent as JSON. */
export async function request(path, { body, signal, method = body ? "POST" : "GET" } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server is not reachable.");
  }
  if (response.ok) return response;
  if (response.status === 401) document.dispatchEvent(new Event("key-needed"));
  throw new ApiError(response.status, await errorMessage(response));
}

async function errorMessage(response) {
  try {
    const { error } = await response.json();
    return typeof error === "string" ? error : error.message;
  } catch {
    return `The server replies ${response.status}.`;
  }
}

/** The objects of an NDJSON response, as they arrive. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ApiError(0, "The connection to the server was lost.");
      });
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) if (part.trim()) yield JSON.parse(part);
    }
    if (rest.trim()) yield JSON.parse(rest);
  } finally {
    reader.cancel().catch(() => {});
  }
}
