// Calls to the gateway that serves this page. Keys stay in this tab.

export class Failure extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const keys = {
  get admin() { return sessionStorage.getItem("admin") ?? ""; },
  get api() { return sessionStorage.getItem("api") ?? ""; },
  set(admin, api) { sessionStorage.setItem("admin", admin); sessionStorage.setItem("api", api); },
};

const TIMEOUT_MS = 15000;

/** What an endpoint below /admin answers. Throws `Failure`. */
export async function admin(method, path, body) {
  const headers = keys.admin ? {authorization: `Bearer ${keys.admin}`} : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(`/admin${path}`, {
      method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal: AbortSignal.timeout(TIMEOUT_MS),
    });
  } catch (error) {
    throw new Failure(0, `The gateway does not answer (${error.message}).`);
  }
  return told(answer);
}

async function told(answer) {
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Failure(answer.status, said.error?.message ?? `${answer.status} ${answer.statusText}`);
  return said;
}

/** Streams a chat answer: calls `onText` with each piece; returns the answer's id and usage. `signal` ends it. */
export async function chat(model, messages, maxTokens, onText, signal) {
  const headers = {"content-type": "application/json", ...(keys.api ? {authorization: `Bearer ${keys.api}`} : {})};
  const body = {model, messages, max_tokens: maxTokens, stream: true, stream_options: {include_usage: true}};
  const answer = await fetch("/v1/chat/completions", {method: "POST", headers, body: JSON.stringify(body), signal});
  if (!answer.ok) await told(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "", id = "", usage = null;
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return {id, usage};
    const lines = (left + value).split("\n");
    left = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Failure(500, chunk.error.message);
      id = chunk.id; usage = chunk.usage ?? usage;
      const text = chunk.choices?.[0]?.delta?.content;
      if (text) onText(text);
    }
  }
}
