"""Clients of a soak: every kind of request in turn, each answer checked for its shape."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.e2e.streams import stream_completion

MODELS = ("llama", "opt")
REFUSED = frozenset({429, 503})
"""Answers that name no fault where they say when to come again: the system is full, or a process of it restarts."""
MAX_FAULTS_KEPT = 50
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
    "required": ["yes", "of"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "choose", "parameters": SCHEMA}}

Ask = Callable[["Traffic", random.Random], Awaitable[str]]


class FaultError(Exception):
    """An answer that is not what was asked for."""


class Traffic:
    """Counts answers by kind and outcome."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url = url
        self.client = client
        self.counts: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []
        self.num_faults = 0

    def fault(self, what: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS_KEPT:
            self.faults.append(what)

    async def one(self, kind: str, random_: random.Random) -> None:
        try:
            outcome = await KINDS[kind](self, random_)
        except FaultError as error:
            outcome = "fault"
            self.fault(f"{kind}: {error}")
        except httpx.HTTPError as error:
            outcome = "fault"
            self.fault(f"{kind}: {error!r}")
        self.counts[kind, outcome] += 1

    async def forever(self, seed: int) -> None:
        """One client, which asks one thing after another."""
        random_ = random.Random(seed)
        kinds = list(KINDS)
        while True:
            random_.shuffle(kinds)
            for kind in kinds:
                await self.one(kind, random_)

    async def post(self, path: str, body: dict[str, Any], expected: int = 200) -> Any:
        """None: refused for now. Raises `FaultError` at any other status than expected."""
        answer = await self.client.post(f"{self.url}{path}", json=body)
        if answer.status_code in REFUSED and "retry-after" in answer.headers:
            return None
        if answer.status_code != expected:
            raise FaultError(f"{answer.status_code} {answer.text[:300]}")
        return answer.json()


def outcome_of(is_answered: bool) -> str:
    return "answered" if is_answered else "refused"


def completion_body(random_: random.Random) -> dict[str, Any]:
    prompt = [3 + random_.randrange(200) for _ in range(random_.choice((4, 30, 120)))]
    return {
        "model": random_.choice(MODELS),
        "prompt": prompt,
        "max_tokens": random_.choice((1, 8, 40)),
        "ignore_eos": True,
    }


def chat_body(random_: random.Random) -> dict[str, Any]:
    text = f"Say {random_.randrange(1000)}"
    return {"model": "llama", "messages": [{"role": "user", "content": text}], "max_tokens": 16}


async def completion(traffic: Traffic, random_: random.Random) -> str:
    body = completion_body(random_) | {"n": random_.choice((1, 1, 4)), "logprobs": random_.choice((None, 3))}
    answer = await traffic.post("/v1/completions", body)
    if answer and answer["usage"]["completion_tokens"] != body["n"] * body["max_tokens"]:
        raise FaultError(f"usage {answer['usage']} of {body['n']} x {body['max_tokens']}")
    return outcome_of(bool(answer))


async def chat(traffic: Traffic, random_: random.Random) -> str:
    return outcome_of(bool(await traffic.post("/v1/chat/completions", chat_body(random_))))


async def long_history(traffic: Traffic, random_: random.Random) -> str:
    """One that its text process makes plain."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"of": "a"})}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call] * 4}] * 40
    body = chat_body(random_)
    body["messages"] = [*messages, *body["messages"]]
    await traffic.post("/v1/chat/completions", body, expected=200)
    return "answered"


async def stream(traffic: Traffic, random_: random.Random) -> str:
    body = completion_body(random_)
    model, prompt = body["model"], body["prompt"]
    found = await stream_completion(traffic.client, traffic.url, model, prompt, 60, lambda _: None)
    if found.error is not None and found.error.get("code") in ("overloaded", "unavailable"):
        return "refused"
    if not found.ended_well or found.num_tokens != 60:
        raise FaultError(f"a stream of {found.num_tokens} tokens of 60, error {found.error}")
    return "answered"


async def cancelled(traffic: Traffic, random_: random.Random) -> str:
    """A client that leaves in the middle."""
    body = completion_body(random_) | {"max_tokens": 300, "stream": True}
    async with traffic.client.stream("POST", f"{traffic.url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return "refused"
        async for line in answer.aiter_lines():
            if line and random_.random() < 0.3:
                break
    return "left"


async def structured(traffic: Traffic, random_: random.Random) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = await traffic.post(
        "/v1/chat/completions", chat_body(random_) | {"response_format": form, "max_tokens": 60}
    )
    if answer and answer["choices"][0]["finish_reason"] == "stop":
        found = json.loads(answer["choices"][0]["message"]["content"])
        if set(found) != {"yes", "of"} or found["of"] not in ("a", "b"):
            raise FaultError(f"not of the schema: {found}")
    return outcome_of(bool(answer))


async def tools(traffic: Traffic, random_: random.Random) -> str:
    body = chat_body(random_) | {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
    }
    answer = await traffic.post("/v1/chat/completions", body)
    if answer and answer["choices"][0]["finish_reason"] == "tool_calls":
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        if call["function"]["name"] != "choose" or set(json.loads(call["function"]["arguments"])) != {"yes", "of"}:
            raise FaultError(f"not a call of the tool: {call}")
    return outcome_of(bool(answer))


async def response(traffic: Traffic, random_: random.Random) -> str:
    body = {"model": "llama", "input": f"Say {random_.randrange(1000)}", "max_output_tokens": 16, "store": False}
    return outcome_of(bool(await traffic.post("/v1/responses", body)))


async def flex(traffic: Traffic, random_: random.Random) -> str:
    body = completion_body(random_) | {"service_tier": "flex"}
    return outcome_of(bool(await traffic.post("/v1/completions", body)))


async def tokenized(traffic: Traffic, random_: random.Random) -> str:
    """Short, and long enough for a text process."""
    text = "word " * random_.choice((3, 2_000, 20_000))
    found = await traffic.post("/tokenize", {"model": "llama", "prompt": text})
    return outcome_of(bool(found))


async def wrong(traffic: Traffic, random_: random.Random) -> str:
    """What is refused with a reason: embeddings, which are not served, a model that is not there, a prompt of lists."""
    path, body, status = random_.choice(
        (
            ("/v1/embeddings", {"model": "llama", "input": "a"}, 400),
            ("/v1/completions", {"model": "nobody", "prompt": "a"}, 404),
            ("/v1/completions", {"model": "llama", "prompt": [[]] * 70_000}, 400),
            ("/v1/completions", {"model": "llama", "prompt": "a" * 100_000}, 400),
        )
    )
    await traffic.post(path, body, status)
    return "refused rightly"


async def listed(traffic: Traffic, random_: random.Random) -> str:
    path = random_.choice(("/v1/models", "/metrics", "/admin/requests", "/admin/console/state", "/admin/models"))
    answer = await traffic.client.get(f"{traffic.url}{path}")
    if answer.status_code != 200 and answer.status_code not in REFUSED:
        raise FaultError(f"{path}: {answer.status_code} {answer.text[:300]}")
    return outcome_of(answer.status_code == 200)


KINDS: dict[str, Ask] = {
    kind.__name__: kind
    for kind in (
        completion, chat, long_history, stream, cancelled, structured, tools, response, flex, tokenized, wrong, listed,
    )
}  # fmt: skip


async def run_clients(traffic: Traffic, num_clients: int, seconds: float) -> None:
    """Each ends what it has begun."""
    clients = [asyncio.create_task(traffic.forever(seed)) for seed in range(num_clients)]
    try:
        done, _ = await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for each in done:
            each.result()
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
