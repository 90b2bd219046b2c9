"""Instances whose steps take as long as those of real models on another kind of device, a GPU say, while small models
compute the tokens on this machine's CPU. All else is as it is: so the system can be looked at without the noise of a CPU
that models, services and clients share. A step that is interrupted leaves the device within two safepoints, as on a GPU.

`python -m bench.emulated worker` in the place of `services.worker`, `python -m bench.emulated instance` in that of an
instance. Cost models by the names of the models: a JSON file that TIDEWAY_BENCH_STEP_TIMES names.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from services.worker import __main__ as worker
from shared.costs.model import CostModel
from shared.engine.plan import StepPlan, StepResult
from shared.placement.facts import SHAPES
from shared.placement.hardware import HARDWARE, cost_model

STEP_TIMES = "TIDEWAY_BENCH_STEP_TIMES"
MODULE = "bench.emulated"
WORKER = (MODULE, "worker")


def tiny(number: int, **others: int) -> dict[str, int]:
    """A shape of the models that compute the tokens, as many layers as a step has safepoints. Each `number` has its own, as
    step times are known by the shape."""
    return others | {
        "hidden_size": 64, "intermediate_size": 128 + 32 * number, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip


def environment(folder: Path, device: str, shapes: Mapping[str, str]) -> dict[str, str]:
    """Environment that makes steps of models take what those of `shapes` (model -> name in `placement.facts`) do on a
    device by its name in `placement.hardware`."""
    costs = {name: cost_model(HARDWARE[device], SHAPES[shape]) for name, shape in shapes.items()}
    path = folder / "step_times.json"
    path.write_bytes(msgspec.json.encode(costs))
    return {STEP_TIMES: str(path)}


class Stream:
    """What is computed on the device, one after the other. Seconds of the performance counter."""

    def __init__(self) -> None:
        self.done_s = 0.0
        """Time at which all of it is done."""

    def begin(self) -> None:
        self.done_s = max(self.done_s, time.perf_counter())

    def add(self, seconds: float) -> None:
        self.done_s += seconds


class Mark:
    """At a safepoint, as a CUDA event: the device has done what was launched before."""

    def __init__(self, launched: Callable[[], float]) -> None:
        """`launched`: when what has been launched will be done."""
        self._launched = launched
        self._done_s = 0.0

    def record(self) -> None:
        self._done_s = self._launched()

    def synchronize(self) -> None:
        _wait_until(self._done_s)


def _wait_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.perf_counter()))


def _run_instance() -> None:
    # A device that is waited for leaves the cores to others.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    from services.worker.executor import executor, profiler
    from services.worker.executor.suspension import Safepoints

    costs = msgspec.json.decode(Path(os.environ[STEP_TIMES]).read_bytes(), type=dict[str, CostModel])

    class EmulatedExecutor(executor.Executor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._stream = Stream()
            self._interval_s = 0.0
            """Time of the launched step between two safepoints."""
            self._done_s: deque[float] = deque()
            """Time at which each step in flight is."""
            self._safepoints = Safepoints(lambda: Mark(self._launched_interval))

        def _launched_interval(self) -> float:
            self._stream.add(self._interval_s)
            return self._stream.done_s

        def launch(self, plan: StepPlan) -> None:
            step_s, loaded = costs[plan.model].predict(plan.shape), self._models[plan.model]
            begun = self._suspended.get(plan.step_id)
            self._interval_s = step_s * loaded.layers_per_safepoint / loaded.model.num_layers
            self._stream.begin()
            super().launch(plan)
            if not plan.is_interruptible:
                self._stream.add(step_s * (1.0 - (begun.share if begun is not None else 0.0)))
            self._done_s.append(self._stream.done_s)

        def collect(self) -> StepResult:
            result = super().collect()
            _wait_until(self._done_s.popleft())
            return result

    executor.Executor = EmulatedExecutor  # type: ignore[misc]
    profiler.step_clock = lambda executor: time.perf_counter
    runpy.run_module("services.worker.instance.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker.NodeAgent = partial(  # type: ignore[misc, assignment]
            worker.NodeAgent, command=(sys.executable, "-m", MODULE, "instance")
        )
        worker.main()
    else:
        _run_instance()
