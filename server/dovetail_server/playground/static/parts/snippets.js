// The same request as a command or a program.
import { BASE, hasKey } from "../core/api.js";

// What OpenAI's Python client takes as arguments; the rest goes into `extra_body`.
const OPENAI = new Set(["model", "messages", "temperature", "top_p", "max_tokens", "seed", "frequency_penalty"]);
for (const name of ["presence_penalty", "stop", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice"]) {
  OPENAI.add(name);
}
OPENAI.add("reasoning_effort");

export const SNIPPETS = { curl, Python: python, JavaScript: javascript };

function curl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey() ? ' \\\n  -H "Authorization: Bearer $DOVETAIL_API_KEY"' : "";
  return `curl -s ${BASE.href}v1/chat/completions \\\n  -H "Content-Type: application/json"${key} \\\n  -d '${quoted}'\n`;
}

function python(body) {
  const lines = [];
  const extra = {};
  for (const [name, value] of Object.entries(body)) {
    if (OPENAI.has(name)) lines.push(`    ${name}=${literal(value, "    ")},`);
    else extra[name] = value;
  }
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, "    ")},`);
  const key = hasKey() ? 'os.environ["DOVETAIL_API_KEY"]' : '"none"';
  return `${hasKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${BASE.href}v1", api_key=${key})
reply = client.chat.completions.create(
${lines.join("\n")}
)
print(reply.choices[0].message.content)
`;
}

/** A JSON value as Python writes it. */
export function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const deeper = `${indent}    `;
  const rows = isList
    ? value.map((one) => deeper + literal(one, deeper))
    : Object.entries(value).map(([name, one]) => `${deeper}${JSON.stringify(name)}: ${literal(one, deeper)}`);
  if (!rows.length) return isList ? "[]" : "{}";
  return `${isList ? "[" : "{"}\n${rows.join(",\n")},\n${indent}${isList ? "]" : "}"}`;
}

function javascript(body) {
  const key = hasKey() ? '\n    authorization: `Bearer ${process.env.DOVETAIL_API_KEY}`,' : "";
  const text = JSON.stringify(body, null, 2).replaceAll("\n", "\n  ");
  return `const response = await fetch("${BASE.href}v1/chat/completions", {
  method: "POST",
  headers: {
    "content-type": "application/json",${key}
  },
  body: JSON.stringify(${text}),
});
const reply = await response.json();
console.log(reply.choices[0].message.content);
`;
}
