"""Shapes of the configured models' checkpoints, read in the background: a hub id may first have to be downloaded."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection

from shared.models.checkpoint import (
    CheckpointError,
    CheckpointMissing,
    CheckpointShape,
    check_shapes,
    check_tokenizer,
    describe,
    resolve,
)

logger = logging.getLogger(__name__)


def read_shape(source: str) -> CheckpointShape:
    """Blocking; `CheckpointError`."""
    folder = resolve(source)
    shape = describe(folder)
    check_shapes(folder)
    check_tokenizer(folder)
    return shape


class Checkpoints:
    """By source. `on_change` is called on the event loop when one more is known."""

    def __init__(self, on_change: Callable[[], None], read: Callable[[str], CheckpointShape] = read_shape) -> None:
        self._on_change = on_change
        self._read = read
        self._readings: dict[str, asyncio.Future[CheckpointShape]] = {}
        self._problems: dict[str, str] = {}
        """Kept while it is tried again."""

    def shape(self, source: str) -> CheckpointShape | None:
        """None: not known (yet)."""
        reading = self._readings.get(source)
        if reading is None or not reading.done() or reading.exception() is not None:
            return None
        return reading.result()

    def problem(self, source: str) -> str:
        """Why it cannot be read; empty if it can, or was not tried yet."""
        return self._problems.get(source, "")

    def begin(self, source: str, *, again: bool = False) -> None:
        """Begins to read, unless that is under way or known. What was not there is tried again; what cannot be used, and
        what is known, with `again` only."""
        reading = self._readings.get(source)
        if reading is None or (reading.done() and (again or isinstance(reading.exception(), CheckpointMissing))):
            self._readings[source] = self._start(source)

    async def wait(self, sources: Collection[str], timeout_s: float) -> None:
        """Until all of them are known or failed, `timeout_s` at most. They were begun."""
        if sources:
            await asyncio.wait({self._readings[source] for source in sources}, timeout=timeout_s)

    def forget_all_but(self, sources: Collection[str]) -> None:
        """A model that is added again later is read again."""
        for source in self._readings.keys() - set(sources):
            del self._readings[source]
            self._problems.pop(source, None)

    def _start(self, source: str) -> asyncio.Future[CheckpointShape]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CheckpointShape] = loop.create_future()
        logger.info("reading the checkpoint %s (a hub id is downloaded first, which may take long)", source)

        def finish(shape: CheckpointShape | None, error: CheckpointError | None) -> None:
            is_wanted = self._readings.get(source) is future
            if shape is not None:
                logger.info("%s: %s, %.1f MiB of weights", source, shape.architecture, shape.weight_bytes / 2**20)
                self._problems.pop(source, None)
                future.set_result(shape)
            else:
                assert error is not None
                if str(error) != self._problems.get(source):
                    logger.warning("%s cannot be used: %s", source, error)
                if is_wanted:
                    self._problems[source] = str(error)
                future.set_exception(error)
                future.exception()  # marks it as seen
            self._on_change()

        def work() -> None:
            shape, failure = None, None
            try:
                shape = self._read(source)
            except CheckpointError as error:
                failure = error
            except Exception as error:
                logger.exception("reading %s failed", source)
                failure = CheckpointMissing(f"{source!r} cannot be read: {error!r}")
            try:
                loop.call_soon_threadsafe(finish, shape, failure)
            except RuntimeError:
                logger.info("%s was read too late: the service has ended", source)

        # A thread of its own rather than one of a pool: a download that hangs holds up neither others nor the exit.
        threading.Thread(target=work, name=f"checkpoint {source}", daemon=True).start()
        return future
