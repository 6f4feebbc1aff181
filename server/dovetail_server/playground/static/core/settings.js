// What a request asks beside its messages: the fields of the form, and the body that they make.

const LAST = "dovetail-settings";

/** Numbers of a request, by the API's name. */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "Higher is more random; 0 always takes the most likely token." },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05, hint: "Sample from the most likely tokens whose probabilities add up to this." },
  { name: "top_k", label: "Top k", min: -1, step: 1, hint: "Sample from this many of the most likely tokens; 0: all." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "Minimum probability of a token, relative to the most likely one." },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "Maximum length of the response." },
  { name: "seed", label: "Seed", step: 1, hint: "The same seed gives the same reply." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 2, step: 0.05 },
];
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);

export const THINKING = [
  ["", "Model default"],
  ["none", "Off"],
  ["low", "Low"],
  ["medium", "Medium"],
  ["high", "High"],
];

export const OUTPUTS = [
  ["", "Text"],
  ["json_object", "Any JSON object"],
  ["json_schema", "JSON schema"],
  ["regex", "Regular expression"],
  ["ebnf", "Grammar (EBNF)"],
];

export const EXAMPLES = {
  json_schema: JSON.stringify(
    {
      type: "object",
      properties: { name: { type: "string" }, capital: { type: "string" } },
      required: ["name", "capital"],
      additionalProperties: false,
    },
    null,
    2,
  ),
  regex: "(yes|no)",
  ebnf: 'root ::= "yes" | "no"',
  tools: JSON.stringify(
    [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "The weather in a city",
          parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        },
      },
    ],
    null,
    2,
  ),
};

/** The settings used last, for a new conversation. */
export function lastSettings() {
  try {
    return JSON.parse(localStorage.getItem(LAST)) ?? {};
  } catch {
    return {};
  }
}

export function rememberSettings(settings) {
  try {
    localStorage.setItem(LAST, JSON.stringify(settings));
  } catch {
    // The browser keeps nothing; the conversation still has them.
  }
}

/** The body of a request without its messages, and what is wrong, by the field's name. */
export function bodyOf(settings) {
  const body = {};
  const problems = {};
  for (const field of NUMBERS) number(settings, field, body, problems);
  if (settings.thinking) body.reasoning_effort = settings.thinking;
  const stop = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  output(settings, body, problems);
  tools(settings, body, problems);
  extra(settings, body, problems);
  return { body, problems };
}

function number(settings, { name, label, min = -Infinity, max = Infinity }, body, problems) {
  const text = String(settings[name] ?? "").trim();
  if (text === "") return;
  const value = Number(text);
  if (!Number.isFinite(value)) problems[name] = `${label} is not a number.`;
  else if (WHOLE.has(name) && !Number.isSafeInteger(value)) problems[name] = `${label} is not a whole number.`;
  else if (value < min) problems[name] = `${label} is less than ${min}.`;
  else if (value > max) problems[name] = `${label} is more than ${max}.`;
  else body[name] = value;
}

function output(settings, body, problems) {
  const kind = settings.output;
  const text = (settings.grammar ?? {})[kind] ?? "";
  if (kind === "json_object") body.response_format = { type: "json_object" };
  else if (kind === "json_schema") {
    const schema = parsed(text, "The schema", "grammar", problems);
    if (schema === undefined) return;
    if (schema === null || Array.isArray(schema) || typeof schema !== "object") {
      problems.grammar = "The schema is not a JSON object.";
    } else body.response_format = { type: "json_schema", json_schema: { name: "reply", schema } };
  } else if (kind && text.trim() === "") problems.grammar = "The field is empty.";
  else if (kind) body[kind] = text;
}

function tools(settings, body, problems) {
  if (!(settings.tools ?? "").trim()) return;
  const value = parsed(settings.tools, "The list of tools", "tools", problems);
  if (value === undefined) return;
  if (!Array.isArray(value)) problems.tools = "The tools are not a list: a list begins with [.";
  else if (value.length) {
    body.tools = value.map((tool) => (tool?.function || !tool?.name ? tool : { type: "function", function: tool }));
    if (settings.tool_choice) body.tool_choice = settings.tool_choice;
  }
}

function extra(settings, body, problems) {
  if (!(settings.extra ?? "").trim()) return;
  const value = parsed(settings.extra, "What else to send", "extra", problems);
  if (value === undefined) return;
  if (value === null || Array.isArray(value) || typeof value !== "object") problems.extra = "It is not a JSON object.";
  else Object.assign(body, value);
}

function parsed(text, what, name, problems) {
  try {
    return JSON.parse(text);
  } catch (error) {
    problems[name] = text.trim() === "" ? `${what} is empty.` : `${what} is not JSON: ${error.message}.`;
    return undefined;
  }
}
