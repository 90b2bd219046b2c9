"""Loop, engine and executor together, real models in a pool that is too small: offline steps are interrupted in the middle
by online arrivals, sequences are preempted, checkpointed and restored, and every request makes what transformers makes."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest

from services.worker.executor.executor import Executor
from services.worker.instance.building import build_engine
from services.worker.instance.engine_loop import EngineLoop
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from shared.costs.model import CostModel
from shared.engine.calls import AddModel, SetCostModel, Submit
from shared.engine.driver import StepStats
from shared.engine.requests import Ended, Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import (
    GenerationRequest,
    RequestClass,
    SamplingParams,
    pack_tokens,
    unpack_tokens,
)
from shared.runtime.settings import InstanceSettings
from tests.shared.costs import costs
from tests.worker.checkpoints import prompt_of, reference_outputs, write_checkpoint

NUM_OFFLINE, NUM_ONLINE = 8, 8
OFFLINE_TOKENS, ONLINE_TOKENS = 60, 8
VARIANTS = ("llama3", "opt")


SLOW = costs(0.05, 0.01, decode_s=0.005, num_layers=3, checkpoint_block_s=0.001, restore_block_s=0.001)
"""Predicts steps long enough to be interrupted, and to be gone on with in parts."""


def prompt_length(number: int) -> int:
    return 40 + 9 * number


class Scene:
    def __init__(self, paths: list[Path], interruption: str, host_share: float, cost_model: CostModel | None) -> None:
        probe = Executor("cpu", 1, 1 << 20, 1)
        prepared = [probe.prepare_model(ModelSpec(path.name, str(path))) for path in paths]
        block_sizes = [model.model.kv_shape(model.block_size).block_bytes for model in prepared]
        merged_bytes = math.lcm(*block_sizes)
        num_merged = 7 * max(block_sizes) // merged_bytes
        num_host_merged = int(num_merged * host_share)
        settings = InstanceSettings(
            max_running=8,
            token_budget=64,
            interruption=interruption,
            checkpoint_start=0.2,
            steps_in_flight=1 if cost_model is None else 2,
            profile="off",
        )
        self.executor = Executor("cpu", num_merged, merged_bytes, 12, num_host_merged=num_host_merged)
        self.engine = build_engine(settings, num_merged, "cpu", num_host_merged)
        for model in prepared:
            self.engine.apply(AddModel(self.executor.add_model(model)), 0.0)
            self._interfere(model.model)
            if cost_model is not None:
                self.engine.apply(SetCostModel(model.name, cost_model), 0.0)
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.num_suspended_steps = 0
        self._num_arrived = self._num_layers = 0
        self._changed = threading.Event()
        self.loop = EngineLoop(self.engine, self.executor, time.monotonic, self._on_effects)

    def _on_effects(self, effects: list[Output | Ended], stats: StepStats | None) -> None:
        for effect in effects:
            if isinstance(effect, Ended):
                self.ended[effect.request.request_id] = effect
                continue
            for entry in effect.entries:
                self.outputs.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))
        self.num_suspended_steps += stats is not None and stats.is_suspended
        self._changed.set()

    def _interfere(self, model: DecoderModel) -> None:
        """An online request arrives after each 17 ranges of layers: in all places of a step, in turn."""
        original = model.run_layers

        def run_layers(state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
            original(state, start, stop, batch)
            self._num_layers += 1
            if self._num_layers % 17 == 0 and self._num_arrived < NUM_ONLINE:
                self._num_arrived += 1
                self.submit("online", self._num_arrived - 1)

        model.run_layers = run_layers  # type: ignore[method-assign]

    def submit(self, kind: str, number: int) -> None:
        num_tokens = ONLINE_TOKENS if kind == "online" else OFFLINE_TOKENS
        request = GenerationRequest(
            request_id=f"{kind}-{number}", gateway_id="gateway", model=VARIANTS[number % 2],
            prompt=pack_tokens(prompt_of(prompt_length(number))), sampling=SamplingParams(max_tokens=num_tokens,
            temperature=0.0), request_class=RequestClass(kind),
        )  # fmt: skip
        assert self.loop.apply(Submit(request)) is None

    def run(self) -> None:
        for number in range(NUM_OFFLINE):
            self.submit("offline", number)
        self.loop.start()
        deadline = time.monotonic() + 20
        while len(self.ended) < NUM_OFFLINE + NUM_ONLINE and not self.loop.failure:
            assert self._changed.wait(deadline - time.monotonic()), (sorted(self.ended), self._num_layers)
            self._changed.clear()
        with self.loop.locked() as engine:
            engine.check()
        self.loop.stop(5)
        self.executor.close()


@pytest.mark.parametrize(
    ("interruption", "host_share", "cost_model"),
    [
        ("suspend", 2.0, None),
        ("suspend", 0.3, None),
        ("discard", 2.0, None),
        ("off", 0, None),
        ("suspend", 2.0, SLOW),
    ],
)
def test_every_request_makes_its_tokens(
    tmp_path: Path, interruption: str, host_share: float, cost_model: CostModel | None
) -> None:
    paths = [write_checkpoint(tmp_path, variant) for variant in VARIANTS]
    scene = Scene(paths, interruption, host_share, cost_model)
    scene.run()
    assert not scene.loop.failure
    counters = scene.engine.counters
    # With objectives to keep, offline sequences come so late that the pool may do for all.
    is_crowded = cost_model is None
    assert counters.num_preemptions > 0 or not is_crowded
    if interruption == "off":
        assert scene.num_suspended_steps == counters.steps_suspended == 0
    else:
        # A step that goes on in parts stops at the end of each as well.
        assert scene.num_suspended_steps >= counters.steps_suspended >= 2
        assert (counters.steps_resumed > 0) == (interruption == "suspend")
        assert not scene.executor._suspended
    assert bool(counters.checkpointed_blocks) == bool(host_share)
    if host_share >= 1 and is_crowded:
        assert counters.restored_blocks, "what does not fit on the device comes back from host memory"
    for index, path in enumerate(paths):
        lengths = [prompt_length(number) for number in range(index, NUM_OFFLINE, 2)]
        expected = reference_outputs(path, [prompt_of(length) for length in lengths], OFFLINE_TOKENS)
        for number, tokens in zip(range(index, NUM_OFFLINE, 2), expected, strict=True):
            assert scene.outputs[f"offline-{number}"] == tokens
            assert scene.outputs[f"online-{number}"] == tokens[:ONLINE_TOKENS]
