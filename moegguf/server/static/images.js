// Pictures for a model: any that the browser reads, as base64 of a PNG, GIF or JPEG.

const MAX_SIDE_PX = 2048; // models see less
const AS_THEY_ARE = ["image/png", "image/gif"]; // a JPEG may be turned, which only the browser sees

/** The base64 of a picture. Throws an Error for a file that is none. */
export async function readPicture(file) {
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "This"} is not a picture that the browser can read.`);
  }
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
export function pictures(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

function base64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
