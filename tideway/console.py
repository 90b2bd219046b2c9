"""What the operator reads: one line a thing that is done, a spinner on a terminal, plain lines elsewhere; and tables, from
which names can be copied."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tideway.data_folder import OperatorError

WAIT_LINE_INTERVAL_S = 10.0
UNBOUNDED_CELLS = 10_000
LEAST_NOTE_CELLS = 16
"""To which the last column of a table may shrink, in more lines, before another column is left out for it."""
LEAST_NAME_CELLS = 8


class TableConsole(Console):
    """For stdout: as wide as its tables are where no terminal bounds them."""

    def __init__(self) -> None:
        super().__init__(highlight=False)
        if not self.file.isatty() and "COLUMNS" not in os.environ:
            # A width without a height does not hold where TERM is dumb.
            self.size = ConsoleDimensions(UNBOUNDED_CELLS, self.height)

    def print(self, *objects: Any, **options: Any) -> None:
        """Raises `OperatorError` where stdout does not take it."""
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            raise  # typer ends quietly with it
        except OSError as error:
            # What is left in its buffer must not be tried once more when the interpreter ends.
            with contextlib.suppress(OSError):
                self.file.close()
            raise OperatorError(f"What was to be shown cannot be written: {error.strerror}.") from None


def fit(table: Table, console: Console, least_wanted: Iterable[str]) -> Table:
    """Leaves out the columns of these headers, in their order, until the rest fits beside the names in the first one, which
    are folded only where nothing else can give way. The last column may take more lines."""
    name, *others, note = table.columns
    unbounded = console.options.update(max_width=UNBOUNDED_CELLS)
    for column in others:
        column.no_wrap = True
    note.max_width = LEAST_NOTE_CELLS
    too_wide = 0
    for header in (None, *least_wanted):
        table.columns[:] = [column for column in table.columns if column.header != header]
        too_wide = Measurement.get(console, unbounded, table).maximum - console.width
        if too_wide <= 0:
            break
    note.max_width = None
    longest = max(Measurement.get(console, unbounded, cell).maximum for cell in (name.header, *name.cells))
    name.width, name.overflow = max(min(longest, LEAST_NAME_CELLS), longest - max(0, too_wide)), "fold"
    return table


def count_sources(sources: Iterable[str]) -> str:
    """Where a model's step times are from, over its instances."""
    return ", ".join(f"{source} on {number}" for source, number in sorted(Counter(filter(None, sources)).items()))


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
