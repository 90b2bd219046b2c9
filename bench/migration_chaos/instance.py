"""An instance process of the chaos run: `instance_main` as it is, on a `ChaosExecutor`, with faults where its migrations
have them. It tells the driver what happens, and obeys it, over a pipe: that works also without NATS."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from bench.migration_chaos.executor import PREFILL_TOKENS_S, ChaosExecutor
from bench.migration_chaos.faults import NO_FAULT, NOTE, REFUSE, Fault
from bench.migration_chaos.network import SLOW_S, CuttableNetwork
from services.worker.executor import executor as executor_module
from services.worker.instance import cost_models as costs_module
from services.worker.instance import main as instance_main
from services.worker.instance import migrations as moves_module
from services.worker.instance import service as instance_module
from services.worker.instance.engine_loop import EngineLoop
from services.worker.instance.service import InstanceService
from services.worker.kv_transport import transport as transport_module
from services.worker.kv_transport.staging import KvPool
from services.worker.kv_transport.transport import KvTransport, TransportLimits
from services.worker.kv_transport.ucx import UcxNetwork
from services.worker.migration.faults import FaultAction, FaultPoints
from services.worker.migration.service import MigrationService
from shared.bus.interface import ServiceError
from shared.costs.model import CostModel
from shared.engine.calls import SetCostModel
from shared.messages.cluster import ModelSpec
from shared.messages.migration import MigrationReason, PreAllocate, Reserved
from shared.messages.requests import ErrorCode
from shared.migration import recording as recording_module
from shared.migration.commands import BeginOut, Command, WindUp
from shared.migration.core import MigrationCore
from shared.migration.outgoing import MOVED
from shared.runtime.service import run_service
from shared.runtime.settings import InstanceSettings


class Options(msgspec.Struct, frozen=True):
    step_s: float
    num_host_merged: int
    log_path: str


class Driver:
    """The other end of the pipe. Events: tuples of a name and what belongs to it."""

    def __init__(self, connection: Connection, options: Options) -> None:
        self.options = options
        self.armed: deque[tuple[str, Fault]] = deque()
        """Trial and fault of migrations to come."""
        self.service: InstanceService | None = None
        self.transport: KvTransport | None = None
        self.network: CuttableNetwork | None = None
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, *event: Any) -> None:
        with self._lock:
            self._connection.send(event)

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def listen() -> None:
            while True:
                try:
                    order = self._connection.recv()
                except (EOFError, OSError):
                    os._exit(0)  # the driver is gone
                loop.call_soon_threadsafe(self._obey, *order)

        threading.Thread(target=listen, daemon=True).start()

    def _obey(self, order: str, *arguments: Any) -> None:
        if order == "arm":
            self.armed.append((arguments[0], arguments[1]))
        elif order == "disarm":
            self.armed = deque(armed for armed in self.armed if armed[0] != arguments[0])
        elif order == "cut" and self.network is not None:
            self.network.cut(*arguments)
        elif order == "mend" and self.network is not None:
            self.network.mend()
        elif order == "check":
            self.tell("checked", self._state())

    def _state(self) -> dict[str, Any]:
        """What is held of anything; all 0 where nothing goes on."""
        assert self.service is not None
        loop, migrations, transport = self.service._loop, self.service._migrations._service, self.transport
        wrong = ""
        with loop.locked() as engine:
            try:
                engine.check()
            except AssertionError as error:
                wrong = f"engine.check: {error!r}"
            host = engine.memory.host.pool
            held = {
                "requests": len(engine.all_held()),
                "merged": engine.pool.used_merged(),
                "host merged": 0 if host is None else host.used_merged(),
                "reservations": sum(1 for _ in engine.reservations),
                "pins": len(engine.outgoing.pinned),
                "awaited": len(engine.outgoing._awaited),
            }
            held["merged not free"] = engine.pool.num_merged - engine.load().free_merged
        held["transfers"] = 0 if transport is None else transport.num_active
        held["migrations out"] = 0 if migrations is None else migrations.core.num_migrating_out + len(migrations._out)
        held["migrations in"] = 0 if migrations is None else migrations.core.num_migrating_in + len(migrations._in)
        held["disowned"] = 0 if migrations is None else migrations.core.incoming.num_disowned
        gc.collect()
        now, heard_s = self.service._bus.now(), {} if migrations is None else migrations.core.holder._heard_s
        silences_s = {source_id: now - since_s for source_id, since_s in heard_s.items()}
        size = {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "tasks": len(asyncio.all_tasks()),
        }
        return {"held": held, "silences_s": silences_s, "size": size, "wrong": wrong, "failure": loop.failure}


_driver: Driver


def _tag(migration_id: str, trial: str, fault: Fault) -> str:
    return f"{migration_id}~{trial}~{msgspec.json.encode(fault).decode()}"


def read_tag(migration_id: str) -> tuple[str, Fault]:
    """Trial ("" for none) and fault."""
    _, _, rest = migration_id.partition("~")
    trial, _, fault = rest.partition("~")
    return (trial, msgspec.json.decode(fault, type=Fault)) if fault else ("", NO_FAULT)


class _MigrationFaults(FaultPoints):
    """Those of one migration; each happens once at this end."""

    def __init__(self, migration_id: str) -> None:
        super().__init__()
        self._id = migration_id
        self._steps = {step.point: step for step in read_tag(migration_id)[1].steps}
        self.refusal = self._steps.get(REFUSE)

    def has(self, point: str) -> bool:
        return point in self._steps

    async def at(self, point: str) -> None:
        if (step := self._steps.pop(point, None)) is None:
            return
        _driver.tell("hit", self._id, str(point), step.action)
        if step.action == NOTE:
            await asyncio.sleep(step.seconds)
        elif step.action == FaultAction.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            points = FaultPoints(f"{point}:{step.action}:{step.seconds}")
            await points.at(point)  # type: ignore[arg-type]


class _Core(MigrationCore):
    def _begin_one(self, order: Any, now: float) -> bool:
        # Without a drain, each migration is one that the driver asked for.
        if order.reason is MigrationReason.BALANCE and not _driver.armed:
            return False
        return super()._begin_one(order, now)


class _Service(MigrationService):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._by_migration: dict[str, _MigrationFaults] = {}

    def _new_id(self) -> str:
        trial, fault = _driver.armed.popleft() if _driver.armed else ("", NO_FAULT)
        return _tag(super()._new_id(), trial, fault)

    def _faults_of(self, migration_id: str) -> _MigrationFaults:
        faults = self._by_migration.get(migration_id)
        if faults is None:
            faults = self._by_migration[migration_id] = _MigrationFaults(migration_id)
        return faults

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, BeginOut):
            _driver.tell("began", command.migration_id, command.request.request_id, command.destination_id)
        super()._carry_out(command)

    async def _wind_up(self, out: Any, command: WindUp) -> None:
        await super()._wind_up(out, command)
        is_migrated = command.outcome == MOVED
        _driver.tell(
            "ended", command.migration_id, is_migrated, "" if is_migrated else command.outcome, command.num_stages
        )

    async def on_pre_allocate(self, query: PreAllocate) -> Reserved:
        step = self._faults_of(query.migration_id).refusal
        if step is not None and step.seconds == query.stage:
            _driver.tell("hit", query.migration_id, REFUSE, "fail")
            raise ServiceError.of(ErrorCode.OVERLOADED, "no room, as the fault says")
        return await super().on_pre_allocate(query)


class _Instance(InstanceService):
    async def start(self) -> None:
        _driver.service = self
        _driver.start()
        await super().start()
        _driver.tell("started", self.incarnation)


class _CostModels:
    """Those of all models, which nobody needs to measure."""

    def __init__(self, loop: EngineLoop, *_: Any, **__: Any) -> None:
        self._loop = loop

    async def provide(self, spec: ModelSpec, *_: Any, **__: Any) -> CostModel:
        cost = CostModel(
            fixed_s=_driver.options.step_s,
            prefill_token_s=1 / PREFILL_TOKENS_S,
            prefill_attention_s=0.0,
            decode_s=1e-5,
            decode_context_s=0.0,
        )
        self._loop.apply(SetCostModel(spec.name, cost))
        return cost


def _make_executor(device: str, num_merged: int, *_: Any, **__: Any) -> ChaosExecutor:
    options = _driver.options
    return ChaosExecutor(num_merged, options.num_host_merged, options.step_s, lambda what: _driver.tell("wrong", what))


async def _open_transport(settings: InstanceSettings, *_: Any, **__: Any) -> KvTransport:
    _driver.network = CuttableNetwork(UcxNetwork("127.0.0.1"))
    limits = TransportLimits(chunk_bytes=1024, drain_s=0.3, rate_fraction=None)
    transport = KvTransport(_driver.network, limits)
    await transport.open()
    if settings.migration_rate_share < 0.1:
        # By its estimates the source copies slowly, so that a few blocks are worth a stage.
        transport.bandwidth_bytes_s = lambda address: None  # type: ignore[method-assign]
    _driver.transport = transport
    return transport


class _Pool(KvPool):
    def scatter(self, *arguments: Any) -> int:
        if _driver.network is not None and _driver.network.is_slow:
            time.sleep(SLOW_S)
        return super().scatter(*arguments)


def run(settings: InstanceSettings, options: Options, connection: Connection) -> None:
    """The process's main function."""
    global _driver
    log = os.open(options.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.setswitchinterval(0.001)
    _driver = Driver(connection, options)
    for module, name, stand_in in (
        (executor_module, "Executor", _make_executor),
        (instance_module, "InstanceService", _Instance),
        (costs_module, "CostModels", _CostModels),
        (instance_main, "open_transport", _open_transport),
        (instance_main, "host_pool_merged", lambda *_: options.num_host_merged),
        (recording_module, "MigrationCore", _Core),
        (moves_module, "MigrationService", _Service),
        (transport_module, "KvPool", _Pool),
    ):
        assert hasattr(module, name)
        setattr(module, name, stand_in)
    run_service(lambda stop: instance_main.main(stop, settings), settings)
