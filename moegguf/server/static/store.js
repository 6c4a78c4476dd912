// Conversations kept in this browser's database: their heads (title, model, settings) in one store, their messages in another, so
// that the list is read without pictures and answers. Other tabs are told of changes.

const HEADS = "heads", MESSAGES = "messages";
const channel = new BroadcastChannel("moegguf.conversations");

let opening = null;

function open() {
  return (opening ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("moegguf", 1);
    asked.onupgradeneeded = () => [HEADS, MESSAGES].forEach((name) => asked.result.createObjectStore(name, { keyPath: "id" }));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  }));
}

/** Runs `use(heads, messages)` in a transaction; resolves to the results of the requests that it returns. */
async function transact(mode, use) {
  const transaction = (await open()).transaction([HEADS, MESSAGES], mode);
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

/** What was saved under `id`; null when there is nothing. */
export async function load(id) {
  const [head, body] = await transact("readonly", (heads, messages) => [heads.get(id), messages.get(id)]);
  return head && body ? { ...head, ...body } : null;
}

/** Saves a conversation; without its messages where only the head has changed. */
export async function save({ messages, ...head }) {
  await transact("readwrite", (heads, bodies) => [heads.put(head), ...(messages ? [bodies.put({ id: head.id, messages })] : [])]);
  channel.postMessage(head.id);
}

export async function remove(id) {
  await transact("readwrite", (heads, messages) => [heads.delete(id), messages.delete(id)]);
  channel.postMessage(id);
}

/** Calls `listener(id)` when another tab has saved or removed a conversation. */
export function onChange(listener) {
  channel.addEventListener("message", ({ data }) => listener(data));
}
