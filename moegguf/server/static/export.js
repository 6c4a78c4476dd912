// Exports a conversation as a file: the shown messages as Markdown, or the whole conversation as JSON.

import { make } from "./dom.js";
import { pictureUrl } from "./turns.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

/** Downloads a conversation as a Markdown file if `isMarkdown` is true, and otherwise as a JSON file. */
export function save(conversation, isMarkdown) {
  const text = isMarkdown ? markdownOf(conversation) : JSON.stringify({ ...conversation, kind: "moegguf conversation" }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: isMarkdown ? "text/markdown" : "application/json" }));
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat";
  make("a", { href: url, download: `${name}.${isMarkdown ? "md" : "json"}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function markdownOf({ title, model, changed, settings: { system }, path }) {
  const facts = [model, new Date(changed).toISOString().slice(0, 10)].filter(Boolean).join(" · ");
  const parts = [`# ${title}`, facts, ...(system ? ["## System message", system] : []), ...path.flatMap(partsOf)];
  return `${parts.join("\n\n")}\n`;
}

function partsOf({ role, content, thinking, images = [], files = [], tool_name: tool, tool_calls: calls = [] }) {
  return [
    `## ${NAMES[role]}${tool ? `: ${tool}` : ""}`,
    ...images.map((data, i) => `![Picture ${i + 1}](${pictureUrl(data)})`),
    ...files.flatMap(({ name, text }) => [`File ${name}:`, fenced(text)]),
    ...(thinking ? [thinking.trim().replace(/^/gm, "> ")] : []),
    ...(content ? [role === "tool" ? fenced(content) : content.trim()] : []),
    ...calls.flatMap(({ function: { name, arguments: given } }) => [`Calls ${name}:`, fenced(JSON.stringify(given, null, 2), "json")]),
  ];
}

/** Returns `text` as a code block in Markdown, with a fence that is longer than any run of backticks in the text. */
function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((marks) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text.trimEnd()}\n${fence}`;
}
