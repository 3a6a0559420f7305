// Two calls of a tool through Vercel's AI SDK, by one of its ways to a server:
// node --input-type=module - WAY URL < ai_sdk.mjs, where the packages are installed.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [way, url] = process.argv.slice(2);
const to = { baseURL: url, apiKey: "none", name: "local" };
const ways = {
  responses: () => createOpenAI(to)("tiny"),
  chat: () => createOpenAI(to).chat("tiny"),
  compatible: () => createOpenAICompatible(to)("tiny"),
  messages: () => createAnthropic(to)("tiny"),
};
const asked = [];
const multiply = tool({
  description: "Multiply two integers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => {
    asked.push([a, b]);
    return a * b;
  },
});
const found = streamText({
  model: ways[way](),
  prompt: "Multiply 47 by 85, then 12 by 34, by the tool.",
  tools: { multiply },
  stopWhen: stepCountIs(5),
  onError: ({ error }) => {
    throw error;
  },
});
const text = await found.text;
console.log(JSON.stringify({ asked, text }));
