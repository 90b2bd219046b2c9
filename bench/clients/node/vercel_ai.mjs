import { ASKED, assert, check, CITIES, load, MODEL, V1, wasCalled, weather } from "./checks.mjs";

const [{ createOpenAICompatible }, { createOpenAI }, { createAnthropic }, ai, { z }] = await load(
  "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic", "ai", "zod",
);
const { generateText, Output, streamText, tool, stepCountIs } = ai;
const models = [
  createOpenAICompatible({ name: "tideway", baseURL: V1, supportsStructuredOutputs: true })(MODEL),
  createOpenAI({ baseURL: V1, apiKey: "none" })(MODEL), // by /v1/responses
  createAnthropic({ baseURL: V1, apiKey: "none" })(MODEL),
];
const Answer = z.object({ city: z.enum(CITIES) });

async function forAll(runOne) {
  for (const model of models) await runOne(model);
}

await check("ai", {
  stream: () => forAll(async (model) => {
    let text = "";
    for await (const piece of streamText({ model, prompt: ASKED, maxOutputTokens: 20, maxRetries: 0 }).textStream) text += piece;
    assert(text);
  }),
  tool: () => forAll(async (model) => {
    const tools = { weather: tool({ description: "Tells the weather.", inputSchema: Answer, execute: weather }) };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "weather" } });
    const result = streamText({
      model, prompt: ASKED, tools, prepareStep, stopWhen: stepCountIs(2), maxOutputTokens: 60, maxRetries: 0,
    });
    await result.consumeStream({ onError: (error) => { throw error; } });
    assert((await result.steps).length === 2);
    wasCalled();
  }),
  structured: () => forAll(async (model) => {
    const { output } = await generateText({ model, prompt: ASKED, output: Output.object({ schema: Answer }), maxRetries: 0 });
    assert(CITIES.includes(output.city));
  }),
});
