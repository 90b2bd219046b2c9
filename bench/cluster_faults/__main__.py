"""Runs rows of faults: see the package. Exits with 1 where something broke or an answer was wrong."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.cluster_faults.faults import ROWS, SECOND_GATEWAY, SETTLE_S, Row
from bench.cluster_faults.load import READERS, Batch, Resuming, expected_texts, probe
from bench.mishaps import Load
from tests.conftest import NatsServer
from tests.e2e.checkpoints import make_llama, make_opt
from tests.e2e.stack import Stack
from tests.e2e.streams import stream_completion
from tests.nats_cluster import NatsCluster

STEP_S = 0.02
"""What a step of an instance takes at least."""
TOKEN_BUDGET = 64
"""Tokens of a step at most, so that long prompts take several."""
NUM_COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    num_streams: int
    num_broken: int
    num_other_texts: int
    answers: Counter[tuple[int, str]]
    """Answers of short requests, by status and code; status 0: no answer."""
    batch: str
    num_lines_once: int
    num_lines: int
    longest_silence_s: float
    longest_pause_s: float
    """The longest silence after a stream's first token."""
    found: Sequence[str]
    """What was wrong in the answers to the fault's own requests."""

    @property
    def is_well(self) -> bool:
        """Nothing broke and no answer was wrong: 503 tells the truth, and is tried again."""
        refused = {status for status, _ in self.answers} - {200, 503}
        is_whole = self.num_lines_once == self.num_lines
        return not (self.num_broken or self.num_other_texts or refused or self.found) and is_whole

    def line(self, name: str) -> str:
        answers = ", ".join(f"{n} x {status} {code}".strip() for (status, code), n in sorted(self.answers.items()))
        return (
            f"{name}: {self.num_broken} of {self.num_streams} streams broken, {self.num_other_texts} other texts; "
            f"{answers}; batch {self.batch}, {self.num_lines_once} of {self.num_lines} lines once; "
            f"longest silence {self.longest_silence_s:.1f} s, {self.longest_pause_s:.1f} s within a stream; "
            f"load of the machine {os.getloadavg()[0]:.0f}" + "".join(f"; {each}" for each in self.found)
        )


async def run_row(
    stack: Stack, second_url: str, row: Row, num_streams: int, num_tokens: int, num_lines: int, reader: str
) -> Outcome:
    """`second_url`: of another gateway. `reader`: what reads streams that are resumed."""
    models, over = list(stack.models), asyncio.Event()
    texts = await expected_texts(stack.url, models, num_streams, num_tokens)
    read = Resuming([stack.url, second_url], reader).read if row.is_resumed else stream_completion
    load = Load(stack.url, models, num_streams, num_tokens, read)
    batch = Batch(stack.url, models, num_lines)
    await asyncio.to_thread(batch.begin)
    running = asyncio.create_task(load.run())
    probing = asyncio.create_task(probe(stack.url, models, over))
    await asyncio.sleep(2.0)
    found = await asyncio.to_thread(row.fault, stack)
    await asyncio.sleep(2 * SETTLE_S)
    load.end()
    over.set()
    await running
    answers = await probing
    status, num_once = await asyncio.to_thread(batch.end)
    broken = [stream for stream in load.streams if not stream.ended_well or stream.num_tokens != num_tokens]
    for stream in broken[:3]:
        print(f"  broken after {stream.num_tokens} tokens: {stream.finish_reasons} {stream.error}")
    others = [stream for stream in load.streams if stream not in broken and stream.text not in texts]
    return Outcome(
        num_streams=len(load.streams),
        num_broken=len(broken),
        num_other_texts=len(others),
        answers=answers,
        batch=status,
        num_lines_once=num_once,
        num_lines=num_lines,
        longest_silence_s=max(load.silences_s),
        longest_pause_s=max(load.pauses_s),
        found=found,
    )


@contextmanager
def running_stack(is_cluster: bool) -> Iterator[tuple[Stack, str]]:
    """A system with two schedulers and two gateways, and the second one's URL."""
    with tempfile.TemporaryDirectory() as folder:
        models = {"llama": str(make_llama(Path(folder) / "llama")), "opt": str(make_opt(Path(folder) / "opt"))}
        environment = {
            "TIDEWAY_NATS_REPLICAS": str(NUM_COPIES if is_cluster else 1),
            "TIDEWAY_TOKEN_BUDGET": str(TOKEN_BUDGET),
        }
        nats = NatsCluster if is_cluster else NatsServer
        with Stack(models, environment=environment, step_s=STEP_S, nats=nats, num_schedulers=2) as stack:
            second_url = stack.add_gateway(SECOND_GATEWAY)
            stack.wait_ready()
            yield stack, second_url


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster_faults", description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="all without any")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--lines", type=int, default=200, help="of the batch of each row")
    parser.add_argument("--client", choices=READERS, default="httpx", help="of streams that are resumed")
    options = parser.parse_args()
    rows, are_well = options.rows or list(ROWS), []
    for is_cluster in (True, False):
        if not (names := [name for name in rows if ROWS[name].is_cluster is is_cluster]):
            continue
        with running_stack(is_cluster) as (stack, second_url):
            for name in names:
                stack.wait_ready()
                outcome = asyncio.run(
                    run_row(
                        stack, second_url, ROWS[name], options.streams, options.tokens, options.lines, options.client
                    )
                )
                print(outcome.line(name), flush=True)
                are_well.append(outcome.is_well)
    sys.exit(0 if all(are_well) else 1)


if __name__ == "__main__":
    main()
