"""python -m bench.migration_chaos --migrations 2000 --seed 1 --output bench/results

Leaves migration-chaos-DATE.json and .md under --output. 2,000 migrations take about 20 minutes on two cores. The same seed
draws the same requests, faults and pairs; what the processes make of them depends on their timing. Exit status: 0 where no
stream differed and nothing leaked, else 1 (logs of all processes are kept then).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from bench.migration_chaos.trials import UNFAULTED, Result, Trials
from bench.reporting import machine, table, write
from shared.runtime.service import new_event_loop


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.migration_chaos", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--migrations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--streams", type=int, default=18)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--rest-every", type=int, default=100)
    parser.add_argument(
        "--faults",
        choices=("all", "brief", "gentle", "cuts"),
        default="all",
        help="brief: those that cost little time; gentle: those that end no process; cuts: of networks",
    )
    parser.add_argument(
        "--everywhere",
        action="store_true",
        help="KV is handed over after prompts, copied against crashes, kept in host memory and fetched",
    )
    parser.add_argument("--keep-logs", action="store_true")
    parser.add_argument("--output", type=Path)
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level="WARNING", format="%(asctime)s driver %(levelname)s %(message)s")
    started_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started_s:6.1f} s] {text}", flush=True)

    trials = Trials(
        parsed.seed,
        num_instances=parsed.instances,
        num_streams=parsed.streams,
        num_at_once=parsed.at_once,
        rest_every=parsed.rest_every,
        faults=parsed.faults,
        is_everywhere=parsed.everywhere,
        say=say,
    )
    say(f"logs are in {trials.cluster.folder}")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        # Processes that run must not outlive this one.
        running = runner.get_loop().create_task(trials.run(parsed.migrations))
        runner.get_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        result = runner.get_loop().run_until_complete(running)
    text = markdown(result)
    print(text)
    if parsed.output is not None:
        kind = ("" if parsed.faults == "all" else f"-{parsed.faults}") + "-everywhere" * parsed.everywhere
        document = {"machine": machine(), **vars(result)}
        write(parsed.output, f"migration-chaos{kind}-{time.strftime('%Y-%m-%d')}", document, text)
    if not result.failures and not parsed.keep_logs:
        shutil.rmtree(trials.cluster.folder, ignore_errors=True)
    return 1 if result.failures else 0


def markdown(result: Result) -> str:
    total: Counter[str] = Counter()
    for of_fault in result.outcomes.values():
        total.update(of_fault)
    outcomes = [name for name, _ in total.most_common()]
    differing = sum(result.streams.get(name, 0) for name in ("differing", "short", "failed", "hung"))
    lines = [
        f"# Chaos: {total.total()} migrations, seed {result.seed}",
        "",
        f"{result.num_migrations} met a fault of their own, the others at most those of their neighbours. "
        f"{differing} of {result.streams.get('complete', 0) + differing} streams differed, were short, failed or hung; "
        f"{result.streams.get('cancelled', 0)} were cancelled by their clients, and what they had was right. "
        f"Longest silence of a stream: {', '.join(f'{s:.1f} s ({name})' for name, s in result.silences_s.items())}. "
        f"{len(result.failures)} failures in all; {result.num_rests} times everything was at rest and nothing was held. "
        f"{result.seconds:.0f} s, {result.num_starts} starts of instances.",
        "",
    ]
    rows: list[list[object]] = []
    for fault in sorted(result.outcomes, key=lambda name: (name == UNFAULTED, name)):
        counts = result.outcomes[fault]
        rows.append([fault, counts.total(), *(counts[name] or "" for name in outcomes)])
    rows.append(["all", total.total(), *(total[name] for name in outcomes)])
    lines += table(["fault", "migrations", *outcomes], rows)
    sums: list[tuple[str, dict[str, int]]] = [
        ("Streams", result.streams),
        ("Gateway", result.gateway),
        ("Stages of those that moved", {str(key): value for key, value in sorted(result.stages.items())}),
        ("Largest growth of an instance between rests", result.sizes),
    ]
    for title, sizes in sums:
        lines += ["", f"{title}: " + ", ".join(f"{name} {count}" for name, count in sizes.items()) + "."]
    if result.failures:
        lines += ["", "## Failures", "", *(f"- {text}" for text in result.failures)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
