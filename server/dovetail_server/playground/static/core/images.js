// Images of messages. This window alone holds them: a conversation that the browser stores has their names.
import { asSentence } from "./api.js";

export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
export const KINDS = "PNG, JPEG, WebP or GIF, up to 20 MiB each";
const MOST_BYTES = 20 << 20; // of one image, as the server has it
const MOST_HELD = 256 << 20; // characters of all that were sent; the oldest are given up
const held = new Map(); // by identifier: `{url, preview}`, the oldest first

/** Why a file cannot be sent as an image; empty if it can. */
export function refusalOf(file) {
  if (!TYPES.includes(file.type)) return `${file.name} is not a PNG, JPEG, WebP or GIF image and was left out.`;
  return file.size > MOST_BYTES ? `${file.name} has more than 20 MiB and was left out.` : "";
}

/** `{name, type, size, url, preview}` of an image's file; throws a sentence for people. */
export async function imageOf(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} could not be read and was left out.`));
    reader.readAsDataURL(file);
  });
  return { name: file.name, type: file.type, size: file.size, url, preview: URL.createObjectURL(file) };
}

/** A picture of a number, drawn here, with which a model that sees can be tried at once. */
export function examplePicture() {
  const canvas = Object.assign(document.createElement("canvas"), { width: 160, height: 96 });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  Object.assign(context, { fillStyle: "black", font: "56px sans-serif", textAlign: "center", textBaseline: "middle" });
  context.fillText("84", canvas.width / 2, canvas.height / 2);
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(imageOf(new File([blob], "number.png", { type: "image/png" })))));
}

/** Hold images that are sent, by their `id`, and return them. */
export function hold(images) {
  for (const { id, url, preview } of images) held.set(id, { url, preview });
  let total = [...held.values()].reduce((sum, { url }) => sum + url.length, 0);
  for (const [id, { url, preview }] of held) {
    if (total <= MOST_HELD) break;
    held.delete(id);
    total -= url.length;
    URL.revokeObjectURL(preview);
  }
  return images;
}

/** Where a held image can be shown from; undefined once this window has it no more. */
export function previewOf({ id }) {
  return held.get(id)?.preview;
}

/** Bytes of a request that images take, whether held already or to be sent; the data is base64. */
export function bytesOf(images) {
  return images.reduce((sum, { id, url, size = 0 }) => sum + ((held.get(id)?.url ?? url)?.length ?? Math.ceil(size / 3) * 4), 0);
}

/** A message's image as the API takes it; the model is told of one that is gone. `isShown`: for people to read. */
export function partOf({ id, name, type }, isShown = false) {
  const url = held.get(id)?.url;
  if (!url) return { type: "text", text: `[The image ${name} is no longer available.]` };
  return { type: "image_url", image_url: { url: isShown ? `data:${type};base64,…` : url } };
}

/** Put a reply's error at the image that it names, if it does; return the message, or undefined. `path`: the messages sent, the last ones of `messages`. */
export function blame(reply, messages, path) {
  const [, message, part] = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(reply.param ?? "") ?? [];
  const node = path[message - (messages.length - path.length)];
  const image = node?.images?.[part];
  if (!image) return undefined;
  image.problem = asSentence(reply.error.replace(/^messages\[\S*: /i, "")); // without its place, which says nothing here
  reply.error = `${image.name}: ${image.problem}`;
  return node;
}
