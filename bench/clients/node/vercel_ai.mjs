import { ASKED, assert, check, CITIES, load, MODEL, V1, wasCalled, weather } from "./checks.mjs";

const [{ createOpenAICompatible }, { generateText, Output, streamText, tool, stepCountIs }, { z }] = await load(
  "@ai-sdk/openai-compatible", "ai", "zod",
);
const provider = createOpenAICompatible({ name: "tideway", baseURL: V1, supportsStructuredOutputs: true });
const model = provider(MODEL);
const Answer = z.object({ city: z.enum(CITIES) });

await check("ai", {
  stream: async () => {
    let text = "";
    for await (const piece of streamText({ model, prompt: ASKED, maxOutputTokens: 20, maxRetries: 0 }).textStream) text += piece;
    assert(text);
  },
  tool: async () => {
    const tools = { weather: tool({ description: "Tells the weather.", inputSchema: Answer, execute: weather }) };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "weather" } });
    const result = streamText({
      model, prompt: ASKED, tools, prepareStep, stopWhen: stepCountIs(2), maxOutputTokens: 60, maxRetries: 0,
    });
    await result.consumeStream({ onError: (error) => { throw error; } });
    assert((await result.steps).length === 2);
    wasCalled();
  },
  structured: async () => {
    const { output } = await generateText({ model, prompt: ASKED, output: Output.object({ schema: Answer }), maxRetries: 0 });
    assert(CITIES.includes(output.city));
  },
});
