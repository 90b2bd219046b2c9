"""The processes of the chaos run, as a node agent and an operator see them."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec

from bench.migration_chaos.executor import MERGED_BYTES, SHAPES
from bench.migration_chaos.instance import Options
from bench.migration_chaos.instance import run as run_instance
from bench.migration_chaos.network import NatsProxy
from shared.bus.interface import Bus, BusError
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import INSTANCE_EXITED, INSTANCES, MODELS
from shared.messages.channels import bucket_key
from shared.messages.cluster import InstanceExited, InstanceInfo, InstancePlan, ModelSpec
from shared.runtime.replica import serve
from shared.runtime.service import run_service
from shared.runtime.settings import BusSettings, InstanceSettings, SchedulerSettings
from shared.runtime.tasks import TaskSet
from tests.conftest import NatsServer, free_port

log = logging.getLogger(__name__)

PRELOAD = ["bench.migration_chaos.instance", "services.scheduler.service", "ucxx"]
NUM_MERGED = 160
NUM_HOST_MERGED = 64
NUM_SCHEDULERS = 2
STEP_S = 0.005
BACKUP_TOKENS = 32
START_TIMEOUT_S = 60.0
SPECS = [ModelSpec(name, f"/models/{name}") for name in SHAPES]


def _run_scheduler(settings: SchedulerSettings, log_path: str, driver: Connection) -> None:
    from services.scheduler.service import SchedulerService

    def end_with_driver() -> None:
        try:
            driver.recv()
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=end_with_driver, daemon=True).start()
    file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run_service(partial(serve, "scheduler", SchedulerService, settings), settings)


class Process:
    """One that is started again when it ends, until `stop`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self.process: Any = None
        self.num_stops = 0
        """By SIGSTOP, under way."""

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    @property
    def is_stopped(self) -> bool:
        return self.num_stops > 0

    def stop(self) -> None:
        self.num_stops += 1
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.num_stops = max(0, self.num_stops - 1)
        if not self.num_stops:
            self._signal(signal.SIGCONT)

    def go_on_if_forgotten(self) -> None:
        """One that stops itself may do so only after it was to go on."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "T" and not self.num_stops:
            self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def _signal(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            log.info("%s is gone already", self.name)


class Instance(Process):
    """`on_event(instance, event)`: what its process tells."""

    def __init__(self, index: int, cluster: Cluster, on_event: Callable[[Instance, tuple[Any, ...]], None]) -> None:
        super().__init__(f"node-{index}", cluster.folder)
        self.index = index
        self.proxy = NatsProxy(cluster.nats.port)
        self.incarnation = ""
        self.num_starts = 0
        self.is_up = False
        """It has registered with its models, and nobody has said that it should end."""
        self.is_ending = False
        """It was told to."""
        self.died = asyncio.Event()
        self.died_s = 0.0
        """Time at which it last did."""
        self._cluster = cluster
        self._on_event = on_event
        self._connection: Connection | None = None

    def tell(self, *order: Any) -> None:
        assert self._connection is not None
        try:
            self._connection.send(order)
        except OSError:
            log.info("%s is gone already", self.name)

    def start(self) -> None:
        cluster = self._cluster
        random = Random(f"{cluster.seed} {self.name} {self.num_starts}")
        self.num_starts += 1
        self.is_ending, self.num_stops = False, 0
        self.died = asyncio.Event()
        plan = InstancePlan(self.name, "node", SPECS, NUM_MERGED * MERGED_BYTES, MERGED_BYTES)
        settings = InstanceSettings(
            nats_url=self.proxy.url,
            instance_id=self.name,
            node_id="node",
            plan=msgspec.json.encode(plan).decode(),
            device="cpu",
            profile="off",
            max_running=random.choice((24, 64)),
            token_budget=96,
            steps_in_flight=random.choice((1, 2)),
            checkpoint_start=0.3,
            migration_rate_share=random.choice((4e-4, 0.5)),
            max_migrations=4,
            migration_cooldown_s=0.05,
            drain_grace_s=8.0,
        )
        if cluster.is_everywhere:
            settings = msgspec.structs.replace(
                settings,
                profile="auto",  # which prompts are long is told by a cost model
                role="prefill" if self.index == 0 else "auto",
                kv_backup="all",
                kv_backup_tokens=BACKUP_TOKENS,
                kv_offload="host",
                kv_offload_start=0.3,
                prefix_fetch="auto",
            )
        options = Options(STEP_S, NUM_HOST_MERGED, str(self.log_path))
        near, far = cluster.context.Pipe()
        self._connection = near
        self.process = cluster.context.Process(target=run_instance, args=(settings, options, far), daemon=True)
        self.process.start()
        far.close()
        asyncio.get_running_loop().add_reader(near.fileno(), self._read, near)

    def _read(self, connection: Connection) -> None:
        try:
            while connection.poll():
                event = connection.recv()
                if event[0] == "started":
                    self.incarnation = event[1]
                self._on_event(self, event)
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(connection.fileno())
            connection.close()
            self.is_up = False
            self.died.set()
            self.died_s = time.monotonic()
            self._on_event(self, ("died",))
            self._cluster.tasks.start(self._end())

    async def _end(self) -> None:
        """What a node agent does: it tells everybody, if it lives, and starts the instance again."""
        cluster = self._cluster
        process, incarnation = self.process, self.incarnation
        await asyncio.to_thread(process.join, 10)
        random = cluster.random
        tells, lingers = random.random() < 0.7, random.random() < 0.2
        if tells:
            exited = InstanceExited(self.name, incarnation, "node", process.exitcode or 0)
            cluster.bus.publish(INSTANCE_EXITED, exited)
        if cluster.is_closing:
            return
        if lingers and not tells:
            await asyncio.sleep(4.0)  # the registry forgets it
        self.proxy.mend()
        self.start()

    def can_serve(self) -> bool:
        """Whether its registry entry says so."""
        info = self._cluster.registry.get(self.name)
        return (
            info is not None
            and info.incarnation == self.incarnation
            and info.state == "ready"
            and bool(info.kv_address)
            and len(info.models) == len(SHAPES)
            and all(model.state == "ready" for model in info.models)
        )


class Scheduler(Process):
    def __init__(self, index: int, cluster: Cluster) -> None:
        super().__init__(f"scheduler-{index}", cluster.folder)
        self._cluster = cluster
        self.metrics_port = free_port()

    def start(self) -> None:
        cluster = self._cluster
        settings = SchedulerSettings(
            nats_url=cluster.nats.url,
            scheduler_id=self.name,
            metrics_port=self.metrics_port,
            # Only drains move requests by themselves.
            rebalance_low=-2e9,
            rebalance_high=-1e9,
            max_waiting_per_model=8,
        )
        self.num_stops = 0
        self._pipe, far = cluster.context.Pipe()
        self.process = cluster.context.Process(
            target=_run_scheduler, args=(settings, str(self.log_path), far), daemon=True
        )
        self.process.start()
        far.close()

    async def killed(self, down_s: float) -> None:
        self.kill()
        await asyncio.to_thread(self.process.join, 10)
        await asyncio.sleep(down_s)
        if not self._cluster.is_closing:
            self.start()

    async def held(self) -> dict[str, float]:
        """What the leader holds: requests that it thinks of; {} of any other."""
        found = dict.fromkeys(("is_leader", "tracked_requests", "ledger_requests"), 0.0)
        try:
            async with httpx.AsyncClient(timeout=2.0) as client:
                text = (await client.get(f"http://127.0.0.1:{self.metrics_port}/metrics")).text
        except httpx.HTTPError:
            return {}
        for line in text.splitlines():
            name, _, value = line.removeprefix("tideway_scheduler_").rpartition(" ")
            if name in found:
                found[name] = float(value)
        return found if found.pop("is_leader") else {}


class Cluster:
    bus: Bus

    def __init__(
        self,
        seed: int,
        num_instances: int,
        on_event: Callable[[Instance, tuple[Any, ...]], None],
        *,
        is_everywhere: bool = False,
    ) -> None:
        """`is_everywhere`: KV is handed over, copied to other instances, kept in host memory and fetched."""
        self.seed = seed
        self.is_everywhere = is_everywhere
        self.random = Random(f"{seed} cluster")
        self.folder = Path(tempfile.mkdtemp(prefix="tideway-chaos-"))
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.nats = NatsServer()
        self.is_nats_up = True
        self.is_closing = False
        self.instances = [Instance(index, self, on_event) for index in range(num_instances)]
        self.schedulers = [Scheduler(index, self) for index in range(NUM_SCHEDULERS)]
        self.registry: dict[str, InstanceInfo] = {}
        self.tasks = TaskSet()

    def __getitem__(self, instance_id: str) -> Instance:
        return next(instance for instance in self.instances if instance.name == instance_id)

    async def start(self) -> None:
        # The server that processes are forked from imports everything first, which takes a while.
        first = self.context.Process(target=int)
        await asyncio.to_thread(first.start)
        await asyncio.to_thread(first.join)
        self.bus = await NatsBus.connect(BusSettings(nats_url=self.nats.url), "gateway", "chaos")
        await self._write_models()
        self._watch = await (await self.bus.key_value(INSTANCES)).watch(self._on_instance)
        for instance in self.instances:
            await instance.proxy.start()
            instance.start()
        for scheduler in self.schedulers:
            scheduler.start()
        self.tasks.start(self._wake_forgotten())
        async with asyncio.timeout(START_TIMEOUT_S):
            while not all(instance.is_up for instance in self.instances):
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self.is_closing = True
        for process in [*self.instances, *self.schedulers]:
            process.kill()
            await asyncio.to_thread(process.process.join, 10)
        for instance in self.instances:
            await instance.proxy.stop()
        await self.tasks.end_all()
        await self.bus.close()
        self.nats.close()

    async def _wake_forgotten(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for process in [*self.instances, *self.schedulers]:
                process.go_on_if_forgotten()

    def _on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        if info is None:
            self.registry.pop(instance_id, None)
        else:
            self.registry[instance_id] = info
        for instance in self.instances:
            if instance.name == instance_id:
                instance.is_up = instance.can_serve() and not instance.is_ending

    async def _write_models(self) -> None:
        """Writes the models as placement does."""
        bucket = await self.bus.key_value(MODELS)
        for spec in SPECS:
            await bucket.put(bucket_key(spec.name), spec)

    async def restart_nats(self, down_s: float, keep_store: bool) -> None:
        self.is_nats_up = False
        await asyncio.to_thread(self.nats.kill)
        await asyncio.sleep(down_s)
        await asyncio.to_thread(partial(self.nats.restart, keep_store=keep_store))
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            try:
                await self._write_models()
                break
            except BusError:
                await asyncio.sleep(0.1)
        self.is_nats_up = True
