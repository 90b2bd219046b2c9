import { ASKED, assert, check, CITIES, load, MODEL, SCHEMA, V1, wasCalled, weather } from "./checks.mjs";

const [{ default: OpenAI }] = await load("openai");
const client = new OpenAI({ baseURL: V1, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: ASKED }];

await check("openai", {
  stream: async () => {
    let text = "";
    const stream = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 20, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert(text);
  },
  tool: async () => {
    const tool = { name: "weather", parameters: SCHEMA, parse: JSON.parse, function: weather };
    const runner = client.chat.completions.runTools({
      model: MODEL, messages, max_tokens: 60, stream: true, tools: [{ type: "function", function: tool }],
      tool_choice: { type: "function", function: { name: "weather" } },
    });
    await runner.done();
    wasCalled();
  },
  structured: async () => {
    const schema = { type: "json_schema", json_schema: { name: "a", schema: SCHEMA, strict: true } };
    const answer = await client.chat.completions.parse({ model: MODEL, messages, response_format: schema });
    assert(CITIES.includes(JSON.parse(answer.choices[0].message.content).city));
  },
});
