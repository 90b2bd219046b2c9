import { ASKED, assert, check, CITIES, load, MODEL, SCHEMA, URL_, wasCalled, weather } from "./checks.mjs";

const [{ default: Anthropic }] = await load("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: URL_, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: ASKED }];
const tools = [{ name: "weather", input_schema: SCHEMA }];

await check("@anthropic-ai/sdk", {
  stream: async () => {
    const message = await client.messages.stream({ model: MODEL, messages, max_tokens: 20 }).finalMessage();
    assert(message.content[0].text);
  },
  tool: async () => {
    const chosen = { type: "tool", name: "weather" };
    const stream = client.messages.stream({ model: MODEL, messages, max_tokens: 100, tools, tool_choice: chosen });
    const { content } = await stream.finalMessage();
    const result = { type: "tool_result", tool_use_id: content[0].id, content: weather(content[0].input) };
    wasCalled();
    const history = [...messages, { role: "assistant", content }, { role: "user", content: [result] }];
    await client.messages.create({ model: MODEL, messages: history, max_tokens: 8, tools });
  },
  structured: async () => {
    const output_config = { format: { type: "json_schema", schema: SCHEMA } };
    const answer = await client.messages.create({ model: MODEL, messages, max_tokens: 100, output_config });
    assert(CITIES.includes(JSON.parse(answer.content[0].text).city));
  },
});
