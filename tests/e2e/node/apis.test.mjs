// Responses by the official Node SDK, and messages by Anthropic's, on the real engine.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import { ResponsesWS } from 'openai/resources/responses/ws';

const client = new OpenAI({ maxRetries: 0, timeout: 60_000 });
const model = 'sluice-tiny';
const count = { model, input: 'Count from 1 to 9', temperature: 0 };
const counted = '1, 2, 3, 4, 5, 6, 7, 8, 9';
const person = {
  type: 'object',
  properties: { name: { type: 'string', maxLength: 20 }, age: { type: 'integer' } },
  required: ['name', 'age'],
  additionalProperties: false,
};

test('a response comes whole and streamed, and is parsed', async () => {
  const whole = await client.responses.create(count);
  assert.equal(whole.output_text, counted);
  assert.equal(whole.status, 'completed');
  const stream = client.responses.stream(count);
  const types = [];
  stream.on('event', ({ type }) => types.push(type));
  const last = await stream.finalResponse();
  assert.equal(last.output_text, counted);
  assert.equal(types.at(0), 'response.created');
  assert.equal(types.at(-1), 'response.completed');
  const format = { type: 'json_schema', name: 'person', schema: person, strict: true };
  const input = 'Return JSON with name and age. Anna is 30 years old.';
  const parsed = await client.responses.parse({ model, input, temperature: 0, text: { format } });
  assert.deepEqual(parsed.output_parsed, { name: 'Anna', age: 30 });
});

test('responses go over a socket, and the second continues the first', async () => {
  const socket = new ResponsesWS(client);
  const ask = (fields) =>
    new Promise((resolve, reject) => {
      socket.on('response.completed', ({ response }) => resolve(response));
      socket.on('error', reject);
      socket.send({ type: 'response.create', ...count, store: false, ...fields });
    });
  try {
    const first = await ask({});
    assert.equal(first.output[0].content[0].text, counted);
    const second = await ask({ input: 'And now?', previous_response_id: first.id });
    assert.notEqual(second.id, first.id);
    assert.ok(second.usage.input_tokens > first.usage.input_tokens);
  } finally {
    socket.close();
  }
});

test('a message comes whole and streamed, and is counted', async () => {
  const anthropic = new Anthropic({
    apiKey: process.env.OPENAI_API_KEY,
    baseURL: process.env.OPENAI_BASE_URL.replace(/\/v1$/, ''),
    maxRetries: 0,
  });
  const messages = [{ role: 'user', content: 'What is 7 * 8?' }];
  const asked = { model, max_tokens: 32, messages, temperature: 0 };
  const message = await anthropic.messages.create(asked);
  assert.equal(message.content[0].text, '7 * 8 = 56');
  assert.equal(message.stop_reason, 'end_turn');
  assert.equal(await anthropic.messages.stream(asked).finalText(), '7 * 8 = 56');
  const { input_tokens: tokens } = await anthropic.messages.countTokens({ model, messages });
  const { input_tokens: computed, cache_read_input_tokens: cached } = message.usage;
  assert.equal(tokens, computed + (cached ?? 0));
  await assert.rejects(anthropic.messages.create({ ...asked, model: 'none' }), Anthropic.NotFoundError);
});
