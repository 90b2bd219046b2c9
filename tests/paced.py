"""Workers and instances whose steps take a while however fast the engine is: a request of so many tokens lasts for so long
at least, and costs the machine nothing meanwhile. All else is as it is.

`python -m tests.paced worker` in the place of `services.worker`, `python -m tests.paced instance` in that of an instance.
What a step takes at least: TIDEWAY_TEST_STEP_S, in seconds.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from functools import partial

from services.worker import __main__ as worker
from services.worker.instance import engine_loop

STEP_S = "TIDEWAY_TEST_STEP_S"
MODULE = "tests.paced"


class PacedLoop(engine_loop.EngineLoop):
    step_s = float(os.environ.get(STEP_S, "0"))

    def _collect(self) -> None:
        time.sleep(self.step_s)
        super()._collect()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker.NodeAgent = partial(worker.NodeAgent, command=(sys.executable, "-m", MODULE, "instance"))
        worker.main()
    else:
        engine_loop.EngineLoop = PacedLoop
        runpy.run_module("services.worker.instance.main", run_name="__main__", alter_sys=True)
