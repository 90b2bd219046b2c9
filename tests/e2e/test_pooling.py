"""Embeddings, ranks and scores of the whole system, beside a model that generates, equal what transformers' models give."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from openai import OpenAI
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.e2e.checkpoints import make_llama
from tests.e2e.stack import Stack
from tests.e2e.test_examples import run
from tests.worker.pooling_checkpoints import WORDS, write_pooling_checkpoint

TEXTS = ["w1 w2 w3", "w4 w5", " ".join(WORDS[:40]), "w7"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    found = {name: write_pooling_checkpoint(root / name, name) for name in ("qwen3-last", "bert-mean", "cross-bert")}
    return found | {"chat": make_llama(root / "chat")}


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path]) -> Iterator[Stack]:
    stack = Stack({name: str(path) for name, path in folders.items()}, num_instances=1)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.close()


def post(stack: Stack, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}{path}", json=body, timeout=60)


@torch.inference_mode()
def vectors_of(path: Path, texts: list[str], *, is_mean: bool) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for text in texts:
        hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        found.append(F.normalize(hidden.mean(0) if is_mean else hidden[-1], dim=0).numpy())
    return np.stack(found)


@torch.inference_mode()
def scores_of(path: Path, query: str, documents: list[str]) -> list[float]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    pairs = [tokenizer.encode(query, document) for document in documents]
    return [
        torch.sigmoid(model(torch.tensor([p.ids]), token_type_ids=torch.tensor([p.type_ids])).logits[0, 0]).item()
        for p in pairs
    ]


@pytest.mark.parametrize(("name", "is_mean"), [("qwen3-last", False), ("bert-mean", True)])
def test_openais_client_gets_the_models_vectors(
    stack: Stack, folders: dict[str, Path], name: str, is_mean: bool
) -> None:
    own = vectors_of(folders[name], TEXTS, is_mean=is_mean)
    client = OpenAI(base_url=f"{stack.url}/v1", api_key="none")
    answer = client.embeddings.create(model=name, input=TEXTS)  # as base64
    np.testing.assert_allclose([one.embedding for one in answer.data], own, atol=1e-5)
    num_tokens = sum(len(Tokenizer.from_file(str(folders[name] / "tokenizer.json")).encode(t).ids) for t in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    floats = client.embeddings.create(model=name, input=TEXTS[2], encoding_format="float")
    np.testing.assert_allclose(floats.data[0].embedding, own[2], atol=1e-5)
    ids = Tokenizer.from_file(str(folders[name] / "tokenizer.json")).encode(TEXTS[0]).ids
    of_ids = client.embeddings.create(model=name, input=[ids, ids])
    np.testing.assert_allclose([one.embedding for one in of_ids.data], own[[0, 0]], atol=1e-5)


def test_many_texts_in_one_call(stack: Stack, folders: dict[str, Path]) -> None:
    texts = [f"w{i % 90} w{i % 7}" for i in range(150)]
    answer = post(stack, "/v1/embeddings", model="qwen3-last", input=texts, encoding_format="base64")
    assert answer.status_code == 200, answer.text
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer.json()["data"]]
    np.testing.assert_allclose(found, vectors_of(folders["qwen3-last"], texts, is_mean=False), atol=1e-5)


def test_fewer_dimensions_where_the_model_was_trained_for_them(stack: Stack, folders: dict[str, Path]) -> None:
    answer = post(stack, "/v1/embeddings", model="qwen3-last", input=TEXTS[0], dimensions=16)
    cut = vectors_of(folders["qwen3-last"], TEXTS[:1], is_mean=False)[0][:16]
    np.testing.assert_allclose(answer.json()["data"][0]["embedding"], cut / np.linalg.norm(cut), atol=1e-5)
    refused = post(stack, "/v1/embeddings", model="bert-mean", input="w1", dimensions=20)
    assert refused.status_code == 400 and "one of 16, 32" in refused.json()["error"]["message"]


def test_long_texts_are_refused_or_cut(stack: Stack, folders: dict[str, Path]) -> None:
    text = " ".join(WORDS)
    refused = post(stack, "/v1/embeddings", model="bert-mean", input=text)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert "66 tokens; you requested 92" in refused.json()["error"]["message"]
    cut = post(stack, "/v1/embeddings", model="bert-mean", input=text, truncate_prompt_tokens=-1).json()
    own = vectors_of(folders["bert-mean"], [" ".join(WORDS[:64])], is_mean=True)[0]
    np.testing.assert_allclose(cut["data"][0]["embedding"], own, atol=1e-5)
    assert cut["usage"]["prompt_tokens"] == 66


def test_documents_are_ranked_by_a_cross_encoder(stack: Stack, folders: dict[str, Path]) -> None:
    own = scores_of(folders["cross-bert"], "w9 w8", TEXTS)
    order = sorted(range(len(TEXTS)), key=lambda i: -own[i])
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = post(stack, path, model="cross-bert", query="w9 w8", documents=TEXTS, top_n=3).json()
        assert [one["index"] for one in answer["results"]] == order[:3]
        assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[i] for i in order[:3]]
        assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(
            [own[i] for i in order[:3]], abs=1e-5
        )
    scored = post(stack, "/v1/score", model="cross-bert", text_1="w9 w8", text_2=TEXTS).json()
    assert [one["score"] for one in scored["data"]] == pytest.approx(own, abs=1e-5)


def test_an_embedding_model_scores_by_the_angle(stack: Stack, folders: dict[str, Path]) -> None:
    vectors = vectors_of(folders["qwen3-last"], ["w9 w8", *TEXTS], is_mean=False)
    scored = post(stack, "/score", model="qwen3-last", text_1="w9 w8", text_2=TEXTS).json()
    assert [one["score"] for one in scored["data"]] == pytest.approx(list(vectors[1:] @ vectors[0]), abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/embeddings", {"model": "chat", "input": "a"}, "generates text; /v1/embeddings needs an embedding model"),
        ("/v1/embeddings", {"model": "cross-bert", "input": "a"}, "is a reranking model and makes no vectors"),
        ("/v1/completions", {"model": "bert-mean", "prompt": "a"}, "is an embedding model and generates no text"),
        (
            "/v1/chat/completions",
            {"model": "cross-bert", "messages": [{"role": "user", "content": "a"}]},
            "is a reranking model and generates no text",
        ),
        ("/v1/score", {"model": "chat", "text_1": "a", "text_2": "b"}, "generates text; /v1/score needs"),
        ("/v1/embeddings", {"model": "qwen3-last", "input": []}, "'input' must not be an empty list"),
        ("/v1/embeddings", {"model": "qwen3-last", "input": "w1", "dimensions": 49}, "from 1 to 48"),
        ("/v1/score", {"model": "cross-bert", "text_1": ["a", "b"], "text_2": ["c"]}, "one, or as many"),
    ],
)
def test_what_a_model_cannot_do_is_refused(stack: Stack, path: str, body: dict[str, Any], reason: str) -> None:
    answer = post(stack, path, **body)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text


def test_a_batch_of_embeddings(stack: Stack, folders: dict[str, Path]) -> None:
    client = OpenAI(base_url=f"{stack.url}/v1", api_key="none")
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"model": "bert-mean", "input": text}}
        for i, text in enumerate(TEXTS)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="1h")
    deadline = time.monotonic() + 60
    while batch.status != "completed" and time.monotonic() < deadline:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    found = [answer["response"]["body"]["data"][0]["embedding"] for answer in answers]
    np.testing.assert_allclose(found, vectors_of(folders["bert-mean"], TEXTS, is_mean=True), atol=1e-5)


def test_they_are_counted_as_others_are(stack: Stack) -> None:
    post(stack, "/v1/embeddings", model="qwen3-last", input="w1").raise_for_status()
    text = httpx.get(f"{stack.url}/metrics").text
    assert 'tideway_gateway_requests_total{class="online",model="qwen3-last",outcome="ok"}' in text
    assert 'gen_ai_operation_name="embeddings"' in text


def test_the_example(stack: Stack) -> None:
    told, *ranked = run(stack, "embeddings", "qwen3-last")
    assert told.startswith("3 vectors of 48 dimensions")
    scores = [float(line.split()[0]) for line in ranked]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
