"""A recorded term of a scheduler, and its replay (`shared.recording`): its decisions are its actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from shared import recording
from shared.messages.cluster import ExecutionStatistics
from shared.recording import Recorder
from shared.runtime.settings import BusSettings, SchedulerSettings
from shared.scheduling import calls
from shared.scheduling.actions import Action, Dispatch, LeftQueue
from shared.scheduling.core import SchedulerCore

CALLS = recording.decoder_of(calls.Call)

_DECIDING = [name for name in SchedulerSettings.__struct_fields__ if name not in BusSettings.__struct_fields__]
"""The others say where the bus is, and its password."""


class Configuration(msgspec.Struct, frozen=True, tag="scheduler"):
    """All that a core is made of."""

    settings: dict[str, Any]
    term: int
    inherited: dict[str, ExecutionStatistics]
    picks_at_once: int | None = None

    @classmethod
    def of(
        cls,
        settings: SchedulerSettings,
        term: int,
        inherited: Mapping[str, ExecutionStatistics],
        picks_at_once: int | None = None,
    ) -> Configuration:
        return cls({name: getattr(settings, name) for name in _DECIDING}, term, dict(inherited), picks_at_once)

    def build(self, record: Recorder | None = None) -> SchedulerCore:
        settings = msgspec.convert(self.settings, SchedulerSettings)
        return SchedulerCore(settings, self.term, self.inherited, picks_at_once=self.picks_at_once, record=record)


def recorded(configuration: Configuration, write: Callable[[bytes], object]) -> SchedulerCore:
    """A core whose configuration, calls and actions go, encoded, to `write`."""
    record = recording.recorder(configuration, write)

    def put(what: object, now: float) -> None:
        record([_brief(action) for action in what] if isinstance(what, list) else what, now)

    return configuration.build(put)


def _brief(action: Action) -> Action:
    """Without tokens and images, which the recording has already where the request was submitted."""
    if isinstance(action, Dispatch | LeftQueue):
        request = msgspec.structs.replace(action.request, prompt=b"", prior=b"", images=(), chat=b"")
        return msgspec.structs.replace(action, request=request)
    return action


def replay(recorded: bytes) -> tuple[SchedulerCore, int]:
    """Runs a recording again. Returns the core as it stands at the end and how often it was asked what to do; raises
    `ReplayMismatch` at the first action that differs, and where the bytes are no recording of a scheduler."""
    core = recording.header_of(recorded, Configuration).build()

    def decide(now: float) -> Sequence[Action]:
        return [_brief(action) for action in core.actions(now)]

    return core, recording.replay(recorded, core, CALLS, decide)
