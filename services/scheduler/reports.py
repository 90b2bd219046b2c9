"""Load reports that have come and are not taken in yet: whatever else comes overtakes them.

They come by the ten thousand a second, and in bursts. A dispatch must not wait behind a burst, so the reports are taken in
in slices of `SLICE_S`, and what came meanwhile is done between two of them. To whoever overtakes it looks as if the bus had
been a little slower with the reports. Nothing else changes: each report is taken in, none is folded into another, and those
of one instance keep the order in which they came, because each tells what came and went since the one before.

Gateways' words and time overtake. What an instance says (answers, its registry entry, its node agent's word of its end) does
not overtake what it said before: an answer is compared with the ends that were reported, and the end of an older epoch of a
request must not be taken for that of the one just accepted. Nor does the verdict that instances are silent (`before`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from shared.messages.cluster import LoadReport
from shared.scheduling.calls import (
    BeginServing,
    Call,
    DeclareLost,
    GrantGrace,
    OnDispatched,
    OnExited,
    OnHeld,
    OnRegistry,
)

logger = logging.getLogger(__name__)

SLICE_S = 0.001
MAX_LATE_S = 0.1
"""A report that has waited for so long is overtaken by nothing more: silence and lost reports are judged after seconds."""


class WaitingReports:
    def __init__(self, take_in: Callable[[LoadReport], None], now: Callable[[], float]) -> None:
        """`take_in`: what is done with each in the end. One that it fails on is logged and left out."""
        self._take_in = take_in
        self._now = now
        self._waiting: OrderedDict[str, tuple[float, list[LoadReport]]] = OrderedDict()
        """By instance, those that have waited longest first: when the first one came, and all in order."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, report: LoadReport) -> None:
        known = self._waiting.get(report.instance_id)
        if known is None:
            self._waiting[report.instance_id] = (self._now(), [report])
        else:
            known[1].append(report)

    def late_s(self) -> float:
        """How long the first one has waited; 0 if none waits."""
        if not self._waiting:
            return 0.0
        came_s, _ = next(iter(self._waiting.values()))
        return self._now() - came_s

    def take_slice(self) -> None:
        """Takes in those that have waited longest, for `SLICE_S`, at least one instance's; and all that are too late."""
        until_s = self._now() + SLICE_S
        while self._waiting:
            self._take(next(iter(self._waiting)))
            if self._now() >= until_s and self.late_s() < MAX_LATE_S:
                return

    def before(self, call: Call[object]) -> None:
        """Takes in what the call must not overtake."""
        match call:
            case OnDispatched(instance_id=instance_id) | OnRegistry(instance_id=instance_id):
                self._take(instance_id)
            case OnHeld(ask=ask):
                self._take(ask.instance_id)
            case OnExited(exited=exited):
                self._take(exited.instance_id)
            case DeclareLost() | GrantGrace() | BeginServing():
                self.take_all()

    def take_all(self) -> None:
        while self._waiting:
            self._take(next(iter(self._waiting)))

    def _take(self, instance_id: str) -> None:
        """All of an instance."""
        _, reports = self._waiting.pop(instance_id, (0.0, ()))
        for report in reports:
            try:
                self._take_in(report)
            except Exception:
                logger.exception("report %d of %s was not taken in", report.sequence, instance_id)
