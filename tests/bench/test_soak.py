"""A soak ends where it began, and says so where it does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import httpx
import pytest

from bench.soak.__main__ import page, run
from bench.soak.kept import RESUMED_TOKENS, resumed
from bench.soak.kinds import KINDS
from bench.soak.traffic import FaultError, RefusedError, Traffic
from bench.soak.usage import (
    LIMITS,
    MAX_MORE_CONSUMERS,
    MIB,
    TREND_S,
    ZERO_METRICS,
    Held,
    Sample,
    _held,
    metric,
    streams,
    targets,
    trend,
)
from shared.bus.nats_bus import NatsBus
from shared.runtime.settings import BusSettings
from tests.shared.bus_contract import LEDGER


def of(memory_mib: float, at_s: float = 0.0, **more: float) -> Sample:
    held = Held(memory_mib, int(more.get("descriptors", 20)), int(more.get("threads", 5)), more.get("tasks", 9.0))
    return Sample(at_s, {"gateway": [held]})


def missed(before: Sample, after: Sample, during: list[Sample] | None = None) -> set[str]:
    return {
        target.name
        for target in targets(before, after, during or [], num_kept=3, kv_disk_bytes=MIB)
        if not target.is_met
    }


def test_what_is_left_is_missed() -> None:
    limits = LIMITS["gateway"]
    assert missed(of(100), of(100 + limits.memory_mib)) == set()
    assert missed(of(100), of(101 + limits.memory_mib)) == {"gateway: more memory"}
    assert missed(of(100), of(90, descriptors=21 + limits.descriptors)) == {"gateway: more descriptors"}
    assert missed(of(100), of(90, threads=6 + limits.threads)) == {"gateway: more threads"}
    assert missed(of(100), of(90, tasks=10.0 + limits.tasks)) == {"gateway: more tasks"}
    after = of(100)
    after.under_way, after.num_files = {"tideway_gateway_open_streams": 1.0, "a num_running": 0.0}, 2
    assert missed(of(100), after) == {"tideway_gateway_open_streams", "files"}


def test_rows_are_judged_by_what_their_bucket_is_for() -> None:
    was = {"KV_tideway_batches": 0, "KV_tideway_files": 1, "KV_tideway_instances": 2, "KV_tideway_responses": 5}
    now = {"KV_tideway_batches": 1, "KV_tideway_files": 1, "KV_tideway_instances": 4, "KV_tideway_responses": 8}

    def more(**changed: int) -> set[str]:
        before, after = of(100), of(100, at_s=60.0)
        before.num_messages, after.num_messages = was, now | {f"KV_tideway_{key}": n for key, n in changed.items()}
        return {name.removeprefix("more rows of KV_tideway_") for name in missed(before, after)}

    assert more(batches=0) == set()
    assert more() == {"batches"}
    assert more(batches=0, files=2, instances=5, responses=9) == {"files", "instances", "responses"}
    # One each ten seconds of a minute.
    assert more(batches=0, history=8, request_log=9, unheard_of=1) == {"request_log", "unheard_of"}


def test_kv_on_disk_stays_within_its_bound_at_any_time() -> None:
    full = of(100)
    full.kv_disk_bytes = MIB + 1
    assert missed(of(100), of(100), [full]) == {"KV on disk, at most at any time"}


class TestTraffic:
    """A refusal is right while NATS is away, for a reason that says so; a broken connection where its gateway is killed."""

    def answer(self, status: int, message: str) -> httpx.Response:
        return httpx.Response(
            status,
            json={"error": {"message": message}},
            headers={"retry-after": "2"},
            request=httpx.Request("POST", "http://a/v1/completions"),
        )

    def test_refusals(self) -> None:
        traffic = Traffic(["http://a", "http://b"], httpx.AsyncClient(), {})
        away, full = self.answer(503, "put: JetStream did not answer in time"), self.answer(503, "Too many requests.")
        begun_s = time.monotonic()
        traffic.check(self.answer(404, ""), begun_s, (404,))
        with pytest.raises(FaultError, match="503"):
            traffic.check(away, begun_s)
        with traffic.window(aftermath_s=0.0):
            with pytest.raises(RefusedError, match="JetStream"):
                traffic.check(away, begun_s)
            for wrong in (full, self.answer(500, "NATS"), self.answer(429, "NATS")):
                with pytest.raises(FaultError):
                    traffic.check(wrong, begun_s)
        with pytest.raises(RefusedError):  # it was under way then
            traffic.check(away, begun_s)
        with pytest.raises(FaultError):
            traffic.check(away, time.monotonic() + 1.0)

    def test_broken_connections(self) -> None:
        traffic = Traffic(["http://a", "http://b"], httpx.AsyncClient(), {})

        def cut(url: str) -> None:
            with traffic.judged(url):
                raise httpx.ReadError("")

        with pytest.raises(FaultError):
            cut("http://a")
        with traffic.window("http://a", aftermath_s=0.0):
            with pytest.raises(RefusedError):
                cut("http://a")
            with pytest.raises(FaultError):
                cut("http://b")
        with traffic.window(), pytest.raises(FaultError):
            cut("http://a")


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_a_resumed_stream_is_compared_with_one_in_one_piece(is_wrong: bool) -> None:
    words = [f"{number} " for number in range(RESUMED_TOKENS)]
    connections = []

    def answer(request: httpx.Request) -> httpx.Response:
        if not json.loads(request.content).get("stream"):
            return httpx.Response(200, json={"choices": [{"text": "".join(words[is_wrong:])}]})
        connections.append(request.url.host)
        chunks = [
            {
                "event_id": str(number),
                "choices": [{"text": word, "finish_reason": "length" if word == words[-1] else None}],
                "usage": {"completion_tokens": number + 1},
            }
            for number, word in enumerate(words)
        ]
        rest = chunks[int(request.headers["last-event-id"] or -1) + 1 :]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in rest]
        return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        traffic = Traffic(["http://a", "http://b"], client, {"resumed": resumed})
        await traffic.one("resumed", Random(1))
    assert {"a", "b"} == set(connections)
    assert traffic.counts == {("resumed", "fault" if is_wrong else "answered"): 1}, traffic.faults
    assert traffic.num_faults == is_wrong


def test_a_trend_is_that_of_the_second_half_of_a_long_run() -> None:
    def growing(mib_a_minute: float, seconds: float) -> list[Sample]:
        return [
            of(100 + mib_a_minute * i * seconds / 20 / 60 * (1 if i > 9 else 5), i * seconds / 20) for i in range(21)
        ]

    assert trend("gateway", growing(2.0, TREND_S / 2)) is None
    assert trend("gateway", growing(2.0, 2 * TREND_S)) == pytest.approx(2.0)
    assert missed(of(100), of(100), growing(2.0, 2 * TREND_S)) == {"gateway: memory a minute"}


def test_a_trend_is_that_of_each_process_after_its_own_start() -> None:
    """One is killed each four minutes and grows as it fills what it remembers; the other one lives on."""

    def at(i: int, slope: float) -> Sample:
        restarted = Held(50 + min(8.0, 4 * (i % 8)), 20, 5, 9.0, pid=100 + i // 8)
        return Sample(30.0 * i, {"gateway": [restarted, Held(60 + slope * i / 2, 20, 5, 9.0, pid=1)]})

    assert trend("gateway", [at(i, 0.0) for i in range(41)]) == pytest.approx(0.0)
    # The restarted ones, which do not grow, have a part in it.
    assert 1.0 < (trend("gateway", [at(i, 2.0) for i in range(41)]) or 0.0) <= 2.0


async def test_planted_leaks_of_a_process_and_of_nats_are_found(nats_settings: BusSettings) -> None:
    """Real ones: memory, descriptors and threads of this process, and consumers that nobody stops."""

    async def now() -> Sample:
        held = _held(os.getpid(), float(len(asyncio.all_tasks())))
        assert held is not None
        uses = await streams(nats_settings.nats_url)
        return Sample(0.0, {"gateway": [held]}, num_consumers=sum(use.num_consumers for use in uses.values()))

    limits, bus = LIMITS["gateway"], await NatsBus.connect(nats_settings, "test", "leaks")
    ledger = await bus.key_value(LEDGER)
    before, is_over = await now(), threading.Event()
    assert missed(before, await now()) == set()
    memory = bytearray(b"x") * (int(limits.memory_mib + 40) * MIB)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(limits.descriptors + 5)]
    threads = [threading.Thread(target=is_over.wait) for _ in range(limits.threads + 2)]
    tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(limits.tasks + 2)]
    watches = [await ledger.watch(lambda *_: None) for _ in range(MAX_MORE_CONSUMERS + 2)]
    for thread in threads:
        thread.start()
    try:
        after = await now()
        assert missed(before, after) == {
            "gateway: more memory",
            "gateway: more descriptors",
            "gateway: more threads",
            "gateway: more tasks",
            "more consumers of NATS",
        }
        assert len(memory) and len(watches)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        for task in tasks:
            task.cancel()
        for file in files:
            os.close(file)
        await bus.close()


def test_counts_that_end_at_zero_are_those_of_the_services() -> None:
    """One that was renamed would be 0 for ever."""
    services = Path(__file__).parents[2] / "services"
    for role, names in ZERO_METRICS.items():
        text = "".join(file.read_text() for file in (services / role).rglob("*.py"))
        named = set(re.findall(r'gauge\(\s*"(\w+)"', text))
        assert {name.removeprefix(f"tideway_{role}_") for name in names} <= named


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP a_b x\na_b{c="d"} 2.0\na_b{c="e"} 3.0\na_b_total 9.0\nf 1.0\n'
    assert (metric(text, "a_b"), metric(text, "f"), metric(text, "a")) == (5.0, 1.0, None)


def processes_of(folder: str) -> set[int]:
    """Those that work for a soak with its files in `folder`."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TIDEWAY_KV_DISK_FOLDER={folder}".encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_soak_that_is_stopped_leaves_no_process(tmp_path: Path, number: int) -> None:
    """It is started as a shell starts one in the background: with SIGINT ignored."""
    soak = subprocess.Popen(
        [sys.executable, "-m", "bench.soak", "--output", str(tmp_path / "out")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        deadline_s = time.monotonic() + 240
        while len(processes_of(str(tmp_path))) < 7 and time.monotonic() < deadline_s:  # all but the instances
            assert soak.poll() is None
            time.sleep(0.05)
        soak.send_signal(number)
        assert soak.wait(120) != 0
        assert not processes_of(str(tmp_path))
    finally:
        soak.kill()
        for pid in processes_of(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_short_soak_ends_where_it_began() -> None:
    found = run(40.0, 4)
    assert found["is_met"], page(found)
    operations = {name for name in found["counts"] if name.endswith("done")}
    assert {"batch, done", "adapter, done", "kill_instance, done"} <= operations
    assert KINDS.keys() <= {name.partition(",")[0] for name in found["counts"]}, "every kind of request was asked"
