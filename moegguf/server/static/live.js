// The stream of snapshots of one model: reconnects after an error, and pauses while the page is hidden.

import { lines, request } from "./api.js";

const SNAPSHOTS_PER_S = 8; // an answer of a small model takes less than a second
const FIRST_PAUSE_MS = 500;
const MAX_PAUSE_MS = 8000;

/** `onLine(line)` is called for each object of the stream, `onLost(error)` when the connection fails. */
export class Live {
  constructor({ onLine, onLost }) {
    this.onLine = onLine;
    this.onLost = onLost;
    this.model = null;
    this.abort = null;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  watch(model) {
    this.model = model;
    this.restart();
  }

  restart() {
    this.abort?.abort();
    this.abort = null;
    if (this.model && !document.hidden) {
      this.abort = new AbortController();
      this.run(this.abort.signal);
    }
  }

  async run(signal) {
    let pause = FIRST_PAUSE_MS;
    while (!signal.aborted) {
      try {
        const response = await request(`live?model=${encodeURIComponent(this.model)}&per_s=${SNAPSHOTS_PER_S}`, { signal });
        pause = FIRST_PAUSE_MS;
        for await (const line of lines(response)) {
          if (signal.aborted) return;
          this.onLine(line);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.onLost(error);
        if (error.status === 401) return; // watch() is called again when the key is known
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, MAX_PAUSE_MS);
    }
  }
}

/** Bytes of a base64 text. */
export function bytes(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}
