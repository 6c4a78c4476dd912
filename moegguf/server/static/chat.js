// One conversation: what was said, the answer as it comes, and stopping it.

import { lines, request } from "./api.js";
import { digits, duration, percent, size } from "./format.js";
import { render } from "./markdown.js";

const NEAR_END_PX = 60;

export class Chat {
  /** `options()` gives {model, system, options} of the next message; `onBusy(busy)` hears when an answer runs. */
  constructor({ log, scroll, options, onBusy }) {
    Object.assign(this, { log, scroll, options, onBusy });
    this.messages = [];
    this.abort = null;
  }

  get busy() {
    return this.abort !== null;
  }

  reset() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
  }

  stop() {
    this.abort?.abort();
  }

  /** Asks and shows the answer. Returns false when it could not be asked at all. */
  async send(text) {
    const { model, system, options } = this.options();
    const said = turn("user", text);
    const answer = new AnswerView((change) => this.keepingEnd(change));
    this.log.append(said, answer.element);
    this.toEnd();
    this.messages.push({ role: "user", content: text });
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
    const conversation = this.messages, abort = (this.abort = new AbortController());
    this.onBusy(true);
    try {
      const response = await request("api/chat", { body: { model, messages, options, stream: true }, signal: abort.signal });
      for await (const line of lines(response)) {
        if (line.error) throw new Error(line.error);
        answer.take(line);
      }
      answer.end();
    } catch (error) {
      if (error.name === "AbortError") answer.stop();
      else answer.fail(error.message);
    } finally {
      this.abort = null;
      this.onBusy(false);
    }
    if (answer.text || answer.thought) {
      conversation.push({ role: "assistant", content: answer.text, ...(answer.thought && { thinking: answer.thought }) });
      return true;
    }
    conversation.splice(conversation.findLastIndex((message) => message.role === "user"), 1); // an unanswered question would confuse the next
    return false;
  }

  /** Stays at the end of the conversation while the reader is there. */
  keepingEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    const reading = scrollHeight - scrollTop - clientHeight > NEAR_END_PX;
    change();
    if (!reading) this.toEnd();
  }

  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

function turn(kind, text) {
  const element = document.createElement("article");
  element.className = `turn ${kind}`;
  element.setAttribute("aria-label", kind === "user" ? "You" : "Answer");
  const said = document.createElement("div");
  said.className = "said";
  said.textContent = text;
  element.append(said);
  return element;
}

function paragraph(kind, text) {
  const element = document.createElement("p");
  element.className = kind;
  element.textContent = text;
  return element;
}

/** An answer on the page while it is written. */
class AnswerView {
  /** `keepingEnd(change)` makes a change to the page and stays where the reader is. */
  constructor(keepingEnd) {
    this.keepingEnd = keepingEnd;
    this.element = turn("answer writing", "");
    this.element.setAttribute("aria-label", "Answer");
    this.element.setAttribute("aria-busy", "true");
    this.said = this.element.firstChild;
    this.waiting = paragraph("waiting", "Waiting for the first word");
    this.element.prepend(this.waiting);
    this.text = "";
    this.thought = "";
    this.started = performance.now();
    this.first = 0;
    this.painting = 0;
  }

  take(line) {
    const { content = "", thinking = "" } = line.message ?? {};
    if ((content || thinking) && !this.first) this.first = performance.now() - this.started;
    this.thought += thinking;
    this.text += content;
    if (line.done) this.figures = figures(line, this.first);
    this.painting ||= requestAnimationFrame(() => this.keepingEnd(() => this.paint()));
  }

  paint() {
    this.painting = 0;
    if (this.first) this.waiting.remove();
    if (this.thought && !this.folded) this.fold();
    if (this.folded) this.folded.lastChild.textContent = this.thought.trim();
    if (this.text && this.folded && !this.thinkingEnded) this.endThinking();
    render(this.said, this.text.trimStart());
  }

  fold() {
    this.folded = document.createElement("details");
    this.folded.className = "thinking";
    const summary = document.createElement("summary");
    summary.textContent = "Thinking…";
    this.folded.append(summary, document.createElement("div"));
    this.element.prepend(this.folded);
  }

  endThinking() {
    this.thinkingEnded = true;
    const seconds = (performance.now() - this.started - this.first) / 1000;
    this.folded.firstChild.textContent = `Thought for ${seconds.toFixed(1)} s`;
  }

  end(note) {
    cancelAnimationFrame(this.painting);
    this.keepingEnd(() => {
      this.paint();
      this.waiting.remove();
      this.element.classList.remove("writing");
      this.element.removeAttribute("aria-busy");
      if (this.folded && !this.thinkingEnded) this.endThinking();
      if (note) this.element.append(note);
      else if (this.figures) this.element.append(paragraph("figures", this.figures));
    });
  }

  stop() {
    this.end(paragraph("note", "Stopped."));
  }

  fail(message) {
    const note = paragraph("note fault", message);
    note.setAttribute("role", "alert");
    this.end(note);
  }
}

/** What an answer took: "142 tokens · 61.3 tokens/s · first word after 240 ms · hit rate 93.1 % · ...". */
function figures(line, first) {
  const parts = [];
  if (line.eval_count) parts.push(`${line.eval_count} token${line.eval_count === 1 ? "" : "s"}`);
  if (line.eval_count > 1 && line.eval_duration) parts.push(`${digits((line.eval_count / line.eval_duration) * 1e9)} tokens/s`);
  if (first) parts.push(`first word after ${duration(first / 1000)}`);
  if (line.moe?.lookups) parts.push(`hit rate ${percent(line.moe.hit_rate).join(" ")}`, `${size(line.moe.bytes_per_token).join(" ")} read per token`);
  if (line.done_reason === "length") parts.push("cut at the limit");
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
}
