"""What bench/peers makes and concludes; servers are its own run's to try."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.peers.checkpoints import make_tokenizer
from bench.peers.gguf_file import gguf_name, interleave, read_tensors
from bench.peers.results import Measured, best_peer, rows, targets, turns


def turn(server: str, rate: float, *, case: str = "8 streams", p99_tpot_ms: float = 10.0) -> Measured:
    return Measured(
        server=server, case=case, round=0, duration_s=1.0, output_tokens_per_s=rate, mean_ttft_ms=5.0, p99_ttft_ms=9.0,
        mean_tpot_ms=8.0, p99_tpot_ms=p99_tpot_ms, p50_itl_ms=7.0, p99_itl_ms=20.0, max_itl_ms=30.0,
        others_cores=0.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(4000)


def test_text_of_any_tokens_is_itself_again(tokenizer: Tokenizer) -> None:
    chooser = random.Random(0)
    text = tokenizer.decode([chooser.randrange(3 + 256, 4000) for _ in range(200)])
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == 4000
    assert tokenizer.decode(ids) == text
    assert len(ids) < 500, "in words, not in bytes"


def test_turns_cancel_a_steady_drift() -> None:
    order = turns(["a", "b", "c"])
    assert order == ["a", "b", "c", "c", "b", "a"]
    assert {name: sum(place for place, each in enumerate(order) if each == name) for name in "abc"} == dict.fromkeys(
        "abc", 5
    )


def test_a_case_is_judged_against_the_peer_with_the_most_tokens() -> None:
    measured = [
        turn("tideway", 120), turn("vllm", 100), turn("llama.cpp", 50, p99_tpot_ms=1.0),
        turn("llama.cpp", 50, p99_tpot_ms=1.0), turn("vllm", 100), turn("tideway", 40),
    ]  # fmt: skip
    found = rows(measured)
    assert [(row.server, round(row.output_tokens_per_s)) for row in found] == [
        ("tideway", 60), ("vllm", 100), ("llama.cpp", 50),
    ]  # fmt: skip
    peer = best_peer(found, "8 streams", "tideway")
    assert peer is not None and peer.server == "vllm"
    throughput, ttft, tpot = targets(found, "tideway")
    assert throughput.value == pytest.approx(0.6) and not throughput.is_met
    assert ttft.is_met and tpot.value == 1 and tpot.is_met


def test_without_peers_nothing_is_judged() -> None:
    assert targets(rows([turn("tideway", 1.0)]), "tideway") == []


def test_a_gguf_file_has_the_bits_of_the_checkpoint(tmp_path: Path) -> None:
    bits = np.arange(24, dtype=np.uint16).reshape(8, 3)
    head = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": [8, 3], "data_offsets": [0, 48]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bits.tobytes())
    [(name, read)] = read_tensors(tmp_path)
    assert name == "w" and (read == bits).all()
    # Two heads of four: halves (0, 1), (2, 3) become neighbours (0, 2), (1, 3).
    assert interleave(read, 2)[:, 0].tolist() == [bits[row, 0] for row in (0, 2, 1, 3, 4, 6, 5, 7)]


def test_tensors_have_the_names_of_llama_cpp() -> None:
    assert gguf_name("model.layers.7.self_attn.q_proj.weight") == "blk.7.attn_q.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.mlp.experts.weight")
