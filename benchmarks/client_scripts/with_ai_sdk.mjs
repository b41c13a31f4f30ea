// The AI SDK: OpenAI's provider with its default (Responses) and with chat, and Anthropic's.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

const url = process.env.PHALANX_URL;
const name = process.env.PHALANX_MODEL;
const prompt = "What is the capital of France? Answer in one word.";
const apiKey = process.env.PHALANX_KEY;
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const compatible = createOpenAICompatible({ name: "phalanx", baseURL: `${url}/v1`, apiKey });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey });
const city = jsonSchema({
  type: "object",
  properties: { name: { type: "string" }, large: { type: "boolean" } },
  required: ["name", "large"],
  additionalProperties: false,
});
const weather = tool({ inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false }) });

function assert(held, what) {
  if (!held) throw new Error(what);
}

const checks = {
  "responses (default)": async () => assert((await generateText({ model: openai(name), prompt, temperature: 0 })).text.includes("Paris"), "no Paris"),
  "responses streamed": async () => {
    let text = "";
    for await (const part of streamText({ model: openai(name), prompt, temperature: 0 }).textStream) text += part;
    assert(text.includes("Paris"), text);
  },
  chat: async () => assert((await generateText({ model: openai.chat(name), prompt, temperature: 0 })).text.includes("Paris"), "no Paris"),
  "openai-compatible": async () => assert((await generateText({ model: compatible(name), prompt, temperature: 0 })).text.includes("Paris"), "no Paris"),
  "object output": async () => {
    const { output } = await generateText({ model: openai.chat(name), prompt, output: Output.object({ schema: city }), maxOutputTokens: 200 });
    assert(typeof output.large === "boolean", JSON.stringify(output));
  },
  "tools with object output": async () => {
    const answer = await generateText({ model: openai.chat(name), prompt, tools: { weather }, output: Output.object({ schema: city }), maxOutputTokens: 200 });
    assert(answer.toolCalls.length > 0 || typeof answer.output.large === "boolean", "neither call nor object");
  },
  tools: async () => {
    const { toolCalls } = await generateText({ model: openai(name), prompt, tools: { weather }, toolChoice: "required", maxOutputTokens: 200 });
    assert(toolCalls[0].toolName === "weather", "no call");
  },
  anthropic: async () => assert((await generateText({ model: anthropic(name), prompt, maxOutputTokens: 16 })).text.length > 0, "no text"),
};

for (const [check, run] of Object.entries(checks)) {
  let problem = null;
  try {
    await run();
  } catch (error) {
    console.error(error);
    problem = `${error.name}: ${error.message}`.slice(0, 200);
  }
  console.log(JSON.stringify({ check, problem }));
}
