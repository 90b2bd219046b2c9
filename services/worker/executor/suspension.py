"""Steps that stop between two layers and go on later: ConServe's safepoints (section 4.3), but what was computed is kept.

A suspended forward pass owns all that the rest of it reads: hidden states, the inputs of its rows and its layout on the
host, from which attention metadata is made again. What it has written to the KV cache stays valid for as long as its
blocks stay its own, which the engine sees to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.attention.interface import BatchLayout
from services.worker.executor.grammars import Guides
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from services.worker.ranks.agreement import FREE, Agreement

NO_STEP = -1


@dataclass
class PartialForward:
    """A forward pass between two layers."""

    model: DecoderModel
    rows: np.ndarray
    """[S] int64"""
    row_versions: np.ndarray
    """[S]: which of its successive owners each row had."""
    layout: BatchLayout
    batch: ForwardBatch
    state: ForwardState
    num_layers_done: int = 0
    guides: Guides | None = None
    """Those with which tokens were drafted for it."""

    @property
    def share(self) -> float:
        return self.num_layers_done / self.model.num_layers


class Event(Protocol):
    """A mark in a device's stream."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Safepoints:
    """Points at which an interruptible step looks whether it is interrupted: before its first layer and after every few.

    On a GPU launching runs ahead of computing, so that the flag would be read when the last layer has long been launched.
    Therefore the end of each interval is marked, and after launching one interval the launching thread waits for the end
    of the one before: at most two intervals are on the device, and an interrupted step leaves it within two.

    All ranks of a group stop at the same safepoint: what one knows, the others are told (`Agreement`)."""

    def __init__(self, make_event: Callable[[], Event] | None, agreement: Agreement = FREE) -> None:
        """`make_event`: None where launching computes (CPU)."""
        self._agreement = agreement
        self._events = None if make_event is None else (make_event(), make_event())
        self._interrupted = NO_STEP

    def interrupt(self, step_id: int) -> None:
        """Asks the step to stop at its next safepoint, also if it has not been launched yet; without effect if it has
        passed its last one. From any thread; the latest call counts."""
        self._interrupted = step_id

    def run(self, forward: PartialForward, step_id: int, layers_per_safepoint: int, stop_share: float = 1.0) -> bool:
        """Computes the layers that are left, or those within a share of all of them (at least to the next safepoint). False:
        the step was interrupted, or stopped there, before the last of them. Raises `GroupError`."""
        try:
            return self._run(forward, step_id, layers_per_safepoint, stop_share)
        finally:
            # One that came too late is not meant for the step's next part.
            if self._interrupted == step_id:
                self._interrupted = NO_STEP

    def _run(self, forward: PartialForward, step_id: int, layers_per_safepoint: int, stop_share: float) -> bool:
        model, num_intervals = forward.model, 0
        self._agreement.begin_run()
        last_start = stop_share * model.num_layers - layers_per_safepoint
        while forward.num_layers_done < model.num_layers:
            if stop_share < 1.0 and num_intervals and forward.num_layers_done > last_start:
                return False
            if not self._agreement.goes_on(num_intervals, self._interrupted != step_id):
                return False
            stop = min(forward.num_layers_done + layers_per_safepoint, model.num_layers)
            model.run_layers(forward.state, forward.num_layers_done, stop, forward.batch)
            forward.num_layers_done = stop
            if self._events is not None:
                self._events[num_intervals % 2].record()
                if num_intervals:
                    self._events[(num_intervals - 1) % 2].synchronize()
            num_intervals += 1
        return True


def cuda_event() -> Any:
    """One on which waiting sleeps in the driver, instead of spinning on its lock."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def timed_event() -> Any:
    """One whose time can be compared with another's."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
