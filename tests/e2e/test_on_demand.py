"""Models that are loaded on demand, on a running system: `a` and `b` do not fit together, `c` is always loaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.checkpoints import make_llama
from tests.e2e.stack import Stack
from tests.stalls import Stopwatch

MEMORY_BYTES = 220 << 20
"""Room for `c`, a KV pool and one of the others, of 77 MB each."""
IDLE_S = {"a": 60.0, "b": 60.0, "short": 1.0}
STILL_S = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on-demand")
    for seed, name in enumerate("ab"):
        make_llama(folder / name, seed=seed, hidden=512, layers=10)
    for seed, name in enumerate(("c", "short", "gone")):
        make_llama(folder / name, seed=7 + seed)
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    models = {name: str(folder / name) for name in ("c", "a", "b", "short", "gone")}
    specs = [{"name": name, "source": source, "on_demand": name != "c"} for name, source in models.items()]
    for spec in specs:
        spec |= {"idle_s": IDLE_S[spec["name"]]} if spec["name"] in IDLE_S else {}
    environment = {"TIDEWAY_MODELS": json.dumps(specs), "TIDEWAY_MEMORY_BYTES": str(MEMORY_BYTES)}
    with Stack(models, num_instances=1, environment=environment, step_s=0.01) as stack:
        stack.wait_until(lambda: state(stack, "c") == "ready", "the model that is always loaded")
        yield stack


def state(stack: Stack, model: str) -> str:
    response = httpx.get(f"{stack.url}/v1/models/{model}", timeout=10)
    return response.json()["state"] if response.status_code == 200 else str(response.status_code)


def completion(model: str, num_tokens: int = 8, **more: object) -> dict[str, object]:
    body = {"model": model, "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return body | more


def complete(stack: Stack, model: str, num_tokens: int = 8) -> str:
    response = httpx.post(f"{stack.url}/v1/completions", json=completion(model, num_tokens), timeout=60)
    assert response.status_code == 200, f"{response.text}\n{stack.logs()}"
    return response.json()["choices"][0]["text"]


class Streaming:
    """Streams of a model, one after another in a thread, while a block runs."""

    def __init__(self, stack: Stack, model: str) -> None:
        self._stack, self._model = stack, model
        self._is_over = threading.Event()
        self.longest_gap_s = 0.0
        self.num_chunks = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        watch, watched_s = Stopwatch().start(), time.monotonic()
        while not self._is_over.is_set():
            body = completion(self._model, 300, stream=True)
            with httpx.stream("POST", f"{self._stack.url}/v1/completions", json=body, timeout=60) as response:
                last_s = None
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    if last_s is not None:
                        # Less the time for which the machine had no core for the system; to look at that takes a while.
                        gap_s = now - last_s if now - last_s < STILL_S else watch.seconds - (last_s - watched_s)
                        self.longest_gap_s = max(self.longest_gap_s, gap_s)
                    if now - watched_s > STILL_S:
                        watch, watched_s = Stopwatch().start(), time.monotonic()
                    last_s = time.monotonic()
                    self.num_chunks += 1
                    if self._is_over.is_set():
                        return

    def __enter__(self) -> Streaming:
        self._thread.start()
        self._stack.wait_until(lambda: self.num_chunks > 5, "the first chunks")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(30)


def test_what_is_configured_is_listed_and_only_what_is_unknown_is_not_found(stack: Stack) -> None:
    cards = {card["id"]: card["state"] for card in httpx.get(f"{stack.url}/v1/models", timeout=10).json()["data"]}
    assert cards == {"c": "ready", "a": "disk", "b": "disk", "short": "disk", "gone": "disk"}
    assert httpx.get(f"{stack.url}/ready", timeout=10).json()["models"] == list(cards)
    assert httpx.post(f"{stack.url}/v1/completions", json=completion("unknown"), timeout=10).status_code == 404
    assert "a disk 0 idle 60 s 0+0+0" in " ".join(stack.tideway("model", "list").split())


def test_models_that_do_not_fit_together_take_turns_and_no_stream_of_another_stands_still(stack: Stack) -> None:
    with Streaming(stack, "c") as streaming:
        first = {name: complete(stack, name) for name in "ab"}
        assert state(stack, "a") == "host", stack.logs()
        with Stopwatch() as watch:
            assert complete(stack, "a") == first["a"]
        stack.wait_until(lambda: state(stack, "b") == "host", "the other one to be put away")
        assert complete(stack, "b") == first["b"]
    assert streaming.longest_gap_s < STILL_S, f"{streaming.longest_gap_s:.2f} s, of {streaming.num_chunks} chunks"
    assert first["a"] != first["b"] and watch.seconds < 10.0
    metrics = httpx.get(f"http://127.0.0.1:{stack.metrics_ports['placement']}/metrics", timeout=10).text
    for sample in ('wakes_total{model="a",tier="disk"}', 'wakes_total{model="a",tier="host"}',
                   'put_aways_total{cause="room",model="a"}', 'wake_seconds_count{tier="host"}'):  # fmt: skip
        assert f"tideway_model_{sample}" in metrics


def test_a_stream_is_told_why_it_waits(stack: Stack) -> None:
    complete(stack, "a")
    with Streaming(stack, "a"):
        body = completion("b", 4, stream=True)
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            first = next(lines)
    assert response.status_code == 200
    assert first.startswith(": cold start: b is ") and first.endswith("the memory that it needs is in use"), first
    assert state(stack, "a") == "ready", "never put away under a stream"


def test_two_models_that_are_wanted_at_once_are_both_served(stack: Stack) -> None:
    with ThreadPoolExecutor(6) as pool:
        names = ["a", "b", "short"] * 2
        texts = list(pool.map(lambda name: complete(stack, name), names))
    assert texts[:3] == texts[3:] and len(set(texts)) == 3


def test_a_model_is_put_away_when_it_is_idle_also_when_nobody_waited_for_it(stack: Stack) -> None:
    stack.wait_until(lambda: state(stack, "short") in ("host", "disk"), "short to be put away")
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", f"{stack.url}/v1/completions", json=completion("short", 500, stream=True), timeout=0.02),
    ):
        pass
    with Stopwatch() as watch:
        text = complete(stack, "short")
        assert text == complete(stack, "short")
    assert watch.seconds < 10.0
    stack.wait_until(lambda: state(stack, "short") == "host", "short to be put away again")


def test_files_that_vanished_are_told_and_tried_again(stack: Stack, folder: Path) -> None:
    shutil.move(folder / "gone", folder / "moved")
    response = httpx.post(f"{stack.url}/v1/completions", json=completion("gone"), timeout=60)
    assert response.status_code == 503, response.text
    assert (
        int(response.headers["retry-after"]) >= 1 and "'gone' cannot be loaded" in response.json()["error"]["message"]
    )
    assert state(stack, "gone") in ("failed", "disk", "503")
    shutil.move(folder / "moved", folder / "gone")

    def is_served() -> bool:
        return httpx.post(f"{stack.url}/v1/completions", json=completion("gone"), timeout=60).status_code == 200

    stack.wait_until(is_served, "the model whose files are back")


def test_a_batch_wakes_a_model(stack: Stack) -> None:
    stack.wait_until(lambda: state(stack, "short") in ("host", "disk"), "short to be put away")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": completion("short")}
    files = {"file": ("input.jsonl", json.dumps(line).encode())}
    file = httpx.post(f"{stack.url}/v1/files", files=files, data={"purpose": "batch"}, timeout=10).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = httpx.post(f"{stack.url}/v1/batches", json=body, timeout=10).json()

    def is_completed() -> bool:
        now = httpx.get(f"{stack.url}/v1/batches/{batch['id']}", timeout=10).json()
        return now["status"] == "completed" and now["request_counts"]["completed"] == 1

    stack.wait_until(is_completed, "the batch")


def test_models_are_added_on_demand_and_removed(stack: Stack, folder: Path) -> None:
    shutil.copytree(folder / "c", folder / "late")
    told = stack.tideway("model", "add", "late", str(folder / "late"), "--idle", "30")
    assert "late is loaded when the first request for it comes" in told
    stack.wait_until(lambda: state(stack, "late") == "disk", "the model")
    assert complete(stack, "late") == complete(stack, "c")
    stack.tideway("model", "remove", "late")
    stack.wait_until(lambda: state(stack, "late") == "404", "no model")
    stack.wait_until(
        lambda: all(model["name"] != "late" for one in stack.instances() for model in one["models"]), "nothing of it"
    )


def test_an_instance_that_dies_while_it_loads_serves_the_request_when_it_is_back(stack: Stack) -> None:
    """The last one: what it had in host memory is gone."""
    with ThreadPoolExecutor(1) as pool:
        held = {model["name"]: model["state"] for model in stack.instances()[0]["models"]}
        wanted = "b" if held.get("a") == "ready" else "a"
        answer = pool.submit(complete, stack, wanted)

        def is_loading() -> bool:
            states = {model["name"]: model["state"] for one in stack.instances() for model in one["models"]}
            return states.get(wanted) in ("loading", "ready") or answer.done()

        stack.wait_until(is_loading, "the load")
        os.kill(stack.instances()[0]["pid"], signal.SIGKILL)
        assert answer.result(90)
    assert state(stack, wanted) == "ready"
