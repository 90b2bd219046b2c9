"""What the operator reads: one line a thing that is done, a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

WAIT_LINE_INTERVAL_S = 10.0


class Reporter:
    """Prints to stdout. As a context manager it shows what is awaited until it is left."""

    def __init__(self, console: Console | None = None) -> None:
        # Paths and addresses are for copying: no wrapping, no colouring of numbers.
        self._console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._status: Status | None = None
        self._started_s = time.monotonic()
        self._waited_s = self._started_s

    def __enter__(self) -> Reporter:
        self._started_s = self._waited_s = time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def done(self, what: str, detail: str = "") -> None:
        tail = f" [dim]{escape(detail)}[/]" if detail else ""
        self._print(f"  [green]{self._mark('✓', 'ok')}[/] {escape(what)}{tail}")

    def failed(self, what: str, reason: str) -> None:
        self._print(f"  [red]{self._mark('✗', 'failed')}[/] {escape(what)}: {escape(reason)}")

    def warn(self, text: str) -> None:
        self._print(f"  [yellow]![/] {escape(text)}")

    def say(self, text: str) -> None:
        """As it is, to the last character: it may be there to be copied."""
        self._print(Text(text))

    def waiting(self, for_what: str) -> None:
        if self._status is not None:
            self._status.update(f"waiting for {escape(for_what)} ({self.elapsed_s:.0f} s)")
        elif time.monotonic() - self._waited_s >= WAIT_LINE_INTERVAL_S:
            self._waited_s = time.monotonic()
            self._print(f"  ... waiting for {escape(for_what)} ({self.elapsed_s:.0f} s)")

    def _print(self, line: str | Text) -> None:
        # A terminal or pipe that is gone must not keep anyone from stopping what they started.
        with contextlib.suppress(OSError):
            self._console.print(line)

    def _mark(self, symbol: str, word: str) -> str:
        try:
            symbol.encode(self._console.encoding)
        except UnicodeEncodeError:
            return word
        return symbol
