// The settings of a conversation: system message, sampling, thinking and tools. A new conversation begins with the
// settings that were saved last.

import { json } from "./api.js";
import { at } from "./dom.js";

const KEPT = "moegguf.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "num_predict", "num_ctx", "seed"];
const FIELDS = ["system", ...NUMBERS, "think", "tools"];
const NAMES_OF_PROPS = { num_predict: "n_predict" };

/** Returns the settings that were saved last, with which a new conversation begins; {} if none were saved. */
export function lastSettings() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}

/** Returns the settings, except the system message, as fields of a request to /api/chat. Leaves out thinking and tools
 *  if the selected model cannot use them. */
export function requestFields(settings, models) {
  const numbers = NUMBERS.filter((name) => settings[name]).map((name) => [name, Number(settings[name])]);
  const fields = { options: Object.fromEntries(numbers) };
  if (settings.think && models.can("thinking")) fields.think = { on: true, off: false }[settings.think] ?? settings.think;
  if (settings.tools && models.can("tools")) fields.tools = JSON.parse(settings.tools);
  return fields;
}

export class SettingsDialog {
  /** `onChange(settings)` is called when the dialog is closed. */
  constructor(onChange) {
    at("tools").addEventListener("input", () => at("tools").setCustomValidity(toolsFault(at("tools").value)));
    at("settings").addEventListener("close", () => {
      const valid = FIELDS.filter((name) => at(name).checkValidity() && at(name).value.trim());
      const settings = Object.fromEntries(valid.map((name) => [name, at(name).value.trim()]));
      localStorage.setItem(KEPT, JSON.stringify(settings));
      onChange(settings);
    });
  }

  open(settings, models) {
    for (const name of FIELDS) at(name).value = settings[name] ?? "";
    at("tools").setCustomValidity("");
    for (const capability of ["thinking", "tools"]) at(`for-${capability}`).hidden = !models.can(capability);
    at("settings").showModal();
    this.showDefaults(models.name).catch(() => {}); // the fields also work without default values
  }

  /** Shows the model's default values as placeholders in empty fields. */
  async showDefaults(model) {
    const { default_generation_settings: defaults } = await json(`props?model=${encodeURIComponent(model)}`);
    for (const name of NUMBERS) {
      const value = defaults.params[NAMES_OF_PROPS[name] ?? name] ?? (name === "num_ctx" ? defaults.n_ctx || "default" : "");
      at(name).placeholder = { seed: "random", num_predict: "no limit" }[value === -1 ? name : ""] ?? String(value);
    }
  }
}

/** Returns the error in the text that defines the tools, or "" if there is none. */
function toolsFault(text) {
  if (!text.trim()) return "";
  try {
    const tools = JSON.parse(text);
    return Array.isArray(tools) && tools.every((tool) => tool.function?.name) ? "" : 'A list of tools: [{"type": "function", "function": {"name": …}}]';
  } catch (error) {
    return error.message;
  }
}
