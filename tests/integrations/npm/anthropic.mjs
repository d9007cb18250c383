// @anthropic-ai/sdk: messages, whole and streamed, with a tool, its tool runner, counting and an error.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none-such", maxRetries: 0 });
const hello = { model, max_tokens: 100, messages: [{ role: "user", content: "Good morning" }] };
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const question = { role: "user", content: "What is the weather in 'Paris'?" };
const weather = { model, max_tokens: 100, messages: [question], tools: [{ name: "get_weather", input_schema }] };

const whole = await client.messages.create(hello);
assert.equal(whole.content[0].text, "You said: Good morning");
assert.deepEqual([whole.stop_reason, whole.usage.output_tokens], ["end_turn", 5]);

const pieces = [];
const stream = client.messages.stream(hello).on("text", (piece) => pieces.push(piece));
assert.equal((await stream.finalMessage()).content[0].text, "You said: Good morning");
assert.equal(pieces.length, 5);

const called = await client.messages.create(weather);
assert.deepEqual([called.stop_reason, called.content[0].input], ["tool_use", { city: "Paris" }]);
const tool = {
  name: "get_weather",
  description: "Tell the weather.",
  input_schema,
  run: ({ city }) => `sunny in ${city}`,
  parse: (input) => input,
};
const last = await client.beta.messages.toolRunner({ ...weather, tools: [tool] }).runUntilDone();
assert.equal(last.content[0].text, "The tool said: sunny in Paris");

const counted = await client.messages.countTokens({ model, messages: hello.messages });
assert.ok(counted.input_tokens >= 2);

await assert.rejects(client.messages.create({ ...hello, messages: [] }), (error) => {
  assert.ok(error instanceof Anthropic.BadRequestError);
  assert.match(error.message, /messages is empty/);
  return true;
});
