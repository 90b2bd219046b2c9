"""kill -9 of a worker instance, the scheduler, NATS or a gateway while streams run: every stream ends with exactly the
tokens of the undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.stack import Stack
from tests.e2e.streams import Stream, run_streams
from tests.stalls import whatever_the_machine_does

NUM_STREAMS = 50
NUM_RESUMED = 16
MAX_TOKENS = 120
AFTER_TOKENS = 300
STEP_S = 0.012
"""An instance with streams of both models makes one token of each in twice that: they last for seconds."""


@pytest.fixture(scope="module")
def system(checkpoints: dict[str, str]) -> Iterator[Stack]:
    with Stack(checkpoints, num_schedulers=2, step_s=STEP_S) as system:
        system.wait_ready()
        yield system


@pytest.fixture(scope="module")
def undisturbed(system: Stack) -> list[Stream]:
    streams = asyncio.run(run_streams(system.url, ["llama", "opt"], NUM_STREAMS, MAX_TOKENS))
    assert all(stream.ended_well for stream in streams), [s.error for s in streams if s.error]
    assert len({stream.text for stream in streams}) > NUM_STREAMS / 2, "the streams should differ"
    return streams


async def disturbed(system: Stack, disturb, **fields) -> list[Stream]:
    return await run_streams(
        system.url,
        ["llama", "opt"],
        NUM_STREAMS,
        MAX_TOKENS,
        after_tokens=AFTER_TOKENS,
        disturb=disturb,
        timeout_s=90,
        **fields,
    )


def assert_same(streams: list[Stream], expected: list[Stream]) -> None:
    assert [s.error for s in streams if s.error] == []
    for stream, other in zip(streams, expected, strict=True):
        with whatever_the_machine_does():
            assert stream.text == other.text
        assert stream.done and stream.finish_reasons == ["length"]
        assert stream.usage["completion_tokens"] == MAX_TOKENS
        assert stream.usage["prompt_tokens"] == len(stream.prompt)


async def test_an_instance_dies(system, undisturbed):
    killed: list[dict] = []
    streams = await disturbed(system, lambda: killed.append(system.kill_instance(0)))
    assert_same(streams, undisturbed)
    losses = [(one, event) for one in rescued_timelines(system) for event in one["events"] if event["kind"] == "lost"]
    # A request whose instance had not answered yet was nobody's.
    assert {event["place"] for _, event in losses} - {""} == {killed[0]["instance_id"]}
    shown, lost = next((one, event) for one, event in losses if event["place"])
    assert any(phase["phase"] == "rescue" and phase["end_s"] > lost["after_s"] for phase in shown["phases"])
    pids = {killed[0]["pid"]}
    system.wait_until(lambda: not pids & {one["pid"] for one in system.instances()}, "the dead instance is forgotten")
    system.wait_ready()


def rescued_timelines(system: Stack) -> list[dict]:
    """Timelines of the requests that lost their instance."""
    with httpx.Client(base_url=system.url, timeout=5) as client:
        listed = client.get("/admin/requests?limit=200").json()["requests"]
        ids = [one["id"] for one in listed if one["num_losses"]]
        return [client.get(f"/admin/requests/{request_id}").json()["requests"][0] for request_id in ids]


async def test_an_instance_stops_answering(system, undisturbed):
    """SIGSTOP: no process exit tells anybody; the missing heartbeat does. The instance that wakes up later is stale."""
    pid = sorted(system.instances(), key=lambda one: one["instance_id"])[0]["pid"]
    try:
        streams = await disturbed(system, lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_same(streams, undisturbed)
    system.wait_ready()


async def test_the_scheduler_dies(system, undisturbed):
    """The standby takes over; whatever was queued in the dead one is submitted again."""
    leader = leading_scheduler(system)
    streams = await disturbed(system, lambda: system.kill(leader))
    assert_same(streams, undisturbed)
    again = await run_streams(system.url, ["llama"], 4, 10)
    assert all(stream.ended_well for stream in again)
    system.start(leader)


async def test_all_schedulers_die(system, undisturbed):
    """Without any scheduler the gateway dispatches straight to the instances."""

    def kill_both() -> None:
        system.kill("scheduler-0")
        system.kill("scheduler-1")

    try:
        streams = await disturbed(system, kill_both)
        assert_same(streams, undisturbed)
        bypassed = await run_streams(system.url, ["llama", "opt"], NUM_STREAMS, MAX_TOKENS, timeout_s=60)
        assert_same(bypassed, undisturbed)
    finally:
        system.start("scheduler-0")
        system.start("scheduler-1")


@pytest.mark.parametrize("keep_store", [True, False], ids=["store kept", "store lost"])
async def test_nats_dies_and_comes_back(system, undisturbed, keep_store):
    def restart() -> None:
        system.nats.kill()
        time.sleep(8.0 if keep_store else 2.0)
        system.nats.restart(keep_store=keep_store)

    # A request that comes while NATS is away is refused, as it should be.
    streams = await disturbed(system, restart, all_begun=True)
    assert_same(streams, undisturbed)
    system.wait_ready()


async def test_placement_and_node_agent_may_die_without_harm(system, undisturbed):
    streams = await disturbed(system, lambda: system.kill("placement"))
    assert_same(streams, undisturbed)
    system.start("placement")


def leading_scheduler(system: Stack) -> str:
    """The scheduler that holds the lease, as the bus knows it."""
    import threading

    from shared.bus.nats_bus import NatsBus
    from shared.messages.catalogue import LEASES
    from shared.runtime.settings import BusSettings

    found: list[str] = []

    async def ask() -> None:
        bus = await NatsBus.connect(BusSettings(nats_url=system.nats.url), service="test", service_id="test")
        entry = await (await bus.key_value(LEASES)).get("scheduler")
        assert entry is not None
        found.append(entry.value.scheduler_id)
        await bus.close()

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    thread.join(20)
    return found[0]


class Reader:
    """One completion, over as many connections as it takes."""

    def __init__(self, number: int, model: str, prompt: list[int]) -> None:
        self.text = ""
        self.num_tokens = 0
        self.event_id = ""
        self.finish_reasons: list[str] = []
        self._key = f"resumed-{number}"
        self._model = model
        self._prompt = prompt

    async def read(self, client: openai.AsyncOpenAI) -> None:
        """The same call each time: the key says which answer it is of, the header what this client has of it."""
        stream = await client.completions.create(
            model=self._model,
            prompt=self._prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"Idempotency-Key": self._key, "Last-Event-ID": self.event_id},
        )
        async for chunk in stream:
            choice = chunk.choices[0]
            self.text += choice.text
            self.event_id = chunk.event_id  # type: ignore[attr-defined]
            self.num_tokens = int(self.event_id.split("-")[0].rstrip("e"))
            if choice.finish_reason:
                self.finish_reasons.append(choice.finish_reason)


def test_a_killed_gateways_streams_are_read_to_their_ends_elsewhere(system: Stack, undisturbed: list[Stream]) -> None:
    """With OpenAI's client, which gets exactly the rest."""
    url = system.add_gateway("gateway-1")
    system.wait_until(lambda: is_ready(url), "the second gateway")
    expected = undisturbed[:NUM_RESUMED]
    readers = [Reader(number, ("llama", "opt")[number % 2], stream.prompt) for number, stream in enumerate(expected)]

    async def killed_under_streams() -> None:
        async with client_of(url) as dying, client_of(system.url) as living:
            begun = asyncio.gather(*(reader.read(dying) for reader in readers), return_exceptions=True)
            while min(reader.num_tokens for reader in readers) < 20:
                await asyncio.sleep(0.01)
            system.kill("gateway-1")
            ends = await begun
            assert all(isinstance(end, httpx.TransportError | openai.APIError) for end in ends), ends
            assert not any(reader.finish_reasons for reader in readers)
            await asyncio.gather(*(reader.read(living) for reader in readers))

    asyncio.run(asyncio.wait_for(killed_under_streams(), 90))
    assert [reader.finish_reasons for reader in readers] == [["length"]] * NUM_RESUMED
    for reader, stream in zip(readers, expected, strict=True):
        with whatever_the_machine_does():
            assert reader.text == stream.text
        assert reader.event_id.split("-")[0] == f"{MAX_TOKENS}e"


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
