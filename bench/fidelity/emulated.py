"""Instances whose steps take as long as those of another kind of device, a GPU say: tokens are computed by small models on
this machine's CPU, and a step ends when one of real models on that device would, by their cost models. All else is as it is.
So what a simulation says of everything but step times can be held against the live system without the noise of a CPU that
models, services and clients share.

`python -m bench.fidelity.emulated worker` in the place of `services.worker`, `python -m bench.fidelity.emulated instance` in
that of an instance. Cost models by the names of the models: a JSON file that TIDEWAY_BENCH_STEP_TIMES names.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec

from services.worker import __main__ as worker
from shared.cost_model import CostModel
from shared.engine.plan import StepPlan, StepResult

STEP_TIMES = "TIDEWAY_BENCH_STEP_TIMES"
MODULE = "bench.fidelity.emulated"


def _run_instance() -> None:
    # A device that is waited for leaves the cores to others.
    os.environ |= {"OMP_WAIT_POLICY": "passive"}
    from services.worker import executor, profiler

    costs = msgspec.json.decode(Path(os.environ[STEP_TIMES]).read_bytes(), type=dict[str, CostModel])

    class EmulatedExecutor(executor.Executor):
        ends_s: ClassVar[deque[float]] = deque()
        """Of the steps in flight, in a process's only executor."""

        def launch(self, plan: StepPlan) -> None:
            begins_s = max(time.perf_counter(), self.ends_s[-1] if self.ends_s else 0.0)
            self.ends_s.append(begins_s + costs[plan.model].predict(plan.shape))
            super().launch(plan)

        def collect(self) -> StepResult:
            result = super().collect()
            time.sleep(max(0.0, self.ends_s.popleft() - time.perf_counter()))
            return result

    executor.Executor = EmulatedExecutor  # type: ignore[misc]
    profiler.step_clock = lambda device: time.perf_counter
    runpy.run_module("services.worker.instance_main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker.NodeAgent = partial(  # type: ignore[misc, assignment]
            worker.NodeAgent, command=(sys.executable, "-m", MODULE, "instance")
        )
        worker.main()
    else:
        _run_instance()
