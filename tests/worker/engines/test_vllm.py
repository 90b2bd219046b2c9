"""vLLM itself, hosted by a real Tideway: `make test-engines`. Needs `tideway engine install vllm`; several minutes.

Streams go on through the death of any process of the instance that computes them, with the tokens of an undisturbed run
(float32).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx
import pytest

from services.worker.engines.environments import EngineEnvironmentError, python_of
from tests.conftest import free_port
from tests.worker.engines.test_foreign import is_running

ARGUMENTS = "--dtype float32 --enforce-eager --max-num-seqs 8 --max-num-batched-tokens 256 --block-size 32"
NUM_STREAMS = 8
NUM_TOKENS = 400

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def said(log: Path) -> str:
    """At last."""
    return log.read_text()[-2000:]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    try:
        python_of("vllm")
    except EngineEnvironmentError as error:
        pytest.skip(str(error))
    port = free_port()
    command = [
        sys.executable, "-m", "tideway", "up", "--model", "demo=models/tideway-demo-llama", "--engine", "vllm",
        "--engine-args", ARGUMENTS, "--instances", "2", "--port", str(port),
        "--data-dir", str(tmp_path_factory.mktemp("up")),
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    asyncio.run(_until_serving(address, process, log))
    started = descendants(process.pid)
    yield address
    process.send_signal(signal.SIGINT)
    process.wait(60)
    left = [pid for pid in started if is_running(pid)]
    assert not left, [command_of(pid) for pid in left]


async def _instances(http: httpx.AsyncClient, address: str) -> list[dict]:
    return (await http.get(f"{address}/admin/instances")).json()["instances"]


async def _until_serving(address: str, process: subprocess.Popen[bytes], log: Path, num: int = 2) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        for _ in range(1200):
            assert process.poll() is None, said(log)
            try:
                ready = [one for one in await _instances(http, address) if one["state"] == "ready"]
            except (httpx.HTTPError, ValueError, KeyError):
                ready = []
            if len(ready) >= num:
                return
            await asyncio.sleep(0.5)
    raise AssertionError(said(log))


async def stream(http: httpx.AsyncClient, address: str, number: int, **fields: object) -> tuple[str, str | None]:
    """Its text, and its finish reason."""
    body = {
        "model": "demo", "prompt": f"Chapter {number}: An operating system is", "max_tokens": NUM_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True, **fields,
    }  # fmt: skip
    text, reason = "", None
    async with http.stream("POST", f"{address}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = httpx.Response(200, content=line[6:]).json()
                for choice in chunk.get("choices", []):
                    text += choice.get("text") or ""
                    reason = choice.get("finish_reason") or reason
    return text, reason


async def streams(http: httpx.AsyncClient, address: str, **fields: object) -> list[tuple[str, str | None]]:
    return await asyncio.gather(*(stream(http, address, number, **fields) for number in range(NUM_STREAMS)))


def processes_of(instance_pid: int) -> dict[str, int]:
    """Processes of a hosted instance: itself, the adapter, vLLM's engine."""
    (adapter,) = children(instance_pid)
    engine = next(pid for pid in descendants(adapter) if "resource_tracker" not in command_of(pid))
    return {"instance": instance_pid, "adapter": adapter, "engine": engine}


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 7}, {"presence_penalty": 0.8}], ids=str)
async def test_streams_go_on_through_the_death_of_any_process(url: str, fields: dict[str, object]) -> None:
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=50)) as http:
        expected = await streams(http, url, **fields)
        assert all(reason == "length" for _, reason in expected)
        for victim in ("engine", "adapter", "instance"):
            await _until_ready(http, url)
            running = asyncio.create_task(streams(http, url, **fields))
            processes = processes_of((await _busiest(http, url))["pid"])
            assert not running.done(), "the streams are too short for this machine"
            os.kill(processes[victim], signal.SIGKILL)
            assert await running == expected, victim
            await _until_ended(processes.values(), victim)


async def _busiest(http: httpx.AsyncClient, address: str) -> dict:
    """The instance that runs most requests, once one runs any: load is reported now and then."""
    for _ in range(200):
        busiest = max(await _instances(http, address), key=lambda one: one["load"]["num_running"])
        if busiest["load"]["num_running"] > 0:
            return busiest
        await asyncio.sleep(0.1)
    raise AssertionError("no instance runs anything")


async def _until_ended(pids: Iterable[int], victim: str) -> None:
    for _ in range(200):
        if not any(is_running(pid) for pid in pids):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"after the death of the {victim}: {[command_of(pid) for pid in pids if is_running(pid)]}")


async def _until_ready(http: httpx.AsyncClient, address: str) -> None:
    for _ in range(600):
        if sum(one["state"] == "ready" for one in await _instances(http, address)) == 2:
            return
        await asyncio.sleep(0.5)
    raise AssertionError("no second instance came back")


async def test_a_schema_is_followed_and_what_is_lacking_is_refused_by_name(url: str) -> None:
    properties = {"yes": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["yes"], "additionalProperties": False}
    async with httpx.AsyncClient(timeout=120) as http:
        body = {"model": "demo", "prompt": "Is C a language?", "max_tokens": 40, "temperature": 0}
        structured = {**body, "structured_outputs": {"json": schema}}
        answer = (await http.post(f"{url}/v1/completions", json=structured)).json()
        assert answer["choices"][0]["text"] in ('{"yes": true}', '{"yes": false}', '{"yes":true}', '{"yes":false}')
        refused = await http.post(f"{url}/v1/completions", json={**body, "prompt_logprobs": 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"
        assert "lacks prompt_logprobs" in refused.json()["error"]["message"]
