import { ASKED, assert, check, CITIES, load, MODEL, V1, wasCalled, weather } from "./checks.mjs";

const [agents, { default: OpenAI }, { z }] = await load("@openai/agents", "openai", "zod");
const { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } = agents;
setTracingDisabled(true);
const client = new OpenAI({ baseURL: V1, apiKey: "none", maxRetries: 0 });
const models = [new OpenAIChatCompletionsModel(client, MODEL), new OpenAIResponsesModel(client, MODEL)];
const Answer = z.object({ city: z.enum(CITIES) });

async function forBoth(runOne) {
  for (const model of models) await runOne(model);
}

await check("@openai/agents", {
  stream: () => forBoth(async (model) => {
    // Without a limit: the SDK takes a response that is cut off for a failure.
    const agent = new Agent({ name: "a", model, modelSettings: { temperature: 0 } });
    const result = await run(agent, ASKED, { stream: true });
    let text = "";
    for await (const piece of result.toTextStream()) text += piece;
    await result.completed;
    assert(text && result.finalOutput === text);
  }),
  tool: () => forBoth(async (model) => {
    const own = tool({ name: "weather", description: "Tells the weather.", parameters: Answer, execute: weather });
    await run(new Agent({ name: "a", model, tools: [own], modelSettings: { toolChoice: "weather", temperature: 0 } }), ASKED);
    wasCalled();
  }),
  structured: () => forBoth(async (model) => {
    const result = await run(new Agent({ name: "a", model, outputType: Answer }), ASKED);
    assert(CITIES.includes(result.finalOutput.city));
  }),
});
