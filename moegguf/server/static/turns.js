// What stands around answers: questions and their pictures, results of tools, and the buttons below each.

import { button, copy, grow, iconButton, make } from "./dom.js";

/** A question with its pictures. */
export function questionView({ content, images = [] }) {
  const pictures = images.map((data, i) => pictureView(data, `Picture ${i + 1} of the message`));
  const parts = [...(pictures.length ? [make("div", { className: "pictures" }, ...pictures)] : []), make("div", { className: "content" }, content)];
  return make("article", { className: "turn user", ariaLabel: "You" }, ...(content ? parts : parts.slice(0, -1)));
}

/** A picture of a message, by its base64. */
export function pictureView(data, alt) {
  const kind = { iVBOR: "png", R0lGO: "gif" }[data.slice(0, 5)] ?? "jpeg";
  return make("img", { src: `data:image/${kind};base64,${data}`, alt });
}

/** What a tool returned. */
export function resultView({ tool_name: name, content }) {
  const summary = make("summary", {}, "Result of ", make("b", {}, name));
  return make("article", { className: "turn result", ariaLabel: `Result of ${name}` }, make("details", {}, summary, make("pre", { tabIndex: 0 }, content)));
}

/** Asks for the results of tool calls; `onResults(messages)` gets them. */
export function resultForm(calls, onResults) {
  const fields = calls.map(({ function: { name } }) => make("textarea", { rows: 2, required: true, ariaLabel: `Result of ${name}`, placeholder: `Result of ${name}` }));
  const form = make("form", { className: "results" }, ...fields, make("button", { className: "primary" }, calls.length > 1 ? "Send the results" : "Send the result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onResults(calls.map(({ id, function: { name } }, i) => ({ role: "tool", tool_name: name, tool_call_id: id, content: fields[i].value })));
  });
  return form;
}

/** The buttons below a message; those without a function are left out. `versions`: of the message, `onVersion(other)` shows
 *  another. */
export function actions(message, { versions, onVersion, onEdit, onAgain }) {
  const found = [], i = versions.indexOf(message);
  if (versions.length > 1) {
    const arrow = (name, label, other) => Object.assign(iconButton(name, label, () => onVersion(other)), { disabled: !other });
    found.push(arrow("before", "Previous version", versions[i - 1]), `${i + 1}/${versions.length}`, arrow("after", "Next version", versions[i + 1]));
  }
  if (message.content) found.push(iconButton("copy", "Copy", (event) => copy(message.content, event)));
  if (onEdit) found.push(iconButton("edit", "Edit", onEdit));
  if (onAgain) found.push(iconButton("again", "Answer again", onAgain));
  return make("div", { className: "below" }, ...found);
}

/** Replaces a question by a field to change it in; `onSend(text)` gets the new text. */
export function edit(view, text, onSend) {
  const field = make("textarea", { value: text, ariaLabel: "Edit the message" });
  const close = () => form.replaceWith(view);
  const cancel = () => {
    close();
    view.querySelector(".below [title=Edit]")?.focus();
  };
  const send = make("button", { className: "primary" }, "Send");
  const form = make("form", { className: "turn editing" }, field, make("div", { className: "buttons" }, button("Cancel", cancel, { className: "secondary" }), send));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    close();
    onSend(field.value.trim());
  });
  field.addEventListener("input", () => grow(field));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) form.requestSubmit();
    else return;
    event.preventDefault();
  });
  view.replaceWith(form);
  grow(field);
  field.focus();
}
