"""Vectors and scores are those that transformers' own models give, however texts are cut into steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from services.worker.executor.executor import Executor
from shared.engine.plan import NO_TOKEN
from shared.messages.cluster import ModelSpec
from shared.messages.requests import Pooled, unpack_vector
from shared.models.checkpoint import CheckpointError, describe
from tests.worker.pooling_checkpoints import CHECKPOINTS, SPECIAL, VOCAB_SIZE, write_pooling_checkpoint
from tests.worker.step_driver import Driver, Row

LENGTHS = (1, 3, 33, 60)
YES, NO = SPECIAL.index("yes"), SPECIAL.index("no")


def text_of(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1, VOCAB_SIZE) for _ in range(length)]


@torch.inference_mode()
def expected(path: Path, name: str, text: list[int], num_first: int = 0) -> torch.Tensor:
    """Vectors as sentence-transformers' modules give them, from transformers' own forward pass."""
    ids = torch.tensor([text])
    if name == "qwen3-yes-no":
        logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits[0, -1]
        return torch.sigmoid(logits[YES] - logits[NO])[None]
    if CHECKPOINTS[name][2] == []:
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
        types = (
            {} if name.startswith("qwen3") else {"token_type_ids": (torch.arange(len(text)) >= num_first)[None].long()}
        )
        return torch.sigmoid(model(ids, **types).logits[0])
    hidden = AutoModel.from_pretrained(path, dtype=torch.float32).eval()(ids).last_hidden_state[0]
    mode, *others = CHECKPOINTS[name][2]
    vector = {"cls": hidden[0], "mean": hidden.mean(0), "lasttoken": hidden[-1]}[mode]
    if "Dense" in others:
        dense = load_file(path / "2_Dense" / "model.safetensors")
        vector = torch.tanh(F.linear(vector, dense["linear.weight"], dense["linear.bias"]))
    return F.normalize(vector, dim=0) if "Normalize" in others else vector


def make(path: Path) -> Driver:
    executor = Executor("cpu", 4, 1 << 18, 8)
    return Driver(executor, executor.add_model(executor.prepare_model(ModelSpec("m", str(path)))), range(4))


def vector_of(row: Row) -> torch.Tensor:
    return torch.tensor(unpack_vector(row.prompt_logprobs))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_vectors_are_transformers_own_in_any_chunks(tmp_path: Path, name: str) -> None:
    path = write_pooling_checkpoint(tmp_path, name)
    driver = make(path)
    firsts = [0 if CHECKPOINTS[name][2] or length < 3 else length // 2 for length in LENGTHS]
    rows = [
        driver.add(i, text_of(length, i), logprobs=0, pooled=Pooled(num_first=first))
        for i, (length, first) in enumerate(zip(LENGTHS, firsts, strict=True))
    ]
    chance = random.Random(3)
    while left := [row for row in rows if not row.output]:
        driver.step([(row, chance.randint(1, min(25, len(row.tokens) - row.computed))) for row in left])
    for row, first in zip(rows, firsts, strict=True):
        own = expected(path, name, row.tokens[: row.num_prompt], first or row.num_prompt)
        assert vector_of(row).shape == own.shape == (describe(path).pooling.num_dimensions,)
        torch.testing.assert_close(vector_of(row), own, atol=2e-5, rtol=1e-4)


def test_fewer_dimensions_are_cut_before_the_length_is_made_1(tmp_path: Path) -> None:
    path = write_pooling_checkpoint(tmp_path, "qwen3-last")
    driver = make(path)
    row = driver.add(0, text_of(20, 1), logprobs=0, pooled=Pooled(num_dimensions=16))
    driver.step([(row, 20)])
    own = F.normalize(expected(path, "qwen3-last", row.tokens[:20])[:16], dim=0)
    torch.testing.assert_close(vector_of(row), own, atol=2e-5, rtol=1e-4)


def test_a_mean_begins_anew_after_a_preemption(tmp_path: Path) -> None:
    path = write_pooling_checkpoint(tmp_path, "mistral-mean")
    driver = make(path)
    row = driver.add(0, text_of(40, 1), logprobs=0, pooled=Pooled(is_whole=True))
    driver.step([(row, 13)])
    driver.preempt(row)
    driver.step([(row, 30)])
    driver.step([(row, 10)])
    torch.testing.assert_close(vector_of(row), expected(path, "mistral-mean", row.tokens[:40]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["mistral-mean", "qwen3-score", "bert-mean", "cross-bert"])
def test_a_vector_that_is_not_finite_ends_its_request_alone(tmp_path: Path, name: str) -> None:
    path = write_pooling_checkpoint(tmp_path, name)
    driver = make(path)
    model = driver.executor._models["m"].model
    parts = vars(model).get("_model")
    embeddings = model._embedding._weight if parts is None else parts.get_input_embeddings().weight
    with torch.inference_mode():
        embeddings[7] = torch.nan
    lame = driver.add(0, [3, 7, 4], logprobs=0, pooled=Pooled())
    good = driver.add(1, [3, 8, 4], logprobs=0, pooled=Pooled())
    driver.step([(lame, 3), (good, 3)])
    assert lame.output == [NO_TOKEN] and good.output != [NO_TOKEN]
    assert vector_of(good).isfinite().all()
    assert driver.executor.is_sound("m")
    with torch.inference_mode():
        embeddings.fill_(torch.nan)
    assert not driver.executor.is_sound("m")


def test_what_a_checkpoint_says_is_read(tmp_path: Path) -> None:
    found = {name: describe(write_pooling_checkpoint(tmp_path / name, name)) for name in CHECKPOINTS}
    tasks = {name: (shape.pooling.task, shape.pooling.mode, shape.pooling.is_whole) for name, shape in found.items()}
    assert tasks == {
        "qwen3-last": ("embed", "lasttoken", False),
        "mistral-last": ("embed", "lasttoken", False),
        "mistral-mean": ("embed", "mean", True),
        "bert-mean": ("embed", "mean", True),
        "xlmr-cls": ("embed", "cls", True),
        "distilbert": ("embed", "mean", True),
        "cross-bert": ("score", "cls", True),
        "qwen3-score": ("score", "lasttoken", False),
        "qwen3-yes-no": ("score", "lasttoken", False),
    }
    # one more than the positions, of which XLM-R's first stands for padding
    assert found["qwen3-last"].max_model_len == 129
    assert (found["bert-mean"].max_model_len, found["xlmr-cls"].max_model_len) == (67, 66)
    assert found["bert-mean"].pooling.matryoshka_dimensions == (16, 32)


@pytest.mark.parametrize(
    ("name", "file", "change", "reason"),
    [
        ("bert-mean", "1_Pooling/config.json", {"pooling_mode": "max"}, "pooling max is not supported"),
        ("mistral-mean", "2_Dense/config.json", {"activation_function": "torch.nn.ReLU"}, "'torch.nn.ReLU'"),
        ("qwen3-last", "1_Pooling/config.json", {"pooling_mode": "cls"}, "no meaning for a causal"),
        ("cross-bert", "config.json", {"id2label": {"0": "a", "1": "b"}}, "2 classes"),
        ("qwen3-yes-no", "config.json", {"classifier_from_token": ["no", "perhaps"]}, "two tokens"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    tmp_path: Path, name: str, file: str, change: dict[str, object], reason: str
) -> None:
    path = write_pooling_checkpoint(tmp_path, name)
    stored = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(stored | change))
    with pytest.raises(CheckpointError, match=reason):
        describe(path)


def test_texts_of_other_lengths_beside_it_change_no_encoded_text(tmp_path: Path) -> None:
    path = write_pooling_checkpoint(tmp_path, "bert-mean")
    alone, together = make(path), make(path)
    texts = [text_of(length, 9) for length in (5, 40, 17)]
    rows = [together.add(i, text, logprobs=0, pooled=Pooled()) for i, text in enumerate(texts)]
    together.step([(row, row.num_prompt) for row in rows])
    for i, text in enumerate(texts):
        row = alone.add(i, text, logprobs=0, pooled=Pooled())
        alone.step([(row, row.num_prompt)])
        np.testing.assert_allclose(vector_of(row), vector_of(rows[i]), atol=1e-5)
