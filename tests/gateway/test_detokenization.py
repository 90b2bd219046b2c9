"""Text pieces add up to the whole text; no piece shows half a character or any part of a stop string."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from services.gateway.text.detokenization import REPLACEMENT, Decoding, Detokenizer, StopStrings
from tests.gateway.checkpoints import byte_level_tokenizer, sentencepiece_tokenizer

TOKENIZERS = {"byte-level": byte_level_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}


def detokenizer(tokenizer: Tokenizer, *, knows_bytes: bool = True) -> Detokenizer:
    """`knows_bytes`: that of a byte-level tokenizer, as the gateway does."""
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    joins_bytes = knows_bytes and isinstance(tokenizer.decoder, decoders.ByteLevel)
    decoding = Decoding(functools.partial(tokenizer.decode, skip_special_tokens=False), joins_bytes=joins_bytes)
    return Detokenizer(decoding, special)


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, knows_bytes: bool = True) -> list[str]:
    incremental = detokenizer(tokenizer, knows_bytes=knows_bytes)
    return [*(incremental.push(i) for i in ids), incremental.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=60))
def test_pieces_of_any_text_add_up(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all(REPLACEMENT not in piece for piece in pieces)


@given(st.lists(st.integers(0, TOKENIZERS["byte-level"].get_vocab_size() - 1), max_size=30))
def test_pieces_of_any_tokens_add_up(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    shown = "".join(pieces_of(tokenizer, ids))
    assert whole.startswith(shown)
    assert set(whole[len(shown) :]) <= {REPLACEMENT}, "only an incomplete last character may be missing"


@given(st.lists(st.integers(0, TOKENIZERS["byte-level"].get_vocab_size() - 1), max_size=80))
def test_pieces_are_the_same_without_what_is_known_of_bytes(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert pieces_of(tokenizer, ids) == pieces_of(tokenizer, ids, knows_bytes=False)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_appears_whole_when_its_last_token_comes(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the 🦀 w", add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, ids)
    assert len([i for i in ids if tokenizer.decode([i]) == REPLACEMENT]) >= 2, "the crab is several tokens"
    assert sum("🦀" in piece for piece in pieces) == 1
    assert "".join(pieces).strip() == "the 🦀 w"


def test_leading_space_of_a_sentencepiece_word_is_kept_inside_a_text() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("the in the", add_special_tokens=False).ids
    end = tokenizer.token_to_id("</s>")
    mixed = [end, ids[0], end, *ids[1:]]
    assert "".join(pieces_of(tokenizer, mixed)) == "the in the"


def test_garbage_is_shown_in_bounded_time() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    garbage = tokenizer.encode("é", add_special_tokens=False).ids[0]
    [first_byte] = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.id_to_token(i) == "Ã"]
    incremental = detokenizer(tokenizer)
    shown = "".join(incremental.push(first_byte) for _ in range(500))
    assert len(shown) >= 450
    assert set(shown) == {REPLACEMENT}
    unknown = "".join(incremental.push(10**6) for _ in range(200))
    assert unknown in ("", REPLACEMENT * len(unknown))
    assert len(incremental._window) < 100, garbage


def test_an_incomplete_last_character_is_dropped_but_not_the_text_before_it() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("the 🦀", add_special_tokens=False).ids
    assert "".join(pieces_of(tokenizer, ids[:-1])) == "the "


def whole_text_cut(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The definition: output goes on character by character until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            return (text[:end] if include else text[: end - max(map(len, endings))]), True
    return text, False


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30), max_size=10),
    st.booleans(),
)
def test_stop_strings_are_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    expected, stopped = whole_text_cut(text, stops, include)
    watcher = StopStrings(stops, include)
    shown, found = "", False
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(bounds):
        piece, found = watcher.feed(text[start:end])
        shown += piece
        assert expected.startswith(shown), "never more than may be shown"
        if found:
            break
    if not found:
        shown += watcher.flush()
    assert (shown, found) == (expected, stopped)
    assert watcher.num_released == len(shown)


@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=4))
def test_no_more_than_needed_is_held_back(text: str, stop: str) -> None:
    watcher = StopStrings([stop])
    fed = shown = ""
    for character in text:
        piece, found = watcher.feed(character)
        fed, shown = fed + character, shown + piece
        if found:
            break
        held = fed[len(shown) :]
        assert held != stop
        assert stop.startswith(held)


def test_only_a_possible_beginning_is_held_back() -> None:
    watcher = StopStrings(["END"])
    assert watcher.feed("the E") == ("the ", False)
    assert watcher.feed("N") == ("", False)
    assert watcher.feed("T") == ("ENT", False)
    assert watcher.feed("ENEND more") == ("EN", True)


def test_text_before_min_tokens_is_exempt() -> None:
    watcher = StopStrings(["ab"])
    assert watcher.skip("xab") == "xab"
    assert watcher.feed("ab") == ("", True)
