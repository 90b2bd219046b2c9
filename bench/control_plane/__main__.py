"""How many instances one scheduler can hear: load reports, pairings and dispatches at 1 to 1,024 instances that report as
live ones do, on one core.

    python -m bench.control_plane [--short] [--instances 64 1024] [--nats] [--flat-out] [--output DIR]

First the core in this process, with encoded messages, by processor time; with --nats also the whole process behind a real
NATS server. Each request is dispatched, accepted, and ended after two seconds.
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

from bench.control_plane.in_process import Paced, most_reports_per_s, paced
from bench.control_plane.over_nats import OverNats, over_nats
from bench.reporting import Target, machine, table_of, write

TARGET_P99_MS = 10.0
MOST_REQUESTS_PER_S = 4.0
"""Requests of each instance."""


class Report(msgspec.Struct, frozen=True):
    machine: dict[str, Any]
    requests_per_s: float
    is_flat_out: bool
    in_process: list[Paced]
    over_nats: list[OverNats]

    def markdown(self) -> str:
        inside = [
            {
                "instances": run.num_instances,
                "requests/s": f"{run.num_requests / run.seconds:,.0f}",
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
                "requests/s": f"{run.num_requests / run.seconds:,.0f}",
                "refused": run.num_refused,
                "sent/s": f"{run.sent_per_s:,.0f}",
                "handled/s": f"{run.handled_per_s:,.0f}",
                "of one core": f"{run.cpu_share:.0%}",
                "server": f"{run.server_cpu_share:.0%}",
                "instances' process": f"{run.instances_cpu_share:.0%}",
                "gateway": f"{run.gateway_cpu_share:.0%}",
                "dispatch P50": f"{run.wait_p50_ms:.2f} ms",
                "P99": f"{run.wait_p99_ms:.2f} ms",
                "max": f"{run.wait_max_ms:.1f} ms",
                "echo P50": f"{run.echo_p50_ms:.2f} ms",
                "echo P99": f"{run.echo_p99_ms:.2f} ms",
                "rebalances": run.num_rebalance_messages,
                "stalls P99": f"{run.stall_p99_ms:.1f} ms",
                "max stall": f"{run.stall_max_ms:.1f} ms",
                "load": f"{run.load_average:.1f}",
            }
            for run in self.over_nats
        ]
        how = "as often as it may" if self.is_flat_out else "when a live one would"
        lines = [
            f"Each instance reports {how}; {self.requests_per_s:g} requests come each second, at most "
            f"{MOST_REQUESTS_PER_S:g} for each instance. {self.machine}",
        ]
        if inside:
            lines += [
                "",
                "The core in one process, encoded messages in and out, by processor time:",
                "",
                *table_of(inside),
            ]
        if behind:
            lines += [
                "",
                "The scheduler's process behind a NATS server, by the wall clock (submission to arrival at the instance), "
                "and what each process took of a core. Echo: the same way without a scheduler, at the "
                "same time. Stalls: how long a process that only sleeps waited for the "
                "scheduler's core:",
                "",
                *table_of(behind),
            ]
        return "\n".join(lines)

    def verdict(self) -> str:
        targets = [
            Target(
                name=f"dispatch P99 {where}, {run.num_instances} instances",
                value=run.wait_p99_ms,
                limit=TARGET_P99_MS,
                unit=" ms",
                note=f"{run.cpu_share:.0%} of a core",
            )
            for where, runs in (("in one process", self.in_process), ("behind NATS", self.over_nats))
            for run in runs
        ]
        return "\n".join(map(str, targets))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.control_plane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument(
        "--requests-per-s",
        type=float,
        default=500.0,
        help=f"over all, at most {MOST_REQUESTS_PER_S:g} for each instance",
    )
    parser.add_argument("--flat-out", action="store_true", help="every instance reports as often as it may")
    parser.add_argument("--only-nats", action="store_true", help="nothing in this process")
    parser.add_argument("--short", action="store_true", help="16 and 64 instances for half a second each")
    parser.add_argument("--nats", action="store_true", help="also over a real NATS server")
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON and table")
    options = parser.parse_args(arguments)
    counts, seconds = ([16, 64], 0.5) if options.short else (options.instances, options.seconds)
    inside, behind = [], []
    per_s = {count: min(options.requests_per_s, MOST_REQUESTS_PER_S * count) for count in counts}
    for count in () if options.only_nats else counts:
        run = paced(count, seconds, per_s[count], is_flat_out=options.flat_out)
        most = most_reports_per_s(count, seconds / 2, per_s[count] / run.reports_per_s)
        inside.append(msgspec.structs.replace(run, most_reports_per_s=most))
        print(inside[-1], flush=True)
    for count in counts if options.nats or options.only_nats else ():
        behind.append(asyncio.run(over_nats(count, seconds, per_s[count], is_flat_out=options.flat_out)))
        print(behind[-1], flush=True)
    report = Report(machine(), options.requests_per_s, options.flat_out, inside, behind)
    text = f"{report.markdown()}\n\n{report.verdict()}\n"
    print("\n" + text)
    name = f"control-plane-{'flat-out-' if options.flat_out else ''}{time.strftime('%Y-%m-%d')}"
    write(options.output, name, report, "# The scheduler's capacity\n\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
