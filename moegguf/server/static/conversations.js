// Conversations. A conversation is a tree of messages, because an edited question, or another answer to a question,
// becomes a new branch. The browser's database has the heads (title, model, settings) in one store and the messages in
// another, so that the list of conversations is read without pictures and answers.

const SENT = ["role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"];
const TITLE_CHARS = 60;
const HEADS = "heads", MESSAGES = "messages";

export class Conversation {
  /** `kept`: the stored fields of a conversation, from `load`. `messages` are in order of arrival. The field `parent`
   *  of a message is the index of the message before it, and `leaf` is the index of the last message that is shown;
   *  null: none. */
  constructor(kept = {}) {
    const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    Object.assign(this, { id, title: "", model: "", settings: {}, changed: 0, leaf: null, messages: [] }, kept);
  }

  /** The shown messages, from the first one to `leaf`. */
  get path() {
    const found = [];
    for (let i = this.leaf; i !== null; i = this.messages[i].parent) found.unshift(this.messages[i]);
    return found;
  }

  /** Adds a message after the message with index `parent` (default: the last shown message), and shows it. If the
   *  conversation has no title, a message of the user sets the title. */
  add(message, parent = this.leaf) {
    this.leaf = this.messages.push(Object.assign(message, { parent })) - 1;
    this.changed = Date.now();
    if (message.role === "user") this.title ||= message.content.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARS) || message.files?.[0].name || "Picture";
  }

  /** Returns all versions of a message: the messages that have the same parent. */
  versions(message) {
    return this.messages.filter(({ parent }) => parent === message.parent);
  }

  /** Shows a message and the messages after it. If a message has several next messages, the newest one is shown. */
  show(message) {
    for (let next = message; next; next = this.messages.findLast(({ parent }) => parent === this.leaf)) this.leaf = this.messages.indexOf(next);
  }

  /** The shown messages, in the form in which /api/chat accepts them. */
  get sent() {
    const fields = (message) => SENT.filter((name) => message[name]?.length).map((name) => [name, message[name]]);
    return this.path.map((message) => ({ ...Object.fromEntries(fields(message)), content: contentOf(message) }));
  }
}

/** Returns the texts of a message's files, followed by the text of the message. */
function contentOf({ content, files = [] }) {
  const texts = files.map(({ name, text }) => `[File: ${name}]\n${text.trim()}\n[End of the file: ${name}]\n\n`);
  return texts.join("") + content;
}

/** Finds `words` (in lower case) in the text or the files of messages. Returns the first such message, the text and the
 *  position of the words in this text, or undefined. */
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

/** Calls `use` with both stores in one transaction. Returns the results of the database requests that `use` returns. */
async function transact(mode, use) {
  opening ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("moegguf", 1);
    asked.onupgradeneeded = () => [HEADS, MESSAGES].forEach((name) => asked.result.createObjectStore(name, { keyPath: "id" }));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  const transaction = (await opening).transaction([HEADS, MESSAGES], mode);
  const requests = use(transaction.objectStore(HEADS), transaction.objectStore(MESSAGES));
  if (mode === "readwrite") transaction.commit(); // commits now, so that the change is not lost if the tab is closed
  await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  return requests.map((request) => request.result);
}

/** Returns the heads of all conversations, the last changed one first. */
export async function list() {
  const [heads] = await transact("readonly", (heads) => [heads.getAll()]);
  return heads.sort((a, b) => b.changed - a.changed);
}

/** Returns a Map {id of a conversation: result of `findWords`} with the conversations that contain `words`. */
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

/** Saves a conversation. If `messages` is undefined, saves only the head, and the stored messages stay. */
export async function save({ messages, ...head }) {
  await transact("readwrite", (heads, bodies) => [heads.put(head), ...(messages ? [bodies.put({ id: head.id, messages })] : [])]);
}

export async function remove(id) {
  await transact("readwrite", (heads, messages) => [heads.delete(id), messages.delete(id)]);
}
