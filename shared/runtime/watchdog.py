"""Ends a process whose event loop stands still, so that whoever keeps it running starts it again.

A thread looks whether the loop takes its turns. What counts is how often in a row this thread looked in vain, not what the
clock says: a process that was stopped, or had no processor, is late in both and goes on, unless that took longer than
`HELD_FACTOR` times the timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

STUCK_EXIT_CODE = 3
INTERVAL_S = 1.0
"""Between two looks."""
HELD_FACTOR = 4
"""Multiple of the timeout after which a hung interpreter ends. Where no Python code runs at all, because some extension
keeps the interpreter's lock, this thread cannot look either. A thread without Python (faulthandler's) then ends the
process, after so many times the timeout, by the clock: also one that was stopped for so long, when it goes on."""


class Watchdog:
    """Watches the running event loop; `timeout_s` 0: never. It counts from the loop's first turn on: what a service does
    before it first waits, such as importing torch, may take its time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = min(INTERVAL_S, timeout_s / 4)
        self._loop = asyncio.get_running_loop()
        self._num_turns = 0
        self._stopped = threading.Event()
        if timeout_s > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _turn(self) -> None:
        self._num_turns += 1

    def _watch(self) -> None:
        num_seen, num_missed = 0, 0
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._turn)
            while not self._stopped.wait(self._interval_s):
                faulthandler.dump_traceback_later(HELD_FACTOR * self._timeout_s, exit=True)
                if self._stopped.is_set():  # `stop` may have cancelled before it was armed
                    faulthandler.cancel_dump_traceback_later()
                    return
                if self._num_turns > num_seen:
                    num_seen, num_missed = self._num_turns, 0
                    self._loop.call_soon_threadsafe(self._turn)
                elif num_seen:
                    num_missed += 1
                if num_missed * self._interval_s >= self._timeout_s:
                    self._end()

    def _end(self) -> None:
        logger.critical(
            "the event loop has stood still for %.0f s: this process ends, to be started again; its stacks:",
            self._timeout_s,
        )
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(STUCK_EXIT_CODE)
