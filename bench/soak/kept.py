"""Requests of a soak whose answers are kept at NATS: stored and background responses, answers under a key, streams that go
on at another gateway."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any
from uuid import UUID

import httpx

from bench.soak.traffic import FaultError, RefusedError, Traffic
from tests.e2e.streams import Stream, stream_completion

WITHIN_S = 120.0
AGAIN_S = 0.3
RESUMED_TOKENS = 80
HANG_UPS = 2
"""Times that a client leaves its stream by itself."""
RETRIED = frozenset({"unavailable", "overloaded", "handed_over"})
"""Codes of errors after which a client comes again."""


def _key(random_: random.Random) -> str:
    return str(UUID(int=random_.getrandbits(128)))


async def patiently(traffic: Traffic, method: str, path: str, random_: random.Random, **more: Any) -> Any:
    """The answer to a request that is made again, at any gateway, while it is refused for a fault."""
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        try:
            return (await traffic.ask(method, path, random_, **more)).json()
        except RefusedError as error:
            if time.monotonic() > deadline_s:
                raise FaultError(f"{method} {path} is refused for {WITHIN_S:g} s: {error}") from None
            await asyncio.sleep(AGAIN_S)


def _response(random_: random.Random, **more: Any) -> dict[str, Any]:
    return {"model": "llama", "input": f"Say {random_.randrange(1000)}", "max_output_tokens": 24, **more}


async def stored(traffic: Traffic, random_: random.Random) -> str:
    """One that is read, continued and deleted, each at any gateway."""
    first = await traffic.post("/v1/responses", _response(random_), random_)
    if not first["store"]:
        raise RefusedError("the response could not be stored")
    path = f"/v1/responses/{first['id']}"
    if (read := await patiently(traffic, "GET", path, random_))["output"] != first["output"]:
        raise FaultError(f"answered {first['output']}, stored {read['output']}")
    more = _response(random_, previous_response_id=first["id"], store=False)
    await patiently(traffic, "POST", "/v1/responses", random_, json=more)
    await _delete(traffic, path, random_)
    return "deleted"


async def background(traffic: Traffic, random_: random.Random) -> str:
    """One that is polled to its end, or cancelled, and deleted."""
    is_cancelled = random_.random() < 0.5
    tokens = 300 if is_cancelled else 24
    body = _response(random_, background=True) | {"max_output_tokens": tokens}
    begun = await traffic.post("/v1/responses", body, random_)
    path, deadline_s = f"/v1/responses/{begun['id']}", time.monotonic() + WITHIN_S
    if is_cancelled:
        await patiently(traffic, "POST", f"{path}/cancel", random_)
    while (found := await patiently(traffic, "GET", path, random_))["status"] in ("queued", "in_progress"):
        if time.monotonic() > deadline_s:
            raise FaultError(f"is {found['status']} after {WITHIN_S:g} s")
        await asyncio.sleep(AGAIN_S)
    if found["status"] not in ("completed", "incomplete") + (("cancelled",) if is_cancelled else ()):
        raise FaultError(f"{found['status']}: {found['error']}")
    await _delete(traffic, path, random_)
    return str(found["status"])


async def _delete(traffic: Traffic, path: str, random_: random.Random) -> None:
    # 404: it was deleted by a request whose answer was lost.
    await patiently(traffic, "DELETE", path, random_, expected=(200, 404))
    await patiently(traffic, "GET", path, random_, expected=(404,))


async def idempotent(traffic: Traffic, random_: random.Random) -> str:
    """The same chat twice at once and once more, under one key: one answer."""
    body = {"model": "llama", "messages": [{"role": "user", "content": f"Say {random_.random()}"}], "max_tokens": 16}
    headers = {"Idempotency-Key": _key(random_)}

    async def ask() -> Any:
        found = await patiently(traffic, "POST", "/v1/chat/completions", random_, json=body, headers=headers)
        return found["id"], found["choices"][0]["message"]["content"]

    found = {*await asyncio.gather(ask(), ask()), await ask()}
    if len(found) != 1:
        raise FaultError(f"answers under one key: {found}")
    await patiently(
        traffic,
        "POST",
        "/v1/chat/completions",
        random_,
        json=body | {"max_tokens": 3},
        headers=headers,
        expected=(422,),
    )
    return "answered once"


class _HangUp(Exception):
    """The client leaves."""


async def resumed(traffic: Traffic, random_: random.Random) -> str:
    """A stream that its client leaves, and goes on with at the next gateway, by `Last-Event-ID`. Its text is that of the
    same request in one piece."""
    prompt = [3 + random_.randrange(200) for _ in range(30)]
    key, stream, begun_s, may_have_failed = _key(random_), Stream(prompt), time.monotonic(), False
    leave_after = [random_.randrange(1, RESUMED_TOKENS) for _ in range(HANG_UPS)]
    first = random_.randrange(len(traffic.urls))

    def on_tokens(_: int) -> None:
        if leave_after and stream.num_tokens >= leave_after[0]:
            leave_after.pop(0)
            raise _HangUp

    for number in itertools.count(first):
        url, stream.error = traffic.urls[number % len(traffic.urls)], None
        headers = {"Idempotency-Key": key, "Last-Event-ID": stream.event_id}
        try:
            await stream_completion(
                traffic.client, url, "llama", prompt, RESUMED_TOKENS, on_tokens, headers=headers, stream=stream
            )
        except _HangUp:
            continue
        except httpx.TransportError as error:
            if not traffic.is_cut(begun_s, url):
                raise FaultError(f"{error!r} at {url}, of {stream.num_tokens} tokens") from None
            stream.error = {"code": "unavailable", "message": "the gateway was killed"}
        if may_have_failed and stream.error is not None and stream.error.get("code") == "stream_not_found":
            stream, may_have_failed = Stream(prompt), False  # nothing is left of what has failed
            continue
        may_have_failed = may_have_failed or stream.error is not None
        is_over = stream.done if stream.error is None else stream.error.get("code") not in RETRIED
        if is_over or time.monotonic() - begun_s > WITHIN_S:
            break
        await asyncio.sleep(AGAIN_S)
    # Of a stream that was read over several connections, each event comes once.
    if not stream.ended_well or stream.num_tokens != RESUMED_TOKENS:
        raise FaultError(
            f"{stream.num_tokens} tokens of {RESUMED_TOKENS}, ends {stream.finish_reasons}, error {stream.error}"
        )
    if stream.text != (text := await _in_one_piece(traffic, prompt, random_)):
        raise FaultError(f"a stream over several connections says {stream.text!r}, the same in one piece {text!r}")
    return "answered"


async def _in_one_piece(traffic: Traffic, prompt: list[int], random_: random.Random) -> str:
    """The text of the same greedy output, generated anew."""
    body = {"model": "llama", "prompt": prompt, "max_tokens": RESUMED_TOKENS, "temperature": 0, "ignore_eos": True}
    found = await patiently(traffic, "POST", "/v1/completions", random_, json=body)
    return str(found["choices"][0]["text"])
