// A conversation: a tree of messages, as an edited question and an answer asked for again stand beside the one before.

const SENT = ["role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"];
const TITLE_CHARS = 60;

export class Conversation {
  /** `kept`: what `store` has of one. `messages` are in order of arrival, each with the index of the one before as `parent`;
   *  `leaf`: the index of the last one that is shown. */
  constructor(kept = {}) {
    const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    Object.assign(this, { id, title: "", model: "", settings: {}, changed: 0, leaf: null, messages: [] }, kept);
  }

  /** The messages that are shown, in order. */
  get path() {
    const found = [];
    for (let i = this.leaf; i !== null; i = this.messages[i].parent) found.unshift(this.messages[i]);
    return found;
  }

  /** Adds a message behind another, by default the last shown one, and shows it. */
  add(message, parent = this.leaf) {
    this.leaf = this.messages.push(Object.assign(message, { parent })) - 1;
    this.changed = Date.now();
    if (message.role === "user") this.title ||= message.content.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARS) || "Picture";
  }

  /** The messages that answer, or ask, at the same place as this one. */
  versions(message) {
    return this.messages.filter(({ parent }) => parent === message.parent);
  }

  /** Shows a message, and what was said last behind it. */
  show(message) {
    for (let next = message; next; next = this.messages.findLast(({ parent }) => parent === this.leaf)) this.leaf = this.messages.indexOf(next);
  }

  /** The shown messages as the server takes them. */
  get sent() {
    const fields = (message) => SENT.filter((name) => message[name]?.length).map((name) => [name, message[name]]);
    return this.path.map((message) => ({ content: "", ...Object.fromEntries(fields(message)) }));
  }
}
