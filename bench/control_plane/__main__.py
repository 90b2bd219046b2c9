"""How many instances one scheduler can hear: load reports, pairings and dispatches at 16 to 1,024 instances that report 50
times a second each, on one core.

    python -m bench.control_plane [--short] [--instances 16 1024] [--nats] [--output DIR]

First the core in this process, with encoded messages, by processor time; with --nats also the whole process behind a real
NATS server. Each instance is given a request every `--request-seconds`, each of which is dispatched, accepted and ended.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.control_plane.fleet import REPORTS_PER_S
from bench.control_plane.in_process import Paced, most_reports_per_s, paced
from bench.control_plane.over_nats import OverNats, over_nats
from bench.reporting import machine, met, table_of, write

TARGET_P99_MS = 5.0
TARGET_INSTANCES = 1000


class Report(msgspec.Struct, frozen=True):
    machine: dict[str, Any]
    request_seconds: float
    in_process: list[Paced]
    over_nats: list[OverNats]

    def markdown(self) -> str:
        inside = [
            {
                "instances": run.num_instances,
                "reports/s": f"{run.reports_per_s:,.0f}",
                "of one core": f"{run.cpu_share:.0%}",
                "reports/s at most": f"{run.most_reports_per_s:,.0f}",
                "dispatch P50": f"{run.wait_p50_ms:.2f} ms",
                "P99": f"{run.wait_p99_ms:.2f} ms",
                "max": f"{run.wait_max_ms:.2f} ms",
                "pairings": run.num_pairings,
                "rebalances": run.num_rebalance_messages,
            }
            for run in self.in_process
        ]
        behind = [
            {
                "instances": run.num_instances,
                "sent/s": f"{run.sent_per_s:,.0f}",
                "handled/s": f"{run.handled_per_s:,.0f}",
                "of one core": f"{run.cpu_share:.0%}",
                "dispatch P50": f"{run.wait_p50_ms:.2f} ms",
                "P99": f"{run.wait_p99_ms:.2f} ms",
                "rebalances": run.num_rebalance_messages,
                "stalls P99": f"{run.stall_p99_ms:.1f} ms",
                "max": f"{run.stall_max_ms:.1f} ms",
            }
            for run in self.over_nats
        ]
        lines = [
            f"Each instance reports {REPORTS_PER_S} times a second and is given a request every "
            f"{self.request_seconds:g} s. {self.machine}",
            "",
            "The core in one process, encoded messages in and out, by processor time:",
            "",
            *table_of(inside),
        ]
        if behind:
            lines += [
                "",
                "The scheduler's process behind a NATS server, by the wall clock (submission to arrival at the instance). "
                "Stalls: how long a process that only sleeps waited for the scheduler's core:",
                "",
                *table_of(behind),
            ]
        return "\n".join(lines)

    def verdict(self) -> str:
        largest = max(self.in_process, key=lambda run: run.num_instances)
        is_kept = (
            largest.num_instances >= TARGET_INSTANCES
            and largest.wait_p99_ms < TARGET_P99_MS
            and largest.reports_per_s >= 0.99 * REPORTS_PER_S * largest.num_instances
        )
        return (
            f"{met(is_kept)} {TARGET_INSTANCES} instances at {REPORTS_PER_S} reports a second on one core, "
            f"dispatch P99 under {TARGET_P99_MS:g} ms ({largest.num_instances} instances, "
            f"{largest.cpu_share:.0%} of a core, P99 {largest.wait_p99_ms:.2f} ms)"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.control_plane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--instances", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--request-seconds", type=float, default=1.0, help="between two requests for one instance")
    parser.add_argument("--short", action="store_true", help="16 and 64 instances for half a second each")
    parser.add_argument("--nats", action="store_true", help="also over a real NATS server")
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON and table")
    options = parser.parse_args(arguments)
    counts, seconds = ([16, 64], 0.5) if options.short else (options.instances, options.seconds)
    inside, behind = [], []
    for count in counts:
        per_s = count / options.request_seconds
        most = most_reports_per_s(count, seconds / 2, per_s / (REPORTS_PER_S * count))
        inside.append(msgspec.structs.replace(paced(count, seconds, per_s), most_reports_per_s=most))
        print(inside[-1], flush=True)
    if options.nats:
        for count in counts:
            behind.append(asyncio.run(over_nats(count, seconds, count / options.request_seconds)))
            print(behind[-1], flush=True)
    report = Report(machine(), options.request_seconds, inside, behind)
    text = f"{report.markdown()}\n\n{report.verdict()}\n"
    print("\n" + text)
    name = f"control-plane-{time.strftime('%Y-%m-%d')}"
    write(options.output, name, report, "# The scheduler's capacity\n\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
