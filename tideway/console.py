"""Output for operators: one line per completed step, a spinner on a terminal, plain lines elsewhere; and tables from which
names can be copied."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console, ConsoleDimensions, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table
from rich.text import Text

from shared.placement.plan import DEFAULT_SLO_SCALE
from tideway.data_folder import OperatorError

LOOK: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": None, "padding": (0, 2, 0, 0)}
"""Look of tables."""
WAIT_LINE_INTERVAL_S = 10.0
UNBOUNDED_CELLS = 10_000
LEAST_NOTE_CELLS = 16
"""Width to which the last column of a table may shrink, in more lines, before another column is left out for it."""
LEAST_NAME_CELLS = 8


class TableConsole(Console):
    """Console on stdout, as wide as its tables where no terminal bounds them."""

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


def print_json(console: Console, told: object) -> None:
    """Prints one JSON object on one line, however narrow the console is."""
    console.print(msgspec.json.encode(told).decode(), markup=False, highlight=False, emoji=False, soft_wrap=True)


SLO_TOLD = (
    "A request is within its SLO if it ends within slo_scale times its model's mean execution time (slo_scale is "
    f"{DEFAULT_SLO_SCALE:g} unless set). tideway explain tells of other objectives: for the first token and for later ones."
)
"""What plans and traffic call the SLO."""


def show_listing(
    console: Console,
    told: object,
    table: Table,
    *,
    as_json: bool,
    empty: str = "",
    least_wanted: Sequence[str] = (),
    wrapped: Collection[str] = (),
) -> None:
    """Prints what an endpoint listed: `told` as one JSON object, or `table` as `fit` makes it, or, where it has no row,
    `empty`."""
    if as_json:
        print_json(console, told)
    elif empty and not table.row_count:
        console.print(empty)
    else:
        console.print(fit(table, console, least_wanted, wrapped))


def fit(table: Table, console: Console, least_wanted: Sequence[str], wrapped: Collection[str] = ()) -> Table:
    """Leaves out columns of these headers, the first of them first, until the rest fits beside the names in the first
    column, which are folded only where nothing else can give way; the caption says what is left out. The last column may
    take more lines, and so may those of the headers `wrapped`."""
    name, *others = columns = list(table.columns)
    for column in others[:-1]:
        column.no_wrap = column.header not in wrapped
    flexible = [column for column in others if column is others[-1] or not column.no_wrap]
    for column in flexible:
        column.max_width, column.overflow = LEAST_NOTE_CELLS, "fold"

    def excess(left_out: Collection[str]) -> int:
        """Cells that the table is too wide without these."""
        table.columns[:] = [column for column in columns if column.header not in left_out]
        return _width(table, console) - console.width

    wanted = [column.header for column in columns]
    left_out = [header for header in least_wanted if header in wanted]
    num_needed = next((num for num in range(len(left_out)) if excess(left_out[:num]) <= 0), len(left_out))
    left_out = left_out[:num_needed]
    for header in reversed(left_out):
        # A narrow one may have room all the same.
        without = [one for one in left_out if one != header]
        left_out = without if excess(without) <= 0 else left_out
    too_wide = excess(left_out)
    for column in flexible:
        column.max_width = None
    longest = max(_width(cell, console) for cell in (name.header, *name.cells))
    name.width, name.overflow = max(min(longest, LEAST_NAME_CELLS), longest - max(0, too_wide)), "fold"
    if left_out:
        shown = ", ".join(" ".join(header.split()) for header in wanted if header in left_out)
        table.caption, table.caption_justify = f"Too narrow for: {shown}.", "left"
    return table


def turned(table: Table, console: Console) -> Table:
    """The table itself, or one with a row for each of its columns where that alone fits the console. For few rows."""
    if _width(table, console) <= console.width:
        return table
    first, *others = table.columns
    made = Table(f"{first.header}", title=table.title, title_style=table.title_style, title_justify="left")
    made.box, made.padding = table.box, table.padding
    for cell in first.cells:
        made.add_column(cell, justify="right", no_wrap=True)
    for column in others:
        made.add_row(" ".join(f"{column.header}".split()), *column.cells)
    return made if _width(made, console) <= console.width else table


def _width(shown: RenderableType, console: Console) -> int:
    """Cells that it takes where nothing bounds it."""
    return Measurement.get(console, console.options.update(max_width=UNBOUNDED_CELLS), shown).maximum


def count_sources(sources: Iterable[str]) -> str:
    """Sources of a model's step times, over its instances."""
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
        """Prints the text as it is, to the last character: it may be there to be copied."""
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
