"""Tokenizers of older checkpoints, in sentencepiece's file alone: read without its library, and written as tokenizer.json.

The file is a protobuf, `ModelProto` of google/sentencepiece's sentencepiece_model.proto. How merges follow from the pieces
of BPE is as transformers derives them (`generate_merges` in convert_slow_tokenizer.py).
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

FILE = "tokenizer.model"
SPACE = "\u2581"
"""Stands for white space in pieces."""

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of pieces that are no text, or not by merging."""
_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
"""Wire types."""


class SentencePieceError(ValueError):
    """The file is none of sentencepiece, or of a kind that is not known here."""


class Piece(msgspec.Struct, frozen=True):
    text: str
    score: float
    kind: int


class SentencePieceModel(msgspec.Struct, frozen=True):
    pieces: list[Piece]
    """By id."""
    kind: int
    """1 is unigram, 2 BPE."""
    has_byte_fallback: bool
    charsmap: bytes
    """Character map of the normalisation; empty: none."""
    adds_prefix: bool
    """A space before the text."""

    @property
    def ids(self) -> dict[str, int]:
        return {piece.text: i for i, piece in enumerate(self.pieces)}


def read_model(file: Path) -> SentencePieceModel:
    """Raises `SentencePieceError`, `OSError`."""
    try:
        model = _model(file.read_bytes())
    except (ValueError, LookupError, struct.error):
        raise SentencePieceError(f"{file} is no tokenizer of sentencepiece") from None
    if not model.pieces:
        raise SentencePieceError(f"{file} is no tokenizer of sentencepiece: it has no pieces")
    if model.kind not in (_UNIGRAM, _BPE):
        raise SentencePieceError(f"{file}: type {model.kind} of sentencepiece is not supported (BPE and unigram are)")
    return model


def tokenizer_json(folder: Path, config: dict[str, Any]) -> str:
    """What tokenizer.json of the checkpoint in `folder` would be. `config`: tokenizer_config.json. Raises as
    `read_model`."""
    model = read_model(folder / FILE)
    ids = model.ids
    unknown = next((piece.text for piece in model.pieces if piece.kind == _UNKNOWN), None)
    if model.kind == _BPE:
        described: dict[str, Any] = {
            "type": "BPE",
            "vocab": ids,
            "merges": _merges(model, ids),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": model.has_byte_fallback,
        }
    else:
        described = {
            "type": "Unigram",
            "vocab": [[piece.text, piece.score] for piece in model.pieces],
            "unk_id": None if unknown is None else ids[unknown],
            "byte_fallback": model.has_byte_fallback,
        }
    normalizers: list[dict[str, Any]] = []
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.adds_prefix:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.adds_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model, folder, config),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _around(config, ids),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": described,
    }
    return json.dumps(whole, ensure_ascii=False)


def _merges(model: SentencePieceModel, ids: dict[str, int]) -> list[list[str]]:
    """By their results' scores, the best first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece in model.pieces:
        if piece.kind in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        parts = [(piece.text[:i], piece.text[i:]) for i in range(1, len(piece.text))]
        known = [(left, right) for left, right in parts if left in ids and right in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(piece.score, len(left), len(right), left, right) for left, right in known]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in found]


def _added_tokens(model: SentencePieceModel, folder: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    added = {
        i: (piece.text, piece.kind != _USER_DEFINED)
        for i, piece in enumerate(model.pieces)
        if piece.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    file = folder / "added_tokens.json"
    for text, number in (json.loads(file.read_text(encoding="utf-8-sig")) if file.is_file() else {}).items():
        added[int(number)] = (text, text.startswith("<") and text.endswith(">"))
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        added[int(number)] = (token["content"], bool(token.get("special")))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": i, "content": text, "special": special, **flags} for i, (text, special) in sorted(added.items())]


def _around(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any] | None:
    """What is put before and after a text: by default its beginning, as with Llama's."""
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for name, default, place in (("bos", True, 0), ("eos", False, 2)):
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if config.get(f"add_{name}_token", default) and text in ids:
            parts.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
            special[text] = {"id": text, "ids": [ids[text]], "tokens": [text]}
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


def _model(data: bytes) -> SentencePieceModel:
    pieces, kind, has_byte_fallback, charsmap, adds_prefix = [], _UNIGRAM, False, b"", True
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_bytes(value)))
        elif number == 2:  # trainer_spec
            trained = dict(_fields(_bytes(value)))
            kind, has_byte_fallback = int(trained.get(3, _UNIGRAM)), bool(trained.get(35, 0))
        elif number == 3:  # normalizer_spec
            normalized = dict(_fields(_bytes(value)))
            charsmap, adds_prefix = _bytes(normalized.get(2, b"")), bool(normalized.get(3, 1))
    return SentencePieceModel(pieces, kind, has_byte_fallback, charsmap, adds_prefix)


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _bytes(fields.get(2, bytes(4))))
    return Piece(_bytes(fields[1]).decode(), score, int(fields.get(3, 1)))


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field of bytes is expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields: integers, or bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire == _LENGTH:
            length, place = _varint(data, place)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"no wire type {wire}")
        if place + length > len(data):
            raise ValueError("it is cut off")
        yield number, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise ValueError("no number")
