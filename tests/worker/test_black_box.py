"""What an instance notes of its work is found by its agent, whenever the instance ends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from services.worker import black_box
from services.worker.black_box import NUM_BYTES, BlackBox


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = black_box.make()
    yield made
    os.close(made)


def test_the_last_note_is_found(descriptor: int) -> None:
    assert black_box.read(descriptor) == ()
    box = BlackBox(descriptor)
    assert not box.is_computing and not os.get_inheritable(descriptor)
    for noted in (["one", "two"], ["three"], []):
        box.note(noted)
        assert black_box.read(descriptor) == tuple(noted) and box.is_computing is bool(noted)


def test_what_is_prepared_is_noted_beside_what_is_computed(descriptor: int) -> None:
    box = BlackBox(descriptor)
    with pytest.raises(ValueError), box.preparing("late"):
        box.note(["one"])
        assert black_box.read(descriptor) == ("one", "late")
        raise ValueError
    assert black_box.read(descriptor) == ("one",)


def test_of_more_than_fits_the_first_are_noted_whole(descriptor: int) -> None:
    ids = [f"request-{number:06}" for number in range(NUM_BYTES // 10)]
    BlackBox(descriptor).note(ids)
    found = black_box.read(descriptor)
    assert found == tuple(ids[: len(found)]) and 15 * len(found) in range(NUM_BYTES - 32, NUM_BYTES)


def test_without_an_agent_nothing_is_noted() -> None:
    box = BlackBox(-1)
    box.note(["one"])
    with box.preparing("two"):
        assert box.is_computing
