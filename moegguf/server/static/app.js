// Entry point of the page: connects conversations, models, settings, chat and map.

import { keepKey } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Conversation, load, save } from "./conversations.js";
import { at } from "./dom.js";
import { save as saveFile } from "./export.js";
import { Library } from "./library.js";
import { Models } from "./models.js";
import { Panel } from "./panel.js";
import { SettingsDialog, lastSettings, requestFields } from "./settings.js";
import { Sidebar } from "./sidebar.js";

const THEME = "moegguf.theme";
const DEMO = "demo:latest";
const AGAIN_MS = 3000; // milliseconds before the list of models is requested again after an error
const finePointer = matchMedia("(pointer: fine)");

const panel = new Panel((names, loading) => {
  if (models.selected) models.mark(names);
  else listModels();
  chat.showLoads(loading, names);
});
const models = new Models(showModel);
const chat = new Chat({ fields, isLoaded: () => models.loaded.includes(models.name), onChange: showState });
const composer = new Composer({ onSend: send, refusal: () => (models.can("vision") ? "" : `${models.name} does not see pictures.`) });
const settings = new SettingsDialog((changed) => {
  const { conversation } = chat;
  conversation.settings = changed;
  if (conversation.messages.length) save({ ...conversation, messages: undefined });
});
const sidebar = new Sidebar({ onRemove: forget, onRename: retitle, onFound: (words) => chat.show(chat.conversation, words) });
const library = new Library(models, { onChange: listModels, onChoose: (name) => models.pick(name) });

// Models

let again = 0; // timer that requests the list of models again

async function listModels() {
  try {
    await models.refresh(chat.conversation.model);
  } catch (error) {
    models.fail(error);
    panel.disconnect(error);
    clearTimeout(again);
    if (error.status !== 401) again = setTimeout(listModels, AGAIN_MS);
  }
  library.draw();
  showState();
}

addEventListener("focus", () => listModels()); // a model may have been pulled while the page was not in focus

function showModel({ name, details, capabilities }) {
  const facts = [details.family, details.parameter_size, details.quantization_level, ...capabilities.filter((each) => each !== "completion")];
  at("facts").textContent = facts.filter(Boolean).join(" · ");
  at("starters").hidden = name !== DEMO;
  panel.watch(name);
  composer.showAttached(); // clears a problem that was shown for the previous model
  showState();
}

// Messages

function fields(conversation) {
  const { system } = conversation.settings;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation.sent];
  // The page shows a conversation before it knows the list of models.
  return { model: models.selected?.name ?? conversation.model, messages, ...requestFields(conversation.settings, models) };
}

async function send(content, attached) {
  const images = attached.filter(({ image }) => image).map(({ image }) => image), files = attached.filter(({ text }) => text);
  await chat.ask({ role: "user", content, ...(images.length && { images }), ...(files.length && { files }) });
  if (finePointer.matches) at("message").focus(); // a touch keyboard would cover the answer
}

/** Updates the buttons, the page's title and its address after a change of the shown conversation, of its answer or of
 *  the models. */
function showState() {
  const { conversation, busy } = chat;
  composer.update({ busy, ready: models.selected !== undefined });
  at("export").hidden = !conversation?.messages.length;
  document.title = conversation?.title ? `${conversation.title} – moegguf` : "moegguf";
  if (conversation?.messages.length && address() !== conversation.id) history.replaceState(null, "", `#${conversation.id}`);
}

at("stop").addEventListener("click", () => chat.stop());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy && !document.querySelector("dialog:modal")) chat.stop();
});
at("starters").addEventListener("click", ({ target }) => {
  if (target.matches("button") && models.selected) send(target.textContent, []);
});

// Conversations: the part of the page's address after # is the id of the shown conversation

const address = () => location.hash.slice(1);

/** Shows the conversation whose id is in the page's address. Shows a new conversation if the address has no id, or if
 *  there is no such conversation. */
async function open() {
  const id = address(), kept = id && !chat.running(id) ? await load(id).catch(() => null) : null;
  if (id !== address()) return; // the address has changed during the load
  chat.show(chat.running(id) ?? new Conversation(kept ?? { settings: lastSettings() }), sidebar.words);
  if (!kept && !chat.running(id)) history.replaceState(null, "", location.pathname);
  models.choose(chat.conversation.model);
  sidebar.refresh(chat.conversation.id);
  showState();
}

function startNew() {
  if (address()) history.pushState(null, "", location.pathname);
  sidebar.leave();
  open();
  at("message").focus();
}

function forget(id) {
  chat.forget(id);
  if (id !== chat.conversation.id) return;
  history.replaceState(null, "", location.pathname);
  open();
}

function retitle(id, title) {
  const conversation = chat.running(id) ?? chat.conversation;
  if (conversation.id === id) conversation.title = title;
  showState();
}

at("export").addEventListener("click", ({ target }) => {
  if (target.matches("button")) saveFile(chat.conversation, target.textContent === "Markdown");
});
chat.onKept = (error) => sidebar.refresh(chat.conversation.id, error);
at("new").addEventListener("click", startNew);
addEventListener("popstate", open);
document.addEventListener("keydown", (event) => {
  const key = (event.ctrlKey || event.metaKey) && (event.shiftKey ? "Shift+" : "") + event.key.toLowerCase();
  const act = { "Shift+o": startNew, k: () => sidebar.find() }[key];
  if (!act || document.querySelector("dialog:modal:not(.list)")) return;
  event.preventDefault();
  act();
});

// Settings and API key

at("open-settings").addEventListener("click", () => settings.open(chat.conversation.settings, models));
document.addEventListener("key-needed", () => {
  if (!at("key").open) at("key").showModal();
});
at("key").addEventListener("close", () => {
  if (at("api-key").value) keepKey(at("api-key").value);
  at("api-key").value = "";
  listModels();
});

// Light and dark

const systemDark = matchMedia("(prefers-color-scheme: dark)");

at("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  const dark = dataset.theme ? dataset.theme === "dark" : systemDark.matches;
  dataset.theme = dark ? "light" : "dark";
  localStorage.setItem(THEME, dataset.theme);
  panel.map.readColours();
});
systemDark.addEventListener("change", () => panel.map.readColours());

await open();
await listModels();
