"""Weights that a plan will load soon: onto local disk and into the page cache, in the background, while instances serve."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from shared.models.checkpoint import CheckpointError, resolve, weight_files

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20


def fetch(source: str) -> int:
    """Downloads what is not here, and reads it once. Returns the bytes of the weights. Blocking; `CheckpointError`,
    `OSError`."""
    return sum(_read(file) for file in weight_files(resolve(source)))


def _read(file: Path) -> int:
    total, buffer = 0, bytearray(CHUNK_BYTES)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            total += count
    return total


class Fetching:
    """`on_change` is called on the event loop when one more is there, or has failed."""

    def __init__(self, on_change: Callable[[], None], fetch: Callable[[str], int] = fetch) -> None:
        self._on_change = on_change
        self._fetch = fetch
        self._wanted: set[str] = set()
        self._under_way: set[str] = set()
        self._fetched: set[str] = set()
        self._problems: dict[str, str] = {}

    @property
    def fetched(self) -> tuple[str, ...]:
        return tuple(sorted(self._fetched))

    @property
    def problems(self) -> dict[str, str]:
        return dict(sorted(self._problems.items()))

    def want(self, sources: Collection[str]) -> None:
        """What is not wanted any more is forgotten, so that it is looked at again the next time."""
        self._wanted = set(sources)
        self._fetched &= self._wanted
        self._problems = {source: text for source, text in self._problems.items() if source in self._wanted}
        for source in self._wanted - self._fetched - self._under_way - self._problems.keys():
            self._under_way.add(source)
            loop = asyncio.get_running_loop()
            # A thread of its own: a download that hangs holds up neither others nor the exit.
            threading.Thread(target=self._work, args=(loop, source), name=f"fetch {source}", daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop, source: str) -> None:
        num_bytes, problem = 0, ""
        try:
            num_bytes = self._fetch(source)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        except Exception as error:
            logger.exception("fetching %s failed", source)
            problem = repr(error)
        try:
            loop.call_soon_threadsafe(self._end, source, num_bytes, problem)
        except RuntimeError:
            logger.info("%s was fetched too late: the service has ended", source)

    def _end(self, source: str, num_bytes: int, problem: str) -> None:
        self._under_way.discard(source)
        if problem:
            logger.warning("%s cannot be fetched: %s", source, problem)
        else:
            logger.info("%s is here, %.1f MiB of weights", source, num_bytes / 2**20)
        if source in self._wanted:
            if problem:
                self._problems[source] = problem
            else:
                self._fetched.add(source)
        self._on_change()
