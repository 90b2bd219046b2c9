import { ASKED, assert, check, CITIES, load, MODEL, V1, wasCalled, weather } from "./checks.mjs";

const [{ ChatOpenAI }, { tool }, { z }] = await load("@langchain/openai", "@langchain/core/tools", "zod");
const make = (more) => new ChatOpenAI({ model: MODEL, apiKey: "none", configuration: { baseURL: V1 }, maxRetries: 0, ...more });
const Answer = z.object({ city: z.enum(CITIES) });

await check("@langchain/openai", {
  stream: async () => {
    let text = "";
    for await (const piece of await make({ maxTokens: 20 }).stream(ASKED)) text += piece.content;
    assert(text);
  },
  tool: async () => {
    const own = tool(weather, { name: "weather", description: "Tells the weather.", schema: Answer });
    let whole;
    for await (const piece of await make().bindTools([own], { tool_choice: "any", parallel_tool_calls: false }).stream(ASKED)) {
      whole = whole ? whole.concat(piece) : piece;
    }
    const results = [];
    for (const call of whole.tool_calls) results.push(await own.invoke(call));
    wasCalled();
    await make({ maxTokens: 8 }).bindTools([own]).invoke([["user", ASKED], whole, ...results]);
  },
  structured: async () => {
    for (const method of ["jsonSchema", "functionCalling"]) {
      const answer = await make().withStructuredOutput(Answer, { method, name: "answer" }).invoke(ASKED);
      assert(CITIES.includes(answer.city));
    }
  },
});
