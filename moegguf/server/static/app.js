// Entry point of the page: connects chat, panel, model selection and settings.

import { keepKey, request } from "./api.js";
import { Chat } from "./chat.js";
import { at } from "./dom.js";
import { Panel } from "./panel.js";

const MODEL = "moegguf.model";
const SETTINGS = "moegguf.settings";
const THEME = "moegguf.theme";
const FIELDS = ["system", "temperature", "seed"];

const panel = new Panel();
const chat = new Chat({ log: at("log"), scroll: at("scroll"), options: requestOptions, onBusy: showBusy });
const message = at("message"), choice = at("model");

// Models

async function listModels() {
  try {
    const { models } = await (await request("api/tags")).json();
    const names = models.filter((model) => model.capabilities?.includes("completion") ?? true).map((model) => model.name);
    choice.replaceChildren(...names.map((name) => new Option(name, name)));
    choice.disabled = !names.length;
    if (!names.length) choice.replaceChildren(new Option("No models yet: moegguf pull NAME"));
    const last = localStorage.getItem(MODEL);
    if (names.includes(last)) choice.value = last;
    if (names.length) panel.watch(choice.value);
  } catch (error) {
    choice.replaceChildren(new Option(error.message));
    panel.disconnect(error);
  }
  showBusy(chat.busy);
}

choice.addEventListener("change", () => {
  localStorage.setItem(MODEL, choice.value);
  panel.watch(choice.value);
  message.focus();
});

// Messages

function requestOptions() {
  const { system, temperature, seed } = readSettings();
  const options = {};
  if (temperature !== "") options.temperature = Number(temperature);
  if (seed !== "") options.seed = Number(seed);
  return { model: choice.value, system: system.trim(), options };
}

async function send() {
  const text = message.value.trim();
  if (!text || chat.busy || choice.disabled) return;
  message.value = "";
  grow();
  const answered = await chat.send(text);
  if (!answered && !message.value) {
    message.value = text; // to send again
    grow();
    showBusy(false);
  }
  if (matchMedia("(pointer: fine)").matches) message.focus(); // a touch keyboard would cover the answer
}

function showBusy(busy) {
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  at("send").disabled = !message.value.trim() || choice.disabled;
}

function grow() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
message.addEventListener("input", () => {
  grow();
  showBusy(chat.busy);
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy && !document.querySelector("dialog[open]")) chat.stop();
});
at("stop").addEventListener("click", () => chat.stop());
at("new").addEventListener("click", () => {
  chat.reset();
  message.focus();
});
document.querySelectorAll(".starters button").forEach((button) => {
  button.addEventListener("click", () => {
    message.value = button.textContent;
    send();
  });
});

// Settings and API key

function readSettings() {
  const empty = Object.fromEntries(FIELDS.map((name) => [name, ""]));
  try {
    return { ...empty, ...JSON.parse(localStorage.getItem(SETTINGS)) };
  } catch {
    return empty;
  }
}

at("open-settings").addEventListener("click", () => {
  const settings = readSettings();
  for (const name of FIELDS) at(name).value = settings[name];
  at("settings").showModal();
});
at("settings").addEventListener("close", () => {
  const valid = FIELDS.filter((name) => at(name).checkValidity());
  localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(valid.map((name) => [name, at(name).value]))));
});
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

grow();
chat.restore();
listModels();
