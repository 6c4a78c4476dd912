// One conversation: its messages, the streamed answer, and stopping it. It lasts as long as its tab: a reload shows it
// again.

import { lines, request } from "./api.js";
import { make } from "./dom.js";
import { count, digits, duration, percent, size } from "./format.js";
import { Markdown } from "./markdown.js";

const NEAR_END_PX = 60;
const FRAME_MS = 16; // and four times what painting takes: a long block must not keep the processor from the model
const CONVERSATION = "moegguf.conversation";
const WAITING = "Waiting for the first token";

export class Chat {
  /** `options()` returns {model, system, options} of the next message; `onBusy(busy)` is called when an answer starts or ends. */
  constructor({ log, scroll, options, onBusy }) {
    Object.assign(this, { log, scroll, options, onBusy });
    this.messages = [];
    this.abort = null;
    this.answer = null; // while it is written
    addEventListener("pagehide", () => this.keep());
  }

  /** Shows the conversation that was kept. */
  restore() {
    try {
      this.messages = JSON.parse(sessionStorage.getItem(CONVERSATION)) ?? [];
    } catch {
      this.messages = [];
    }
    const change = (apply) => apply();
    for (const message of this.messages) {
      this.log.append(message.role === "user" ? turn("user", "You", message.content) : new AnswerView(change).restored(message));
    }
    this.toEnd();
  }

  /** Keeps the conversation, with what there is of an answer that is being written. */
  keep() {
    const written = this.answer?.message;
    const answered = this.answer && !written ? this.messages.slice(0, -1) : this.messages;
    try {
      sessionStorage.setItem(CONVERSATION, JSON.stringify(written ? [...answered, written] : answered));
    } catch {
      sessionStorage.removeItem(CONVERSATION); // too long for the browser
    }
  }

  get busy() {
    return this.abort !== null;
  }

  reset() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
    this.keep();
  }

  stop() {
    this.abort?.abort();
  }

  /** Sends a message and shows the answer. Returns false when nothing was answered. */
  async send(text) {
    const { model, system, options } = this.options();
    const question = turn("user", "You", text);
    const answer = (this.answer = new AnswerView((change) => this.keepingScroll(change)));
    this.log.append(question, answer.element);
    this.toEnd();
    this.messages.push({ role: "user", content: text });
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
    const conversation = this.messages, abort = (this.abort = new AbortController());
    this.onBusy(true);
    try {
      const response = await request("api/chat", { body: { model, messages, options, stream: true, details: true }, signal: abort.signal });
      for await (const line of lines(response)) {
        if (line.error) throw new Error(line.error);
        answer.take(line);
      }
      answer.end();
    } catch (error) {
      if (error.name === "AbortError") answer.stop();
      else answer.fail(error.message);
    } finally {
      this.abort = this.answer = null;
      this.onBusy(false);
    }
    if (answer.message) conversation.push(answer.message);
    else conversation.splice(conversation.findLastIndex((message) => message.role === "user"), 1); // an unanswered message is not part of the conversation
    this.keep();
    return answer.message !== null;
  }

  /** Makes a change; scrolls to the end afterwards if the end was visible before. */
  keepingScroll(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    const scrolledUp = scrollHeight - scrollTop - clientHeight > NEAR_END_PX;
    change();
    if (!scrolledUp) this.toEnd();
  }

  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

function turn(kind, label, text) {
  return make("article", { className: `turn ${kind}`, ariaLabel: label }, make("div", { className: "content" }, text));
}

function paragraph(kind, text) {
  return make("p", { className: kind }, text);
}

/** An answer on the page while it is written. */
class AnswerView {
  /** `keepingScroll(change)` makes a change to the page without losing the scroll position. */
  constructor(keepingScroll) {
    this.keepingScroll = keepingScroll;
    this.element = turn("answer writing", "Answer", "");
    this.element.ariaBusy = "true";
    this.markdown = new Markdown(this.element.firstChild);
    this.waiting = paragraph("waiting", WAITING);
    this.element.prepend(this.waiting);
    this.text = "";
    this.thinking = "";
    this.startMs = performance.now();
    this.firstMs = 0;
    this.timer = 0;
    this.paintMs = 0;
  }

  /** The answer as a message of the conversation; null before its first token. */
  get message() {
    if (!this.text && !this.thinking) return null;
    return { role: "assistant", content: this.text, ...(this.thinking && { thinking: this.thinking }) };
  }

  /** Shows an answer of a kept conversation; returns its element. */
  restored({ content, thinking = "" }) {
    Object.assign(this, { text: content, thinking, thinkingEnded: true });
    this.end();
    if (this.details) this.details.firstChild.textContent = "Thought";
    return this.element;
  }

  take(line) {
    const { content = "", thinking = "" } = line.message ?? {};
    if ((content || thinking) && !this.firstMs) this.firstMs = performance.now() - this.startMs;
    this.thinking += thinking;
    this.text += content;
    if (line.prompt_progress) this.waiting.textContent = progress(line.prompt_progress);
    if (line.done) this.statistics = statistics(line, this.firstMs);
    this.timer ||= setTimeout(() => this.step(), Math.max(FRAME_MS, 4 * this.paintMs));
  }

  step() {
    const start = performance.now();
    this.keepingScroll(() => this.paint(false));
    this.paintMs = performance.now() - start;
    this.timer = 0;
  }

  paint(complete) {
    if (this.firstMs) this.waiting.remove();
    if (this.thinking && !this.details) this.addDetails();
    if (this.details) this.details.lastChild.textContent = this.thinking.trim();
    if (this.text && this.details && !this.thinkingEnded) this.endThinking();
    this.markdown.show(this.text.trimStart(), complete);
  }

  addDetails() {
    this.details = make("details", { className: "thinking" }, make("summary", {}, "Thinking…"), make("div"));
    this.element.prepend(this.details);
  }

  endThinking() {
    this.thinkingEnded = true;
    const seconds = (performance.now() - this.startMs - this.firstMs) / 1000;
    this.details.firstChild.textContent = `Thought for ${seconds.toFixed(1)} s`;
  }

  end(note) {
    clearTimeout(this.timer);
    this.keepingScroll(() => {
      this.paint(true);
      this.waiting.remove();
      this.element.classList.remove("writing");
      this.element.ariaBusy = null;
      if (this.details && !this.thinkingEnded) this.endThinking();
      if (note) this.element.append(note);
      else if (this.statistics) this.element.append(paragraph("statistics", this.statistics));
    });
  }

  stop() {
    this.end(paragraph("note", "Stopped."));
  }

  fail(message) {
    this.end(Object.assign(paragraph("note error", message), { role: "alert" }));
  }
}

/** "Reading the prompt: 1,024 of 6,300 tokens · 45.0 tokens/s · 1 min 57 s left". */
function progress({ n_tokens, n_cached, n_done, seconds }) {
  const left = n_tokens - n_done, rate = (n_done - n_cached) / seconds;
  if (!left) return WAITING;
  const parts = [`Reading the prompt: ${count(n_done)} of ${count(n_tokens)} tokens`];
  if (rate > 0) parts.push(`${digits(rate)} tokens/s`, `${duration(left / rate)} left`);
  return parts.join(" · ");
}

/** Statistics of an answer: "142 tokens · 61.3 tokens/s · first token after 240 ms · hit rate 93.1 % · ...". */
function statistics(line, firstMs) {
  const parts = [];
  if (line.eval_count) parts.push(`${line.eval_count} token${line.eval_count === 1 ? "" : "s"}`);
  if (line.eval_count > 1 && line.eval_duration) parts.push(`${digits((line.eval_count / line.eval_duration) * 1e9)} tokens/s`);
  if (firstMs) parts.push(`first token after ${duration(firstMs / 1000)}`);
  if (line.moe?.lookups) parts.push(`hit rate ${percent(line.moe.hit_rate).join(" ")}`, `${size(line.moe.bytes_per_token).join(" ")} read per token`);
  if (line.done_reason === "length") parts.push("cut at the limit");
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
}
