// ai: text, tools and objects by each of its providers that can be pointed at a server.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const given = { baseURL: `${url}/v1`, apiKey: "none-such" };
const models = {
  chat: createOpenAI(given).chat(name),
  responses: createOpenAI(given).responses(name),
  messages: createAnthropic(given)(name),
  compatible: createOpenAICompatible({ ...given, name: "llm-spec", supportsStructuredOutputs: true })(name),
};
const get_weather = tool({
  description: "Tell the weather.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});

for (const [api, model] of Object.entries(models)) {
  const whole = await generateText({ model, prompt: "Good morning", maxRetries: 0 });
  assert.equal(whole.text, "You said: Good morning", api);

  const pieces = [];
  for await (const piece of streamText({ model, prompt: "Good morning", maxRetries: 0 }).textStream) pieces.push(piece);
  assert.equal(pieces.join(""), "You said: Good morning", api);

  const steps = { stopWhen: stepCountIs(3), tools: { get_weather }, maxRetries: 0 };
  const prompt = "What is the weather in 'Paris'?";
  assert.match((await generateText({ model, prompt, ...steps })).text, /The tool said: .*sunny in Paris/, api);
  const streamed = streamText({ model, prompt, ...steps });
  await streamed.consumeStream();
  assert.match(await streamed.text, /The tool said: .*sunny in Paris/, api);

  const output = Output.object({ schema: z.object({ total: z.number().int() }) });
  const sum = await generateText({ model, prompt: "The sum is 42", output, maxRetries: 0 });
  assert.deepEqual(sum.output, { total: 42 }, api);
}
