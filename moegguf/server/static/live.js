// The stream of views of one model: connects again when it breaks, and rests while nobody looks at the page.

import { lines, request } from "./api.js";

const VIEWS_PER_S = 8; // a small model answers within a second
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;

/** `onLine(line)` gets each object of the stream, `onLost()` is told when the server has gone. */
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
        const response = await request(`live?model=${encodeURIComponent(this.model)}&per_s=${VIEWS_PER_S}`, { signal });
        pause = FIRST_PAUSE_MS;
        for await (const line of lines(response)) {
          if (signal.aborted) return;
          this.onLine(line);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.onLost(error);
        if (error.status === 401) return; // the key comes first; watch() is called again with it
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
  }
}

/** Bytes of a base64 text. */
export function bytes(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}
