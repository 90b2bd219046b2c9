"""One measurement of one server: `vllm bench serve`, from vLLM's environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.peers.results import Case, Measured
from bench.peers.servers import Server, ServerError, Vllm, environment
from bench.reporting import others_processor_s

TIMEOUT_S = 1200.0


def measure(client: Vllm, server: Server, checkpoint: Path, case: Case, number: int, seed: int) -> Measured:
    """`number`: of the round. Raises `ServerError` where not all requests were answered."""
    with tempfile.TemporaryDirectory(prefix="tideway-peers-") as folder:
        command = [
            client.binary, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
            "--base-url", server.url, "--model", checkpoint.name, "--tokenizer", checkpoint, "--dataset-name", "random",
            "--random-input-len", str(case.input_tokens), "--random-output-len", str(case.output_tokens), "--ignore-eos",
            # llama.cpp's server closes connections that the client would use again.
            "--header", "Connection=close",
            "--temperature", "0", "--seed", str(seed), "--num-warmups", "0", "--num-prompts", str(case.num_prompts),
            "--max-concurrency", str(case.concurrency), "--percentile-metrics", "ttft,tpot,itl",
            "--metric-percentiles", "99", "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", folder,
            "--result-filename", "result.json",
        ]  # fmt: skip
        began_s, before_s = time.monotonic(), _others_s()
        done = subprocess.run(
            command, env=environment({}), capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
        )
        others_cores = (_others_s() - before_s) / (time.monotonic() - began_s)
        file = Path(folder) / "result.json"
        if done.returncode or not file.exists():
            raise ServerError(f"the client failed on {server.name}:\n{(done.stdout + done.stderr)[-3000:]}")
        found = json.loads(file.read_text())
    if found["completed"] != case.num_prompts:
        why = next((error.strip().splitlines()[-1] for error in found.get("errors", ()) if error and error.strip()), "")
        answered = f"{found['completed']} of {case.num_prompts} requests of {case.name}"
        raise ServerError(f"{server.name} answered {answered}: {why}")
    # All answers have as many tokens as were asked for. The client counts those of a server that does not tell its usage by
    # tokenizing their text again, which gave up to twice as many for random weights.
    decode_ms = [1e3 * sum(gaps) / max(1, case.output_tokens - 1) for gaps in found["itls"]]
    gaps_ms = [1e3 * gap for gaps in found["itls"] for gap in gaps]
    return Measured(
        server=server.name,
        case=case.name,
        round=number,
        duration_s=found["duration"],
        output_tokens_per_s=case.num_prompts * case.output_tokens / found["duration"],
        mean_ttft_ms=found["mean_ttft_ms"],
        p99_ttft_ms=found["p99_ttft_ms"],
        mean_tpot_ms=float(np.mean(decode_ms)),
        p99_tpot_ms=float(np.percentile(decode_ms, 99)),
        p50_itl_ms=float(np.median(gaps_ms)) if gaps_ms else 0.0,
        p99_itl_ms=found["p99_itl_ms"],
        max_itl_ms=max(gaps_ms, default=0.0),
        others_cores=max(0.0, others_cores),
    )


def _others_s() -> float:
    """Processor time of what is no part of this bench; a client that has ended is."""
    times = os.times()
    return others_processor_s() - times.children_user - times.children_system
