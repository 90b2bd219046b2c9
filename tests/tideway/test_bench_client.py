"""`tideway bench` against a real HTTP server: what is sent, how answers are timed and failures counted, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.messages.requests import RequestClass
from tests.conftest import free_port
from tests.tideway.bench_server import FIRST_TOKEN_S, TOKEN_INTERVAL_S, WRONG_KEY, BenchServer, serving
from tests.tideway.conftest import InThisProcess
from tideway.bench.arrivals import Arrivals, Closed, Constant, Gamma, Poisson
from tideway.bench.client import BenchError, Connections, Target, calibrate, list_models
from tideway.bench.lengths import Fixed, Uniform
from tideway.bench.records import INTERRUPTED, UNFINISHED, RequestRecord
from tideway.bench.report import Result, write_result
from tideway.bench.runner import Run
from tideway.bench.session import Session, run_session
from tideway.bench.workload import PlannedRequest, StreamSpec, Workload
from tideway.data_folder import DataFolder, State
from tideway.preflight import REPOSITORY


def read_result(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[BenchServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared_server: BenchServer) -> BenchServer:
    shared_server.bodies.clear()
    shared_server.headers.clear()
    shared_server.max_open = 0
    return shared_server


def stream(arrivals: Arrivals, model: str = "ok", **fields: Any) -> StreamSpec:
    lengths: dict[str, Any] = {"prompt_tokens": Fixed(tokens=65), "output_tokens": Fixed(tokens=8)}
    return StreamSpec(**{"name": model, "models": {model: 1.0}, "arrivals": arrivals, **lengths, **fields})


async def run(server: BenchServer, *streams: StreamSpec, duration_s: float | None = None, **options: Any) -> Result:
    drain_s = options.pop("drain_s", 10.0)
    session = Session(
        target=Target(url=server.url, **options),
        drain_s=drain_s,
        api_key="secret",
        metrics_urls=[f"{server.url}/metrics"],
    )
    return await run_session(session, Workload(streams=list(streams), duration_s=duration_s), io.StringIO())


def sent(server: BenchServer) -> list[dict[str, Any]]:
    """Without the calibration's requests."""
    return [
        body
        for body, headers in zip(server.bodies, server.headers, strict=True)
        if not headers["x-request-id"].startswith("calibration")
    ]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_an_open_loop_with_usage(server: BenchServer, endpoint: str) -> None:
    result = await run(server, stream(Constant(rate_rps=50), num_requests=20), endpoint=endpoint)
    group = result.summary.group()
    assert (group.num_requests, group.num_succeeded, group.failures) == (20, 20, {})
    for record in result.records:
        assert record.prompt_tokens == 65 and record.cached_prompt_tokens == 4  # 5 + 2 * 30 words, as calibrated
        assert record.output_tokens == 8 and len(record.token_times) == 8 and record.finish_reason == "length"
        assert record.ttft_s is not None and record.tpot_s is not None and record.latency_s is not None
        # The role alone, which comes at once in chat, is no token.
        assert record.ttft_s >= FIRST_TOKEN_S
        # Tokens that are read late, on a busy machine, seem to have come together: only their sum is sure.
        assert record.latency_s >= FIRST_TOKEN_S + 7 * TOKEN_INTERVAL_S
        assert record.latency_s == pytest.approx(record.ttft_s + 7 * record.tpot_s)
    body = sent(server)[0]
    limit = "max_tokens" if endpoint == "completions" else "max_completion_tokens"
    asked = "prompt" if endpoint == "completions" else "messages"
    assert set(body) == {"model", asked, limit, "temperature", "stream", "stream_options"}
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert result.tokens_per_word["ok"] == (5.0, 2.0)


async def test_an_open_loop_does_not_wait_for_answers(server: BenchServer) -> None:
    """100 requests in half a second, none of which ends: all are sent at their times."""
    result = await run(server, stream(Poisson(rate_rps=200), "hangs"), duration_s=0.5, drain_s=0.2)
    assert len(result.records) == 100 and {record.error for record in result.records} == {UNFINISHED}
    assert result.lateness.num_sent == 100
    # Beyond what the event loop was late in any case, on a busy machine.
    assert result.lateness.send_p50_s < 0.02 + result.lateness.loop_max_s
    group = result.summary.group()
    assert (group.num_unfinished, group.failures) == (100, {})
    assert group.attainment.both is None


async def test_an_open_loop_ends_a_closed_one(server: BenchServer) -> None:
    """Without a duration: with the last open request, which is sent itself."""
    online = stream(Constant(rate_rps=15), name="online", num_requests=10)
    backlog = stream(Closed(concurrency=2), name="backlog", num_requests=10_000, request_class=RequestClass.OFFLINE)
    result = await run(server, online, backlog)
    assert result.summary.group("online").num_succeeded == 10
    assert 2 <= result.summary.group("offline").num_succeeded < 100
    assert result.summary.end_s == max(record.arrival_s for record in result.records if record.stream == "online")


async def test_a_closed_loop_keeps_its_concurrency(server: BenchServer) -> None:
    spec = stream(Closed(concurrency=4), num_requests=24, output_tokens=Uniform(min_tokens=4, max_tokens=12))
    result = await run(server, spec)
    assert result.summary.group().num_succeeded == 24
    assert server.max_open == 4
    assert sorted(record.request_id for record in result.records) == [f"ok-{index:06d}" for index in range(24)]


async def test_offline_work_beside_online(server: BenchServer) -> None:
    """The backlog is cut when the online load ends, and its tokens until then count."""
    online = stream(Gamma(rate_rps=40, cv=2.0), name="online", ttft_ms=2000, tpot_ms=1000)
    offline = stream(
        Closed(concurrency=3),
        name="offline",
        request_class=RequestClass.OFFLINE,
        num_requests=10_000,
        output_tokens=Fixed(tokens=100),
    )
    result = await run(server, online, offline, duration_s=1.0, drain_s=0.0, sends_objectives=True, ignore_eos=True)
    assert result.summary.end_s == 1.0
    waiting, working = result.summary.group("online"), result.summary.group("offline")
    assert waiting.num_requests == 40 and waiting.attainment.both == 1.0
    assert working.num_unfinished <= 3 and working.output_tokens_per_s > 100
    assert working.attainment.both is None
    by_class = {body.get("service_tier"): body for body in sent(server)}
    assert set(by_class) == {None, "flex"}
    assert (by_class[None]["ttft_ms"], by_class[None]["tpot_ms"]) == (2000, 1000)
    assert "ttft_ms" not in by_class["flex"] and by_class["flex"]["ignore_eos"] is True
    assert any(name.startswith("tideway_sequences_running{class=online}") for name in result.series)
    assert not any("python" in name for name in result.series)
    plain = await run(server, offline, duration_s=0.1, drain_s=0.0, sends_service_tier=False)
    assert plain.records and "service_tier" not in server.bodies[-1]


@pytest.mark.parametrize(
    ("model", "reason", "message"),
    [
        ("refuses", "http_429", "too many requests"),
        ("errors", "stream_engine_dead", "the engine died"),
        ("cut", "stream_cut", "without a finish reason"),
        ("garbled", "malformed", ""),
        ("hangs", "timeout", "0.3 s"),
        ("stuck", "timeout", "0.3 s"),
    ],
)
async def test_failures_have_reasons(server: BenchServer, model: str, reason: str, message: str) -> None:
    spec = stream(Constant(rate_rps=100), model, num_requests=3, ttft_ms=10_000)
    result = await run(server, spec, timeout_s=0.3 if reason == "timeout" else 20.0)
    group = result.summary.group()
    assert (group.num_succeeded, group.failures) == (0, {reason: 3})
    assert all(message in record.error_message for record in result.records)
    assert group.attainment.ttft == 0.0 and group.goodput_rps == 0.0


async def test_a_server_that_counts_nothing(server: BenchServer) -> None:
    progress = io.StringIO()
    workload = Workload(streams=[stream(Constant(rate_rps=100), "plain", num_requests=3)])
    result = await run_session(Session(target=Target(url=server.url)), workload, progress)
    assert "reports no usage" in progress.getvalue()
    assert [(r.has_usage, r.output_tokens, r.prompt_tokens) for r in result.records] == [(False, 8, 0)] * 3


async def test_token_ids_and_more_fields(server: BenchServer) -> None:
    spec = stream(Constant(rate_rps=100), num_requests=3, extra_body={"priority": "high"})
    result = await run(server, spec, vocabulary=500, extra_body={"min_p": 0.1})
    assert [record.prompt_tokens for record in result.records] == [65] * 3
    for body in sent(server):
        assert all(3 <= token < 500 for token in body["prompt"])
        assert (body["priority"], body["min_p"]) == ("high", 0.1)


async def test_a_server_that_is_not_there() -> None:
    session = Session(target=Target(url=f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(BenchError, match="ok does not answer"):
        await run_session(session, Workload(streams=[stream(Constant(rate_rps=1), num_requests=1)]))


async def test_a_server_that_wants_another_key_is_told_in_its_own_words(server: BenchServer) -> None:
    async with Connections() as connections:
        with pytest.raises(BenchError) as refused:
            await list_models(connections, server.url, WRONG_KEY)
    assert str(refused.value) == (
        f"{server.url}/v1/models does not name the models (401: Incorrect API key.); give an API key of that server by "
        "--api-key or OPENAI_API_KEY"
    ), "a model's name would not help"


async def test_a_key_of_a_tenant(server: BenchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_TENANT_KEY", "tenants-own")
    result = await run(server, stream(Constant(rate_rps=100), num_requests=2, api_key_env="BENCH_TENANT_KEY"))
    assert {headers["authorization"] for headers in server.headers} == {"Bearer tenants-own"}
    assert b"tenants-own" not in msgspec.json.encode(result)
    monkeypatch.delenv("BENCH_TENANT_KEY")
    with pytest.raises(BenchError, match="BENCH_TENANT_KEY"):
        await run(server, stream(Constant(rate_rps=100), num_requests=2, api_key_env="BENCH_TENANT_KEY"))


async def test_calibration_holds_for_other_lengths(server: BenchServer) -> None:
    async with Connections() as connections:
        rate, has_usage = await calibrate(connections, Target(url=server.url), "ok", 0)
    assert has_usage and rate.words(205) == 100


async def test_a_result_is_read_back_as_it_was(server: BenchServer, tmp_path: Path) -> None:
    result = await run(server, stream(Constant(rate_rps=50), num_requests=5, ttft_ms=100.0))
    write_result(result, tmp_path / "result.json")
    again = read_result(tmp_path / "result.json")
    assert msgspec.to_builtins(again) == msgspec.to_builtins(result)
    assert msgspec.convert(again.workload, Workload).streams[0].arrivals == Constant(rate_rps=50)
    assert json.loads((tmp_path / "result.json").read_bytes())["records"][0]["request_id"] == "ok-000000"


# ------------------------------------------------------------------------------------------- as a person types it


def command(server: BenchServer, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tideway", "bench", "--url", server.url + "/v1", *arguments]


def test_the_command_writes_table_json_and_plots(server: BenchServer, tmp_path: Path) -> None:
    arguments = [
        "--arrivals",
        "gamma:40:2",
        "--duration",
        "1",
        "--offline-arrivals",
        "closed:2",
        "--offline-requests",
        "999",
    ]
    arguments += ["--output-tokens", "zipf:1.1:2:10", "--prompt-tokens", "uniform:20:60", "--ttft-ms", "500"]
    arguments += ["--drain", "0.5", "--output", str(tmp_path), "--rows", "tokens", "--seed", "7"]
    done = subprocess.run(command(server, *arguments), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "SLO attainment: TTFT" in done.stdout and "E2E per token" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"result.json", "latency.png", "throughput.png", "batch.png"}
    result = read_result(tmp_path / "result.json")
    assert result.workload["seed"] == 7 and result.records[0].token_times
    assert result.target["url"] == server.url


def test_ctrl_c_sums_up_what_was_done(server: BenchServer, tmp_path: Path) -> None:
    arguments = ["--arrivals", "constant:20", "--num-requests", "10000", "--output", str(tmp_path), "--no-plots"]
    process = subprocess.Popen(
        command(server, *arguments), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 30
    # Ten are answered, and the client has lived on since: it sends more.
    num_enough = 10_000
    while len(server.bodies) < num_enough and time.monotonic() < deadline_s:
        if num_enough == 10_000 and len(server.bodies) - server.num_open >= 10:
            num_enough = len(server.bodies) + 10
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in err and "retrieved" not in err, err
    result = read_result(tmp_path / "result.json")
    assert result.was_interrupted and result.num_planned == 10_000
    group = result.summary.group()
    assert group.num_succeeded > 0 and "succeeded" in out
    assert {record.error for record in result.records} <= {"", INTERRUPTED}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--arrivals", "gamma:x"], "'gamma:x' is none of"),
        (["--arrivals", "poisson:0"], "'poisson:0' is none of"),
        (["--arrivals", "poisson:2"], "need a duration or a number"),
        (["--arrivals", "closed:2", "--prompt-tokens", "many"], "'many' is none of"),
        ([], "nothing to send"),
        (["--arrivals", "trace:/no/such/file.csv"], "No such file"),
        (["--workload", "/no/such/file.toml"], "No such file"),
        (["--arrivals", "poisson:2", "--endpoint", "responses"], "Invalid enum value"),
        (["--arrivals", "poisson:2", "--extra-body", "{"], "truncated"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    server: BenchServer, arguments: list[str], sentence: str, in_this_process: InThisProcess
) -> None:
    done = in_this_process("bench", "--url", server.url + "/v1", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_data_folders_gateway_is_the_target(
    server: BenchServer, in_this_process: InThisProcess, tmp_path: Path
) -> None:
    data = DataFolder(tmp_path / "data")
    data.prepare()
    load = ("--model", "ok", "--arrivals", "constant:50", "--num-requests", "2", "--data-dir", str(data.path))
    done = in_this_process("bench", *load)
    assert done.returncode == 2 and f"Nothing runs on {data.path}; give --url" in done.stderr
    data.acquire()
    try:
        address = State(pid=1, phase="ready", address=server.url, nats_url="", started_unix_s=0.0, processes=[])
        data.write_state(address)
        done = in_this_process("bench", *load)
    finally:
        data.release()
    assert done.returncode == 0 and "succeeded" in done.stdout
    assert done.stderr.splitlines()[0] == f"Target: {server.url}, data folder {data.path}."


def test_all_failed_is_an_exit_code(server: BenchServer) -> None:
    arguments = ["--model", "refuses", "--arrivals", "constant:50", "--num-requests", "3"]
    done = subprocess.run(command(server, *arguments), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "failed: http_429" in done.stdout and "http_429, the first: too many requests" in done.stdout


def test_a_workload_file_with_streams_of_two_tenants(server: BenchServer, tmp_path: Path) -> None:
    (tmp_path / "mix.toml").write_text(
        """
        duration_s = 0.6
        seed = 3

        [[streams]]
        name = "chat"
        models = { ok = 3, plain = 1 }
        arrivals = { kind = "phases", phases = [{ duration_s = 0.2, rate_rps = 60 }, { duration_s = 0.2, rate_rps = 0 }] }
        prompt_tokens = { kind = "lognormal", mean_tokens = 40, cv = 0.5, max_tokens = 100 }
        output_tokens = { kind = "fixed", tokens = 4 }
        api_key_env = "BENCH_KEY"

        [[streams]]
        name = "summaries"
        class = "offline"
        models = { ok = 1 }
        arrivals = { kind = "closed", concurrency = 2 }
        num_requests = 6
        prompt_tokens = { kind = "fixed", tokens = 100 }
        output_tokens = { kind = "fixed", tokens = 4 }
        """
    )
    done = subprocess.run(
        command(server, "--workload", str(tmp_path / "mix.toml"), "--output", str(tmp_path / "out"), "--no-plots"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "BENCH_KEY": "k"},
    )
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "out" / "result.json")
    assert result.summary.group("offline", "ok").num_succeeded == 6
    assert result.summary.group("online").num_succeeded == 24
    assert {group.model for group in result.summary.groups} == {"ok", "plain", "all"}
    assert not any(0.21 < r.arrival_s % 0.4 < 0.39 for r in result.records if r.stream == "chat")


async def test_a_run_ends_although_the_server_does_not(server: BenchServer) -> None:
    async with asyncio.timeout(5):
        result = await run(server, stream(Closed(concurrency=2), "hangs", num_requests=4), duration_s=0.2, drain_s=0.1)
    assert len(result.records) == 2 and all(record.is_unfinished for record in result.records)


async def test_a_full_collection_passes_by_what_was_there_before_a_run() -> None:
    frozen = []
    num_frozen = gc.get_freeze_count()

    async def send(request: PlannedRequest, record: RequestRecord, now: object) -> None:
        frozen.append(gc.get_freeze_count())
        record.end_s = 0.0

    request = PlannedRequest(
        request_id="a", stream="s", model="m", request_class=RequestClass.ONLINE, prompt_tokens=1, output_tokens=1, at_s=0.0
    )  # fmt: skip
    await Run([request], send, duration_s=None, drain_s=1.0).run(asyncio.Event())
    assert frozen[0] > max(10_000, num_frozen)
