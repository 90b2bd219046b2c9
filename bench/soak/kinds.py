"""Every kind of request of a soak, each of which checks its answer."""

from __future__ import annotations

import json
import random
from typing import Any

from bench.soak.kept import background, idempotent, resumed, stored
from bench.soak.traffic import Ask, FaultError, RefusedError, Traffic
from tests.e2e.streams import stream_completion
from tests.worker.pooling_checkpoints import WORDS

MODELS = ("llama", "opt")
EMBEDDING_MODEL, RERANKING_MODEL = "embed", "rank"
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
    "required": ["yes", "of"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "choose", "parameters": SCHEMA}}
STREAM_TOKENS = 60


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


# ------------------------------------------------------------------------------------------------------- generation


async def completion(traffic: Traffic, random_: random.Random) -> str:
    body = completion_body(random_) | {"n": random_.choice((1, 1, 4)), "logprobs": random_.choice((None, 3))}
    answer = await traffic.post("/v1/completions", body, random_)
    if answer["usage"]["completion_tokens"] != body["n"] * body["max_tokens"]:
        raise FaultError(f"usage {answer['usage']} of {body['n']} x {body['max_tokens']}")
    return "answered"


async def chat(traffic: Traffic, random_: random.Random) -> str:
    await traffic.post("/v1/chat/completions", chat_body(random_), random_)
    return "answered"


async def long_history(traffic: Traffic, random_: random.Random) -> str:
    """One that its text process makes plain."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"of": "a"})}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call] * 4}] * 40
    body = chat_body(random_)
    body["messages"] = [*messages, *body["messages"]]
    await traffic.post("/v1/chat/completions", body, random_)
    return "answered"


async def stream(traffic: Traffic, random_: random.Random) -> str:
    body, url = completion_body(random_), random_.choice(traffic.urls)
    with traffic.judged(url) as begun_s:
        found = await stream_completion(
            traffic.client, url, body["model"], body["prompt"], STREAM_TOKENS, lambda _: None
        )
    if found.error is not None and traffic.is_excused(begun_s, reason := str(found.error.get("message"))):
        raise RefusedError(reason)
    if not found.ended_well or found.num_tokens != STREAM_TOKENS:
        raise FaultError(f"a stream of {found.num_tokens} tokens of {STREAM_TOKENS}, error {found.error}")
    return "answered"


async def cancelled(traffic: Traffic, random_: random.Random) -> str:
    """A client that leaves in the middle."""
    body, url = completion_body(random_) | {"max_tokens": 300, "stream": True}, random_.choice(traffic.urls)
    with traffic.judged(url) as begun_s:
        async with traffic.client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                traffic.check(answer, begun_s)
            async for line in answer.aiter_lines():
                if line and random_.random() < 0.3:
                    break
    return "left"


async def structured(traffic: Traffic, random_: random.Random) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    body = chat_body(random_) | {"response_format": form, "max_tokens": 60}
    (choice,) = (await traffic.post("/v1/chat/completions", body, random_))["choices"]
    if choice["finish_reason"] == "stop":
        found = json.loads(choice["message"]["content"])
        if set(found) != {"yes", "of"} or found["of"] not in ("a", "b"):
            raise FaultError(f"not of the schema: {found}")
    return "answered"


async def tools(traffic: Traffic, random_: random.Random) -> str:
    body = chat_body(random_) | {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
    }
    (choice,) = (await traffic.post("/v1/chat/completions", body, random_))["choices"]
    if choice["finish_reason"] == "tool_calls":
        (call,) = choice["message"]["tool_calls"]
        if call["function"]["name"] != "choose" or set(json.loads(call["function"]["arguments"])) != {"yes", "of"}:
            raise FaultError(f"not a call of the tool: {call}")
    return "answered"


async def message(traffic: Traffic, random_: random.Random) -> str:
    """Anthropic's, streamed or not."""
    body = chat_body(random_) | {"stream": random_.random() < 0.5}
    answer = await traffic.ask("POST", "/v1/messages", random_, json=body)
    if not body["stream"]:
        if (found := answer.json())["role"] != "assistant" or found["stop_reason"] not in ("max_tokens", "end_turn"):
            raise FaultError(f"not a message that ended: {found}")
        return "answered"
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    if kinds[0] != "message_start" or kinds[-1] != "message_stop":
        raise FaultError(f"events {kinds[0]} to {events[-1]}")
    return "answered"


async def response(traffic: Traffic, random_: random.Random) -> str:
    body = {"model": "llama", "input": f"Say {random_.randrange(1000)}", "max_output_tokens": 16, "store": False}
    await traffic.post("/v1/responses", body, random_)
    return "answered"


async def flex(traffic: Traffic, random_: random.Random) -> str:
    await traffic.post("/v1/completions", completion_body(random_) | {"service_tier": "flex"}, random_)
    return "answered"


# ---------------------------------------------------------------------------------------------- vectors and scores


def _text(random_: random.Random) -> str:
    return " ".join(random_.choices(WORDS, k=random_.choice((1, 8, 40))))


async def embedding(traffic: Traffic, random_: random.Random) -> str:
    texts = [_text(random_) for _ in range(random_.choice((1, 4)))]
    answer = await traffic.post("/v1/embeddings", {"model": EMBEDDING_MODEL, "input": texts}, random_)
    lengths = [sum(value * value for value in one["embedding"]) for one in answer["data"]]
    if len(lengths) != len(texts) or any(abs(length - 1.0) > 1e-3 for length in lengths):
        raise FaultError(f"vectors of the lengths {lengths} for {len(texts)} texts")
    return "answered"


async def reranked(traffic: Traffic, random_: random.Random) -> str:
    documents = [_text(random_) for _ in range(5)]
    body = {"model": RERANKING_MODEL, "query": "w9 w8", "documents": documents}
    found = [one["relevance_score"] for one in (await traffic.post("/v1/rerank", body, random_))["results"]]
    if len(found) != len(documents) or found != sorted(found, reverse=True):
        raise FaultError(f"not a ranking of {len(documents)} documents: {found}")
    return "answered"


async def scored(traffic: Traffic, random_: random.Random) -> str:
    texts = [_text(random_) for _ in range(3)]
    body = {"model": random_.choice((EMBEDDING_MODEL, RERANKING_MODEL)), "text_1": "w9 w8", "text_2": texts}
    if len(found := (await traffic.post("/v1/score", body, random_))["data"]) != len(texts):
        raise FaultError(f"{len(found)} scores of {len(texts)}")
    return "answered"


# ----------------------------------------------------------------------------------------------------------- others


async def tokenized(traffic: Traffic, random_: random.Random) -> str:
    """Short, and long enough for a text process."""
    text = "word " * random_.choice((3, 2_000, 20_000))
    await traffic.post("/tokenize", {"model": "llama", "prompt": text}, random_)
    return "answered"


async def wrong(traffic: Traffic, random_: random.Random) -> str:
    """What is refused with a reason: vectors of a model without, a model that is not there, a prompt of lists, one that is
    too long, a key that nobody has."""
    path, body, status = random_.choice(
        (
            ("/v1/embeddings", {"model": "llama", "input": "a"}, 400),
            ("/v1/completions", {"model": "nobody", "prompt": "a"}, 404),
            ("/v1/completions", {"model": "llama", "prompt": [[]] * 70_000}, 400),
            ("/v1/completions", {"model": "llama", "prompt": "a" * 100_000}, 400),
            ("/v1/completions", {"model": "llama", "prompt": "a"}, 401),
        )
    )
    headers = {"authorization": "Bearer nobody"} if status == 401 else {}
    await traffic.post(path, body, random_, status, headers=headers)
    return "refused rightly"


async def listed(traffic: Traffic, random_: random.Random) -> str:
    path = random_.choice(
        ("/v1/models", "/metrics", "/admin/requests", "/admin/console/state", "/admin/models", "/admin/tenants")
    )
    await traffic.ask("GET", path, random_)
    return "answered"


KINDS: dict[str, Ask] = {
    kind.__name__: kind
    for kind in (
        completion, chat, long_history, stream, cancelled, structured, tools, message, response, flex, stored, background,
        idempotent, resumed, embedding, reranked, scored, tokenized, wrong, listed,
    )
}  # fmt: skip
