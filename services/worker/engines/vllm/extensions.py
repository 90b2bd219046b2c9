"""What vLLM's processes do for the adapter beside their own work; no file of vLLM is changed.

`Worker` is vLLM's `worker_extension_cls`. The scheduler's module has the engine core answer the adapter's utility calls by
`install`.
"""

from __future__ import annotations

from typing import Any

from services.worker.engines.vllm.adapters import leave_others_alone
from services.worker.engines.vllm.interrupting import InterruptibleWorker, watch_steps
from services.worker.engines.vllm.parents import die_with_parent
from services.worker.engines.vllm.staging import Staging, StagingWorker

die_with_parent()
leave_others_alone()


class Worker(StagingWorker, InterruptibleWorker):
    """Mixed into vLLM's worker."""


def install() -> None:
    """Lets the engine core answer the adapter's utility calls."""
    from vllm.v1.engine.core import EngineCore

    def of(core: Any) -> Staging:
        staging: Staging = core.tideway_staging
        return staging

    def tideway_open(core: Any, num_slots: int) -> list[Any]:
        core.tideway_staging = Staging(core)
        return of(core).open(num_slots)

    def tideway_export(core: Any, key: str, first_block: int, slots: list[int]) -> bool:
        return of(core).export(key, first_block, slots)

    def tideway_take_out(core: Any, key: str, first_block: int, slots: list[int]) -> list[int]:
        return of(core).take_out(key, first_block, slots)

    def tideway_wait(core: Any) -> bool:
        """Answered after all that was sent before."""
        return True

    def tideway_watch(core: Any) -> str:
        return watch_steps(core)

    for function in (tideway_open, tideway_export, tideway_take_out, tideway_wait, tideway_watch):
        setattr(EngineCore, function.__name__, function)
