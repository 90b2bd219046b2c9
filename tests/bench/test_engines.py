"""The bench of engines: its client on a real server, and what its results say."""

from __future__ import annotations

import argparse
import os
import signal

import pytest

from bench.engines import harvest, results
from bench.engines.load import Client, Lengths, LoadError, Turn
from bench.engines.results import ALONE, BESIDE, HOSTED, PRIORITY, STOCK, Measured
from bench.reporting import asked_to_end
from shared.messages.requests import RequestClass
from tests.worker.engines.completions_server import completions_server
from tideway.bench.records import RequestRecord

LENGTHS = Lengths(prompt=20, output=8)


@pytest.mark.slow
async def test_streams_and_arrivals_are_answered_beside_a_batch() -> None:
    async with completions_server(text="a") as server:
        client = Client(server.url, "there", 1000)
        turn = await client.closed_loop(LENGTHS, num_streams=3, num_requests=7, seed=1)
        assert len(turn.online) == 7 and turn.output_tokens_per_s == 7 * 8 / turn.duration_s
        turn = await client.open_loop(LENGTHS, 10.0, 1.0, 1, 1, batch=LENGTHS, batch_streams=2, ramp_s=0.2)
        assert turn.online and turn.batch_tokens_per_s > 0
        assert all(record.ttft_s > 0 for record in turn.online)
        server.cut_after = 3
        with pytest.raises(LoadError, match="3 of 8 tokens"):
            await client.closed_loop(LENGTHS, num_streams=1, num_requests=1, seed=1)


def record(
    ttft_s: float, tpot_s: float, arrival_s: float = 0.0, num_tokens: int = 5, **fields: object
) -> RequestRecord:
    times = [arrival_s + ttft_s + tpot_s * number for number in range(num_tokens)]
    return RequestRecord(
        request_id="r", model="m", arrival_s=arrival_s, first_token_s=times[0], last_token_s=times[-1], token_times=times,
        output_tokens=num_tokens, planned_prompt_tokens=100, **fields,
    )  # fmt: skip


def test_a_batch_counts_as_far_as_it_lies_in_the_measured_time() -> None:
    offline = {"request_class": RequestClass.OFFLINE}
    batch = [record(0.5, 1.0, 9.0, **offline), record(0.5, 1.0, 11.0, **offline), record(0.5, 1.0, 18.0, **offline)]
    turn = Turn([], batch, duration_s=10.0, began_s=10.0, others_cores=0.0)
    # Of the first, four tokens without the prompt; of the last, a prompt and two tokens.
    assert turn.batch_tokens_per_s == pytest.approx((4 + 105 + 102) / 10)


def measured(variant: str, case: str, ttft_s: float, tpot_s: float, batch: int = 0) -> Measured:
    work = [record(0.1, 0.0, num_tokens=1, request_class=RequestClass.OFFLINE)] * batch
    return Measured(variant, case, Turn([record(ttft_s, tpot_s)] * 4, work, 10.0, 0.0, 0.0))


def test_targets_compare_the_hosted_engine_with_vllm_itself() -> None:
    rows = results.rows(
        [
            measured(STOCK, "1 stream", 0.1, 0.1),
            measured(HOSTED, "1 stream", 0.12, 0.1),
            measured(HOSTED, ALONE, 0.1, 0.1),
            measured(HOSTED, BESIDE, 0.12, 0.12, batch=8),
            measured(STOCK, BESIDE, 0.5, 0.5, batch=10),
            measured(PRIORITY, BESIDE, 0.3, 0.3, batch=10),
        ]
    )
    found = {target.name: (round(target.value, 3), target.is_met) for target in results.targets(rows)}
    assert found == {
        "1 stream: tokens per second over vllm serve's": (1.0, True),
        "1 stream: median TTFT over vllm serve's": (20.0, False),
        "online P99 TTFT beside a batch, times that alone": (1.2, True),
        "online P99 TPOT beside a batch, times that alone": (1.2, False),
        "batch tokens per second over vllm serve's": (0.8, False),
    }
    assert len(results.page(rows)) == 2 + len(rows)
    assert [round(row.p99_itl_ms) for row in rows] == [100, 100, 100, 120, 500, 300]


def test_interrupted_steps_leave_more_to_a_batch_and_users_wait_less() -> None:
    """In virtual time, where little is left to users: the same on every machine."""
    arguments = argparse.Namespace(runs=3, seed=1, rate=0.25, duration=40.0, prompt=64, batch_streams=16)
    to_their_end, interrupted = harvest.measure(arguments)
    assert interrupted.num_interrupted > 2 and to_their_end.num_interrupted == 0
    assert interrupted.harvest > 0.7 > 0.3 > to_their_end.harvest
    assert interrupted.ttft_ratio < 1.25 and interrupted.tpot_ratio < 1.1 and interrupted.itl_ratio < 1.1


def test_a_long_measurement_is_asked_to_end() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        is_told = asked_to_end()
        assert not is_told()
        os.kill(os.getpid(), signal.SIGTERM)
        assert is_told()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
