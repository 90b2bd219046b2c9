"""Malformed messages on every subject of the catalogue, to the real services: each request is refused by a typed error,
nothing crashes, and the system serves afterwards."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from shared.bus.codec import ERROR_HEADER, UNREADABLE, decoder, encode, request_headers
from shared.bus.nats_bus import NatsBus
from shared.messages import catalogue
from shared.messages.channels import Endpoint, Topic
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.settings import BusSettings
from tests.e2e.stack import TEST_USER, Stack
from tests.shared.test_messages import CHANNELS, sample

WORTH_OBEYING = {
    "INSTANCE_DRAIN",
    "INSTANCE_UNLOAD_MODEL",
    "INSTANCE_LOAD_MODEL",
    "NODE_SCALE",
    "PLACEMENT_ADD_MODEL",
    "PLACEMENT_REMOVE_MODEL",
    "PLACEMENT_SCALE_MODEL",
    "PLACEMENT_SCALE_INSTANCES",
    "PLACEMENT_DRAIN_INSTANCE",
}
"""What can be read on these is done: only what cannot is sent."""
DEEP = b"\x91" * 100_000 + b"\xc0"
EXTREMES = [
    2**62,
    2**64 - 1,
    -(2**63),
    -1,
    0,
    2**31,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e308,
    "",
    "llama",
    "x" * 70_000,
    None,
    True,
    [],
    {},
    b"\xff" * 7,
    b"\xff" * 8,
]
PARALLEL = 16


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in range(len(tree)) if isinstance(tree, list) else tree if isinstance(tree, dict) else ():
        yield from paths(tree[key], (*path, key))


def mutated(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return tree


def malformed(kind: type[Any], rng: random.Random, num: int) -> Iterator[bytes]:
    """Noise, what is cut off or nested too deep, and valid messages with one value changed."""
    yield from (b"", DEEP, b"\xdd\xff\xff\xff\xff", b"\x81" * 2000 + b"\xc0")
    whole = encode(sample(kind))
    for _ in range(num // 4):
        yield rng.randbytes(rng.randrange(1, 60))
        yield whole[: rng.randrange(len(whole))]
    # Of a model that is there, so that more of it is looked at; each request is another one.
    tree = msgspec.msgpack.decode(whole.replace(b"\xa4text", b"\xa5llama"))
    if places := list(paths(tree)):
        for number in range(num // 2):
            if isinstance(tree, list) and isinstance(tree[0], str):
                tree[0] = f"fuzz-{num}-{number}"
            yield encode(mutated(tree, rng.choice(places), rng.choice(EXTREMES)))


def is_unreadable(kind: type[Any], body: bytes) -> bool:
    try:
        decoder(kind).decode(body)
    except UNREADABLE:
        return True
    return False


async def fuzz(stack: Stack, num: int) -> None:
    rng = random.Random(num)
    settings = BusSettings(nats_url=stack.nats.url, nats_user=TEST_USER, nats_password=TEST_USER)
    bus = await NatsBus.connect(settings, service="test", service_id="fuzz")
    ids = {"instance_id": stack.instances()[0]["instance_id"], "node_id": "worker-0", "gateway_id": "gateway-0"}
    failures: list[tuple[str, str, bytes]] = []

    async def ask(name: str, subject: str, body: bytes) -> None:
        fields, data = await bus._client.exchange(subject, request_headers(30.0, ""), body, 30.0)
        if ERROR_HEADER in fields:
            info = decoder(ErrorInfo).decode(data)
            if info.code in (ErrorCode.INTERNAL, ErrorCode.DEADLINE):
                failures.append((name, info.message, body[:80]))

    for name, channel in CHANNELS.items():
        subject = channel.subject.format(**ids)
        kind = channel.query if isinstance(channel, Endpoint) else channel.type
        bodies = [
            body
            for body in malformed(kind, rng, num)
            if name not in WORTH_OBEYING or is_unreadable(kind, body)
        ]  # fmt: skip
        for first in range(0, len(bodies), PARALLEL):
            some = bodies[first : first + PARALLEL]
            if isinstance(channel, Topic):
                for body in some:
                    bus._client.send(subject, "", b"", body)
                await bus.round_trip_s()
            else:
                await asyncio.gather(*(ask(name, subject, body) for body in some))
    await bus.close()
    assert not failures, failures[:5]


def check(stack: Stack, num: int) -> None:
    before = {instance["instance_id"]: instance["pid"] for instance in stack.instances()}
    logs = {name: len(stack.log(name, 10**6)) for name in stack.processes}
    asyncio.run(fuzz(stack, num))
    for model in stack.models:
        body = {"model": model, "prompt": "a b c", "max_tokens": 4, "temperature": 0}
        response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
    assert {instance["instance_id"]: instance["pid"] for instance in stack.instances()} == before
    assert all(process.poll() is None for process in stack.processes.values())
    for name, length in logs.items():
        new = stack.log(name, 10**6)[length:]
        assert "Traceback" not in new, new[new.index("Traceback") - 300 :][:3000]
    assert "cannot be read" in stack.log("scheduler-0", 10**6), "a refusal is a line in the log"


def test_malformed_messages_on_every_subject(stack: Stack) -> None:
    assert set(CHANNELS) >= WORTH_OBEYING and catalogue.PREFIX
    check(stack, 60)
