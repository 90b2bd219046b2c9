"""Runs a soak: see the package. Exits with 1 where something is left, or an answer was wrong."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from bench import reporting
from bench.reporting import Target
from bench.soak import usage
from bench.soak.operations import Operations
from bench.soak.traffic import Traffic, run_clients
from bench.soak.usage import LIMITS, Sample
from tests.e2e.checkpoints import make_llama, make_opt
from tests.e2e.stack import Stack

WARM_UP_SHARE, MAX_WARM_UP_S = 0.2, 120.0
NUM_SAMPLES = 60
TIMEOUT_S = 120.0


async def soak(
    stack: Stack, checkpoints: dict[str, str], folder: Path, seconds: float, num_clients: int
) -> dict[str, Any]:
    """What was answered, sampled and left."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client,
        httpx.AsyncClient(timeout=TIMEOUT_S) as own,
    ):
        traffic = Traffic(stack.url, client)
        operations = Operations(stack, traffic, folder, checkpoints)
        during: list[Sample] = []
        begun_s = time.monotonic()

        async def watch() -> None:
            while True:
                with contextlib.suppress(httpx.HTTPError):  # a process that answers is being restarted
                    during.append(await usage.sample(stack, own, time.monotonic() - begun_s))
                await asyncio.sleep(seconds / NUM_SAMPLES)

        # Everything is done once, so that what processes load and remember at the first time is there.
        warm_up_s = min(MAX_WARM_UP_S, WARM_UP_SHARE * seconds)
        await run_clients(traffic, num_clients, warm_up_s)
        for operation in (operations.batch, operations.adapter, operations.kill_instance):
            await operations.run(operation)
        before = await usage.settled(stack, own, time.monotonic() - begun_s)
        operating, watching = asyncio.create_task(operations.forever()), asyncio.create_task(watch())
        try:
            await run_clients(traffic, num_clients, seconds - warm_up_s)
        finally:
            for task in (operating, watching):
                task.cancel()
            ended = await asyncio.gather(operating, watching, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                traffic.fault(f"the soak itself: {error!r}")
        await restored(operations, stack, traffic)
        after = await usage.settled(stack, own, time.monotonic() - begun_s)
    targets = [
        Target(name="wrong answers", value=traffic.num_faults, limit=0),
        *usage.targets(before, after, during),
    ]
    return {
        "seconds": seconds,
        "clients": num_clients,
        "machine": reporting.machine(),
        "counts": {f"{kind}, {outcome}": count for (kind, outcome), count in sorted(traffic.counts.items())},
        "faults": traffic.faults,
        "targets": reporting.judged(targets),
        "is_met": all(target.is_met for target in targets),
        "before": asdict(before),
        "after": asdict(after),
        "during": [asdict(each) for each in during],
        "lines": list(map(str, targets)),
    }


async def restored(operations: Operations, stack: Stack, traffic: Traffic) -> None:
    """What an operation had begun when time was up is put back."""
    for name, process in stack.processes.items():
        if process.poll() is not None:
            stack.start(name)
    await operations.run(operations.put_back)


def page(found: dict[str, Any]) -> str:
    rows = [(name, count) for name, count in found["counts"].items()]
    memory = [
        [
            role,
            *(
                max((h["memory_mib"] for h in each["held"].get(role, ())), default=0.0)
                for each in (found["before"], found["after"])
            ),
        ]
        for role in LIMITS
    ]
    lines = [
        f"# Soak of {found['seconds']:g} s, {found['clients']} clients",
        "",
        f"{'Ends where it began' if found['is_met'] else 'DOES NOT end where it began'}. Load of the machine: "
        f"{found['machine']['load_average']}.",
        "",
        *reporting.table(["what", "count"], rows),
        "",
        *reporting.table(["memory, MiB", "after the warm-up", "at the end"], memory),
        "",
        *reporting.table(
            ["stream of NATS, messages", "after the warm-up", "at the end"],
            [
                [name, found["before"]["num_messages"].get(name, 0), number]
                for name, number in found["after"]["num_messages"].items()
            ],
        ),
        "",
        *(f"- {line}" for line in found["lines"]),
        *(f"- fault: {fault}" for fault in found["faults"]),
    ]
    return "\n".join(lines)


def run(seconds: float, num_clients: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tideway-soak-") as name:
        folder = Path(name)
        checkpoints = {"llama": str(make_llama(folder / "llama")), "opt": str(make_opt(folder / "opt"))}
        with Stack(checkpoints, num_workers=2, num_instances=1, num_schedulers=2) as stack:
            stack.wait_ready()
            return asyncio.run(soak(stack, checkpoints, folder, seconds, num_clients))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"))
    options = parser.parse_args()
    found = run(options.seconds, options.clients)
    text = page(found)
    print(text)
    stem = reporting.write(options.output, f"soak-{date.today()}", found, text)
    print(f"\nwritten to {stem}.md")
    return 0 if found["is_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
