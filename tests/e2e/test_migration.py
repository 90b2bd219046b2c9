"""Requests that move between instances, as clients and operators see them: drain, rolling restart, scale, and all of it
without a transport for KV. Every stream has the tokens of one that nobody disturbed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.checkpoints import make_llama, make_opt
from tests.e2e.otlp_collector import CollectedSpan, OtlpCollector
from tests.e2e.stack import Stack
from tests.e2e.streams import Stream, run_streams, stream_completion
from tests.e2e.test_examples import run
from tests.stalls import whatever_the_machine_does

NUM_STREAMS = 20
MAX_TOKENS = 125
STEP_S = 0.012
"""An instance with streams of both models makes one token of each in twice that: they last for seconds."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Apart from those of other systems, of which a cost model may be kept."""
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return {"llama": str(make_llama(folder / "llama")), "opt": str(make_opt(folder / "opt"))}


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    """Collector of these systems alone: others have moves too, of requests that nobody here knows."""
    collector = OtlpCollector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def machine(checkpoints: dict[str, str], collector: OtlpCollector) -> Iterator[Stack]:
    """One worker that may grow."""
    environment = {
        "TIDEWAY_MAX_NODE_INSTANCES": "3",
        "TIDEWAY_PROFILE": "off",
        "TIDEWAY_OTLP_ENDPOINT": collector.endpoint,
    }
    with Stack(checkpoints, environment=environment, step_s=STEP_S) as machine:
        machine.wait_ready()
        yield machine


@pytest.fixture(scope="module")
def workers(checkpoints: dict[str, str], collector: OtlpCollector) -> Iterator[Stack]:
    """Two, of one instance each. Few requests run at once, so that some wait; requests move to whoever idles."""
    environment = {
        "TIDEWAY_MAX_RUNNING": "16",
        "TIDEWAY_PROFILE": "off",
        "TIDEWAY_REBALANCE_LOW": "180000",
        "TIDEWAY_REBALANCE_HIGH": "600000",
        "TIDEWAY_OTLP_ENDPOINT": collector.endpoint,
    }
    with Stack(checkpoints, num_workers=2, num_instances=1, environment=environment, step_s=STEP_S) as workers:
        workers.wait_ready()
        yield workers


@pytest.fixture(scope="module")
def undisturbed(machine: Stack) -> list[Stream]:
    return asyncio.run(run_streams(machine.url, ["llama", "opt"], NUM_STREAMS, MAX_TOKENS))


def assert_same(streams: list[Stream], expected: list[Stream], num_tokens: int = MAX_TOKENS) -> None:
    assert [stream.error for stream in streams if stream.error] == []
    for stream, other in zip(streams, expected, strict=True):
        with whatever_the_machine_does():
            assert stream.text == other.text
        assert stream.done and stream.finish_reasons == ["length"]
        assert stream.usage["completion_tokens"] == num_tokens


def wait_gone(system: Stack, *instance_ids: str) -> None:
    system.wait_until(lambda: not any(map(system.instance, instance_ids)), f"{', '.join(instance_ids)} gone")


def load(system: Stack, instance_id: str) -> dict:
    """Load that was reported last."""
    system.wait_until(lambda: (system.instance(instance_id) or {}).get("load"), f"a report of {instance_id}")
    return system.instance(instance_id)["load"]


def num_moved(system: Stack, instance_id: str) -> int:
    """Requests that the instance took over from others."""
    return load(system, instance_id)["num_migrated_in"]


def metric(system: Stack, instance_id: str, name: str) -> float:
    """Sum over the labels that `name` begins with."""
    instance = system.instance(instance_id)
    assert instance is not None
    text = httpx.get(f"http://127.0.0.1:{instance['metrics_port']}/metrics", timeout=5).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


# ------------------------------------------------------------------------------------------- one worker


async def test_drained_streams_are_the_same_and_their_traces_show_the_move(machine, undisturbed, collector):
    def drain() -> None:
        answer = httpx.post(f"{machine.url}/admin/instances/worker-0-0/drain", timeout=15)
        assert answer.status_code == 200 and answer.json()["draining"] == ["worker-0-0"]

    streams = await run_streams(
        machine.url, ["llama", "opt"], NUM_STREAMS, MAX_TOKENS, after_tokens=NUM_STREAMS * 10, disturb=drain
    )
    assert_same(streams, undisturbed)
    wait_gone(machine, "worker-0-0")
    assert num_moved(machine, "worker-0-1") > 0
    assert metric(machine, "worker-0-1", 'tideway_migration_bytes_total{direction="in"}') > 0
    machine.wait_until(lambda: moved_with_kv(collector), "the span of a move with KV")
    migration = moved_with_kv(collector)[0]
    # Both ends export on their own.
    machine.wait_until(lambda: "migration.receive" in names(of_move(collector, migration)), "the destination's span")
    spans = of_move(collector, migration)
    assert names(spans) >= {"migration.reserve", "migration.copy", "migration.commit", "migration.receive.stage"}
    receive = next(span for span in spans if span.name == "migration.receive")
    assert migration.span_id in ancestors(receive, collector.of_trace(migration.trace_id))
    assert receive.attributes["tideway.migration.bytes"] > 0
    services = {span.service for span in collector.of_trace(migration.trace_id)}
    assert any("gateway" in service for service in services), "it belongs to the client's trace"
    machine.wait_until(lambda: len(stays(collector, migration)) == 2, "a span of each instance that it was on")
    source, destination = stays(collector, migration)
    assert source.attributes["tideway.moved_to"] == destination.attributes["tideway.instance_id"] == "worker-0-1"
    assert source.attributes["gen_ai.usage.output_tokens"] < destination.attributes["gen_ai.usage.output_tokens"]
    assert {"arrived", "detached"} <= set(source.events) and {"moved", "decode_resumed"} <= set(destination.events)
    shown = timeline(machine, migration.attributes["tideway.request_id"])
    told = {event["kind"]: event for event in shown["events"]}
    assert told["migrating"]["cause"] == "drain" and told["moved"]["place"] == "worker-0-0"
    assert sum(phase["end_s"] - phase["begin_s"] for phase in shown["phases"] if phase["phase"] == "move") > 0
    printed = machine.tideway("request", shown["id"])
    assert all(word in printed for word in ("migrating", "detached", "moved", "decode resumed", "worker-0-1"))


def timeline(system: Stack, request_id: str) -> dict:
    """Timeline of a request that has ended: phases without gaps, and parts that make up what was measured."""
    found: list[dict] = []

    def is_told() -> bool:
        answer = httpx.get(f"{system.url}/admin/requests/{request_id}", timeout=60)
        found[:] = answer.json().get("requests", [])
        return len(found) == 1 and found[0]["is_over"]

    system.wait_until(is_told, "the end of its timeline")
    [shown] = found
    assert abs(shown["phases"][-1]["end_s"] - shown["duration_s"]) < 1e-3
    for objective in shown["objectives"]:
        num_later = shown["output_tokens"] - 1
        measured_s = objective["measured_s"] * (num_later if objective["name"] == "tpot" else 1)
        assert abs(sum(part["seconds"] for part in objective["parts"]) - measured_s) < 1e-3
    return shown


def stays(collector: OtlpCollector, migration: CollectedSpan) -> list[CollectedSpan]:
    """Those of the moved request on instances, the source first."""
    spans = [span for span in collector.of_trace(migration.trace_id) if span.name == "instance"]
    return sorted(spans, key=lambda span: "tideway.moved_to" not in span.attributes)


def moved_with_kv(collector: OtlpCollector) -> list[CollectedSpan]:
    moved = [
        s for s in collector.spans if s.name == "migration" and s.attributes["tideway.migration.outcome"] == "moved"
    ]
    return [
        s
        for s in moved
        if any(other.parent_id == s.span_id and other.name == "migration.copy" for other in collector.spans)
    ]


def of_move(collector: OtlpCollector, migration: CollectedSpan) -> list[CollectedSpan]:
    spans = collector.of_trace(migration.trace_id)
    return [span for span in spans if migration.span_id in ancestors(span, spans)]


def ancestors(span: CollectedSpan, spans: list[CollectedSpan]) -> list[str]:
    parents = {one.span_id: one.parent_id for one in spans}
    found, parent = [], span.parent_id
    while parent:
        found.append(parent)
        parent = parents.get(parent, "")
    return found


def names(spans: list[CollectedSpan]) -> set[str]:
    return {span.name for span in spans}


async def test_a_drain_is_undone_by_the_command(machine, undisturbed):
    if not machine.draining():
        machine.tideway("drain", "worker-0-0", "--wait")
    printed = machine.tideway("drain", "worker-0-0", "--undo", "--wait")
    assert "worker-0-0 is to come back" in printed and "ready" in printed
    machine.wait_ready()
    assert machine.draining() == []


def test_the_example_drains_an_instance_under_streams(machine):
    begun, again, ran, moved, same, _ = run(machine, "drain_under_load", "llama", "250")
    assert begun.startswith("6 streams of 250 tokens of llama") and again.startswith("that took ")
    assert ran.endswith("which is drained") and moved.endswith("of 6 streams moved to another instance")
    with whatever_the_machine_does():
        assert same.startswith("6 of 6 "), same


async def test_instances_come_and_go_under_load(machine, undisturbed):
    """Three, then one: what runs on the others goes there."""
    printed = machine.tideway("scale", "--instances", "3", "--wait")
    assert "There are to be 3 instances" in printed and "ready" in printed
    states = [model["state"] for instance in machine.instances() for model in instance["models"]]
    assert states == ["ready"] * 6

    def shrink() -> None:
        answer = httpx.post(f"{machine.url}/admin/scale", json={"instances": 1}, timeout=15)
        assert answer.status_code == 200 and len(answer.json()["instances"]) == 1

    streams = await run_streams(
        machine.url, ["llama", "opt"], NUM_STREAMS, MAX_TOKENS, after_tokens=NUM_STREAMS * 10, disturb=shrink
    )
    assert_same(streams, undisturbed)
    machine.wait_until(lambda: len(machine.instances()) == 1, "one instance")
    machine.wait_until(lambda: num_moved(machine, machine.instances()[0]["instance_id"]), "a report of what moved")


# ------------------------------------------------------------------------------------------ two workers


class Clients:
    """Each sends one request after the other, always the same, until `stop`."""

    def __init__(self, url: str, expected: list[Stream], models: list[str], max_tokens: int) -> None:
        self._url = url
        self._expected = expected
        self._models = models
        self._max_tokens = max_tokens
        self._is_stopping = False
        self.num_done = 0

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(self._one(client, index) for index in range(len(self._expected))))

    async def _one(self, client: httpx.AsyncClient, index: int) -> None:
        expected, model = self._expected[index], self._models[index % len(self._models)]
        while not self._is_stopping:
            stream = await stream_completion(
                client, self._url, model, expected.prompt, self._max_tokens, lambda _: None
            )
            assert_same([stream], [expected], self._max_tokens)
            self.num_done += 1

    async def during(self, disturb: Callable[[], None]) -> None:
        running = asyncio.create_task(self.run())
        try:
            disturbing = asyncio.create_task(asyncio.to_thread(disturb))
            await asyncio.wait({running, disturbing}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            await disturbing
        finally:
            self._is_stopping = True
            await running


@pytest.mark.long
async def test_requests_that_wait_move_to_an_idle_instance(workers, undisturbed, collector):
    """A model on one instance alone, with more requests than can run, comes to the other: no operator moves anything."""
    printed = workers.tideway("scale", "llama", "1", "--wait")
    assert "llama is to be on 1 instance" in printed and "ready" in printed
    (source,) = places(workers, "llama")
    (destination,) = {"worker-0-0", "worker-1-0"} - {source}

    def widen() -> None:
        workers.wait_until(lambda: load(workers, source)["num_waiting"] > 0, "requests that wait")
        assert num_moved(workers, destination) == 0
        answer = httpx.post(f"{workers.url}/admin/models/llama/scale", json={"replicas": None}, timeout=15)
        assert answer.status_code == 200
        workers.wait_until(lambda: num_moved(workers, destination) > 0, "requests that move", 30)

    clients = Clients(workers.url, undisturbed[::2] * 2, ["llama"], MAX_TOKENS)
    await clients.during(widen)
    assert clients.num_done >= NUM_STREAMS
    workers.wait_until(lambda: moved_without_kv(collector, source, destination), "the span of a move without KV")


def moved_without_kv(collector: OtlpCollector, source: str, destination: str) -> bool:
    expected = {
        "tideway.instance_id": source,
        "tideway.destination_id": destination,
        "tideway.migration.reason": "balance",
        "tideway.migration.outcome": "moved",
        "tideway.migration.bytes": 0,
    }
    return any(s.name == "migration" and expected.items() <= s.attributes.items() for s in collector.spans)


@pytest.mark.long
async def test_a_rolling_restart_under_load_loses_nothing(workers, undisturbed):
    """The second worker comes back with a UCX that cannot be used."""

    def restart() -> None:
        for name, other, environment in (
            ("worker-0", "worker-1", {}),
            ("worker-1", "worker-0", {"UCX_TLS": "bogus"}),
        ):
            workers.wait_until(lambda name=name: load(workers, f"{name}-0")["num_running"] > 0, "load")
            workers.wait_until(lambda other=other: workers.instance(f"{other}-0")["migration"], "the other's transport")
            before = num_moved(workers, f"{other}-0")
            workers.kill(name, signal.SIGTERM)
            assert workers.processes[name].returncode == 0
            workers.wait_until(
                lambda other=other, before=before: num_moved(workers, f"{other}-0") > before,
                f"a report of what left {name}",
            )
            workers.start(name, environment)
            workers.wait_ready()

    clients = Clients(workers.url, undisturbed, ["llama", "opt"], MAX_TOKENS)
    await clients.during(restart)
    assert clients.num_done > NUM_STREAMS


@pytest.mark.long
async def test_without_a_transport_all_else_works(workers, undisturbed):
    """One worker cannot use UCX, the other must not: requests are placed elsewhere with the tokens so far."""
    if workers.instance("worker-1-0")["migration"]:
        workers.kill("worker-1", signal.SIGTERM)
        workers.start("worker-1", {"UCX_TLS": "bogus"})
        workers.wait_ready()
    assert workers.instance("worker-1-0")["migration"] is False
    assert "UCX" in workers.log("worker-1", 200)
    streams = await run_streams(
        workers.url,
        ["llama", "opt"],
        NUM_STREAMS,
        MAX_TOKENS,
        after_tokens=NUM_STREAMS * 10,
        disturb=lambda: workers.kill("worker-0", signal.SIGTERM),
    )
    assert_same(streams, undisturbed)
    workers.start("worker-0", {"TIDEWAY_MIGRATION": "off"})
    workers.wait_ready()
    assert workers.instance("worker-0-0")["migration"] is False
    urgent = await run_streams(workers.url, ["llama"], NUM_STREAMS, 10, priority="high")
    assert all(stream.ended_well for stream in urgent)


def places(system: Stack, model: str) -> list[str]:
    """Instances on which the model is ready."""
    return [
        instance["instance_id"]
        for instance in system.instances()
        if any(one["name"] == model and one["state"] == "ready" for one in instance["models"])
    ]
