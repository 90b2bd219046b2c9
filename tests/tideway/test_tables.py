"""Tables of the command on terminals that are too narrow for them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from shared.messages.cluster import InstanceInfo
from tideway.console import LOOK, fit, show_listing, turned
from tideway.status import instances_table


def lines(table: Table, width: int) -> list[str]:
    console = Console(file=(output := io.StringIO()), width=width)
    console.print(table)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def wide() -> Table:
    table = Table("name", "a rather\nlong header", "few", "source", "note", **LOOK)
    table.add_row("the-name-of-a-model", "12,345,678", "7", "/a/folder/with/a/long/path", "why it does not run")
    return table


def test_what_is_left_out_is_said_and_what_has_room_all_the_same_is_kept() -> None:
    table = fit(wide(), Console(width=64), ("few", "a rather\nlong header"), ("source",))
    shown = lines(table, 64)
    assert all(len(line) <= 64 for line in shown)
    assert shown[0].split() == ["name", "few", "source", "note"]
    assert shown[-1] == "Too narrow for: a rather long header."
    assert "the-name-of-a-model" in shown[1]
    folded = "".join(line[26:43].strip() for line in shown[1:-1])
    assert folded == "/a/folder/with/a/long/path", "in more lines, and whole"


def test_nothing_is_left_out_where_there_is_room() -> None:
    shown = lines(fit(wide(), Console(width=120), ("few",)), 120)
    assert len(shown) == 3 and "No room" not in shown[-1] and "few" in shown[1]


@pytest.mark.parametrize("width, is_turned", [(120, False), (56, True), (12, False)])
def test_a_table_is_turned_where_that_alone_fits(width: int, is_turned: bool) -> None:
    table = wide()
    shown = turned(table, Console(width=width))
    assert (shown is not table) == is_turned
    if is_turned:
        assert [line.split("  ")[0] for line in lines(shown, width)] == [
            "name", "a rather long header", "few", "source", "note",
        ]  # fmt: skip
        assert lines(shown, width)[1].endswith("12,345,678")


def test_a_listing_is_one_object_or_a_sentence_where_it_is_empty() -> None:
    console = Console(file=(output := io.StringIO()), width=20)
    show_listing(console, {"items": ["x" * 30]}, wide(), as_json=True)
    show_listing(console, {}, Table("name", "note"), as_json=False, empty="There is none.")
    assert output.getvalue() == f'{{"items":["{"x" * 30}"]}}\nThere is none.\n'


def test_a_pool_that_another_engine_does_not_tell_has_no_size() -> None:
    def of(name: str, merged_bytes: int) -> InstanceInfo:
        return InstanceInfo(
            instance_id=name,
            incarnation="1",
            node_id="n",
            state="ready",
            models=[],
            num_merged=8,
            merged_bytes=merged_bytes,
        )

    table = instances_table({"n-0": of("n-0", 1 << 20), "n-1": of("n-1", 0)}, {})
    pool = next(column for column in table.columns if column.header == "KV pool")
    assert list(pool.cells) == ["8 MiB", "-"]
