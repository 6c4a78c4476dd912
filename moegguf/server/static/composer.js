// The message field. The user types text, attaches files by button, paste or drop, and sends the message.

import { at, grow, iconButton, make } from "./dom.js";
import { readFile } from "./files.js";
import { fileName, pictureView } from "./turns.js";

export class Composer {
  /** `onSend(text, attached)` is called with the text of a message and the results of `readFile` for its files.
   *  `refusal()` returns the reason why the model accepts no pictures, or "" if it does. */
  constructor({ onSend, refusal }) {
    Object.assign(this, { onSend, refusal, field: at("message"), attached: [], reading: "", state: {} });
    const { field } = this, form = at("composer"), chooser = at("files");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    field.addEventListener("input", () => {
      at("problem").textContent = "";
      this.update();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    at("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      this.attach([...chooser.files]);
      chooser.value = "";
    });
    field.addEventListener("paste", (event) => this.attach([...event.clipboardData.files], event));
    const chat = form.closest(".chat");
    for (const kind of ["dragover", "drop"]) chat.addEventListener(kind, (event) => this.drop(event));
    grow(field);
  }

  /** Updates the buttons. `state.busy`: an answer is being written. `state.ready`: a model is selected. */
  update(state = {}) {
    Object.assign(this.state, state);
    const { busy, ready } = this.state;
    at("send").hidden = busy;
    at("stop").hidden = !busy;
    at("send").disabled = !ready || Boolean(this.reading) || !(this.field.value.trim() || this.attached.length);
    grow(this.field);
  }

  send() {
    const text = this.field.value.trim(), { attached } = this;
    if (!(text || attached.length) || this.reading || this.state.busy || !this.state.ready) return;
    this.field.value = "";
    this.attached = [];
    this.showAttached();
    this.onSend(text, attached);
  }

  drop(event) {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (event.type === "drop") this.attach([...event.dataTransfer.files], event);
  }

  /** Reads files and attaches them. Reads one file at a time, because the server reads only a few PDF files at once. */
  async attach(files, event) {
    if (!files.length) return;
    event?.preventDefault();
    const problems = [];
    for (const file of files) {
      this.reading = file.name || "the file";
      this.showAttached();
      await readFile(file, this.refusal()).then((found) => this.attached.push(found), (error) => problems.push(error.message));
    }
    this.reading = "";
    this.showAttached(problems.join("\n"));
    this.field.focus();
  }

  /** Shows the attached files and a problem. The next call or the next input removes the problem. */
  showAttached(problem = "") {
    at("problem").textContent = problem;
    const items = this.attached.map((each, i) => {
      const label = each.image ? `picture ${i + 1}` : each.name;
      const remove = iconButton("close", `Remove ${label}`, () => {
        this.attached.splice(i, 1);
        this.showAttached();
        this.field.focus();
      });
      return make("li", {}, each.image ? pictureView(each.image, `Picture ${i + 1}`) : fileName(each), remove);
    });
    if (this.reading) items.push(make("li", { className: "waiting" }, `Reading ${this.reading}…`));
    at("attached").replaceChildren(...items);
    this.update();
  }
}
