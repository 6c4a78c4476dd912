// The message field: text, pictures by button, paste and drop, and sending.

import { at, grow, iconButton, make } from "./dom.js";
import { pictureView } from "./turns.js";

const MAX_SIDE_PX = 2048; // models see less
const AS_THEY_ARE = ["image/png", "image/gif"]; // a JPEG may be turned, which only the browser sees

export class Composer {
  /** `onSend(text, images)` is called with a message; `refusal()` returns why the model takes no pictures, or "". */
  constructor({ onSend, refusal }) {
    Object.assign(this, { onSend, refusal, field: at("message"), images: [], state: {} });
    const { field } = this, form = at("composer"), chooser = at("pictures");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    field.addEventListener("input", () => this.update());
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
    field.addEventListener("paste", (event) => this.attach(pictures(event.clipboardData), event));
    const chat = form.closest(".chat");
    for (const kind of ["dragover", "drop"]) chat.addEventListener(kind, (event) => this.drop(event));
    grow(field);
  }

  /** Shows whether an answer is written, and whether there is a model to ask. */
  update(state = {}) {
    Object.assign(this.state, state);
    const { busy, ready } = this.state;
    at("send").hidden = busy;
    at("stop").hidden = !busy;
    at("send").disabled = !ready || !(this.field.value.trim() || this.images.length);
    at("attach").hidden = Boolean(this.refusal());
    grow(this.field);
  }

  send() {
    const text = this.field.value.trim(), { images } = this;
    if (!(text || images.length) || this.state.busy || !this.state.ready) return;
    this.field.value = "";
    this.images = [];
    this.showImages();
    this.onSend(text, images);
  }

  drop(event) {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (event.type === "drop") this.attach(pictures(event.dataTransfer), event);
  }

  async attach(files, event) {
    if (!files.length) return;
    event?.preventDefault();
    let problem = this.refusal();
    try {
      if (!problem) this.images.push(...(await Promise.all(files.map(readPicture))));
    } catch (error) {
      problem = error.message;
    }
    this.showImages(problem);
    this.field.focus();
  }

  showImages(problem = "") {
    at("problem").textContent = problem;
    at("attached").replaceChildren(...this.images.map((data, i) => {
      const remove = iconButton("close", `Remove picture ${i + 1}`, () => {
        this.images.splice(i, 1);
        this.showImages();
        this.field.focus();
      });
      return make("li", {}, pictureView(data, `Picture ${i + 1}`), remove);
    }));
    this.update();
  }
}

/** A picture for a model, as base64 of a PNG, GIF or JPEG. Throws an Error for a file that is none. */
async function readPicture(file) {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name || "This"} is not a picture that the browser can read.`);
  });
  const scale = Math.min(1, MAX_SIDE_PX / Math.max(picture.width, picture.height));
  if (scale === 1 && AS_THEY_ARE.includes(file.type)) return base64(file);
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(picture.width * scale)), Math.max(1, Math.round(picture.height * scale)));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return base64(await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 }));
}

/** The pictures among the files of a paste or drop. */
function pictures(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

async function base64(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}
