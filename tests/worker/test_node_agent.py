"""The node agent on a real NATS server, with a scripted instance program in place of the real one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.worker.node.agent import NodeAgent
from services.worker.node.environment import instance_environment
from services.worker.node.machine import Machine
from shared.bus.interface import Bus, ServiceError, Watch
from shared.bus.nats_bus import NatsBus
from shared.messages.admin import Done, ScaleNode
from shared.messages.catalogue import (
    INSTANCE_EXITED,
    INSTANCES,
    NODE_SCALE,
    NODES,
    PLANS,
)
from shared.messages.cluster import (
    DeviceGroup,
    DeviceGroupError,
    InstanceExited,
    InstanceInfo,
    InstancePlan,
    ModelSpec,
    NodeInfo,
    PlacementPlan,
)
from shared.messages.requests import ErrorCode
from shared.runtime.settings import BusSettings, SettingsError, WorkerSettings
from shared.runtime.telemetry import Telemetry, start_telemetry
from tests.stalls import Stopwatch
from tests.worker.fake_instance import HELD_S

REPOSITORY = Path(__file__).parents[2]
FAKE = (sys.executable, "-m", "tests.worker.fake_instance")
CPU = DeviceGroup(("cpu",))
MACHINE = Machine("cpu", 2, 1 << 30, 1, (CPU,) * 2)
MIB = 1 << 20


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """The first truthy result; polls."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)
    return result


GPUS = Machine("cuda", 2, 1, 4, (DeviceGroup(("GPU-aa",)), DeviceGroup(("GPU-bb",))))


def plan(version: int, *models: str, pool: int = 8, num_instances: int = 2, source: str = "ok") -> PlacementPlan:
    specs = [ModelSpec(name, source) for name in models]
    instances = [InstancePlan(f"n-{k}", "n", specs, pool * MIB, MIB) for k in range(num_instances)]
    return PlacementPlan(version, instances)


class Peers:
    """Placement, scheduler and onlooker in one: writes plans, sees registry and exits."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.exits: list[InstanceExited] = []
        self.instances: Watch[InstanceInfo]
        self.nodes: Watch[NodeInfo]

    async def start(self) -> None:
        self._plans = await self.bus.key_value(PLANS)
        self.instances = await (await self.bus.key_value(INSTANCES)).watch()
        self.nodes = await (await self.bus.key_value(NODES)).watch()
        await self.bus.subscribe(INSTANCE_EXITED, self.exits.append)

    async def carried_out(self, wanted: PlacementPlan) -> dict[str, int]:
        """Publishes the plan, waits until the node has carried it out; instance id -> pid."""
        await self._plans.put("current", wanted)
        await self.at_version(wanted.version)
        return self.pids()

    async def at_version(self, version: int) -> None:
        await until(lambda: "n" in self.nodes.entries and self.nodes.entries["n"].plan_version == version)

    def pids(self) -> dict[str, int]:
        return {instance_id: info.pid for instance_id, info in self.instances.entries.items()}

    def models(self, instance_id: str) -> dict[str, str]:
        return {m.name: m.state for m in self.instances.entries[instance_id].models}


@pytest.fixture
async def peers(nats_settings: BusSettings) -> AsyncIterator[Peers]:
    bus = await NatsBus.connect(nats_settings, service="test", service_id="peers")
    peers = Peers(bus)
    await peers.start()
    yield peers
    await bus.close()


@pytest.fixture
async def agent(nats_settings: BusSettings) -> AsyncIterator[NodeAgent]:
    telemetry = start_telemetry("node", "n", nats_settings)
    async with running_agent(nats_settings.nats_url, telemetry) as agent:
        yield agent


class running_agent:
    def __init__(
        self,
        nats_url: str,
        telemetry: Telemetry,
        command: tuple[str, ...] = FAKE,
        machine: Machine = MACHINE,
        drain_grace_s: float = 0.0,
    ) -> None:
        self._settings = WorkerSettings(nats_url=nats_url, node_id="n")
        self._telemetry = telemetry
        self._command = command
        self._machine = machine
        self._drain_grace_s = drain_grace_s

    async def __aenter__(self) -> NodeAgent:
        self._bus = await NatsBus.connect(self._settings, service="node", service_id="n")
        self._agent = NodeAgent(
            self._bus, self._settings, self._telemetry, self._machine, self._command, self._drain_grace_s
        )
        await self._agent.start()
        return self._agent

    async def __aexit__(self, *_: object) -> None:
        await self._agent.stop()
        await self._bus.close()
        self._telemetry.close()


def is_alive(pid: int) -> bool:
    """Also False for a zombie that its new parent has not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_plan_is_carried_out_and_changed_without_touching_what_stays(peers: Peers, agent: NodeAgent) -> None:
    await until(lambda: "n" in peers.nodes.entries)
    assert peers.nodes.entries["n"].num_instances == 2
    assert peers.nodes.entries["n"].memory_bytes == 1 << 30

    assert agent.unready()
    pids = await peers.carried_out(plan(1, "a", "b"))
    await until(lambda: not agent.unready())
    assert pids.keys() == {"n-0", "n-1"}
    assert peers.models("n-0") == peers.models("n-1") == {"a": "ready", "b": "ready"}

    assert await peers.carried_out(plan(2, "b", "c")) == pids, "models change in running processes"
    assert peers.models("n-0") == peers.models("n-1") == {"b": "ready", "c": "ready"}
    assert peers.exits == []

    assert await peers.carried_out(plan(3, "b", "c", num_instances=1)) == {"n-0": pids["n-0"]}
    await until(lambda: peers.exits)
    assert [(e.instance_id, e.exit_code, e.node_id, e.suspects) for e in peers.exits] == [("n-1", 0, "n", ())]


async def test_a_changed_pool_restarts_one_instance_after_the_other(peers: Peers, agent: NodeAgent) -> None:
    before = await peers.carried_out(plan(1, "a"))
    num_ready = []
    watch = await (await peers.bus.key_value(INSTANCES)).watch(
        lambda *_: num_ready.append(sum(i.state == "ready" for i in peers.instances.entries.values()))
    )
    after = await peers.carried_out(plan(2, "a", pool=4))
    await watch.stop()
    assert before["n-0"] != after["n-0"]
    assert before["n-1"] != after["n-1"]
    assert min(num_ready) >= 1, "one of the two always serves"
    assert all(i.num_merged == 4 for i in peers.instances.entries.values())


async def test_a_killed_instance_is_reported_and_restarted_at_once(peers: Peers, agent: NodeAgent) -> None:
    pids = await peers.carried_out(plan(1, "a"))
    killed = peers.instances.entries["n-1"]
    with Stopwatch() as watch:
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: peers.exits)
        assert watch.seconds < 0.5
        suspects = ("a request of n-1",)
        assert peers.exits == [InstanceExited("n-1", killed.incarnation, "n", -signal.SIGKILL, suspects)]
        await until(lambda: peers.pids().get("n-1", killed.pid) != killed.pid)
    assert watch.seconds < 5.0, "0.5 s of back-off and the start of a process"
    assert peers.pids()["n-0"] == pids["n-0"]
    await until(lambda: peers.models("n-1") == {"a": "ready"})


async def test_an_instance_that_cannot_live_is_a_problem_of_the_node(peers: Peers, agent: NodeAgent) -> None:
    bad = PlacementPlan(
        1, [InstancePlan("n-0", "n", [ModelSpec("x", "exit")], 8 * MIB, MIB), plan(1, "a").instances[1]]
    )
    plans = await peers.bus.key_value(PLANS)
    await plans.put("current", bad)
    problem = await until(lambda: "n" in peers.nodes.entries and peers.nodes.entries["n"].problem)
    assert agent.problems() == [] and any(reason.startswith("n-0 is ") for reason in agent.unready())
    assert problem == "n-0 exited with code 3: cannot go on with x"
    await until(lambda: "n-1" in peers.instances.entries and peers.models("n-1") == {"a": "ready"})
    assert peers.nodes.entries["n"].plan_version == 0
    await peers.carried_out(plan(2, "a"))
    await until(lambda: peers.nodes.entries["n"].problem == "")


async def test_a_model_that_cannot_be_loaded_is_a_problem_of_the_node(peers: Peers, agent: NodeAgent) -> None:
    first = plan(1, "a")
    await peers.carried_out(first)
    models = [*first.instances[0].models, ModelSpec("b", "fail")]
    plans = await peers.bus.key_value(PLANS)
    await plans.put("current", PlacementPlan(2, [InstancePlan("n-0", "n", models, 8 * MIB, MIB), first.instances[1]]))
    await until(lambda: peers.nodes.entries["n"].problem == "n-0 could not load 'b': no such folder")
    assert peers.nodes.entries["n"].plan_version == 1
    assert peers.exits == []


async def test_stopping_the_agent_ends_its_instances(nats_settings: BusSettings, peers: Peers) -> None:
    telemetry = start_telemetry("node", "n", nats_settings)
    async with running_agent(nats_settings.nats_url, telemetry):
        pids = await peers.carried_out(plan(1, "a"))
        samples = telemetry.registry
        assert samples.get_sample_value("tideway_node_instances", {"state": "ready"}) == 2
        assert samples.get_sample_value("tideway_node_plan_version") == 1
    assert not any(is_alive(pid) for pid in pids.values())
    await until(lambda: len(peers.exits) == 2)
    await until(lambda: not peers.nodes.entries and not peers.instances.entries)


async def test_the_instances_of_a_killed_agent_die_and_its_successor_says_so(
    nats_settings: BusSettings, peers: Peers
) -> None:
    """In a process of its own, on the event loop that services run on."""
    program = (
        "import asyncio, sys\n"
        "from services.worker.node.agent import NodeAgent\n"
        "from tests.worker.test_node_agent import FAKE, MACHINE, running_agent\n"
        "from shared.runtime.service import run_service\n"
        "from shared.runtime.settings import WorkerSettings\n"
        "from shared.runtime.telemetry import start_telemetry\n"
        f"settings = WorkerSettings(nats_url={nats_settings.nats_url!r}, node_id='n')\n"
        "async def main(stop):\n"
        "    async with running_agent(settings.nats_url, start_telemetry('node', 'n', settings)):\n"
        "        await stop.wait()\n"
        "run_service(main, settings)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=REPOSITORY)
    try:
        pids = await peers.carried_out(plan(1, "a"))
        incarnations = {(i.instance_id, i.incarnation) for i in peers.instances.entries.values()}
    finally:
        process.kill()
        await process.wait()
    await until(lambda: not any(is_alive(pid) for pid in pids.values()), 5.0)
    assert peers.exits == [], "nobody was left to report"

    async with running_agent(nats_settings.nats_url, start_telemetry("node", "n", nats_settings)):
        await until(lambda: len(peers.exits) == 2, 2.5)
        assert {(e.instance_id, e.incarnation) for e in peers.exits} == incarnations
        await until(lambda: peers.pids().keys() == pids.keys() and not set(peers.pids().values()) & set(pids.values()))


async def test_a_drained_instance_stays_away_until_the_plan_has_it_again(peers: Peers, agent: NodeAgent) -> None:
    both = plan(1, "a")
    pids = await peers.carried_out(both)
    drained = PlacementPlan(2, both.instances[:1], draining=["n-1"])
    assert await peers.carried_out(drained) == {"n-0": pids["n-0"]}
    await until(lambda: peers.exits)
    assert (peers.exits[0].instance_id, peers.exits[0].exit_code) == ("n-1", 0)
    await asyncio.sleep(1.0)
    assert peers.pids() == {"n-0": pids["n-0"]}
    again = await peers.carried_out(PlacementPlan(3, both.instances))
    assert again["n-0"] == pids["n-0"] and again["n-1"] != pids["n-1"]


async def test_an_instance_whose_drain_is_undone_in_time_goes_on(peers: Peers, agent: NodeAgent) -> None:
    both = plan(1, "a", source="held")
    pids = await peers.carried_out(both)
    plans = await peers.bus.key_value(PLANS)
    await plans.put("current", PlacementPlan(2, both.instances[:1], draining=["n-1"]))
    await until(lambda: peers.instances.entries["n-1"].state == "draining")
    await plans.put("current", PlacementPlan(3, both.instances))
    await peers.at_version(3)
    assert peers.pids() == pids and peers.instances.entries["n-1"].state == "ready"
    assert not peers.exits


async def test_the_number_of_instances_is_changed_within_bounds_and_outlives_the_agent(
    nats_settings: BusSettings, peers: Peers
) -> None:
    async def scale(number: int) -> Done:
        return await peers.bus.request(NODE_SCALE.at(node_id="n"), ScaleNode(number), timeout_s=5.0)

    def shown() -> tuple[int, int]:
        info = peers.nodes.entries.get("n")
        return (info.num_instances, info.max_instances) if info is not None else (0, 0)

    machine = Machine("cpu", 1, 1 << 30, 1, (CPU,) * 4, max_instances=4)
    async with running_agent(nats_settings.nats_url, start_telemetry("node", "n", nats_settings), machine=machine):
        await until(lambda: shown() == (1, 4))
        assert await scale(3) == Done()
        await until(lambda: shown() == (3, 4), 2.0)
        for number in (0, 5):
            with pytest.raises(ServiceError, match="runs 1 to 4 instances") as caught:
                await scale(number)
            assert caught.value.code == ErrorCode.CONFLICT
        await peers.carried_out(PlacementPlan(1, plan(1, "a").instances, draining=["n-2", "other-n-7"]))
    await until(lambda: not peers.nodes.entries)
    async with running_agent(nats_settings.nats_url, start_telemetry("node", "n", nats_settings), machine=machine):
        await until(lambda: shown() == (3, 4))
        await scale(2)
        await until(lambda: shown() == (2, 4))
        await peers.carried_out(plan(2, "a", num_instances=2))
        assert shown() == (2, 4), "only the first plan is looked at for it"
    smaller = Machine("cpu", 1, 1 << 30, 1, (CPU,))
    async with running_agent(nats_settings.nats_url, start_telemetry("node", "n", nats_settings), machine=smaller):
        await until(lambda: shown() == (1, 1))


async def test_instances_that_hold_requests_get_their_grace_and_the_node_stays_registered_for_it(
    nats_settings: BusSettings, peers: Peers
) -> None:
    telemetry = start_telemetry("node", "n", nats_settings)
    async with running_agent(nats_settings.nats_url, telemetry, drain_grace_s=15.0):
        pids = await peers.carried_out(plan(1, "a", source="held"))
        was_registered: list[bool] = []
        watch = await (await peers.bus.key_value(INSTANCES)).watch(
            lambda *_: was_registered.append("n" in peers.nodes.entries)
        )
        begin = time.monotonic()
    assert HELD_S <= time.monotonic() - begin < HELD_S + 5.0, "as long as needed, not as long as allowed"
    await watch.stop()
    assert all(was_registered)
    await until(lambda: len(peers.exits) == 2 and not peers.nodes.entries)
    assert {e.exit_code for e in peers.exits} == {0}
    assert not any(is_alive(pid) for pid in pids.values())


async def test_a_second_signal_ends_the_worker_at_once(nats_settings: BusSettings, peers: Peers) -> None:
    """The process as it is started by operators, except for its instances."""
    program = (
        "import services.worker.node.agent as node\n"
        "from services.worker import __main__ as worker\n"
        "from tests.worker.test_node_agent import FAKE\n"
        "worker.NodeAgent.__init__.__defaults__ = (FAKE, *worker.NodeAgent.__init__.__defaults__[1:])\n"
        "worker.main()\n"
    )
    environment = {
        **os.environ,
        "TIDEWAY_NATS_URL": nats_settings.nats_url,
        "TIDEWAY_NODE_ID": "n",
        "TIDEWAY_DEVICE": "cpu",
        "TIDEWAY_DRAIN_GRACE_S": "30",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=REPOSITORY, env=environment)
    try:
        await peers.carried_out(plan(1, "a", source="held", num_instances=1))
        with Stopwatch() as watch:
            process.terminate()
            await until(lambda: peers.instances.entries["n-0"].state == "draining")
            process.terminate()
            assert await process.wait() == 0
        assert watch.seconds < HELD_S
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await until(lambda: peers.exits and not peers.nodes.entries)
    assert [e.exit_code for e in peers.exits] == [-signal.SIGTERM]


async def test_losing_nats_stops_no_instance(fresh_nats: Any) -> None:
    settings = BusSettings(nats_url=fresh_nats.url)
    bus = await NatsBus.connect(settings, service="test", service_id="peers")
    peers = Peers(bus)
    await peers.start()
    async with running_agent(fresh_nats.url, start_telemetry("node", "n", settings)) as agent:
        pids = await peers.carried_out(plan(1, "a"))
        fresh_nats.kill()
        await until(lambda: agent.problems() == ["not connected to NATS"])
        fresh_nats.restart()
        await until(lambda: agent.problems() == [] and bus.is_connected)
        assert await peers.carried_out(plan(2, "a", "b")) == pids
        assert peers.exits == []
    await bus.close()


async def test_the_steps_of_a_plan_are_spans_of_one_trace(nats_settings: BusSettings, peers: Peers) -> None:
    exporter = InMemorySpanExporter()
    telemetry = start_telemetry("node", "n", BusSettings(otlp_endpoint="http://127.0.0.1:9"))
    telemetry.provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with running_agent(nats_settings.nats_url, telemetry):
        await peers.carried_out(plan(1, "a", num_instances=1))
        await peers.carried_out(plan(2, "b", num_instances=1))
        spans = exporter.get_finished_spans()
    parents = {s.context.span_id: s.attributes["tideway.plan_version"] for s in spans if s.name == "node.apply_plan"}
    children = sorted((s.name, parents[s.parent.span_id]) for s in spans if s.name != "node.apply_plan")
    assert children == [("node.LoadModel", 2), ("node.UnloadModel", 2), ("node.start_instance", 1)]


def test_the_environment_of_an_instance() -> None:
    settings = WorkerSettings(nats_url="nats://h:1", nats_password="p", metrics_port=9100, trace_sample_ratio=0.5)
    planned = plan(1, "a").instances[1]
    environment = instance_environment(settings, GPUS, "n", planned, {"TIDEWAY_MAX_RUNNING": "7"})
    assert environment["TIDEWAY_NATS_URL"] == "nats://h:1"
    assert environment["TIDEWAY_NATS_PASSWORD"] == "p"
    assert environment["TIDEWAY_METRICS_PORT"] == "9102"
    assert environment["TIDEWAY_TRACE_SAMPLE_RATIO"] == "0.5"
    assert environment["TIDEWAY_INSTANCE_ID"] == "n-1"
    assert environment["TIDEWAY_NODE_ID"] == "n"
    assert environment["TIDEWAY_DEVICE"] == "cuda"
    assert environment["TIDEWAY_NUM_THREADS"] == "4"
    assert environment["TIDEWAY_MAX_RUNNING"] == "7", "what the operator sets for instances is passed on"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-bb"
    passed = msgspec.json.decode(environment["TIDEWAY_PLAN"], type=InstancePlan)
    assert (passed.instance_id, passed.group) == ("n-1", DeviceGroup(("GPU-bb",)))
    named = msgspec.structs.replace(planned, group=DeviceGroup(("GPU-aa",)))
    assert instance_environment(settings, GPUS, "n", named, {})["CUDA_VISIBLE_DEVICES"] == "GPU-aa"


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (("GPU-cc",), "GPU-cc are devices"),
        (("GPU-aa", "GPU-cc"), "not all of GPU-aa, GPU-cc"),
    ],
)
def test_devices_that_are_not_here_are_refused(devices: tuple[str, ...], words: str) -> None:
    planned = msgspec.structs.replace(plan(1, "a").instances[1], group=DeviceGroup(devices))
    with pytest.raises(DeviceGroupError, match=words):
        instance_environment(WorkerSettings(), GPUS, "n", planned, {})


def test_an_instance_of_several_devices_is_named_after_its_first() -> None:
    gpus = ("GPU-aa", "GPU-bb", "GPU-cc", "GPU-dd")
    machine = Machine("cuda", 2, 1, 4, (DeviceGroup(gpus[:2]), DeviceGroup(gpus[2:])))
    planned = InstancePlan("n-2", "n", [], 1, 1)
    environment = instance_environment(WorkerSettings(metrics_port=9100), machine, "n", planned, {})
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-cc", "rank 0; it gives the others theirs"
    assert environment["TIDEWAY_METRICS_PORT"] == "9103"
    passed = msgspec.json.decode(environment["TIDEWAY_PLAN"], type=InstancePlan)
    assert passed.group == machine.groups[1]


async def test_a_node_id_must_fit_into_subjects(nats_settings: BusSettings) -> None:
    bus = await NatsBus.connect(nats_settings, service="node", service_id="n")
    with pytest.raises(SettingsError, match=r"TIDEWAY_NODE_ID='a\.b'"):
        NodeAgent(bus, WorkerSettings(node_id="a.b"), start_telemetry("node", "n", nats_settings), MACHINE)
    await bus.close()
