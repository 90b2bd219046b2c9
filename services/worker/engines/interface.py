"""What an instance asks of an engine that is another's. A hosted engine (`hosted.py`) and a server behind HTTP
(`endpoint.py`) implement it; the native engine has an instance of its own (`services/worker/instance/service.py`) with the
same bus side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.engines.messages import Command, EngineFacts, Moved, Step


class EngineFailed(Exception):
    """The engine is of no more use. `is_final`: starting it again would fail again."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class ForeignEngine(Protocol):
    @property
    def comes_back(self) -> bool:
        """Whether it is started again here after a failure that is not final; else its instance ends with it."""
        ...

    @property
    def problem(self) -> str:
        """Why `start` has not returned yet, if that is more than the usual time; empty: it is not."""
        ...

    async def start(self) -> EngineFacts:
        """Returns when it serves its model. Raises `EngineFailed`."""
        ...

    def send(self, commands: Sequence[Command]) -> None:
        """Never waits. What comes of it comes with `next_step`; of a key that was aborted nothing more needs to."""
        ...

    async def next_step(self) -> Step | Moved:
        """Waits for what it makes next, or what became of KV that moves. Raises `EngineFailed`."""
        ...

    async def stop(self) -> None:
        """Ends it and all that it started; may be called twice, and after a failure."""
        ...
