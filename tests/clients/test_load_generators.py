"""Clients that put load on a server and report what it did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.clients.conftest import LLAMA, OPT, needs_program
from tests.e2e.stack import REPOSITORY

NUM_REQUESTS = 6


@needs_program("guidellm")
def test_guidellm(url: str, command: Callable[..., str], tmp_path: Path) -> None:
    tokenizer = REPOSITORY / "models" / LLAMA
    command(
        "guidellm",
        *("run", "--backend", f"kind=openai_http,target={url},model={LLAMA}", "--profile", "kind=synchronous"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--disable-console"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["benchmarks"][0]["metrics"]["request_totals"]["successful"] == NUM_REQUESTS


@needs_program("aiperf")
def test_aiperf(url: str, command: Callable[..., str], tmp_path: Path) -> None:
    command(
        "aiperf",
        *("profile", "--model", LLAMA, "--url", url, "--endpoint-type", "chat", "--streaming", "--ui", "none"),
        *("--tokenizer", str(REPOSITORY / "models" / LLAMA), "--request-count", str(NUM_REQUESTS)),
        *("--isl", "32", "--osl", "8", "--output-artifact-dir", str(tmp_path / "artifacts")),
    )
    (report,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == NUM_REQUESTS


@needs_program("vllm")
def test_vllm_bench_serve(url: str, command: Callable[..., str], tmp_path: Path) -> None:
    command(
        "vllm",
        *("bench", "serve", "--backend", "openai", "--base-url", url, "--model", OPT),
        *("--tokenizer", str(REPOSITORY / "models" / OPT), "--dataset-name", "random", "--num-prompts", "6"),
        *("--random-input-len", "32", "--random-output-len", "8", "--save-result", "--result-dir", str(tmp_path)),
    )
    (report,) = tmp_path.glob("*.json")
    assert json.loads(report.read_text())["completed"] == NUM_REQUESTS
