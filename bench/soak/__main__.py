"""Runs a soak: see the package. Exits with 1 where something is left, or an answer was wrong."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from bench import reporting
from bench.reporting import Target
from bench.soak import usage
from bench.soak.faults import SECOND_GATEWAY, Faults, in_turn
from bench.soak.kinds import EMBEDDING_MODEL, KINDS, RERANKING_MODEL
from bench.soak.operations import Operations
from bench.soak.traffic import KEY, Traffic, run_clients
from bench.soak.usage import LIMITS, Sample
from tests.conftest import free_port
from tests.e2e.checkpoints import make_llama, make_opt
from tests.e2e.stack import Stack
from tests.worker.pooling_checkpoints import write_pooling_checkpoint

WARM_UP_SHARE, MAX_WARM_UP_S = 0.2, 120.0
NUM_SAMPLES = 60
FAULTS_SHARE = 0.5
"""Share of the time after the warm-up that has faults. Then processes live long enough to show whether they grow."""
TIMEOUT_S = 240.0
KV_DISK_BYTES = 64 << 20
HEADERS = {"authorization": f"Bearer {KEY}"}
KEPT = ("stored", "background", "idempotent", "resumed")
"""Kinds of requests of which NATS keeps something; rows of one of these are three at most."""


async def soak(
    stack: Stack, urls: list[str], checkpoints: dict[str, str], folder: Path, seconds: float, num_clients: int
) -> dict[str, Any]:
    """What was answered, sampled and left. `urls`: of the gateways."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=HEADERS) as client,
        httpx.AsyncClient(timeout=TIMEOUT_S, headers=HEADERS) as own,
    ):
        traffic = Traffic(urls, client, KINDS)
        operations = Operations(stack, traffic, folder, checkpoints, folder / "keys")
        faults = Faults(operations)
        during: list[Sample] = []
        begun_s = time.monotonic()

        async def take() -> Sample:
            return await usage.sample(stack, own, time.monotonic() - begun_s, folder / "kv")

        async def watch() -> None:
            while True:
                with contextlib.suppress(httpx.HTTPError):  # a process that answers is being restarted
                    during.append(await take())
                await asyncio.sleep(seconds / NUM_SAMPLES)

        async def operate() -> None:
            faults_until_s = time.monotonic() + FAULTS_SHARE * (seconds - warm_up_s)
            while True:
                has_faults = time.monotonic() < faults_until_s
                for operation in in_turn(operations, faults) if has_faults else operations.all:
                    await operations.run(operation)

        # Everything is done once, so that what processes load and remember at the first time is there.
        warm_up_s = min(MAX_WARM_UP_S, WARM_UP_SHARE * seconds)
        await run_clients(traffic, num_clients, warm_up_s)
        for operation in (operations.batch, operations.adapter, operations.limited_key, faults.kill_instance):
            await operations.run(operation)
        before = await usage.settled(take)
        num_kept = number_of(traffic, KEPT)
        operating, watching = asyncio.create_task(operate()), asyncio.create_task(watch())
        try:
            await run_clients(traffic, num_clients, seconds - warm_up_s)
        finally:
            for task in (operating, watching):
                task.cancel()
            ended = await asyncio.gather(operating, watching, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                traffic.fault(f"the soak itself: {error!r}")
        await restored(operations, stack)
        after = await usage.settled(take)
        # Those that their client left when time was up are not counted.
        num_kept = 3 * (number_of(traffic, KEPT) - num_kept + num_clients)
    targets = [
        Target(name="wrong answers", value=traffic.num_faults, limit=0),
        *usage.targets(before, after, during, num_kept=num_kept, kv_disk_bytes=KV_DISK_BYTES),
    ]
    return {
        "seconds": seconds,
        "clients": num_clients,
        "machine": reporting.machine(),
        "counts": {f"{kind}, {outcome}": count for (kind, outcome), count in sorted(traffic.counts.items())},
        "reasons": dict(traffic.reasons.most_common()),
        "faults": traffic.faults,
        "targets": reporting.judged(targets),
        "is_met": all(target.is_met for target in targets),
        "before": asdict(before),
        "after": asdict(after),
        "during": [asdict(each) for each in during],
        "lines": list(map(str, targets)),
    }


def number_of(traffic: Traffic, kinds: Sequence[str]) -> int:
    """Requests of these kinds so far."""
    return sum(count for (kind, _), count in traffic.counts.items() if kind in kinds)


async def restored(operations: Operations, stack: Stack) -> None:
    """Puts back what an operation had changed that was cut short."""
    for name, process in stack.processes.items():
        if process.poll() is not None:
            stack.start(name)
    if not (server := usage.server_of(stack)).is_running:
        server.start()
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
        *reporting.table(["reason of refusals", "count"], list(found["reasons"].items())),
        "",
        *(f"- {line}" for line in found["lines"]),
        *(f"- fault: {fault}" for fault in found["faults"]),
    ]
    return "\n".join(lines)


def run(seconds: float, num_clients: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tideway-soak-") as name:
        folder = Path(name)
        checkpoints = {
            "llama": str(make_llama(folder / "llama")),
            "opt": str(make_opt(folder / "opt")),
            EMBEDDING_MODEL: str(write_pooling_checkpoint(folder / EMBEDDING_MODEL, "qwen3-last")),
            RERANKING_MODEL: str(write_pooling_checkpoint(folder / RERANKING_MODEL, "cross-bert")),
        }
        (folder / "keys").write_text(KEY)
        environment = {
            "TIDEWAY_API_KEYS_FILE": str(folder / "keys"),
            "TIDEWAY_ADMIN_API_KEY": KEY,
            "TIDEWAY_SWEEP_INTERVAL_S": "15",
            # From the first block on: the pool of these models never fills up.
            "TIDEWAY_KV_OFFLOAD": "disk",
            "TIDEWAY_KV_OFFLOAD_START": "0",
            "TIDEWAY_KV_DISK_FOLDER": str(folder / "kv"),
            "TIDEWAY_KV_DISK_BYTES": str(KV_DISK_BYTES),
        }
        with Stack(checkpoints, num_workers=2, num_instances=1, num_schedulers=2, environment=environment) as stack:
            stack.metrics_ports[SECOND_GATEWAY] = free_port()
            urls = [stack.url, stack.add_gateway(SECOND_GATEWAY)]
            stack.wait_ready()
            stack.wait_until(lambda: httpx.get(f"{urls[1]}/ready", timeout=5).status_code == 200, "the second gateway")
            return asyncio.run(soak(stack, urls, checkpoints, folder, seconds, num_clients))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"))
    options = parser.parse_args()
    # Either way the system that was started is ended; a shell's background processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    found = run(options.seconds, options.clients)
    text = page(found)
    print(text)
    stem = reporting.write(options.output, f"soak-{date.today()}", found, text)
    print(f"\nwritten to {stem}.md")
    return 0 if found["is_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
