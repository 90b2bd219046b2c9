"""lm-eval's loglikelihood tasks (`local-completions`), on a small task of our own: its hub has none without the internet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import LLAMA, needs_program
from tests.e2e.stack import REPOSITORY

TASK = """
task: tide
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: {metric}}}]
"""
QUESTIONS = [
    {"question": "What is a compiler? A compiler is", "choices": [" a program", " qzx qzx"], "answer": 0},
    {"question": "An operating system is", "choices": [" xqz zzq", " a program"], "answer": 1},
    {"question": "The tide", "choices": [" comes in", " goes out", " jjj"], "answer": 2},
]


@needs_program("lm_eval")
@pytest.mark.parametrize(("kind", "metric"), [("multiple_choice", "acc"), ("loglikelihood_rolling", "word_perplexity")])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihood(
    base_url: str,
    command: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    metric: str,
    batch_size: int,
) -> None:
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}.items():
        monkeypatch.setitem(os.environ, name, value)
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    task = TASK.format(file=file, kind=kind, metric=metric)
    if kind == "loglikelihood_rolling":
        task = "\n".join(line for line in task.splitlines() if not line.startswith(("doc_to_choice", "doc_to_text")))
        task = task.replace("{{answer}}", "{{question}}") + "\ndoc_to_text: ''"
    (tmp_path / "tide.yaml").write_text(task)
    arguments = {
        "model": LLAMA,
        "base_url": f"{base_url}/completions",
        "tokenizer": str(REPOSITORY / "models" / LLAMA),
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
    }
    pairs = ",".join(f"{name}={value}" for name, value in arguments.items())
    command(
        "lm_eval",
        *("--model", "local-completions", "--model_args", pairs, "--tasks", "tide", "--include_path", str(tmp_path)),
        *("--batch_size", str(batch_size), "--output_path", str(tmp_path / "results")),
    )
    (result,) = (tmp_path / "results").rglob("*.json")
    found = json.loads(result.read_text())["results"]["tide"][f"{metric},none"]
    assert found > 1 if kind == "loglikelihood_rolling" else found in (0.0, 1 / 3, 2 / 3, 1.0)
