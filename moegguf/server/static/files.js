// Reads files that the user attaches to a message. A picture becomes base64, a text file is read as text, and the
// server extracts the text of a PDF file.

import { json } from "./api.js";
import { size } from "./dom.js";

const MAX_SIDE_PX = 2048; // largest width and height of a picture that is sent; larger pictures are scaled down
// Types of pictures that are sent unchanged if they are small enough. A JPEG is always drawn again, because only the
// browser applies the rotation that the file states.
const AS_THEY_ARE = ["image/png", "image/gif"];
const MAX_TEXT_BYTES = 1e6;
const MAX_PDF_BYTES = 16 * 2 ** 20;

/** Returns a file as a part of a message: {image}, {name, text}, or {name, text, n_pages} for a PDF file. Throws an
 *  Error with the file's name and the reason. `refusal`: the reason why the model accepts no pictures, or "" if it
 *  does. */
export async function readFile(file, refusal) {
  const name = file.name || "This file";
  try {
    if (file.type === "application/pdf" || /\.pdf$/i.test(name)) return { name, ...(await readPdf(file)) };
    if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return { image: await readPicture(file, refusal) };
    return { name, text: await readText(file) };
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

function checkSize(file, most) {
  if (file.size > most) throw new Error(`it has ${size(file.size)}, but at most ${size(most)} can be read.`);
}

async function readText(file) {
  checkSize(file, MAX_TEXT_BYTES);
  const text = await file.text();
  if (/[\0\ufffd]/.test(text)) throw new Error("it is not text in UTF-8, a PDF file or a picture.");
  if (!text.trim()) throw new Error("it is empty.");
  return text;
}

async function readPdf(file) {
  checkSize(file, MAX_PDF_BYTES);
  const { n_pages: nPages, text } = await json("pdf-text", { body: file });
  const pages = nPages === 1 ? "page has" : `${nPages} pages have`;
  if (!text.trim()) throw new Error(`its ${pages} no text, as in a scan. A model that sees pictures can read pictures of its pages.`);
  return { text, n_pages: nPages };
}

/** Returns a picture as the base64 of a PNG, GIF or JPEG file. Throws an Error if there is a `refusal`, or if the
 *  browser cannot read the picture. */
async function readPicture(file, refusal) {
  if (refusal) throw new Error(refusal);
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error("the browser cannot read it as a picture.");
  });
  const scale = Math.min(1, MAX_SIDE_PX / Math.max(picture.width, picture.height));
  if (scale === 1 && AS_THEY_ARE.includes(file.type)) return base64(file);
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(picture.width * scale)), Math.max(1, Math.round(picture.height * scale)));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // transparent pixels become white, because JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return base64(await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 }));
}

async function base64(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

/** Describes the text of a file: "12 pages · about 8,300 tokens". */
export function factsOf({ text, n_pages: nPages }) {
  const tokens = Math.max(1, Math.round(text.length / 4)).toLocaleString("en-US", { maximumSignificantDigits: 2 });
  return [nPages && `${nPages} page${nPages === 1 ? "" : "s"}`, `about ${tokens} tokens`].filter(Boolean).join(" · ");
}
