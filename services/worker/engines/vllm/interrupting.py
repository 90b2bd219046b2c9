"""Steps of offline work that end at a layer's start when an online request arrives, in vLLM's worker process; no file of
vLLM is changed.

    adapter --number of the last online request--> memory --read at each layer's start--> worker
    scheduler --`Watch` beside the step--> worker --`Interrupted` instead of the step's output--> scheduler

The step's result is lost, as in ConServe (section 4.3): its sequences compute the same tokens again. vLLM's caches are as
they were before the step but for KV at places that are written again. Eager steps on CPU only: a compiled model has no
layers that could be left, and on another device the layers are not computed when they are called.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shared.engines.harvest import is_given_up

WATCH = "tideway_watch"
"""Attribute of vLLM's `SchedulerOutput` with the `Watch` of an interruptible step."""
INTERRUPTED = "tideway_interrupted"
"""Attribute of vLLM's `ModelRunnerOutput` of an interrupted step: the number that interrupted it."""
NUMBER_BYTES = 8


class Watch(NamedTuple):
    """What a step of offline work does not wait for."""

    seen: int
    """Online requests with greater numbers interrupt it."""
    patience_s: float
    """Time that it may go on all the same."""


class Interrupted(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by online request {number}")
        self.number = number


class ArrivalNumber:
    """The number of the online request that was sent last, in memory that the adapter writes and the worker reads."""

    def __init__(self, file: int) -> None:
        self._numbers = memoryview(mmap.mmap(file, NUMBER_BYTES)).cast("Q")

    @classmethod
    def at(cls, path: str) -> ArrivalNumber:
        file = os.open(path, os.O_RDWR)
        try:
            return cls(file)
        finally:
            os.close(file)

    def get(self) -> int:
        return self._numbers[0]

    def set(self, number: int) -> None:
        self._numbers[0] = number


class LayerWatch:
    """Looks at the start of each of `num_layers` layers whether the step is to go on. Raises `Interrupted` if not."""

    def __init__(self, number: ArrivalNumber, num_layers: int) -> None:
        self._number = number
        self._num_layers = num_layers
        self._watch: Watch | None = None
        self._num_done = 0
        self._began_s = 0.0

    def begin(self, watch: Watch | None) -> None:
        """A step begins; None: it is not interruptible."""
        self._watch, self._num_done = watch, 0

    def look(self, *_: Any) -> None:
        if self._watch is None:
            return
        now, done = time.monotonic(), self._num_done
        if not done:
            self._began_s = now
        self._num_done += 1
        number = self._number.get()
        if number > self._watch.seen and is_given_up(
            now - self._began_s, done, self._num_layers, self._watch.patience_s
        ):
            raise Interrupted(number)


class InterruptibleWorker:
    """Mixed into vLLM's worker, which has `model_runner`."""

    model_runner: Any
    tideway_arrivals: ArrivalNumber

    def tideway_watch(self) -> str:
        """Makes steps interruptible; returns the path of the `ArrivalNumber`. Raises `ValueError`."""
        runner = self.model_runner
        layers = layers_of(runner.model)
        file = os.memfd_create("tideway-arrivals")
        os.ftruncate(file, NUMBER_BYTES)
        self.tideway_arrivals = ArrivalNumber(file)
        watch = LayerWatch(self.tideway_arrivals, len(layers))
        for layer in layers:
            layer.register_forward_pre_hook(watch.look)
        runner.execute_model = interruptible(runner.execute_model, watch)
        return f"/proc/{os.getpid()}/fd/{file}"


def layers_of(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The model's decoder layers: its longest list of modules of one class. Raises `ValueError` without one."""
    lists = [list(one) for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    equal = [layers for layers in lists if len({*map(type, layers)}) == 1]
    if not equal:
        raise ValueError("the model has no list of equal layers")
    return max(equal, key=len)


def interruptible(execute: Any, watch: LayerWatch) -> Any:
    """`execute_model` of vLLM's model runner, which answers an interrupted step with an empty output that says so."""

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        told = getattr(scheduler_output, WATCH, None)
        watch.begin(None if told is None else Watch(*told))
        try:
            return execute(scheduler_output, *args, **kwargs)
        except Interrupted as interrupted:
            return interrupted_output(interrupted.number)
        finally:
            watch.begin(None)

    return execute_model


def interrupted_output(number: int) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    setattr(output, INTERRUPTED, number)
    return output


def watch_steps(core: Any) -> str:
    """Makes offline steps of vLLM's `EngineCore` interruptible; returns the path of the `ArrivalNumber`. Raises
    `ValueError`."""
    from vllm.config import CompilationMode

    config = core.vllm_config
    if config.device_config.device_type != "cpu":
        raise ValueError("the model is not on a CPU")
    if config.parallel_config.world_size != 1:
        raise ValueError("the model is on several devices")
    if config.compilation_config.mode != CompilationMode.NONE:
        raise ValueError("the model is compiled (--enforce-eager is not set)")
    if config.speculative_config is not None or config.scheduler_config.async_scheduling:
        raise ValueError("steps begin before the one before has ended, or speculate")
    if config.model_config.is_multimodal_model:
        raise ValueError("the model takes more than text")
    if len(core.scheduler.kv_cache_manager.coordinator.single_type_managers) != 1:
        raise ValueError("the model has several kinds of KV caches")
    (path,) = core.model_executor.collective_rpc("tideway_watch")
    core.scheduler.tideway_rewinding = Rewinding(core.scheduler)
    return str(path)


class Rewinding:
    """Takes back what vLLM's scheduler noted of an interrupted step. `scheduler`: vLLM's, with one group of KV caches."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._blocks: dict[str, list[int]] = {}
        """By request: the blocks in which the step is to write KV."""

    def note(self, counts: dict[str, int]) -> None:
        """A step begins. `counts`: scheduled tokens by request."""
        scheduler = self._scheduler
        self._blocks = {
            key: scheduler.kv_cache_manager.get_block_ids(key)[0][
                (scheduler.requests[key].num_computed_tokens - count) // scheduler.block_size :
            ]
            for key, count in counts.items()
        }

    def rewind(self, counts: dict[str, int]) -> None:
        """The step was lost. Blocks without KV leave the prefix cache, also those of requests that have ended since, and
        whoever was given them as cached computes their tokens."""
        scheduler, size = self._scheduler, self._scheduler.block_size
        manager = scheduler.kv_cache_manager
        without = {block for blocks in self._blocks.values() for block in blocks}
        for key, count in counts.items():
            if (request := scheduler.requests.get(key)) is None:
                continue
            request.num_in_flight_tokens -= count
            request.num_computed_tokens -= count
            before = manager.get_block_ids(key)[0][: request.num_computed_tokens // size]
            if lost := [at for at, block in enumerate(before) if block in without]:
                request.num_computed_tokens = lost[0] * size
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens - 1
            cached = manager.coordinator.single_type_managers[0].num_cached_block
            cached[key] = min(cached.get(key, 0), request.num_computed_tokens // size)
        manager.evict_blocks(without)
