// What each client of Node does with a server: run by `make clients`.
//
//     node checks.mjs URL MODEL IMAGE     prints JSON: {client: {feature: "yes" or what went wrong}}

import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateObject, generateText, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model, path] = process.argv.slice(2);
const question = "What shape is at the top left?";
const image = readFileSync(path);
const data = image.toString("base64");
const dataUrl = `data:image/png;base64,${data}`;
const shape = z.object({ kind: z.enum(["star", "circle"]) });
const schema = {
  type: "object",
  properties: { kind: { type: "string", enum: ["star", "circle"] } },
  required: ["kind"],
  additionalProperties: false,
};
const right = (text) => assert(text.includes("star"), `it said ${text.slice(0, 60)}`);
const rightCall = (name, given) => {
  assert.equal(name, "look");
  shape.parse(given);
};

function openaiChecks() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const content = [
    { type: "image_url", image_url: { url: dataUrl } },
    { type: "text", text: question },
  ];
  const wish = { model, messages: [{ role: "user", content }], temperature: 0 };
  const input = [
    {
      role: "user",
      content: [
        { type: "input_image", image_url: dataUrl, detail: "auto" },
        { type: "input_text", text: question },
      ],
    },
  ];
  return {
    images: async () => right((await client.chat.completions.create(wish)).choices[0].message.content),
    stream: async () => right(await client.chat.completions.stream(wish).finalContent()),
    "zod parse": async () => {
      const response_format = zodResponseFormat(shape, "shape");
      shape.parse((await client.chat.completions.parse({ ...wish, response_format })).choices[0].message.parsed);
    },
    tools: async () => {
      const tools = [{ type: "function", function: { name: "look", parameters: schema } }];
      const asked = { ...wish, tools, tool_choice: "required", parallel_tool_calls: false };
      const told = await client.chat.completions.stream(asked).finalChatCompletion();
      const call = told.choices[0].message.tool_calls[0].function;
      rightCall(call.name, JSON.parse(call.arguments));
    },
    Responses: async () => right((await client.responses.create({ model, input, temperature: 0 })).output_text),
    "Responses streamed": async () =>
      right((await client.responses.stream({ model, input, temperature: 0 }).finalResponse()).output_text),
  };
}

function anthropicChecks() {
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const source = { type: "base64", media_type: "image/png", data };
  const content = [{ type: "image", source }, { type: "text", text: question }];
  const wish = { model, max_tokens: 60, messages: [{ role: "user", content }] };
  return {
    images: async () => right((await client.messages.create(wish)).content[0].text),
    stream: async () => right(await client.messages.stream(wish).finalText()),
    tools: async () => {
      const tools = [{ name: "look", input_schema: schema }];
      const tool_choice = { type: "any", disable_parallel_tool_use: true };
      const told = await client.messages.stream({ ...wish, tools, tool_choice }).finalMessage();
      rightCall(told.content[0].name, told.content[0].input);
    },
  };
}

function vercelChecks(create, picture = image) {
  const messages = [
    {
      role: "user",
      content: [
        { type: "image", image: picture, mediaType: "image/png" },
        { type: "text", text: question },
      ],
    },
  ];
  const wish = { model: create(model), messages, temperature: 0, maxRetries: 0 };
  const look = tool({ description: "Tell a shape.", inputSchema: shape });
  return {
    images: async () => right((await generateText(wish)).text),
    stream: async () => right(await streamText(wish).text),
    generateObject: async () => shape.parse((await generateObject({ ...wish, schema: shape })).object),
    tools: async () => {
      const told = await generateText({ ...wish, tools: { look }, toolChoice: "required" });
      rightCall(told.toolCalls[0].toolName, told.toolCalls[0].input);
    },
  };
}

const versions = JSON.parse(readFileSync(new URL("package.json", import.meta.url))).dependencies;
const compatible = createOpenAICompatible({
  name: "fleet",
  baseURL: `${url}/v1`,
  supportsStructuredOutputs: true,
});
const official = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const claude = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const ollama = createOllama({ baseURL: `${url}/api` });
// It sends the bytes of an image as an object, which Ollama refuses too; and Ollama has no tool_choice.
const { tools: _, ...ollamaChecks } = vercelChecks(ollama, data);
const clients = {
  openai: openaiChecks(),
  "@anthropic-ai/sdk": anthropicChecks(),
  "@ai-sdk/openai-compatible": vercelChecks(compatible),
  "@ai-sdk/openai": vercelChecks(official),
  "@ai-sdk/anthropic": vercelChecks(claude),
  "ollama-ai-provider-v2": ollamaChecks,
};
const told = {};
for (const [name, checks] of Object.entries(clients)) {
  const results = (told[`${name} ${versions[name]} (Node)`] = {});
  for (const [feature, check] of Object.entries(checks)) {
    try {
      await check();
      results[feature] = "yes";
    } catch (error) {
      results[feature] = `${error.name}: ${error.message}`.slice(0, 300);
    }
  }
}
console.log(JSON.stringify(told));
