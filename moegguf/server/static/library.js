// The dialog that lists the server's models. The user can download, delete and choose models in it.

import { lines, request } from "./api.js";
import { at, button, count, duration, iconButton, make, size } from "./dom.js";

export class Library {
  /** `models`: the `Models` object of the page. `onChange()` is called when the dialog opens and after a model was
   *  added or deleted, and `onChoose(name)` when a model is clicked. */
  constructor(models, { onChange, onChoose }) {
    Object.assign(this, { models, onChange, onChoose, pulls: new Map(), fresh: [] });
    at("open-models").addEventListener("click", () => this.open());
    at("close-models").addEventListener("click", () => at("models").close());
    at("pull").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = at("pull-name").value.trim();
      at("pull-name").value = "";
      if (name) this.pull(name);
    });
    addEventListener("beforeunload", (event) => this.busy && event.preventDefault()); // leaving the page would end a download
  }

  get busy() {
    return [...this.pulls.values()].some((view) => view.running);
  }

  open() {
    at("models").showModal();
    this.onChange();
  }

  /** Downloads a model. The download continues if the dialog is closed. */
  async pull(name) {
    this.pulls.get(name)?.close();
    const view = new PullView(name, { onClose: () => this.pulls.delete(name), onAgain: () => this.pull(name) });
    this.pulls.set(name, view);
    at("pulls").append(view.element);
    this.showBusy();
    try {
      const response = await request("api/pull", { body: { model: name }, signal: view.abort.signal });
      let done = false;
      for await (const line of lines(response)) {
        if (line.error) throw new Error(line.error);
        view.take(line);
        done = line.status === "success";
      }
      if (!done) throw new Error("The connection ended before the download.");
      const before = this.models.all.map((model) => model.name);
      view.close();
      await this.onChange();
      this.fresh.push(...this.models.all.map((model) => model.name).filter((each) => !before.includes(each)));
      this.draw();
      at("status").textContent = `Pulled ${name}`;
    } catch (error) {
      view.fail(error.name === "AbortError" ? "Stopped. The received part is kept, and the next pull continues from there." : error.message);
    }
    this.showBusy();
  }

  showBusy() {
    at("open-models").classList.toggle("busy", this.busy);
  }

  draw() {
    const rows = this.models.all.map((model) => this.row(model));
    at("models-list").replaceChildren(...(rows.length ? rows : [make("li", { className: "hint" }, "None yet.")]));
  }

  row({ name, size: bytes, details, missing }) {
    const facts = [size(bytes), details.parameter_size, details.quantization_level, this.models.loaded.includes(name) && "in memory", this.fresh.includes(name) && "new", missing && "files are missing"];
    const text = make("small", {}, facts.filter(Boolean).join(" · "));
    const choose = button(name, () => this.choose(name), { className: "name", disabled: !this.models.has(name) });
    return make("li", {}, make("div", {}, choose, text), iconButton("delete", `Delete ${name}`, (event) => this.remove(name, event.currentTarget)));
  }

  choose(name) {
    at("models").close();
    this.onChoose(name);
  }

  /** Deletes a model if the user confirms. An error is shown in the model's row of the list. */
  async remove(name, from) {
    if (!confirm(`Delete ${name}? Files that no other name uses are removed from the server's disk.`)) return;
    const row = from.closest("li");
    row.querySelector(".problem")?.remove();
    from.disabled = true;
    try {
      await request("api/delete", { method: "DELETE", body: { model: name } });
      await this.onChange();
      at("pull-name").focus();
    } catch (error) {
      from.disabled = false;
      row.append(make("p", { className: "problem", role: "alert" }, error.message));
    }
  }
}

/** The view of one download: the model's name, the progress, and a button that stops the download. */
class PullView {
  constructor(name, { onClose, onAgain }) {
    Object.assign(this, { onClose, onAgain, abort: new AbortController(), running: true, files: new Map() });
    this.bar = make("progress", { max: 1, ariaLabel: `Progress of ${name}` });
    this.bar.removeAttribute("value");
    this.text = make("p", { className: "hint" }, "Asking for the files…");
    this.buttons = make("div", { className: "buttons" }, button("Stop", () => this.abort.abort(), { className: "secondary", ariaLabel: `Stop pulling ${name}` }));
    this.element = make("li", {}, make("b", {}, name), this.buttons, this.bar, this.text);
  }

  /** Handles a line of the response: a step of the download, or the number of bytes of one file. */
  take({ status, file, total, completed = 0 }) {
    if (!file) {
      if (status.startsWith("verifying")) this.text.textContent = "Checking the files…";
      return;
    }
    this.files.set(file, { total, completed });
    const sum = (name) => [...this.files.values()].reduce((n, each) => n + each[name], 0);
    this.show(sum("completed"), sum("total"));
  }

  /** Shows the progress of the download: "3.42 MB of 8.10 GB · 52.0 MB/s · 1 min 30 s left". `done` and `all` are
   *  bytes. */
  show(done, all) {
    const now = performance.now() / 1000;
    if (done && !this.begin) this.begin = { done, at: now }; // the speed leaves out bytes that were there before
    const rate = this.begin && now > this.begin.at ? (done - this.begin.done) / (now - this.begin.at) : 0;
    const parts = [`${size(done)} of ${size(all)}`];
    if (this.files.size > 1) parts[0] += ` in ${count(this.files.size)} files`;
    if (rate > 0) parts.push(`${size(rate)}/s`, `${duration((all - done) / rate)} left`);
    this.bar.value = all ? done / all : 0;
    this.text.textContent = parts.join(" · ");
  }

  fail(message) {
    this.running = false;
    this.bar.hidden = true;
    this.text.className = "problem";
    this.text.setAttribute("role", "alert");
    this.text.textContent = message;
    const choices = { "Try again": this.onAgain, Close: () => this.close() };
    this.buttons.replaceChildren(...Object.entries(choices).map(([label, act]) => button(label, act, { className: "secondary" })));
  }

  close() {
    this.running = false;
    this.abort.abort();
    this.element.remove();
    this.onClose();
  }
}
