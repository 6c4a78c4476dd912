// Elements that show the messages of a conversation: questions with pictures and files, answers (even while they are
// written), and results of tools. Also makes the buttons below a message.

import { button, copy, count, digits, duration, grow, icon, iconButton, make, percent, size } from "./dom.js";
import { factsOf } from "./files.js";
import { Markdown, codeBlock } from "./markdown.js";

const FRAME_MS = 16; // milliseconds between two paints; more after slow paints, to leave the processor to the model
const WAITING = "Waiting for the first token";
const LOADING = "Loading the model";

/** Returns an element that shows a question with its pictures and files, or the result of a tool call. */
export function messageView({ role, content, images = [], files = [], tool_name: name }) {
  if (role === "tool") {
    const details = make("details", {}, make("summary", {}, "Result of ", make("b", {}, name)), make("pre", { tabIndex: 0 }, content));
    return make("article", { className: "turn result", ariaLabel: `Result of ${name}` }, details);
  }
  const pictures = images.map((data, i) => pictureView(data, `Picture ${i + 1} of the message`));
  const parts = [[pictures.length, "pictures", pictures], [files.length, "files", files.map(fileView)], [content, "content", [content]]].filter(([any]) => any);
  return make("article", { className: "turn user", ariaLabel: "You" }, ...parts.map(([, className, inner]) => make("div", { className }, ...inner)));
}

/** Returns an element for a file of a message. A click on its name shows the text. */
function fileView(file) {
  return make("details", { className: "file" }, make("summary", {}, fileName(file)), make("pre", { tabIndex: 0 }, file.text));
}

/** Returns an element with the name of a file, the number of its pages (only for a PDF file) and its approximate number
 *  of tokens. */
export function fileName(file) {
  return make("span", { className: "file-name" }, icon("file"), make("b", {}, file.name), make("small", {}, factsOf(file)));
}

/** Returns a data URL for a picture in base64. */
export function pictureUrl(data) {
  const kind = { iVBOR: "png", R0lGO: "gif" }[data.slice(0, 5)] ?? "jpeg";
  return `data:image/${kind};base64,${data}`;
}

export function pictureView(data, alt) {
  return make("img", { src: pictureUrl(data), alt });
}

/** Returns a form in which the user writes the results of tool calls. `onResults(messages)` is called with the results
 *  as messages. */
export function resultForm(calls, onResults) {
  const fields = calls.map(({ function: { name } }) => make("textarea", { rows: 2, required: true, ariaLabel: `Result of ${name}`, placeholder: `Result of ${name}` }));
  const form = make("form", { className: "results" }, ...fields, make("button", { className: "primary" }, calls.length > 1 ? "Send the results" : "Send the result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onResults(calls.map(({ id, function: { name } }, i) => ({ role: "tool", tool_name: name, tool_call_id: id, content: fields[i].value })));
  });
  return form;
}

/** Returns an element with the buttons below a message. Buttons whose function (`onEdit`, `onAgain`) is missing are
 *  left out. `versions`: all versions of the message. `onVersion(other)` is called to show another version. */
export function actions(message, { versions, onVersion, onEdit, onAgain }) {
  const found = [], i = versions.indexOf(message);
  if (versions.length > 1) {
    const arrow = (name, label, other) => Object.assign(iconButton(name, label, () => onVersion(other)), { disabled: !other });
    found.push(arrow("before", "Previous version", versions[i - 1]), `${i + 1}/${versions.length}`, arrow("after", "Next version", versions[i + 1]));
  }
  if (message.content) found.push(iconButton("copy", "Copy", (event) => copy(message.content, event)));
  if (onEdit) found.push(iconButton("edit", "Edit", onEdit));
  if (onAgain) found.push(iconButton("again", "Answer again", onAgain));
  return make("div", { className: "below" }, ...found);
}

/** Replaces the element of a question with a form in which the user edits the text. `onSend(text)` is called with the
 *  new text. */
export function edit(view, text, onSend) {
  const field = make("textarea", { value: text, ariaLabel: "Edit the message" });
  const close = () => form.replaceWith(view);
  const cancel = () => {
    close();
    view.querySelector(".below [title=Edit]")?.focus();
  };
  const send = make("button", { className: "primary" }, "Send");
  const form = make("form", { className: "turn editing" }, field, make("div", { className: "buttons" }, button("Cancel", cancel, { className: "secondary" }), send));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    close();
    onSend(field.value.trim());
  });
  field.addEventListener("input", () => grow(field));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) form.requestSubmit();
    else return;
    event.preventDefault();
  });
  view.replaceWith(form);
  grow(field);
  field.focus();
}

/** The view of an answer: thinking (folded), text, tool calls, and statistics. */
export class AnswerView {
  /** `message`: the answer's message, to which text is added as it arrives. `change(apply)` calls `apply`, which
   *  changes the page, and keeps the end of the conversation visible if it was visible before. */
  constructor(message, change = (apply) => apply()) {
    Object.assign(this, { message, change });
    const content = make("div", { className: "content" });
    this.notes = make("div", { className: "notes" });
    this.element = make("article", { className: "turn answer", ariaLabel: "Answer" }, content, this.notes);
    this.markdown = new Markdown(content);
  }

  /** Shows that the answer has not begun yet. `isLoading`: the model must be loaded first. */
  begin(isLoading) {
    this.isLoading = isLoading;
    this.waiting = make("p", { className: "waiting" }, isLoading ? LOADING : WAITING);
    this.element.prepend(this.waiting);
    this.element.classList.add("writing");
    this.element.ariaBusy = "true";
    this.startMs = performance.now();
    this.firstMs = this.timer = this.paintMs = 0;
    return this;
  }

  /** Shows the complete message with its statistics, notes and errors. */
  end() {
    clearTimeout(this.timer);
    this.change(() => {
      this.paint(true);
      this.waiting?.remove();
      this.element.classList.remove("writing");
      this.element.ariaBusy = null;
      this.endThinking();
      const { statistics, note, error } = this.message;
      const notes = [["statistics", statistics], ["note", note], ["note error", error]].filter(([, text]) => text);
      this.notes.replaceChildren(...notes.map(([className, text]) => make("p", { className, role: text === error ? "alert" : null }, text)));
    });
    return this;
  }

  /** Shows the share of the model that has been read, if the answer waits for a load. `share` is undefined if the model
   *  is loaded. */
  showLoad(share) {
    if (!this.isLoading || this.firstMs) return;
    this.isLoading = share !== undefined;
    this.waiting.textContent = this.isLoading ? `${LOADING}: ${Math.floor(100 * share)} %` : WAITING;
  }

  /** True if the message has text, thinking or tool calls. */
  get any() {
    const { content, thinking, tool_calls: calls } = this.message;
    return Boolean(content || thinking || calls);
  }

  /** Adds a line of the response to the message, and schedules the next paint. */
  take({ message: { content = "", thinking = "", tool_calls: calls } = {}, ...line }) {
    const { message } = this;
    if ((content || thinking || calls) && !this.firstMs) this.firstMs = performance.now() - this.startMs;
    if (thinking) message.thinking = (message.thinking ?? "") + thinking;
    if (content && message.thinking) message.thinking_s ??= (performance.now() - this.startMs - this.firstMs) / 1000;
    if (calls) message.tool_calls = [...(message.tool_calls ?? []), ...calls];
    message.content += content;
    if (line.prompt_progress) {
      this.isLoading = false;
      this.waiting.textContent = progress(line.prompt_progress);
    }
    if (line.done) message.statistics = statistics(line, this.firstMs);
    this.timer ||= setTimeout(() => this.step(), Math.max(FRAME_MS, 4 * this.paintMs));
  }

  step() {
    const start = performance.now();
    this.change(() => this.paint(false));
    this.paintMs = this.painted ? performance.now() - start : 0; // not measured for the first paint, which includes compiling code
    this.painted = true;
    this.timer = 0;
  }

  paint(complete) {
    const { message } = this;
    if (this.firstMs) this.waiting.remove();
    if (message.thinking && !this.thinking) {
      this.thinking = make("details", { className: "thinking" }, make("summary", {}, "Thinking…"), make("div"));
      this.element.prepend(this.thinking);
    }
    if (this.thinking) this.thinking.lastChild.textContent = message.thinking.trim();
    if (message.content) this.endThinking();
    this.markdown.show(message.content.trimStart(), complete);
    for (const { function: { name, arguments: given } } of message.tool_calls?.slice(this.nCalls ?? 0) ?? []) {
      const summary = make("summary", {}, "Calls ", make("b", {}, name));
      this.notes.before(make("details", { className: "call", open: true }, summary, codeBlock("json", JSON.stringify(given, null, 2))));
    }
    this.nCalls = message.tool_calls?.length ?? 0;
  }

  endThinking() {
    const { thinking_s: seconds } = this.message;
    if (this.thinking) this.thinking.firstChild.textContent = seconds ? `Thought for ${seconds.toFixed(1)} s` : "Thought";
  }
}

/** Returns the progress of a prompt, such as "Reading the prompt: 1,024 of 6,300 tokens · 45.0 tokens/s · 1 min 57 s
 *  left". Returns WAITING when all tokens have been read. */
function progress({ n_tokens, n_cached, n_done, seconds }) {
  const left = n_tokens - n_done, rate = (n_done - n_cached) / seconds;
  if (!left) return WAITING;
  const parts = [`Reading the prompt: ${count(n_done)} of ${count(n_tokens)} tokens`];
  if (rate > 0) parts.push(`${digits(rate)} tokens/s`, `${duration(left / rate)} left`);
  return parts.join(" · ");
}

/** Returns the statistics of an answer: "142 tokens · 61.3 tokens/s · first token after 240 ms · hit rate 93.1 % ·
 *  ...". */
function statistics(line, firstMs) {
  const parts = [];
  if (line.eval_count) parts.push(`${line.eval_count} token${line.eval_count === 1 ? "" : "s"}`);
  if (line.eval_count > 1 && line.eval_duration) parts.push(`${digits((line.eval_count / line.eval_duration) * 1e9)} tokens/s`);
  if (firstMs) parts.push(`first token after ${duration(firstMs / 1000)}`);
  if (line.moe?.lookups) parts.push(`hit rate ${percent(line.moe.hit_rate)}`, `${size(line.moe.bytes_per_token)} read per token`);
  if (line.done_reason === "length") parts.push("cut at the limit");
  if (line.cut_messages) parts.push(`without the first ${count(line.cut_messages)} messages, which do not fit the context`);
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
}
