"""Requests that move to and fro between two instances that host vLLM, over UCX.

    python -m bench.engines.moves [--moves 500] [--faults] [--shape demo] [--context 200]

Streams decode greedily in float32 and move all the time; each output is compared with that of a run without moves. The pause
of a move is the gap between the last token of one instance and the first of the other, in mean gaps of streams that stay.
With --faults every round has a fault at a named point of the migration at either end, half of them delays. In the end no
slot of the staging memory and no KV block of vLLM may be in use. SIGTERM ends the run with what it has found.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.checkpoints import NUM_SINGLE, SHAPES, make_checkpoint
from bench.reporting import Target, asked_to_end, judged, machine, write
from services.worker.engines.vllm.spec import HostedSpec
from services.worker.engines.vllm.starting import hosted_vllm
from services.worker.kv_transport import KvTransport, UcxNetwork
from services.worker.migration.faults import FaultPoint
from shared.messages.catalogue import GATEWAY_FRAMES
from shared.messages.migration import MigrationReason
from shared.messages.requests import GenerationRequest, SamplingParams, TokenFrame, pack_tokens
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.worker.engines.pair import Pair, pair_on

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "models/tideway-demo-llama"
DEMO_VOCABULARY = 300
FLAGS = "--enforce-eager --max-num-seqs 16 --max-num-batched-tokens 512 --block-size 32"
TURN_S = 0.4
"""Time for which one instance gives its requests away, before the other does."""
MOST_PAUSE_STEPS = 2.0
START_TIMEOUT_S = 600.0


class Entry(NamedTuple):
    sender: str
    at_s: float
    num_tokens: int


class Client:
    """What came of requests, and when."""

    def __init__(self) -> None:
        self.entries: dict[str, list[Entry]] = {}

    def on_frame(self, frame: TokenFrame) -> None:
        now = time.monotonic()
        for entry in frame.entries:
            if entry.tokens:
                self.entries.setdefault(entry.request_id, []).append(Entry(frame.sender, now, len(entry.tokens) // 4))

    def gaps_s(self, request_id: str) -> tuple[list[float], list[float]]:
        """Between entries of one instance, and between those of two."""
        stays, moves = [], []
        entries = self.entries[request_id]
        for before, after in itertools.pairwise(entries):
            (stays if before.sender == after.sender else moves).append(after.at_s - before.at_s)
        return stays, moves


class Found(NamedTuple):
    num_moves: int
    num_differing: int
    num_requests: int
    pauses_s: list[float]
    steps_s: list[float]
    outcomes: dict[str, int]
    num_slots_lost: int
    used_share: float


def requests(arguments: argparse.Namespace, name: str, vocabulary: int) -> list[GenerationRequest]:
    draw = random.Random(arguments.seed)
    return [
        GenerationRequest(
            request_id=f"{name}-{number}",
            gateway_id="gateway",
            model="a",
            prompt=pack_tokens([draw.randrange(NUM_SINGLE, vocabulary) for _ in range(arguments.context)]),
            sampling=SamplingParams(max_tokens=arguments.tokens, temperature=0.0, min_tokens=arguments.tokens),
            timeout_s=3600.0,
        )
        for number in range(arguments.streams)
    ]


async def run_all(pair: Pair, sent: list[GenerationRequest], arguments: argparse.Namespace, *, moves: bool) -> None:
    draw, source = random.Random(arguments.seed), 0
    for one in sent:
        await pair.stages[0].submit(one)
    await pair.until(lambda: all(len(pair.output(one)) > 2 for one in sent), START_TIMEOUT_S)
    while not all(pair.end(one) for one in sent):
        if moves:
            if arguments.faults:
                pair.set_faults(f"{draw.choice(list(FaultPoint))}:{draw.choice(('fail', 'delay:0.1'))}")
            pair.rebalance(source, max_concurrent=2, reason=MigrationReason(arguments.reason))
        await asyncio.sleep(TURN_S)
        if moves:
            pair.stop(source)
            source = 1 - source
    pair.set_faults("")


async def measure(
    arguments: argparse.Namespace, source: Path, vocabulary: int, nats_url: str, is_told: Callable[[], bool]
) -> Found:
    def engine() -> Any:
        spec = HostedSpec(
            source=str(source), dtype="float32", engine_args=tuple(FLAGS.split()), pool_bytes=arguments.pool_mib << 20,
            max_model_len=arguments.context + arguments.tokens + 64,
        )  # fmt: skip
        return hosted_vllm(spec, "cpu", frozenset(sorted(os.sched_getaffinity(0))[-arguments.threads :]))

    async def transport() -> KvTransport:
        opened = KvTransport(UcxNetwork("127.0.0.1"))
        await opened.open()
        return opened

    settings = {"max_migrations": 4, "start_timeout_s": START_TIMEOUT_S}
    async with pair_on(
        BusSettings(nats_url=nats_url), [engine(), engine()], [transport, transport], **settings
    ) as pair:
        client = Client()
        await pair.stages[0].bus.subscribe(GATEWAY_FRAMES.at(gateway_id="gateway"), client.on_frame)
        facts: Any = pair.stages[0].service._book.facts  # type: ignore[attr-defined]
        steps_s: list[float] = []
        pauses_s: list[float] = []
        num_differing = num_requests = number = 0
        reference = requests(arguments, "reference", vocabulary)
        await run_all(pair, reference, arguments, moves=False)
        expected = [pair.output(one) for one in reference]
        while pair.num_moved < arguments.moves and number < arguments.rounds and not (number and is_told()):
            sent = requests(arguments, f"round{number}", vocabulary)
            await run_all(pair, sent, arguments, moves=True)
            outputs = [pair.output(one) for one in sent]
            num_differing += sum(one != other for one, other in zip(outputs, expected, strict=True))
            for one in sent:
                stays, moves = client.gaps_s(one.request_id)
                steps_s += stays
                pauses_s += moves
            num_requests += len(sent)
            number += 1
            median_s = statistics.median(steps_s)
            pauses = " ".join(f"{pause_s / median_s:.1f}" for pause_s in pauses_s[-8:])
            print(
                f"round {number}: {pair.num_moved} moves, {num_differing} outputs differ; a step {1e3 * median_s:.1f} ms, "
                f"last pauses in steps: {pauses}",
                flush=True,
            )
        await asyncio.sleep(1.0)
        outcomes: dict[str, int] = {}
        for stage in pair.stages:
            for report in stage.reports:
                for outcome in report.migrations:
                    name = "moved" if outcome.is_migrated else outcome.reason
                    outcomes[name] = outcomes.get(name, 0) + 1
        services: list[Any] = [stage.service for stage in pair.stages]
        lost = sum(facts.num_slots - service._moves.num_slots_free for service in services)
        used = max(service._book._used_share or 0.0 for service in services)
        return Found(pair.num_moved, num_differing, num_requests, pauses_s, steps_s, outcomes, lost, used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=500)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--shape", choices=["demo", *sorted(SHAPES)], default="demo")
    parser.add_argument("--reason", choices=["balance", "drain"], default="balance", help="a drain copies at full rate")
    parser.add_argument("--rounds", type=int, default=1000, help="at most")
    parser.add_argument("--context", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=400, help="of an output")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--pool-mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "tideway-engines-bench")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench/results")
    arguments = parser.parse_args()
    if arguments.shape == "demo":
        source, vocabulary = DEMO, DEMO_VOCABULARY
    else:
        source = make_checkpoint(arguments.folder.resolve() / "checkpoints", arguments.shape)
        vocabulary = SHAPES[arguments.shape]["vocab_size"]
    is_told = asked_to_end()  # before anything starts that would stay
    server = NatsServer()
    try:
        found = asyncio.run(measure(arguments, source, vocabulary, server.url, is_told))
    finally:
        server.close()
    report(found, arguments)


def report(found: Found, arguments: argparse.Namespace) -> None:
    step_s = statistics.median(found.steps_s)
    pauses = sorted(pause / step_s for pause in found.pauses_s) or [float("nan")]
    targets = [
        Target(name="outputs that differ", value=found.num_differing, limit=0),
        Target(name="slots in use in the end", value=found.num_slots_lost, limit=0),
        Target(name="moves", value=found.num_moves, limit=arguments.moves, is_least=True),
    ]
    if not arguments.faults:
        median = statistics.median(pauses)
        targets.append(Target(name="median pause in steps", value=median, limit=MOST_PAUSE_STEPS))
    lines = [
        f"# Moves between hosted vLLM instances: {arguments.shape}, float32, {time.strftime('%Y-%m-%d')}",
        "",
        *(f"    {target}" for target in targets),
        "",
        f"- {found.num_moves} moves of {found.num_requests} requests of {arguments.context} and {arguments.tokens} tokens; "
        f"how migrations ended: {found.outcomes}",
        f"- a step takes {1e3 * step_s:.1f} ms (median gap); pauses in steps: median {statistics.median(pauses):.2f}, "
        f"P90 {pauses[int(0.9 * len(pauses))]:.2f}, longest {pauses[-1]:.2f}",
        f"- used share of vLLM's KV blocks in its last step: {found.used_share:.4f}",
        f"- machine: {machine()}",
    ]
    print("\n".join(lines))
    document = {
        "date": time.strftime("%Y-%m-%d"), "machine": machine(), "targets": judged(targets), **found._asdict(),
        "steps_s": None, "step_s": step_s,
    }  # fmt: skip
    name = "-".join(["engines-moves", arguments.shape, *(["faults"] if arguments.faults else [])])
    write(arguments.output, f"{name}-{arguments.context}-{time.strftime('%Y-%m-%d')}", document, "\n".join(lines))


if __name__ == "__main__":
    main()
