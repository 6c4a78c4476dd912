// An answer on the page, also while it is written: thinking (folded), text, tool calls, and what it cost.

import { make } from "./dom.js";
import { count, digits, duration, percent, size } from "./format.js";
import { Markdown, codeBlock } from "./markdown.js";

const FRAME_MS = 16; // and four times what painting takes: a long block must not keep the processor from the model
const WAITING = "Waiting for the first token";

export class AnswerView {
  /** `message`: of the conversation; it gets the text as it arrives. `change(apply)` changes the page without losing the scroll
   *  position. */
  constructor(message, change = (apply) => apply()) {
    Object.assign(this, { message, change });
    const content = make("div", { className: "content" });
    this.element = make("article", { className: "turn answer", ariaLabel: "Answer" }, content);
    this.markdown = new Markdown(content);
    this.notes = make("div", { className: "notes" });
    this.element.append(this.notes);
  }

  /** Shows that the answer is awaited. */
  begin(waitingFor) {
    this.waiting = make("p", { className: "waiting" }, waitingFor ?? WAITING);
    this.element.prepend(this.waiting);
    this.element.classList.add("writing");
    this.element.ariaBusy = "true";
    this.startMs = performance.now();
    this.firstMs = this.timer = this.paintMs = 0;
    return this;
  }

  /** Shows the whole message. */
  end() {
    clearTimeout(this.timer);
    this.change(() => {
      this.paint(true);
      this.waiting?.remove();
      this.element.classList.remove("writing");
      this.element.ariaBusy = null;
      this.endThinking();
      const { statistics, note, error } = this.message;
      this.notes.replaceChildren();
      if (statistics) this.notes.append(make("p", { className: "statistics" }, statistics));
      if (note) this.notes.append(make("p", { className: "note" }, note));
      if (error) this.notes.append(make("p", { className: "note error", role: "alert" }, error));
    });
    return this;
  }

  /** Whether there is anything to keep. */
  get any() {
    const { content, thinking, tool_calls: calls } = this.message;
    return Boolean(content || thinking || calls);
  }

  /** Takes a line of the stream. */
  take({ message: { content = "", thinking = "", tool_calls: calls } = {}, ...line }) {
    const { message } = this;
    if ((content || thinking || calls) && !this.firstMs) this.firstMs = performance.now() - this.startMs;
    if (thinking) message.thinking = (message.thinking ?? "") + thinking;
    if (content && message.thinking) message.thinking_s ??= (performance.now() - this.startMs - this.firstMs) / 1000;
    if (calls) message.tool_calls = [...(message.tool_calls ?? []), ...calls];
    message.content += content;
    if (line.prompt_progress) this.waiting.textContent = progress(line.prompt_progress);
    if (line.done) message.statistics = statistics(line, this.firstMs);
    this.timer ||= setTimeout(() => this.step(), Math.max(FRAME_MS, 4 * this.paintMs));
  }

  step() {
    const start = performance.now();
    this.change(() => this.paint(false));
    this.paintMs = this.painted ? performance.now() - start : 0; // the first time tells nothing: code is compiled
    this.painted = true;
    this.timer = 0;
  }

  paint(complete) {
    const { message } = this;
    if (this.firstMs) this.waiting.remove();
    if (message.thinking && !this.thinking) this.addThinking();
    if (this.thinking) this.thinking.lastChild.textContent = message.thinking.trim();
    if (message.content) this.endThinking();
    this.markdown.show(message.content.trimStart(), complete);
    for (const call of message.tool_calls?.slice(this.nCalls ?? 0) ?? []) this.notes.before(callView(call));
    this.nCalls = message.tool_calls?.length ?? 0;
  }

  addThinking() {
    this.thinking = make("details", { className: "thinking" }, make("summary", {}, "Thinking…"), make("div"));
    this.element.prepend(this.thinking);
  }

  endThinking() {
    const { thinking_s: seconds } = this.message;
    if (this.thinking) this.thinking.firstChild.textContent = seconds ? `Thought for ${seconds.toFixed(1)} s` : "Thought";
  }
}

function callView({ function: { name, arguments: given } }) {
  const summary = make("summary", {}, "Calls ", make("b", {}, name));
  return make("details", { className: "call", open: true }, summary, codeBlock("json", JSON.stringify(given, null, 2)));
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
  if (line.cut_messages) parts.push(`without the first ${count(line.cut_messages)} messages, which do not fit the context`);
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
}
