"""The experiments."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.migration.pair import Affinity, Pair, Stream, pause_s
from bench.reporting import Target
from shared.messages.requests import Priority
from tideway.bench.summary import Distribution

BETWEEN_MOVES = 24
"""Tokens that a request decodes between two moves, so that its step time is known."""
MAX_TOKENS = 4096
"""Most tokens of an answer: far more than is waited for, because a request that is about to end is not worth its move."""
NUM_ROUNDS = 3
"""Over the lengths: the machine's speed changes within minutes."""
TRANSFER_TIMEOUT_S = 600.0
SETTLE_S = 2.0
"""After a move, before what comes is compared with the next one."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: Path
    vocab_size: int
    block_size: int
    block_bytes: int
    merged_bytes: int
    pool_bytes: int
    lengths: tuple[int, ...] = (256, 1024, 2048, 4096, 8192)
    num_migrations: int = 12
    num_neighbours: int = 4
    seed: int = 1
    is_pinned: bool = True
    devices: tuple[str, ...] = ("cpu",)
    ends: tuple[dict[str, str], dict[str, str]] = ({}, {})
    """bench/devices.py"""

    def prompt(self, num_tokens: int, number: int = 0) -> list[int]:
        chooser = random.Random(f"{self.seed}/{num_tokens}/{number}")
        return [chooser.randrange(3, self.vocab_size) for _ in range(num_tokens)]


class Result(NamedTuple):
    title: str
    rows: list[dict[str, Any]]
    targets: list[Target]


@asynccontextmanager
async def pair_of(setup: Setup, **environment: str) -> AsyncIterator[tuple[Pair, Affinity]]:
    """Two instances, warm, with their engines' threads pinned."""
    affinity = Affinity(setup.is_pinned)
    async with Pair(
        setup.checkpoint,
        pool_bytes=setup.pool_bytes,
        merged_bytes=setup.merged_bytes,
        environment=environment,
        ends=setup.ends,
        affinity=affinity,
    ) as pair:
        affinity.pin_service(os.getpid())
        try:
            for name in ("a", "b"):
                stream = await pair.submit(name, setup.prompt(64), 4096)
                await pair.decoded(stream, 8)
                affinity.pin_busiest(pair.pid(name))
                await pair.cancel(stream)
            # The first transfer makes the connection and measures the bandwidth.
            stream = await pair.submit("a", setup.prompt(512), 4096)
            for _ in range(2):
                await pair.decoded(stream, 8)
                await pair.move(stream)
            await pair.cancel(stream)
            yield pair, affinity
        finally:
            affinity.release(os.getpid())


async def _moves(pair: Pair, stream: Stream, num_migrations: int) -> list[tuple[float, float, float]]:
    """(pause, decode step beside it, seconds from the order to the first token at the destination) of each move."""
    figures = []
    for _ in range(num_migrations):
        await pair.decoded(stream, BETWEEN_MOVES)
        started_s = time.perf_counter()
        outcome = await pair.move(stream)
        if not outcome.is_migrated:
            raise RuntimeError(f"the request did not move: {outcome}")
        figures.append((*pause_s(stream), time.perf_counter() - started_s))
    return figures


def _row(length: int, figures: list[tuple[float, float, float]]) -> dict[str, Any]:
    pauses, steps, totals = (Distribution.of(values) for values in zip(*figures, strict=True))
    ratios = Distribution.of(pause / step for pause, step, _ in figures)
    return {
        "tokens": length,
        "moves": len(figures),
        "decode step ms": 1e3 * steps.p50,
        "pause ms": 1e3 * pauses.p50,
        "stall ms": 1e3 * Distribution.of(pause - step for pause, step, _ in figures).p50,
        "pause P90 ms": 1e3 * pauses.p90,
        "pause / step": ratios.p50,
        "pause / step P90": ratios.p90,
        "whole move ms": 1e3 * totals.p50,
    }


async def pause(setup: Setup) -> Result:
    """One request of each length, moved to and fro while it decodes. The pause is from its last token at the source to its
    first at the destination, so a request that does not move has one of a decode step; the stall is what is beyond that."""
    figures: dict[int, list[tuple[float, float, float]]] = {length: [] for length in setup.lengths}
    num_migrations = -(-setup.num_migrations // NUM_ROUNDS)
    async with pair_of(setup) as (pair, _):
        for _ in range(NUM_ROUNDS):
            for length in setup.lengths:
                stream = await pair.submit("a", setup.prompt(length - BETWEEN_MOVES), MAX_TOKENS)
                figures[length] += await _moves(pair, stream, num_migrations)
                await pair.cancel(stream)
    rows = [_row(length, found) for length, found in figures.items()]
    ratios = [row["pause / step"] for row in rows]
    return Result(
        "Pause of the moved request",
        rows,
        [
            Target(name="largest pause over decode step, median at each length", value=max(ratios), limit=1.5),
            Target(
                name="longest over shortest pause, in decode steps of its length",
                value=max(ratios) / min(ratios),
                limit=1.2,
            ),
        ],
    )


async def neighbours(setup: Setup) -> Result:
    """Inter-token time of other requests on source and destination, during moves against just before them."""
    length = setup.lengths[-2] if len(setup.lengths) > 1 else setup.lengths[0]
    rows = []
    async with pair_of(setup) as (pair, _):
        for crowded in ("a", "b"):
            others = [
                await pair.submit(crowded, setup.prompt(128, number), 8192, priority=Priority.HIGH)
                for number in range(setup.num_neighbours)
            ]
            stream = await pair.submit("a", setup.prompt(length), MAX_TOKENS)
            windows: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
            took_s = ended_s = 0.0
            for number in range(2 * setup.num_migrations):
                while time.perf_counter() < ended_s + took_s + SETTLE_S:
                    await pair.decoded(stream, 4)
                started_s = time.perf_counter()
                is_away = stream.owner != crowded
                await pair.move(stream)
                ended_s = time.perf_counter()
                took_s = ended_s - started_s
                during = _gaps(others, started_s, started_s + took_s)
                before = _gaps(others, started_s - took_s, started_s)
                if number >= 2 and during and before:
                    # Beside it the moved request itself decodes on one of the two: only alike times compare.
                    windows[is_away].append((statistics.mean(during), statistics.mean(before), took_s))
            for is_away, pairs in windows.items():
                during_s = statistics.median(d for d, *_ in pairs)
                before_s = statistics.median(b for _, b, _ in pairs)
                rows.append(
                    {
                        "others on": "destination" if is_away else "source",
                        "instance": crowded,
                        "moves": len(pairs),
                        "moved tokens": length,
                        "move s": statistics.median(took for *_, took in pairs),
                        "step before ms": 1e3 * before_s,
                        "step during ms": 1e3 * during_s,
                        "during / before": statistics.median(d / b for d, b, _ in pairs),
                    }
                )
            for other in [*others, stream]:
                await pair.cancel(other)
    targets = [
        Target(
            name=f"decode time of others on the {end} during a move",
            value=statistics.mean(row["during / before"] for row in rows if row["others on"] == end),
            limit=1.02,
        )
        for end in ("source", "destination")
    ]
    return Result("Other requests during a move", rows, targets)


def _gaps(streams: list[Stream], begin_s: float, end_s: float) -> list[float]:
    """Inter-token times that lie wholly within the window."""
    return [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.times_s, stream.times_s[1:], strict=False)
        if begin_s <= earlier and later <= end_s
    ]


async def baselines(setup: Setup) -> Result:
    """The longest request: live migration, blocking copy, and computing again at the destination; by what each costs beyond
    a decode step, which the next token takes in any case."""
    length = setup.lengths[-1]
    rows = []
    for name, environment in (("live migration", {}), ("blocking copy", {"TIDEWAY_MIGRATION_MAX_STAGES": "1"})):
        async with pair_of(setup, **environment) as (pair, _):
            stream = await pair.submit("a", setup.prompt(length - BETWEEN_MOVES), MAX_TOKENS)
            figures = await _moves(pair, stream, max(2, setup.num_migrations // 2))
            rows.append({"way": name, **_row(length, figures)})
            if name == "live migration":
                figures = []
                for _ in range(2):
                    await pair.decoded(stream, BETWEEN_MOVES)
                    started_s = time.perf_counter()
                    await pair.place_again(stream)
                    figures.append((*pause_s(stream), time.perf_counter() - started_s))
                recompute = {"way": "recompute", **_row(length, figures)}
            await pair.cancel(stream)
    rows.append(recompute)
    live = rows[0]["stall ms"]
    return Result(
        "Against other ways",
        rows,
        [
            Target(
                name=f"stall of {row['way']} over live migration's, {length} tokens",
                value=row["stall ms"] / live,
                note=f"whole pauses: {row['pause ms'] / rows[0]['pause ms']:.3g} times",
                limit=10.0,
                is_least=True,
            )
            for row in rows[1:]
        ],
    )


async def transfer(setup: Setup) -> Result:
    """The KV of a request of each length between two processes, without instances: bench/kv_transport.py, on a GPU in both
    ways."""
    mib = {length: -(-length // setup.block_size) * setup.block_bytes / (1 << 20) for length in setup.lengths}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.kv_transport", "--json", "--no-perftest", "--repeats", "5"),
        *("--block-kib", str(setup.block_bytes >> 10), "--device", *setup.devices),
        *("--mib", *(str(size) for size in mib.values())),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TRANSFER_TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"bench.kv_transport ended with {process.returncode}")
    found = json.loads(output.splitlines()[-1])["rows"]
    rows = [
        {
            "way": row.get("way", "host"),
            "tokens": length,
            "MiB": size,
            "GB/s": row["transport_gb_s"],
            "raw messages GB/s": row["raw_gb_s"],
            "ms": 1e3 * size * (1 << 20) / (1e9 * row["transport_gb_s"]),
        }
        for row, (length, size) in zip(found, len(found) * list(mib.items()), strict=False)
    ]
    return Result("Transfer of a request's KV, at full rate", rows, [])


EXPERIMENTS = {"transfer": transfer, "pause": pause, "neighbours": neighbours, "baselines": baselines}
