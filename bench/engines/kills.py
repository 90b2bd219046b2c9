"""Streams through the deaths of a hosted instance's processes, and through its drain.

    python -m bench.engines.kills [--rounds 20]

Each round kills each process of the busiest instance in turn (instance, adapter, vLLM's engine core), then drains it,
while eight greedy streams run in float32. All streams must end, with the text of an undisturbed run. SIGTERM ends the run
with what it has found.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from bench.reporting import Target, asked_to_end, judged, machine, table, write
from tests.worker.engines.hosted_stack import NUM_STREAMS, VICTIMS, hosted_stack, streams, struck

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = (*VICTIMS, "drain")


async def measure(address: str, num_rounds: int, is_told: Callable[[], bool]) -> list[tuple[str, int, int]]:
    """Returns for each strike what was struck, how many streams broke, and how many differ."""
    found = []
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=50)) as http:
        expected = await streams(http, address)
        for number, kind in itertools.product(range(num_rounds), KINDS):
            if is_told():
                break
            outputs = await struck(http, address, kind)
            broken = sum(reason != "length" for _, reason in outputs)
            differing = sum(one != other for one, other in zip(outputs, expected, strict=True))
            found.append((kind, broken, differing))
            print(f"round {number + 1}, {kind}: {broken} broken, {differing} differ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench/results")
    arguments = parser.parse_args()
    is_told = asked_to_end()  # before anything starts that would stay
    with tempfile.TemporaryDirectory(prefix="tideway-kills-") as folder, hosted_stack(Path(folder)) as address:
        found = asyncio.run(measure(address, arguments.rounds, is_told))
    rows = [
        (kind, len(of), NUM_STREAMS * len(of), sum(one[1] for one in of), sum(one[2] for one in of))
        for kind in KINDS
        if (of := [one for one in found if one[0] == kind])
    ]
    targets = [
        Target(name="broken streams", value=sum(row[3] for row in rows), limit=0),
        Target(name="streams that differ", value=sum(row[4] for row in rows), limit=0),
    ]
    lines = [
        f"# Deaths of hosted instances, {time.strftime('%Y-%m-%d')}",
        "",
        *table(("struck", "rounds", "streams", "broken", "differing"), rows),
        "",
        *(f"    {target}" for target in targets),
        "",
        f"- machine: {machine()}",
    ]
    print("\n".join(lines))
    document = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "targets": judged(targets), "rounds": found}
    write(arguments.output, f"engines-kills-{time.strftime('%Y-%m-%d')}", document, "\n".join(lines))


if __name__ == "__main__":
    main()
