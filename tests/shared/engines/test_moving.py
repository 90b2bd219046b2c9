"""Requests that move between engines of others: what is refused, who may move, and that no slot is lost."""

from __future__ import annotations

import msgspec
import pytest

from shared.engines.book import Book, Held
from shared.engines.capabilities import Capability
from shared.engines.messages import EngineFacts, Export, Generate, Progress, Step, TakeOut
from shared.engines.moving import Moving, hashes_of
from shared.messages.migration import Commit, PreAllocate
from shared.messages.requests import (
    PLACE_AGAIN_CODES,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    Image,
    Priority,
    RequestClass,
    pack_tokens,
    unpack_tokens,
)
from tests.shared.engine.fake_executor import request

NUM_SLOTS, BLOCK_SIZE = 8, 4
FACTS = EngineFacts(
    version="1", lacks=(Capability.SEED_RESUME, Capability.PENALTY_RESUME), max_model_len=200, block_size=BLOCK_SIZE,
    num_blocks=100, block_bytes=16, max_running=4, max_step_tokens=64, staging="/there", num_slots=NUM_SLOTS,
    layout="as here",
)  # fmt: skip


def running(moving: Moving, book: Book, request_id: str = "r", num_prompt: int = 9, **fields: object) -> Held:
    """A request with three output tokens."""
    sent = request(request_id, list(range(num_prompt)), 50, **{"temperature": 0.0, **fields})
    assert not isinstance(book.submit(sent, 0.0), ErrorInfo)
    held = book.get(request_id)
    assert held is not None
    for token in (100, 101, 102):
        book.step(Step(progress=[Progress(key=held.key, tokens=pack_tokens([token]))]), 1.0)
    return held


@pytest.fixture
def book() -> Book:
    return Book("a", FACTS)


@pytest.fixture
def moving(book: Book) -> Moving:
    return Moving(book, cooldown_s=0.0)


def pre_allocate(**fields: object) -> PreAllocate:
    hashes = hashes_of(str(fields.pop("layout", FACTS.layout)), 0, 2)
    defaults = {
        "migration_id": "m", "source_id": "other", "request_id": "r", "model": "a", "request_class": RequestClass.ONLINE,
        "priority": Priority.NORMAL, "stage": 0, "first_block": 0, "num_blocks": 3, "hashes": hashes,
        "block_size": BLOCK_SIZE, "block_bytes": 16, "max_tokens": 60,
    }  # fmt: skip
    return PreAllocate(**{**defaults, **fields})  # type: ignore[arg-type]


def out(moving: Moving, held: Held) -> None:
    """Pins it, and takes it out of the engine."""
    pinned = moving.outgoing.pin("r", 0)
    assert pinned is not None
    moving.outgoing.exported(pinned.blocks, True)
    assert moving.outgoing.detach("r", 2.0)
    moving.outgoing.unpin(pinned)
    moving.outgoing.taken_out(held.key, 1, 11, 2.0)


def test_a_request_travels_with_all_its_output_and_its_blocks(moving: Moving, book: Book) -> None:
    held = running(moving, book)
    (candidate,) = moving.migration_candidates(2.0, False)
    assert (candidate.is_running, candidate.num_blocks, candidate.tokens_left) == (True, 3, 47)
    out(moving, held)
    export, take = moving.take_commands()
    assert isinstance(export, Export) and len(export.slots) == 2, "the last token is not computed"
    assert isinstance(take, TakeOut) and take.first_block == 2 and len(take.slots) == 2
    (taken,) = moving.outgoing.take_effects()
    assert unpack_tokens(taken.request.prior) == [100, 101, 102] and taken.progress.num_computed == 11
    rest = moving.outgoing.pin_rest("r", 0)
    assert rest is not None and rest.blocks == [*export.slots, take.slots[0]]
    assert len(rest.hashes) == 2 * 16, "of full blocks"
    assert moving.outgoing.freeze("r") and moving.outgoing.is_frozen("r", cancels=True)
    moving.outgoing.unpin(rest)
    assert moving.outgoing.release("r", 3.0), "it was to be cancelled"
    assert len(book) == 0 and moving.slots.num_free == NUM_SLOTS


def test_one_that_does_not_move_goes_on_from_its_tokens(moving: Moving, book: Book) -> None:
    held = running(moving, book)
    out(moving, held)
    moving.take_commands()
    moving.outgoing.reattach("r", 3.0, held.request.epoch + 2)
    (again,) = moving.take_commands()
    assert isinstance(again, Generate) and not again.slots
    assert unpack_tokens(again.prompt)[-3:] == [100, 101, 102] and again.sampling.max_tokens == 47
    assert held.request.epoch == 2 and moving.slots.num_free == NUM_SLOTS


def test_one_that_is_called_back_before_it_is_out_returns_when_it_is(moving: Moving, book: Book) -> None:
    held = running(moving, book)
    pinned = moving.outgoing.pin("r", 0)
    assert pinned is not None and moving.outgoing.detach("r", 2.0)
    moving.outgoing.unpin(pinned)
    moving.outgoing.reattach("r", 2.0)
    assert not any(isinstance(one, Generate) for one in moving.take_commands())
    moving.outgoing.exported(pinned.blocks, True)
    moving.outgoing.taken_out(held.key, -1, -1, 2.1)
    (again,) = moving.take_commands()
    assert isinstance(again, Generate) and not moving.outgoing.take_effects()
    assert moving.slots.num_free == NUM_SLOTS


def test_slots_are_free_when_a_request_ends_on_its_way(moving: Moving, book: Book) -> None:
    held = running(moving, book)
    pinned = moving.outgoing.pin("r", 0)
    assert pinned is not None and moving.outgoing.detach("r", 2.0)
    key = held.key
    book.cancel("r", None, 2.0)
    moving.outgoing.ended("r")
    moving.outgoing.unpin(pinned)
    moving.outgoing.exported(pinned.blocks, False)
    moving.outgoing.taken_out(key, 1, 11, 2.1)
    assert moving.outgoing.pin_rest("r", 0) is None and not moving.outgoing.freeze("r")
    assert moving.slots.num_free == NUM_SLOTS


def test_seeds_penalties_and_images_stay_and_so_does_what_has_no_slots(moving: Moving, book: Book) -> None:
    running(moving, book, temperature=1.0)
    running(moving, book, "shown", images=(Image(b"x"),))
    assert not moving.migration_candidates(2.0, True)
    running(moving, book, "long", num_prompt=60)
    assert moving.outgoing.pin("long", 0) is None and moving.slots.num_free == NUM_SLOTS


def test_a_prompt_is_as_long_as_the_engine_says_that_its_images_make_it(book: Book) -> None:
    held = running(Moving(book, 0.0), book, images=(Image(b"x"),), prior=pack_tokens([7, 8]))
    effects = book.step(Step(progress=[Progress(key=held.key, tokens=pack_tokens([103]), num_prompt=42)]), 1.0)
    assert held.num_prompt == 40, "two of them are output"
    assert [entry.num_prompt_tokens for entry in effects.entries["gateway"]] == [40]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"layout": "another"}, ErrorCode.BAD_REQUEST),
        ({"block_size": 16}, ErrorCode.BAD_REQUEST),
        ({"max_tokens": 500}, ErrorCode.TOO_LONG),
        ({"first_block": 2, "hashes": b""}, ErrorCode.GONE),
        ({"num_blocks": NUM_SLOTS + 1}, ErrorCode.OVERLOADED),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    moving: Moving, fields: dict[str, object], code: ErrorCode
) -> None:
    refused = moving.reservations.reserve(pre_allocate(**fields), 0.0)
    assert isinstance(refused, ErrorInfo) and refused.code == code
    assert moving.slots.num_free == NUM_SLOTS


def test_one_that_comes_begins_with_its_kv_and_its_slots_are_free_when_that_was_read(
    moving: Moving, book: Book
) -> None:
    other = Book("a", FACTS)
    away = Moving(other, cooldown_s=0.0)
    out(away, running(away, other))
    (taken,) = away.outgoing.take_effects()
    reserved = moving.reservations.reserve(pre_allocate(), 0.0)
    assert moving.reservations.reserve(pre_allocate(), 0.0) is reserved, "it is asked again"
    request = msgspec.structs.replace(taken.request, epoch=1)
    commit = Commit("m", "other", request, taken.progress, 3)
    assert moving.incoming.adopt(commit, 5.0) is None
    (begun,) = moving.take_commands()
    assert isinstance(begun, Generate) and not isinstance(reserved, ErrorInfo)
    assert (begun.slots, begun.num_computed) == (tuple(reserved.blocks), 11)
    held = book.get("r")
    assert held is not None and (held.offset, held.is_running, held.num_moves) == (3, True, 1)
    assert not moving.migration_candidates(5.5, True), "the engine has not begun it"
    book.step(Step(progress=[Progress(key=held.key, tokens=pack_tokens([103]))]), 6.0)
    assert moving.migration_candidates(6.5, True)
    again = moving.incoming.adopt(commit, 5.0)
    assert again is not None and again.code == ErrorCode.CONFLICT
    assert moving.slots.num_free < NUM_SLOTS
    moving.incoming.imported(held.key)
    assert moving.slots.num_free == NUM_SLOTS


def test_a_move_counts_and_is_no_arrival_in_what_is_told_of_the_end(moving: Moving, book: Book) -> None:
    other = Book("a", FACTS)
    away = Moving(other, cooldown_s=0.0)
    out(away, running(away, other))  # came at 0, planned at 1, left at 2
    (taken,) = away.outgoing.take_effects()
    moving.reservations.reserve(pre_allocate(), 2.0)
    request = msgspec.structs.replace(taken.request, epoch=1)
    assert moving.incoming.adopt(Commit("m", "other", request, taken.progress, 3), 2.0) is None
    held = book.get("r")
    assert held is not None
    effects = book.step(Step(progress=[Progress(key=held.key, finish_reason=FinishReason.STOP)]), 6.0)
    (ended,) = effects.ended
    assert (ended.arrived_s, ended.submitted_s, ended.here_since_s, ended.first_planned_s) == (0.0, 0.0, 2.0, 1.0)
    assert ended.num_migrations == 1 and ended.stats().queued_s == 1.0
    (entry,) = effects.entries[request.gateway_id]
    assert entry.timing is not None and entry.timing.queued_s == 1.0


@pytest.mark.parametrize("code", sorted(PLACE_AGAIN_CODES))
def test_what_goes_on_elsewhere_is_told_as_given_up(moving: Moving, book: Book, code: ErrorCode) -> None:
    running(moving, book)
    (ended,) = book.give_up(ErrorInfo(code, "it ends here"), 2.0).ended
    assert ended.is_given_up


def test_one_that_came_back_is_not_dropped_with_what_it_was(moving: Moving, book: Book) -> None:
    """Its source learns only then that the destination had taken it over."""
    out(moving, running(moving, book))
    (taken,) = moving.outgoing.take_effects()
    assert moving.outgoing.freeze("r")
    moving.reservations.reserve(pre_allocate(), 4.0)
    request = msgspec.structs.replace(taken.request, epoch=2)
    assert moving.incoming.adopt(Commit("m", "other", request, taken.progress, 3), 5.0) is None
    held = book.get("r")
    assert held is not None
    moving.incoming.imported(held.key)
    assert not moving.outgoing.is_frozen("r") and not moving.outgoing.release("r", 6.0)
    moving.outgoing.reattach("r", 6.0, 4)
    assert book.get("r") is held and held.request.epoch == 2
    assert moving.slots.num_free == NUM_SLOTS
    book.step(Step(progress=[Progress(key=held.key, tokens=pack_tokens([103]))]), 7.0)
    assert moving.migration_candidates(8.0, False), "it may move again"


def test_a_reservation_that_is_not_taken_is_freed(moving: Moving) -> None:
    moving.reservations.reserve(pre_allocate(), 0.0)
    moving.reservations.release("m")
    assert moving.slots.num_free == NUM_SLOTS
