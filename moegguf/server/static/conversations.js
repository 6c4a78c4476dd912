// Conversations: trees of messages, as an edited question and an answer asked for again stand beside the one before. This browser's
// database keeps their heads (title, model, settings) in one store and their messages in another, so that the list is read without
// pictures and answers.

const SENT = ["role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"];
const TITLE_CHARS = 60;
const HEADS = "heads", MESSAGES = "messages";

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
    if (message.role === "user") this.title ||= message.content.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARS) || message.files?.[0].name || "Picture";
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
    return this.path.map((message) => ({ ...Object.fromEntries(fields(message)), content: contentOf(message) }));
  }
}

/** The text of a message, behind the files that came with it. */
function contentOf({ content, files = [] }) {
  const texts = files.map(({ name, text }) => `[File: ${name}]\n${text.trim()}\n[End of the file: ${name}]\n\n`);
  return texts.join("") + content;
}

/** The first message that has these words in its text or its files, and the place where they begin. */
export function findWords(messages, words) {
  for (const message of messages) {
    for (const text of [message.content, ...(message.files ?? []).map((file) => file.text)]) {
      const begin = text.toLowerCase().indexOf(words);
      if (begin >= 0) return { message, text, begin };
    }
  }
  return undefined;
}

let opening = null;

/** Runs `use(heads, messages)` in a transaction; resolves to the results of the requests that it returns. */
async function transact(mode, use) {
  opening ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("moegguf", 1);
    asked.onupgradeneeded = () => [HEADS, MESSAGES].forEach((name) => asked.result.createObjectStore(name, { keyPath: "id" }));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  const transaction = (await opening).transaction([HEADS, MESSAGES], mode);
  const requests = use(transaction.objectStore(HEADS), transaction.objectStore(MESSAGES));
  if (mode === "readwrite") transaction.commit(); // also when the tab is closed now
  await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  return requests.map((request) => request.result);
}

/** Heads of all conversations, the last one used first. */
export async function list() {
  const [heads] = await transact("readonly", (heads) => [heads.getAll()]);
  return heads.sort((a, b) => b.changed - a.changed);
}

/** Returns the places of these words by the id of the conversation (`findWords`). */
export async function search(words) {
  const [bodies] = await transact("readonly", (_, messages) => [messages.getAll()]);
  const found = bodies.map(({ id, messages }) => [id, findWords(messages, words)]);
  return new Map(found.filter(([, place]) => place));
}

/** Returns the conversation that was saved under `id`, or null. */
export async function load(id) {
  const [head, body] = await transact("readonly", (heads, messages) => [heads.get(id), messages.get(id)]);
  return head && body ? { ...head, ...body } : null;
}

/** Saves a conversation; without its messages where only the head has changed. */
export async function save({ messages, ...head }) {
  await transact("readwrite", (heads, bodies) => [heads.put(head), ...(messages ? [bodies.put({ id: head.id, messages })] : [])]);
}

export async function remove(id) {
  await transact("readwrite", (heads, messages) => [heads.delete(id), messages.delete(id)]);
}
