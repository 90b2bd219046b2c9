"""How many characters one token can stand for: a text that is too long for a model is refused before it is tokenised."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

COMPOSED_CHARACTERS = 4
"""The most that Unicode's composition makes one character of (as U+1F82: a letter and three marks)."""

_FACTORS = {"Prepend": 1, "ByteLevel": 1, "NFC": COMPOSED_CHARACTERS, "NFKC": COMPOSED_CHARACTERS, "NFD": 1, "NFKD": 1}
"""Normalizers that take no character away, with how many they make one of."""
_CUTTERS = {"ByteLevel", "Digits", "Metaspace"}
"""Pre-tokenizers that keep every character."""


def longest_token_characters(tokenizer: Tokenizer) -> int | None:
    """Every text has at most this many characters a token. None: this kind of tokenizer may drop characters, or make one
    token of any number of them (unknown words, spaces beside special tokens)."""
    normalizer, cutter = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    factor = _composed(normalizer)
    added = tokenizer.get_added_tokens_decoder().values()
    if factor is None or not _keeps_all(cutter) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not _knows_all(tokenizer.model, vocabulary, _has(cutter, "ByteLevel") or _has(normalizer, "ByteLevel")):
        return None
    return factor * max(map(len, vocabulary))


MAX_INFLATION = 8
"""A normalizer that makes more of a character than this is no normalizer of a language model."""


def may_inflate(normalizer: dict[str, Any] | None) -> bool:
    """Whether a normalizer, as tokenizer.json has it, may make much more of a text than it was: replacements multiply each
    other's."""
    factor = 1.0
    for part in _parts(normalizer or {}):
        if part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            # A regular expression may match a single character, or nothing at all between any two.
            shortest = max(1, len(pattern)) if pattern is not None else 1
            factor *= max(1.0, len(part["content"]) / shortest)
        elif part["type"] == "Prepend" and len(part["prepend"]) > MAX_INFLATION:
            return True
    return factor > MAX_INFLATION


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The members of a sequence, however deep, or the one that it is."""
    if state.get("type") != "Sequence":
        return [state] if state else []
    members = state.get("normalizers") or state.get("pretokenizers") or []
    return [part for member in members for part in _parts(member)]


def _has(state: dict[str, Any], kind: str) -> bool:
    return any(part["type"] == kind for part in _parts(state))


def _composed(state: dict[str, Any]) -> int | None:
    factor = 1
    for part in _parts(state):
        if part["type"] == "Replace" and len(part["content"]) >= len(
            part["pattern"].get("String", part["content"] + "x")
        ):
            continue
        if part["type"] not in _FACTORS:
            return None
        factor *= _FACTORS[part["type"]]
    return factor


def _keeps_all(state: dict[str, Any]) -> bool:
    return all(
        part["type"] in _CUTTERS or (part["type"] in ("Split", "Punctuation") and part["behavior"] != "Removed")
        for part in _parts(state)
    )


def _knows_all(model: Any, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    """Whether there is a token for every character, so that none is dropped, nor several unknown ones become one."""
    if not isinstance(model, BPE):
        return False
    if is_byte_level:
        return all(character in vocabulary for character in ByteLevel.alphabet())
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return model.unk_token is not None and not model.fuse_unk
