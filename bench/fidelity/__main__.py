"""Simulated against live: two instances and three models on this machine, over HTTP, and the same requests on the same
engines in virtual time (README.md beside this file).

    python -m bench.fidelity [--quick] [--mixes chat] [--loads 0.6] [--precedence NICENESS] [--output DIR]

Takes some 15 minutes, --quick 3. Wants a machine that nothing else uses: its load average is in the result. Where
there are GPUs there are as many instances, which `--instances` must say.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from bench.fidelity import simulated
from bench.fidelity.live import LiveStack, Sent
from bench.fidelity.observed import Observed
from bench.fidelity.results import Cell, Comparison, Repeat, cell_order, draw
from bench.fidelity.timing import Delays, Sample, Timing, execution_s, fit, fit_demand, samples, speed
from bench.fidelity.workloads import (
    CALIBRATION,
    EMULATED_MODELS,
    LONG,
    MIXES,
    MODELS,
    SHORT,
    TENANTS,
    VOCABULARY,
    Mix,
    figures,
    planned,
)
from bench.reporting import judged, machine, others_processor_s, save_figure, write
from shared.messages.requests import pack_tokens
from shared.placement.hardware import HARDWARE
from shared.simulation.host import NO_DEMAND
from tideway.bench.prompts import prompt_token_ids
from tideway.bench.workload import PlannedRequest

LOADS = (0.3, 0.6, 0.95)
NUM_CORES = len(os.sched_getaffinity(0))
SETTINGS = {"TIDEWAY_MIGRATION": "off"}
"""Requests stay where they are: on a machine of two cores a copy takes one of them from the steps."""
HISTORY_S = 60.0
"""So long before a run requests are simulated as well: twice as long as an instance expects a tenant at most."""


class _Run(msgspec.Struct):
    load: float
    """Load as a share of the instances' capacity."""
    requests: list[PlannedRequest]
    sent: Sent
    end_s: float
    others_share: float
    """Share of the machine's processor time then that processes beside the stack and this one took."""

    @property
    def start_s(self) -> float:
        return self.sent.start_s

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Bench:
    def __init__(
        self, live: LiveStack, *, run_s: float, calibration_s: float, num_seeds: int, has_own_device: bool = False
    ) -> None:
        """`has_own_device`: steps take no core, so services take none from them."""
        self._live, self._run_s, self._calibration_s, self._num_seeds = live, run_s, calibration_s, num_seeds
        self._has_own_device = has_own_device
        self._calibrations: list[_Run] = []

    def _send(self, load: float, requests: list[PlannedRequest]) -> _Run:
        others_s, began_s = others_processor_s(), time.monotonic()
        sent = self._live.send(requests)
        end_s = sent.start_s + max(one.last_s for one in sent.served)
        others = (others_processor_s() - others_s) / (time.monotonic() - began_s) / NUM_CORES
        return _Run(load, requests, sent, end_s, others)

    def _calibrate(self, load: float, capacity_rps: float, duration_s: float, mix: Mix = CALIBRATION) -> None:
        number = len(self._calibrations)
        name = f"calibration-{number}"
        requests = planned(mix, load * capacity_rps, duration_s, name=name, seed=1000 + number)
        self._calibrations.append(self._send(load, requests))

    def run(self, mixes: Sequence[Mix], loads: Sequence[float], repeats: int) -> Comparison:
        """Raises `RunFailed` of live.py or of the simulation."""
        live = self._live
        observed = live.observed()
        guess = Timing(cost_models=observed[0].cost_models, beside=1.0, noise=0.0, submit_s=0.0, answer_s=0.0)
        rate_rps = simulated.capacity_rps(observed, guess, live.settings, CALIBRATION)
        # The guess knows nothing of the services' share of the machine.
        self._calibrate(0.25, rate_rps, self._calibration_s)
        timing = self._fit(live.observed())
        rate_rps = simulated.capacity_rps(observed, timing, live.settings, CALIBRATION)
        for mix in (SHORT, LONG):
            own_rps = simulated.capacity_rps(observed, timing, live.settings, mix)
            self._calibrate(0.6, own_rps, self._calibration_s, mix)
        # As much as they can: batches of all sizes are seen.
        self._calibrate(1.0, rate_rps, 3 * self._calibration_s)
        timing = self._fit(live.observed())
        rate_rps = simulated.capacity_rps(observed, timing, live.settings, CALIBRATION)
        capacity = {mix.name: simulated.capacity_rps(observed, timing, live.settings, mix) for mix in mixes}
        runs: dict[tuple[str, float, int], tuple[_Run, int]] = {}
        for key in cell_order([mix.name for mix in mixes], loads, repeats):
            name, load, repeat = key
            # At the load of the run: what the services take of the machine grows with it.
            self._calibrate(load, rate_rps, self._calibration_s)
            mix = next(mix for mix in mixes if mix.name == name)
            # The same requests again: what differs between repeats is the system's doing.
            requests = planned(mix, load * capacity[name], self._run_s, name=f"{name}-{load}", seed=1)
            requests = [msgspec.structs.replace(one, request_id=f"{one.request_id}-{repeat}") for one in requests]
            runs[key] = (self._send(load, requests), len(self._calibrations))
            print(f"{name}, load {load}, run {repeat + 1}: {len(requests)} requests, others took "
                  f"{100 * runs[key][0].others_share:.0f} % of the machine", flush=True)  # fmt: skip
        self._calibrate(loads[-1], rate_rps, self._calibration_s)
        observed = live.observed()
        return self._compare(observed, self._fit(observed), capacity, runs)

    def _fit(self, observed: list[Observed]) -> Timing:
        """To all that was sent of the other trace."""
        runs = [
            (run.seconds, len(run.requests), sum(one.output_tokens for one in run.requests), run.sent.services_s)
            for run in self._calibrations
        ]
        demand = NO_DEMAND if self._has_own_device else fit_demand(runs)
        steps = samples(observed, demand, NUM_CORES)
        calibrating = [one for run in self._calibrations for one in _within(steps, run)]
        arrive_s, submit_s, deliver_s, answer_s = np.mean(_delays_s(observed, self._calibrations), axis=0).tolist()
        return fit(calibrating, arrive_s + submit_s, deliver_s + answer_s, demand, NUM_CORES)

    def _compare(
        self,
        observed: list[Observed],
        timing: Timing,
        capacity: dict[str, float],
        runs: dict[tuple[str, float, int], tuple[_Run, int]],
    ) -> Comparison:
        steps, settings = samples(observed, timing.demand, timing.num_cores), self._live.settings
        # What is on the way waits for a core the longer, the more the instances have to do.
        delays_s = {
            load: _delays_s(observed, [one for one in self._calibrations if one.load == load]) for _, load, _ in runs
        }
        everything = [*self._calibrations, *(run for run, _ in runs.values())]
        cells: dict[tuple[str, float], Cell] = {}
        for (name, load, _), (run, number) in runs.items():
            lengths: dict[str, list[tuple[int, int]]] = {model: [] for model in MODELS}
            for one in run.requests:
                lengths[one.model].append((one.prompt_tokens, one.output_tokens))
            alone_s = {model: execution_s(timing, model, pairs) for model, pairs in lengths.items() if pairs}
            around = self._calibrations[number - 1 : number + 1]
            before = speed(timing, [one for calibration in around for one in _within(steps, calibration)])
            own = speed(timing, _within(steps, run))
            before_run = earlier(run.start_s, [(one.start_s, one.requests) for one in everything])
            by_speed = [
                [
                    figures(
                        simulated.run(
                            observed,
                            timing,
                            settings,
                            run.requests,
                            before=before_run,
                            delays_s=delays_s[load],
                            start_s=run.start_s,
                            speed=factor,
                            seed=seed,
                        ),
                        alone_s,
                    )
                    for seed in range(num_seeds)
                ]
                for factor, num_seeds in ((before, self._num_seeds), (own, -(-self._num_seeds // 2)))
            ]
            cell = cells.setdefault(
                (name, load), Cell(workload=name, load=load, rate_rps=load * capacity[name], repeats=[])
            )
            cell.repeats.append(
                Repeat(
                    live=figures(run.sent.served, alone_s), simulated=by_speed[0], hindsight=by_speed[1],
                    speed=before, own_speed=own, others_share=run.others_share,
                    client_late_s=run.sent.client_late_s, services_cores=run.sent.services_s / run.seconds,
                )
            )  # fmt: skip
        return Comparison(cells=list(cells.values()), timing=timing, capacity_rps=capacity)


def _delays_s(observed: Sequence[Observed], runs: Sequence[_Run]) -> list[Delays]:
    """Delays of each request."""
    submitted = {prompt: at_s for one in observed for prompt, at_s in one.submitted_s.items()}
    first = {prompt: at_s for one in observed for prompt, at_s in one.first_s.items()}
    found = []
    for run in runs:
        ordered = sorted(run.requests, key=lambda request: request.request_id)
        for request, served, arrived_s in zip(ordered, run.sent.served, run.sent.arrivals_s, strict=True):
            prompt = pack_tokens(prompt_token_ids(request, VOCABULARY, 0))
            submitted_s, first_s = submitted[prompt] - run.start_s, first[prompt] - run.start_s
            written_s = arrived_s + served.server_ttft_s
            found.append(
                Delays(
                    arrive_s=arrived_s - served.arrival_s, submit_s=submitted_s - arrived_s,
                    deliver_s=written_s - first_s, answer_s=served.first_s - written_s,
                )
            )  # fmt: skip
    return found


def earlier(start_s: float, runs: Sequence[tuple[float, Sequence[PlannedRequest]]]) -> list[PlannedRequest]:
    """Requests of the `HISTORY_S` before a run, at negative times. `runs`: all, with the times at which they began."""
    return [
        msgspec.structs.replace(request, at_s=at_s)
        for began_s, requests in runs
        if began_s < start_s
        for request in requests
        if -HISTORY_S <= (at_s := request.at_s + began_s - start_s) < 0.0
    ]


def _within(steps: Sequence[Sample], run: _Run) -> list[Sample]:
    return [one for one in steps if run.start_s <= one.start_s < run.end_s]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="two loads, one run of each cell, shorter ones")
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON, table and plot")
    parser.add_argument("--repeats", type=int, default=0, help="live runs of each cell; default: 2, quick 1")
    parser.add_argument("--seconds", type=float, default=0.0, help="of arrivals of a run; default: 24, quick 12")
    names = [mix.name for mix in MIXES]
    parser.add_argument("--mixes", nargs="+", choices=[*names, TENANTS.name], default=names,
                        help="workloads (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--loads", nargs="+", type=float, help="shares of the capacity; default: 0.3 0.6 0.95, quick 0.3 0.95"
    )
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--max-running", type=int, default=0, help="sequences of an instance at once; few on a fast "
                        "device, so that the client can send what it computes; default: as the worker has it")  # fmt: skip
    parser.add_argument("--precedence", type=int, default=0, metavar="NICENESS",
                        help="over other processes on a machine that is in use, below 0 as root; default: none")  # fmt: skip
    parser.add_argument("--emulate", default="", choices=sorted(HARDWARE), metavar="DEVICE",
                        help="steps take what they would on such a device: " + ", ".join(sorted(HARDWARE)))  # fmt: skip
    options = parser.parse_args(arguments)
    quick, emulated = options.quick, options.emulate
    began_s, before = time.monotonic(), machine()
    run_s, loads = options.seconds or (12.0 if quick else 24.0), options.loads or ((0.3, 0.95) if quick else LOADS)
    settings = SETTINGS | ({"TIDEWAY_MAX_RUNNING": str(options.max_running)} if options.max_running else {})
    with LiveStack(settings, num_instances=options.instances, precedence=options.precedence, emulated=emulated) as live:
        bench = Bench(
            live, run_s=run_s, calibration_s=min(6.0, run_s / 2), num_seeds=2 if quick else 4,
            has_own_device=bool(emulated) or torch.cuda.is_available(),
        )  # fmt: skip
        mixes = [mix for mix in (*MIXES, TENANTS) if mix.name in options.mixes]
        comparison = bench.run(mixes, loads, options.repeats or (1 if quick else 2))
    took_s, date = time.monotonic() - began_s, time.strftime("%Y-%m-%d")
    targets = comparison.targets()
    machines = {"before": before, "after": machine()}
    head = f"# Simulated against live, {date}\n\n{machines}, {took_s:.0f} s\n\n"
    if emulated:
        shapes = ", ".join(EMULATED_MODELS.values())
        head += f"Steps take what those of {shapes} on {emulated} would; all else is the stack of this machine.\n\n"
    text = head + comparison.markdown() + "\n\n    " + "\n    ".join(map(str, targets))
    print(text)
    result = {"date": date, "machine": machines, "took_s": round(took_s, 1),
              "targets": judged(targets), "rows": comparison.rows(), "comparison": comparison}  # fmt: skip
    name = "-".join(filter(None, ["fidelity", emulated, "quick" if quick else "", date]))
    stem = write(options.output, name, result, text)
    save_figure(lambda: draw(comparison), stem.with_suffix(".png"))
    print(f"written: {stem}.json, .md, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
