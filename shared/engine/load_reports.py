"""What an instance tells the scheduler: each thing that happened in exactly one load report."""

from __future__ import annotations

from shared.engine.load import InstanceLoad
from shared.engine.requests import Ended
from shared.messages.cluster import FinishedStats, LoadReport, MoveOutcome
from shared.messages.requests import HeldRequest


class LoadReports:
    """Collects between two reports; when to report is the caller's matter."""

    def __init__(self, instance_id: str, incarnation: str) -> None:
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._sequence = 0
        self._num_moved_out = 0
        self._num_moved_in = 0
        self._begin()

    def _begin(self) -> None:
        self.admitted: list[str] = []
        self.ended: list[str] = []
        self.finished: list[FinishedStats] = []
        self.moves: list[MoveOutcome] = []
        self.moved_in: list[HeldRequest] = []

    def on_ended(self, ended: Ended) -> None:
        self.ended.append(ended.request.request_id)
        self.finished.append(ended.stats())

    def take(self, load: InstanceLoad, num_moving_out: int, num_moving_in: int) -> LoadReport:
        """The next one. `num_moving_out`, `num_moving_in`: migrations under way."""
        self._sequence += 1
        self._num_moved_out += sum(outcome.is_moved for outcome in self.moves)
        self._num_moved_in += len(self.moved_in)
        report = LoadReport(
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            admitted=tuple(self.admitted),
            ended=tuple(self.ended),
            finished=tuple(self.finished),
            moves=tuple(self.moves),
            moved_in=tuple(self.moved_in),
            num_moving_out=num_moving_out,
            num_moving_in=num_moving_in,
            num_moved_out=self._num_moved_out,
            num_moved_in=self._num_moved_in,
            **{name: getattr(load, name) for name in load.__struct_fields__},
        )
        self._begin()
        return report
