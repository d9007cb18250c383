// openai: chat completions and responses, whole and streamed, with a tool, a schema and an error.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none-such", maxRetries: 0 });
const hello = { model, messages: [{ role: "user", content: "Good morning" }] };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const question = { role: "user", content: "What is the weather in 'Paris'?" };

const whole = await client.chat.completions.create(hello);
assert.equal(whole.choices[0].message.content, "You said: Good morning");
assert.equal(whole.usage.completion_tokens, 5);

const pieces = [];
const stream = client.chat.completions.stream({ ...hello, stream_options: { include_usage: true } });
stream.on("content", (piece) => pieces.push(piece));
assert.equal((await stream.finalChatCompletion()).choices[0].message.content, "You said: Good morning");
assert.equal(pieces.length, 5);
assert.equal((await stream.totalUsage()).completion_tokens, 5);

const called = (await client.chat.completions.create({ model, messages: [question], tools })).choices[0].message;
assert.deepEqual(JSON.parse(called.tool_calls[0].function.arguments), { city: "Paris" });
const result = { role: "tool", tool_call_id: called.tool_calls[0].id, content: "sunny" };
const after = await client.chat.completions.create({ model, messages: [question, called, result], tools });
assert.equal(after.choices[0].message.content, "The tool said: sunny");

const runner = client.chat.completions.runTools({
  model,
  messages: [question],
  tools: [{ type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: () => "sunny" } }],
});
assert.equal(await runner.finalContent(), "The tool said: sunny");

const response = await client.responses.create({ model, input: "Good morning" });
assert.equal(response.output_text, "You said: Good morning");
const deltas = [];
for await (const event of await client.responses.create({ model, input: "Good morning", stream: true }))
  if (event.type === "response.output_text.delta") deltas.push(event.delta);
assert.equal(deltas.join(""), "You said: Good morning");

await assert.rejects(client.chat.completions.create({ model, messages: [] }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.match(error.message, /messages is empty/);
  return true;
});
