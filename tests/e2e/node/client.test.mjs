// The official Node SDK on the real engine. OPENAI_BASE_URL and OPENAI_API_KEY say where it is.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';

const client = new OpenAI({ maxRetries: 0, timeout: 60_000 });
const model = 'sluice-tiny';
const embeddingModel = process.env.EMBEDDING_MODEL;
const user = (content) => [{ role: 'user', content }];
const count = { model, messages: user('Count from 1 to 9'), temperature: 0 };
const counted = '1, 2, 3, 4, 5, 6, 7, 8, 9';
const parameters = {
  type: 'object',
  properties: { city: { type: 'string' } },
  required: ['city'],
  additionalProperties: false,
};
const getWeather = { name: 'get_weather', description: 'Get the weather of a city', parameters };
const asked = { model, messages: user('What is the weather in Paris?'), temperature: 0 };

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test('an answer comes whole', async () => {
  const answer = await client.chat.completions.create(count);
  assert.equal(answer.choices[0].message.content, counted);
  assert.equal(answer.choices[0].finish_reason, 'stop');
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.ok(answer._request_id);
});

test('an answer is streamed, with its usage', async () => {
  const options = { ...count, stream: true, stream_options: { include_usage: true } };
  const chunks = await collect(await client.chat.completions.create(options));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join(''), counted);
  assert.ok(chunks.length > 5);
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
});

test('the helper assembles three answers', async () => {
  const options = { model, messages: user('Tell me a story'), temperature: 2, seed: 5, n: 3, max_tokens: 24 };
  const whole = await client.chat.completions.create(options);
  const streamed = await client.chat.completions.stream(options).finalChatCompletion();
  const texts = (answer) => answer.choices.map((choice) => choice.message.content);
  assert.deepEqual(texts(streamed), texts(whole));
  assert.equal(new Set(texts(whole)).size, 3);
});

test('stop strings, log probabilities and a bias', async () => {
  const stopped = await client.chat.completions.create({ ...count, stop: ', 5' });
  assert.equal(stopped.choices[0].message.content, '1, 2, 3, 4');
  const told = await client.chat.completions.create({ ...count, logprobs: true, top_logprobs: 2 });
  const tokens = told.choices[0].logprobs.content;
  assert.equal(tokens.map(({ token }) => token).join(''), counted);
  assert.ok(tokens.every(({ top_logprobs }) => top_logprobs.length === 2));
  const { tokens: ids } = await client.post('/tokenize', { body: { model, prompt: 'river' } });
  const forced = { ...count, max_tokens: 2, logit_bias: { [ids[0]]: 100 } };
  assert.equal((await client.chat.completions.create(forced)).choices[0].message.content, 'riverriver');
});

test('a schema is kept to', async () => {
  const schema = {
    type: 'object',
    properties: { name: { type: 'string', maxLength: 20 }, age: { type: 'integer' } },
    required: ['name', 'age'],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.create({
    model,
    messages: user('Return JSON with name and age. Anna is 30 years old.'),
    temperature: 0,
    response_format: { type: 'json_schema', json_schema: { name: 'person', strict: true, schema } },
  });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), { name: 'Anna', age: 30 });
});

test('extensions stand beside the other parameters', async () => {
  const options = { model, messages: user('Hello!'), session_id: 'node', deadline_ms: 30_000 };
  const answer = await client.chat.completions.create({ ...options, regex: '[0-9]{3}' });
  assert.match(answer.choices[0].message.content, /^[0-9]{3}$/);
  const chosen = await client.chat.completions.create({ ...options, choice: ['yes', 'no'] });
  assert.ok(['yes', 'no'].includes(chosen.choices[0].message.content));
});

for (const tool_choice of ['auto', 'required', { type: 'function', function: { name: 'get_weather' } }]) {
  test(`a streamed call, tool_choice ${tool_choice.type ?? tool_choice}`, async () => {
    const tools = [{ type: 'function', function: { ...getWeather, strict: true } }];
    const stream = client.chat.completions.stream({ ...asked, tools, tool_choice });
    const [choice] = (await stream.finalChatCompletion()).choices;
    assert.equal(choice.finish_reason, 'tool_calls');
    const [call, ...others] = choice.message.tool_calls;
    assert.deepEqual(others, []);
    assert.ok(call.id);
    assert.equal(call.function.name, 'get_weather');
    assert.deepEqual(JSON.parse(call.function.arguments), { city: 'Paris' });
  });
}

for (const stream of [false, true]) {
  test(`the loop of the SDK calls a function and gets the answer, stream: ${stream}`, async () => {
    const cities = [];
    const run = ({ city }) => {
      cities.push(city);
      return '{"temperature": 21, "sky": "sunny"}'; // spaced as the small model has learned it
    };
    const tools = [{ type: 'function', function: { ...getWeather, function: run, parse: JSON.parse } }];
    const runner = client.chat.completions.runTools({ ...asked, tools, stream });
    assert.equal(await runner.finalContent(), 'It is 21 degrees and sunny in Paris.');
    assert.deepEqual(cities, ['Paris']);
  });
}

test('a text goes on', async () => {
  const options = { model, prompt: 'The river', max_tokens: 8, temperature: 0 };
  const plain = await client.completions.create(options);
  const chunks = await collect(await client.completions.create({ ...options, echo: true, stream: true }));
  const streamed = chunks.map((chunk) => chunk.choices[0]?.text ?? '').join('');
  assert.equal(streamed, `The river${plain.choices[0].text}`);
});

test('a stream can be left', async () => {
  const options = { ...count, ignore_eos: true, stream: true };
  const stream = await client.chat.completions.create(options);
  let chunks = 0;
  for await (const _ of stream) {
    chunks += 1;
    if (chunks === 3) stream.controller.abort();
  }
  assert.ok(chunks >= 3);
});

test('models are listed', async () => {
  const ids = [];
  for await (const listed of client.models.list()) ids.push(listed.id);
  assert.ok(ids.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test('refusals are exceptions of the SDK', async () => {
  await assert.rejects(client.chat.completions.create({ ...count, n: 99 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, 'n');
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...count, model: 'none' }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, 'model_not_found');
    return true;
  });
  const stranger = client.withOptions({ apiKey: 'sk-sluice-wrong' });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
});

test('embeddings', { skip: embeddingModel ? false : 'their model is not installed' }, async () => {
  const input = ['a river', 'a stream of water', 'a tax form'];
  const embed = async (options) =>
    (await client.embeddings.create({ model: embeddingModel, input, ...options })).data;
  const vectors = (await embed({})).map(({ embedding }) => embedding); // base64 on the wire
  const floats = (await embed({ encoding_format: 'float' })).map(({ embedding }) => embedding);
  const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
  assert.ok(dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2]));
  floats.forEach((vector, index) => assert.ok(dot(vector, vectors[index]) > 0.999));
});
