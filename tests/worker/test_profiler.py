"""A profile finds the step times of an executor, in pieces if need be, and an instance's engine gets a cost model without
a request ever waiting for more than one measured step."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
import torch

from services.worker.executor.executor import Executor
from services.worker.executor.profiled_steps import BRIEF, FULL, Extent
from services.worker.executor.profiler import ProfiledModel, ProfileError, Profiling, profile
from services.worker.instance.cost_models import CostModels, CostModelStore, profiled_model
from services.worker.instance.engine_loop import EngineLoop
from services.worker.instance.models import InstanceModels
from shared.bus.interface import BusError
from shared.costs.model import CostModel, CostSource, shape_of
from shared.engine import recording
from shared.engine.calls import AddModel, RemoveModel, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape, StepPlan, StepResult
from shared.engine.requests import Ended
from shared.messages.catalogue import COST_MODELS
from shared.messages.channels import bucket_key
from shared.messages.cluster import ModelSpec
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.migration.incoming import Intake
from tests.memory_bus import MemoryHub
from tests.shared.engine.fake_executor import request
from tests.worker.checkpoints import write_checkpoint

TRUE = CostModel(
    fixed_s=2e-3, prefill_token_s=2e-5, prefill_attention_s=4e-8, decode_s=1e-4, decode_context_s=4e-7, mixed_s=8e-4,
    prefill_s=3e-4,
)  # fmt: skip
NUM_LAYERS = 32
TINY = Extent((1, 4), (16, 64), (8, 32), (0, 64), 3, 3, time_s=2.0, max_step_s=1.0, num_repeats=3)


class SimulatedDevice:
    """Takes the time that `TRUE` says, now and then much longer; checks what it is given."""

    device = torch.device("cpu")
    launching_computes = False

    def __init__(self, num_rows: int, blocks: range, safepoint_s: float = 0.0, speed: float = 1.0) -> None:
        self.num_rows, self.blocks, self.safepoint_s, self.speed = num_rows, blocks, safepoint_s, speed
        self.now_s = 0.0
        self.num_steps = 0
        self.layers_per_safepoint = 0
        self._blocks: dict[int, list[int]] = {}
        self._draw = random.Random(1)

    def clock(self) -> float:
        return self.now_s

    def set_layers_per_safepoint(self, name: str, num_layers: int) -> None:
        self.layers_per_safepoint = num_layers

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        for new in plan.new_sequences:
            self._blocks[new.row] = new.blocks
        used = [block for new in plan.new_sequences for block in new.blocks]
        assert len(used) == len(set(used)) and all(block in self.blocks for block in used)
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            assert row < self.num_rows and start + count <= 32 * len(self._blocks[row])
        seconds = TRUE.predict(shape_of(plan.starts, plan.counts)) * self._draw.uniform(0.98, 1.02)
        if plan.is_interruptible:
            seconds += self.safepoint_s * math.ceil(NUM_LAYERS / self.layers_per_safepoint)
        self.now_s += seconds / self.speed * (20 if self._draw.random() < 0.02 else 1)
        return StepResult(plan.step_id, [0] * len(plan.rows))


def model_of(max_model_len: int = 4096) -> ProfiledModel:
    return ProfiledModel(ModelShape("m", 32, 4, max_model_len, 1000), NUM_LAYERS, 4096, "key")


def profiling_on(device: SimulatedDevice, extent: Extent, max_model_len: int = 4096) -> Profiling:
    return Profiling(device, model_of(max_model_len), len(device.blocks), 512, extent, clock=device.clock)


@pytest.mark.parametrize(("extent", "num_rows"), [(BRIEF, 68), (FULL, 260)])
def test_a_profile_finds_the_step_times(extent: Extent, num_rows: int) -> None:
    device = SimulatedDevice(num_rows, range(100, 5000))
    profiling = profiling_on(device, extent)
    assert profiling.run(device.blocks[: profiling.num_blocks])
    measured = profiling.result()
    assert not {work for work, _ in measured.fitted} & {work for work, _ in measured.held_out}
    assert len(measured.fitted) >= 25 and len(measured.held_out) >= 6
    cost_model = measured.cost_model
    assert cost_model.median_error < 0.03 and cost_model.p99_error < 0.15
    assert cost_model.num_layers == NUM_LAYERS
    assert device.now_s < 1.3 * extent.time_s


@pytest.mark.parametrize(("safepoint_s", "layers"), [(0.0, 1), (5e-6, 4), (1e-3, NUM_LAYERS)])
def test_safepoints_are_as_dense_as_a_hundredth_of_the_step_allows(safepoint_s: float, layers: int) -> None:
    device = SimulatedDevice(8, range(200), safepoint_s)
    profiling = profiling_on(device, FULL)
    profiling.run(device.blocks)
    cost_model = profiling.result().cost_model
    assert cost_model.layers_per_safepoint == device.layers_per_safepoint
    assert layers / 4 <= cost_model.layers_per_safepoint <= layers * 4
    assert cost_model.safepoint_s == pytest.approx(safepoint_s, abs=5e-6)


def test_a_slow_device_is_measured_by_the_essential_steps_alone() -> None:
    device = SimulatedDevice(68, range(2000), speed=0.005)
    profiling = profiling_on(device, BRIEF)
    assert profiling.run(device.blocks)
    assert 6 <= len(profiling.result().fitted) <= 14


def test_small_rooms_are_kept_to() -> None:
    device = SimulatedDevice(2, range(6))
    profiling = profiling_on(device, BRIEF, max_model_len=80)
    assert profiling.run(device.blocks)
    assert all(max(work.lengths) <= 80 for work, _ in profiling.result().fitted)
    nothing = SimulatedDevice(1, range(0))
    empty = profiling_on(nothing, BRIEF)
    assert empty.run([])
    with pytest.raises(ProfileError, match="no step fits"):
        empty.result()


def test_a_profile_in_pieces_is_a_whole_one() -> None:
    """It is stopped after each step, and goes on with other blocks."""
    device = SimulatedDevice(68, range(10_000))
    profiling = profiling_on(device, BRIEF)
    num_pieces = 0
    while True:
        first, steps_before = num_pieces % 7 * 1000, device.num_steps
        if profiling.run(range(first, first + profiling.num_blocks), lambda: False):
            break
        # the one that makes the rows known, and one that is measured; two for safepoints
        assert device.num_steps - steps_before <= 3
        num_pieces += 1
    assert num_pieces > 50
    assert profiling.result().cost_model.median_error < 0.03


# ------------------------------------------------------------------------------------------- the real executor


class CountingExecutor(Executor):
    """`on_profile(n)` is called before the n-th step of a profile."""

    num_profiled = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_profiled += 1
        self.on_profile(self.num_profiled)
        return super().execute(plan)

    @staticmethod
    def on_profile(_number: int) -> None: ...


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama")


@pytest.fixture
def scene(checkpoint: Path) -> Iterator[SimpleNamespace]:
    """An instance's engine thread with one model, recorded."""
    spec = ModelSpec("m", str(checkpoint))
    executor = CountingExecutor("cpu", 24, 1 << 18, 12)
    written: list[bytes] = []
    engine = recording.recorded(
        recording.Configuration(
            num_merged=24, num_rows=8, ordering="doubling_budget", token_budget=64, steps_in_flight=1
        ),
        written.append,
    )
    shape = engine.apply(AddModel(executor.add_model(executor.prepare_model(spec))), 0.0)
    ended: list[Ended] = []
    loop = EngineLoop(
        engine, executor, time.monotonic, lambda effects, _: ended.extend(e for e in effects if isinstance(e, Ended))
    )
    loop.start()
    yield SimpleNamespace(
        spec=spec, executor=executor, engine=engine, shape=shape, loop=loop, ended=ended, written=written
    )
    loop.stop(10)
    executor.close()
    assert not loop.failure


def cost_models(scene: SimpleNamespace, store: CostModelStore) -> CostModels:
    return CostModels(scene.loop, scene.executor, store, 64, extent=TINY)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def engine_cost(scene: SimpleNamespace) -> CostModel | None:
    cost_model: CostModel | None = scene.engine.memory.queues["m"].cost_model
    return cost_model


def test_a_real_executor_is_measured_within_its_blocks(checkpoint: Path) -> None:
    executor = Executor("cpu", 12, 1 << 18, 8)
    shape = executor.add_model(executor.prepare_model(ModelSpec("m", str(checkpoint))))
    model = profiled_model(ModelSpec("m", str(checkpoint)), shape, torch.device("cpu"))
    assert model.num_layers == 3 and "float32" in model.key and model.key.endswith("/tp1")
    executor._store.slab.fill_(0x11)
    mine = range(4 * shape.blocks_per_merged, 8 * shape.blocks_per_merged)
    num_told = 0

    def on_step() -> None:
        nonlocal num_told
        num_told += 1

    measured = profile(executor, model, mine, 64, TINY, on_step=on_step)
    merged = executor._store.slab.view(13, -1)
    assert (merged[:4] == 0x11).all() and (merged[8:] == 0x11).all(), "blocks of others were written to"
    assert num_told > len(measured.fitted) > 8
    cost_model = measured.cost_model
    assert cost_model.checkpoint_block_s > 0 and cost_model.restore_block_s > 0
    assert cost_model.fixed_s > 0 and 0 < cost_model.median_error < 1
    assert cost_model.max_prefill_tokens(1.0, shape_of([], []), 0) > 64
    executor.close()


async def test_the_first_profiles_and_the_next_load(
    scene: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = MemoryHub()
    store = CostModelStore(hub.connect("one"), tmp_path)
    cost_model = await cost_models(scene, store).provide(scene.spec, scene.shape)
    assert cost_model is not None and engine_cost(scene) == cost_model
    num_profiled = scene.executor.num_profiled
    assert num_profiled > 30 and scene.engine.pool.num_free_merged() == 24

    key = profiled_model(scene.spec, scene.shape, torch.device("cpu")).key
    bucket = await hub.connect("two").key_value(COST_MODELS)
    entry = await bucket.get(bucket_key(key))
    assert entry is not None and entry.value.key == key
    # either place is enough
    fresh = MemoryHub()
    for other in (
        CostModelStore(hub.connect("three")),
        CostModelStore(None, tmp_path),
        CostModelStore(fresh.connect("four"), tmp_path),
    ):
        assert await cost_models(scene, other).provide(scene.spec, scene.shape) == cost_model
        assert scene.engine.cost_models()["m"].source == CostSource.STORED
    assert scene.executor.num_profiled == num_profiled
    told = await (await fresh.connect("five").key_value(COST_MODELS)).get(bucket_key(key))
    assert told is not None, "a bus that has lost it is told again"
    assert msgspec.json.decode(told.value.cost_model, type=CostModel) == cost_model
    assert 0 < told.value.profiled_s <= time.time()
    newer = msgspec.structs.replace(entry.value, profiled_s=1e12)
    await bucket.put(bucket_key(key), newer)
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "get", AsyncMock(side_effect=BusError(ErrorInfo(ErrorCode.UNAVAILABLE, "away"))))
        assert await CostModelStore(hub.connect("six"), tmp_path).get(key) == cost_model
    kept = await bucket.get(bucket_key(key))
    assert kept is not None and kept.value == newer, "what cannot be read is not overwritten"

    await until(lambda: not scene.loop.apply(Submit(request("r", [5, 6, 7], 20, model="m"))) and scene.ended)
    scene.loop.stop(10)
    recording.replay(b"".join(scene.written))[0].check()


async def test_a_request_in_the_middle_ends_the_attempt_and_not_the_profile(scene: SimpleNamespace) -> None:
    def on_profile(number: int) -> None:
        assert not scene.loop.ask(Engine.num_held)
        if number in (9, 31):
            scene.loop.apply(Submit(request(f"r{number}", [5, 6, 7], 30, model="m")))

    scene.executor.on_profile = on_profile
    cost_model = await cost_models(scene, CostModelStore(None)).provide(scene.spec, scene.shape)
    assert cost_model is not None
    assert {ended.request.request_id for ended in scene.ended} == {"r9", "r31"}
    scene.loop.stop(10)
    recording.replay(b"".join(scene.written))[0].check()


async def test_nothing_is_measured_while_something_disturbs(scene: SimpleNamespace) -> None:
    is_quiet = False
    task = asyncio.create_task(
        cost_models(scene, CostModelStore(None)).provide(scene.spec, scene.shape, lambda: is_quiet)
    )
    await asyncio.sleep(0.2)
    assert scene.executor.num_profiled == 0
    is_quiet = True
    assert await task is not None


async def test_a_model_that_goes_away_needs_no_cost_model(scene: SimpleNamespace) -> None:
    def remove() -> None:
        with scene.loop.locked() as engine:
            assert engine.apply(RemoveModel("m"), time.monotonic())
        scene.executor.remove_model("m")

    await asyncio.wrap_future(scene.loop.between_steps(remove))
    assert await cost_models(scene, CostModelStore(None)).provide(scene.spec, scene.shape) is None
    assert scene.executor.num_profiled == 0


async def test_cancelling_frees_the_engine(scene: SimpleNamespace) -> None:
    task = asyncio.create_task(cost_models(scene, CostModelStore(None)).provide(scene.spec, scene.shape))
    await until(lambda: scene.executor.num_profiled > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wrap_future(scene.loop.between_steps(lambda: None))
    num_profiled = scene.executor.num_profiled
    assert scene.engine.pool.num_free_merged() == 24
    await asyncio.wrap_future(scene.loop.between_steps(lambda: None))
    assert scene.executor.num_profiled == num_profiled


async def test_a_profile_that_fails_leaves_the_model_serving(scene: SimpleNamespace) -> None:
    def fail(number: int) -> None:
        if number == 5:
            raise ProfileError("the device is busy")

    scene.executor.on_profile = fail
    assert await cost_models(scene, CostModelStore(None)).provide(scene.spec, scene.shape) is None
    assert scene.engine.pool.num_free_merged() == 24
    scene.loop.apply(Submit(request("r", [5, 6, 7], 5, model="m")))
    await until(lambda: scene.ended)


async def test_a_model_that_becomes_ready_gets_its_cost_model(scene: SimpleNamespace) -> None:
    """While another is being prepared nothing is measured."""
    provided = cost_models(scene, CostModelStore(None))
    quiet: list[bool] = []

    async def on_ready(spec: ModelSpec, shape: ModelShape, is_quiet: Callable[[], bool]) -> None:
        quiet.append(is_quiet())
        assert await provided.provide(spec, shape, is_quiet) is not None

    metrics: Any = SimpleNamespace(set_model=lambda *_: None)
    models = InstanceModels(scene.loop, scene.executor, metrics, Intake("i"), lambda: None, on_ready)
    models.begin_load(ModelSpec("second", scene.spec.source))
    await until(lambda: models.any_ready)
    await until(lambda: scene.engine.cost_models()["second"].source == CostSource.PROFILED)
    assert quiet == [True]
    await models.stop()


async def test_what_cannot_be_read_is_measured_again(tmp_path: Path) -> None:
    store = CostModelStore(None, tmp_path)
    assert await store.get("a/b") is None
    file = tmp_path.joinpath("a", "b.json")
    assert await store.put("a/b", TRUE) == [str(file)]
    assert await store.get("a/b") == TRUE
    file.write_text("no JSON")
    assert await store.get("a/b") is None
    tmp_path.joinpath("a", "c.json").mkdir()
    assert await store.put("a/c", TRUE) == []
