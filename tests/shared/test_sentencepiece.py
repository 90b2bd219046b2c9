"""Tokenizers of sentencepiece alone: files written here, byte by byte as its protobuf has them."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.text.tokenization import load_tokenizer
from shared.messages.cluster import ModelSpec
from shared.models import checkpoint
from shared.models.sentencepiece import SentencePieceError, read_model, tokenizer_json
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint

TEXT, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
LETTERS = [("\u2581", TEXT), ("t", TEXT), ("h", TEXT), ("e", TEXT), ("d", TEXT), ("i", TEXT)]
MERGED = ["he", "de", "ti", "tide", "\u2581tide", "\u2581t", "\u2581the"]
"""The earlier one is merged first."""


def varint(value: int) -> bytes:
    head, rest = value & 0x7F, value >> 7
    return bytes([head | 0x80]) + varint(rest) if rest else bytes([head])


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text: str, score: float, kind: int) -> bytes:
    return field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + field(3, kind))


def model(kind: int, *, prefix: bool = True) -> bytes:
    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|x|>", USER)]
    pieces += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    whole = [piece(text, 0.0, what) for text, what in pieces]
    whole += [piece(text, -float(rank), TEXT) for rank, text in enumerate(MERGED, 1)]
    whole += [piece(text, -100.0, what) for text, what in LETTERS]
    whole.append(field(2, field(3, kind) + field(35, 1) + field(1, b"input.txt")))
    whole.append(field(3, field(1, b"identity") + field(3, int(prefix)) + field(4, 0)))
    return b"".join(whole)


def folder_of(tmp_path: Path, data: bytes, **config: Any) -> Path:
    folder = write_checkpoint(tmp_path / "model", byte_level_tokenizer())
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **config}))
    return folder


@pytest.mark.parametrize("kind", [1, 2])
def test_text_becomes_the_pieces_and_is_read_back(tmp_path: Path, kind: int) -> None:
    loaded = load_tokenizer(ModelSpec("m", str(folder_of(tmp_path, model(kind)))))
    ids = loaded.encode("the tide <|x|>\u6f6e", False)
    pieces = [loaded.token_piece(one) for one in ids]
    assert pieces[:3] == ["\u2581the", "\u2581tide", "\u2581"] and "<|x|>" in pieces
    assert pieces[-3:] == ["<0xE6>", "<0xBD>", "<0xAE>"]
    assert loaded.decode(ids).replace(" <|x|> ", " <|x|>") == "the tide <|x|>\u6f6e"
    assert loaded.eos_token_ids == (2,) and loaded.encode("the", True)[0] == 1
    assert loaded.token_bytes(ids[-1]) == b"\xae" and loaded.special_token_id("</s>") == 2


def test_a_text_without_a_space_before_it(tmp_path: Path) -> None:
    loaded = load_tokenizer(ModelSpec("m", str(folder_of(tmp_path, model(2, prefix=False), add_bos_token=False))))
    assert [loaded.token_piece(one) for one in loaded.encode("tide the", True)] == ["tide", "\u2581the"]
    assert loaded.decode(loaded.encode("tide the", False)) == "tide the"


def test_tokens_that_were_added_later(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model(2), added_tokens_decoder={"274": {"content": "<|user|>", "special": True}})
    (folder / "added_tokens.json").write_text(json.dumps({"<|end|>": 273}))
    tokenizer = Tokenizer.from_str(tokenizer_json(folder, checkpoint.read_tokenizer_config(folder)))
    assert (tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|user|>")) == (273, 274)


@pytest.mark.parametrize(
    "data",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 499723\n",
        b"",
        b"IQ== 0\nIg== 1\n",
        model(2)[:-3],
        model(4),
        field(1, b"\x0a"),
    ],
)
def test_a_file_that_is_none_is_told_of_when_a_model_is_added(tmp_path: Path, data: bytes) -> None:
    folder = folder_of(tmp_path, data)
    with pytest.raises(checkpoint.CheckpointError, match="sentencepiece"):
        checkpoint.check_tokenizer(folder)
    with pytest.raises(checkpoint.CheckpointError, match="sentencepiece"):
        load_tokenizer(ModelSpec("m", str(folder)))


def test_one_that_is_there_beside_others_is_not_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, b"junk")
    (folder / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    checkpoint.check_tokenizer(folder)
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        checkpoint.check_tokenizer(folder)


@given(st.binary(max_size=200), st.integers(0, 4000))
def test_no_bytes_do_more_than_to_be_refused(data: bytes, place: int) -> None:
    whole = model(2)
    file = Path(tempfile.gettempdir()) / f"tideway-sentencepiece-{os.getpid()}"
    for one in (data, whole[:place] + data + whole[place:]):
        file.write_bytes(one)
        try:
            read_model(file)
        except SentencePieceError:
            pass
        finally:
            file.unlink()
