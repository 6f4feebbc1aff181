// Asks one server through the JavaScript clients of OpenAI, Anthropic and the AI SDK. Run in the folder where they are
// installed: node clients.mjs BASE_URL. Prints one line per check; the exit code tells whether all held.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import Anthropic from '@anthropic-ai/sdk';
import { generateObject, generateText, streamText, tool } from 'ai';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createDeepSeek } from '@ai-sdk/deepseek';
import { z } from 'zod';

const base = process.argv[2];
const model = 'dovetail-demo';
const baseURL = `${base}/v1`;
const apiKey = 'none';
const question = 'What is the capital of France?';
const user = [{ role: 'user', content: question }];
const weather = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'Get the current weather in a city',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
  },
};
let failed = 0;

async function check(name, run) {
  try {
    await run();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}: ${String(error.stack ?? error).slice(0, 1500)}`);
  }
}

const openai = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
await check('openai: chat', async () => {
  const reply = await openai.chat.completions.create({ model, messages: user, temperature: 0 });
  assert.match(reply.choices[0].message.content, /Paris/);
});
await check('openai: stream', async () => {
  const stream = openai.chat.completions.stream({ model, messages: user, temperature: 0 });
  assert.match((await stream.finalChatCompletion()).choices[0].message.content, /Paris/);
});
await check('openai: tools', async () => {
  const ask = { model, messages: user, tools: [weather], tool_choice: 'required', temperature: 0 };
  const reply = await openai.chat.completions.create(ask);
  assert.equal(reply.choices[0].message.tool_calls[0].function.name, 'get_weather');
  const streamed = await openai.chat.completions.stream(ask).finalChatCompletion();
  assert.equal(streamed.choices[0].message.tool_calls[0].function.name, 'get_weather');
});
await check('openai: completions, models', async () => {
  const reply = await openai.completions.create({ model, prompt: 'The capital of France is', max_tokens: 4 });
  assert.equal(typeof reply.choices[0].text, 'string');
  const names = [];
  for await (const found of openai.models.list()) names.push(found.id);
  assert.deepEqual(names, [model]);
});
await check('openai: responses', async () => {
  const first = await openai.responses.create({ model, input: question, temperature: 0 });
  assert.match(first.output_text, /Paris/);
  const stream = openai.responses.stream({ model, input: question, previous_response_id: first.id });
  assert.equal((await stream.finalResponse()).status, 'completed');
});
await check('openai: files', async () => {
  const file = await openai.files.create({ file: new File(['{}\n'], 'a.jsonl'), purpose: 'batch' });
  assert.equal((await openai.files.retrieve(file.id)).bytes, 3);
  assert.equal((await openai.files.delete(file.id)).deleted, true);
});

const anthropic = new Anthropic({ baseURL: base, apiKey, maxRetries: 0 });
await check('anthropic: message, count', async () => {
  const reply = await anthropic.messages.create({ model, max_tokens: 100, messages: user, temperature: 0 });
  assert.match(reply.content.map((block) => block.text ?? '').join(''), /Paris/);
  assert.ok((await anthropic.messages.countTokens({ model, messages: user })).input_tokens > 0);
});
await check('anthropic: stream, tools', async () => {
  const tools = [{ name: 'get_weather', input_schema: weather.function.parameters }];
  const stream = anthropic.messages.stream({
    model, max_tokens: 200, messages: user, tools, tool_choice: { type: 'any' },
  });
  const reply = await stream.finalMessage();
  assert.equal(reply.stop_reason, 'tool_use');
});

const providers = {
  '@ai-sdk/openai chat': createOpenAI({ baseURL, apiKey }).chat(model),
  '@ai-sdk/openai responses': createOpenAI({ baseURL, apiKey }).responses(model),
  '@ai-sdk/openai-compatible': createOpenAICompatible({
    name: 'dovetail', baseURL, apiKey, supportsStructuredOutputs: true,
  })(model),
  '@ai-sdk/anthropic': createAnthropic({ baseURL, apiKey })(model),
  '@ai-sdk/deepseek': createDeepSeek({ baseURL, apiKey })(model),
};
const tools = {
  get_weather: tool({
    description: 'Get the current weather in a city',
    inputSchema: z.object({ city: z.string() }),
  }),
};
for (const [name, chosen] of Object.entries(providers)) {
  const options = { model: chosen, prompt: question, maxRetries: 0, maxOutputTokens: 200, temperature: 0 };
  await check(`${name}: text`, async () => {
    const { text, usage } = await generateText(options);
    assert.match(text, /Paris/);
    assert.ok(usage.inputTokens > 0);
  });
  await check(`${name}: stream`, async () => {
    let text = '';
    const result = streamText({ ...options, onError: ({ error }) => { throw error; } });
    for await (const piece of result.textStream) text += piece;
    assert.match(text, /Paris/);
    assert.equal(await result.finishReason, 'stop');
  });
  await check(`${name}: tool`, async () => {
    const { toolCalls } = await generateText({ ...options, tools, toolChoice: 'required' });
    assert.equal(toolCalls[0].toolName, 'get_weather');
    assert.equal(typeof toolCalls[0].input.city, 'string');
  });
  if (name === '@ai-sdk/deepseek') continue; // puts the schema into the prompt, which the toy model does not read
  await check(`${name}: object`, async () => {
    const { object } = await generateObject({ ...options, schema: z.object({ city: z.enum(['Paris', 'Rome']) }) });
    assert.ok(['Paris', 'Rome'].includes(object.city));
  });
}
process.exit(failed ? 1 : 0);
