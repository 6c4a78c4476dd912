// The conversation that the page shows. The user can ask, edit a question, request another answer, and stop an answer.
// Answers continue while another conversation is shown.

import { lines, request } from "./api.js";
import { findWords, save } from "./conversations.js";
import { at, button, make, mark } from "./dom.js";
import { AnswerView, actions, edit, messageView, resultForm } from "./turns.js";

const NEAR_END_PX = 60;
const SAVE_MS = 1000; // minimum milliseconds between two saves of an answer that is being written

export class Chat {
  /** `fields(conversation)` returns the fields of a request to /api/chat. `isLoaded()` returns true if the selected
   *  model is in memory. `onChange(conversation)` is called when an answer begins or ends. */
  constructor({ fields, isLoaded, onChange }) {
    const log = at("log"), scroll = at("scroll");
    Object.assign(this, { log, scroll, fields, isLoaded, onChange });
    this.views = new WeakMap(); // {message: the element that shows it}
    this.runs = new Map(); // {conversation: {abort, view} of the answer that is being written}
    scroll.addEventListener("scroll", () => (this.atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END_PX));
    new ResizeObserver(() => this.keepingScroll(log, () => {})).observe(scroll);
    addEventListener("pagehide", () => this.runs.forEach((run, conversation) => run.view.any && this.keep(conversation)));
  }

  get run() {
    return this.runs.get(this.conversation);
  }

  get busy() {
    return this.run !== undefined;
  }

  /** Returns the conversation with this id if an answer to it is being written, otherwise undefined. */
  running(id) {
    return [...this.runs.keys()].find((conversation) => conversation.id === id);
  }

  /** Shows a conversation; screen readers do not read it aloud. If `words` occur in a message or its files, shows the
   *  branch with this message, highlights the words and scrolls to the message. */
  show(conversation, words = "") {
    const { message } = (words && findWords(conversation.messages, words)) || {};
    this.conversation = conversation;
    this.log.ariaLive = "off";
    if (message && !conversation.path.includes(message)) conversation.show(message);
    this.render();
    this.toEnd();
    mark(words ? this.log : null, words);
    if (message) this.views.get(message).scrollIntoView({ block: "center" });
    setTimeout(() => (this.log.ariaLive = "polite"));
  }

  render() {
    const { conversation, run } = this, { path } = conversation, last = path.at(-1);
    const views = path.map((message) => this.viewOf(message));
    if (run && !path.includes(run.view.message)) views.push(run.view.element);
    else if (!run && last?.tool_calls) views.push(resultForm(last.tool_calls, (results) => this.ask(...results)));
    else if (!run && last && last.role !== "assistant") {
      const note = make("p", { className: "note error", role: "alert" }, last.error ?? "Not answered yet.");
      const again = button(last.error ? "Try again" : "Answer", () => this.answer(), { className: "secondary" });
      views.push(make("div", { className: "turn failure" }, note, again));
    }
    this.log.replaceChildren(...views);
  }

  /** Returns the element that shows a message, with new buttons below it. While an answer is being written, and for
   *  results of tools, there are no buttons. */
  viewOf(message) {
    if (!this.views.has(message)) this.views.set(message, message.role === "assistant" ? new AnswerView(message).end().element : messageView(message));
    const view = this.views.get(message), { conversation } = this;
    view.querySelector(":scope > .below")?.remove();
    if (this.busy || message.role === "tool") return view;
    const { images, files, parent } = message;
    const askAt = (...messages) => {
      conversation.leaf = parent;
      this.ask(...messages);
    };
    view.append(actions(message, {
      versions: conversation.versions(message),
      onVersion: (other) => {
        conversation.show(other);
        this.render();
        this.keep(conversation);
      },
      onEdit: message.role === "user" && (() => edit(view, message.content, (content) => (content || images || files) && askAt({ role: "user", content, ...(images && { images }), ...(files && { files }) }))),
      onAgain: message.role === "assistant" && (() => askAt()),
    }));
    return view;
  }

  /** Adds messages to the conversation, and requests an answer. */
  ask(...messages) {
    messages.forEach((message) => this.conversation.add(message));
    return this.answer();
  }

  /** Requests an answer to the shown messages, and shows the answer while it is written. */
  async answer() {
    const { conversation } = this, { leaf } = conversation, question = conversation.messages[leaf];
    const message = { role: "assistant", content: "" };
    const view = new AnswerView(message, (apply) => this.keepingScroll(view.element, apply)).begin(!this.isLoaded());
    const abort = new AbortController();
    let saved = performance.now(), done = false;
    const body = { ...this.fields(conversation), stream: true, details: true };
    conversation.model = body.model;
    delete question.error;
    this.views.set(message, view.element);
    this.runs.set(conversation, { abort, view });
    this.render();
    this.toEnd();
    this.onChange(conversation);
    this.keep(conversation);
    try {
      const response = await request("api/chat", { body, signal: abort.signal });
      for await (const line of lines(response)) {
        if (line.error) throw new Error(line.error);
        view.take(line);
        done ||= line.done;
        const isFirst = (view.any || line.done) && message.parent === undefined;
        if (isFirst) conversation.add(message, leaf);
        if (isFirst || performance.now() - saved > SAVE_MS) {
          saved = performance.now();
          this.keep(conversation);
        }
      }
      if (!done) throw new Error("The connection ended before the answer.");
    } catch (error) {
      if (error.name === "AbortError") message.note = "Stopped.";
      else if (view.any) message.error = error.message;
      else question.error = error.message;
    }
    this.runs.delete(conversation);
    view.end();
    if (!view.any) question.error ??= message.note;
    if (this.conversation === conversation) this.keepingScroll(this.log, () => this.render());
    this.keep(conversation);
    this.onChange(conversation);
  }

  /** Shows the progress of loads in answers that wait for them. `loading`: {name of a model: the share that was read}.
   *  `loaded`: names of the models in memory. */
  showLoads(loading, loaded) {
    for (const [{ model }, { view }] of this.runs) if (model in loading || loaded.includes(model)) view.showLoad(loading[model]);
  }

  stop() {
    this.run?.abort.abort();
  }

  /** Stops the answer to a conversation that is being removed, and prevents this conversation from being saved
   *  again. */
  forget(id) {
    const forgotten = [this.conversation, ...this.runs.keys()].filter((conversation) => conversation.id === id);
    for (const conversation of forgotten) {
      conversation.removed = true;
      this.runs.get(conversation)?.abort.abort();
    }
  }

  keep(conversation) {
    if (conversation.removed) return;
    conversation.changed = Date.now();
    save(conversation).then(() => this.onKept?.(), (error) => this.onKept?.(error));
  }

  /** Calls `change`, which changes an element. If the end of the conversation was visible before, scrolls to the end
   *  again. */
  keepingScroll(element, change) {
    change();
    if (this.atEnd && element.isConnected) this.toEnd();
  }

  toEnd() {
    this.atEnd = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}
