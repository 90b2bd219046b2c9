"""python -m bench.coserving [EXPERIMENT ...]: runs the experiments, prints their tables and targets, writes the results.

Each leaves coserving-NAME-DATE.json (everything), .md (the tables) and .*.png under --output. All take about 40 minutes on
two cores with the 135M-parameter shape, --short about 4. The figures are ratios within one run; still, let nothing else
use the machine. With --virtual no model runs: steps take as long as a cost model says, and hundreds of seconds take a few.
Exit status: 0, also where a target is missed (the tool says so); 1 for a run that failed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.coserving import experiments
from bench.coserving.bench import SHORT, VIRTUAL, Bench, Durations, Options
from bench.coserving.figures import write_figures
from bench.coserving.objectives import objectives
from bench.coserving.results import ExperimentResult
from bench.coserving.runs import Objectives, RunFailed, Setup, VirtualTestbed
from bench.coserving.safepoints import safepoints
from bench.coserving.testbed import SHAPES, Testbed
from bench.coserving.workloads import OFFLINE_TRACE, ONLINE_TRACE, Scale, Workloads
from bench.reporting import judged, write
from shared.costs.model import CostModel
from tideway.bench.plots import PlotsUnavailable

EXPERIMENTS: dict[str, Callable[[Bench], ExperimentResult]] = {
    "safepoints": safepoints,
    "trace": experiments.trace,
    "onoff": experiments.on_off,
    "burst": experiments.burst,
    "rate": experiments.rate,
    "ablation": experiments.ablation,
    "objectives": objectives,
}
VIRTUAL_ONLY = frozenset({"objectives"})
"""Left out where none is named."""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.experiments) - set(EXPERIMENTS):
        parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    started_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started_s:6.1f} s] {text}", flush=True)

    setup, scale, options = (_filled(kind, parsed) for kind in (Setup, Scale, Options))
    if parsed.short:
        setup = msgspec.structs.replace(setup, profile_s=min(setup.profile_s, 6.0))
    if parsed.virtual and (parsed.model or parsed.device):
        parser.error("--virtual has no model and no device; --cost-model says how long steps take")
    if not parsed.virtual and (parsed.noise or parsed.cost_model):
        parser.error("--noise and --cost-model are for --virtual")
    if setup.device == "cuda":
        setup = msgspec.structs.replace(setup, max_step_tokens=parsed.max_step_tokens or 8192, steps_in_flight=2)
    if not parsed.virtual and VIRTUAL_ONLY.intersection(parsed.experiments):
        parser.error(f"{', '.join(VIRTUAL_ONLY)} wants --virtual: hundreds of runs")
    workloads = Workloads(parsed.traces, scale, setup.seed, parsed.online_trace)
    names = parsed.experiments or [name for name in EXPERIMENTS if name not in VIRTUAL_ONLY]
    if not workloads.has_traces:
        missing = f"no {parsed.online_trace} and {OFFLINE_TRACE} in {parsed.traces} (--traces)"
        say(f"{missing}: offline lengths are the trace's means")
        if "trace" in names and parsed.virtual:
            say("experiment trace has Poisson arrivals and log-normal lengths instead")
        elif "trace" in names:
            say("experiment trace is left out")
            names = [name for name in names if name != "trace"]
    command = shlex.join(["python", "-m", "bench.coserving", *arguments])
    testbed = _virtual(setup, parsed) if parsed.virtual else Testbed(setup)
    cost = testbed.cost_model
    say(
        f"{setup.model}: "
        + ("virtual time" if parsed.virtual else setup.device)
        + f"; cost model's error {100 * cost.median_error:.1f} % (median), {100 * cost.p99_error:.1f} % (P99)"
    )
    durations = SHORT if parsed.short else VIRTUAL if parsed.virtual else Durations()
    missed = []
    try:
        bench = Bench(testbed, workloads, durations, options, command, say)
        for name in names:
            began_s = time.monotonic()
            result = EXPERIMENTS[name](bench)
            result.took_s = time.monotonic() - began_s
            for line in report(result):
                print(line)
            missed += [f"{name}: {target}" for target in result.targets if not target.is_met]
            for path in save(result, parsed.output):
                say(f"wrote {path}")
    except RunFailed as error:
        print(f"a run failed: {error}", file=sys.stderr)
        return 1
    finally:
        testbed.close()
    print(f"\n{len(missed)} targets missed" + "".join(f"\n  {line}" for line in missed))
    say("done")
    return 0


def _filled(kind: type[msgspec.Struct], parsed: argparse.Namespace) -> Any:
    """With the options that were given."""
    given = {name: getattr(parsed, name, None) for name in kind.__struct_fields__}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _virtual(setup: Setup, parsed: argparse.Namespace) -> VirtualTestbed:
    if parsed.cost_model is None:
        return VirtualTestbed(setup, noise=parsed.noise)
    cost_model = msgspec.json.decode(parsed.cost_model.read_bytes(), type=CostModel)
    return VirtualTestbed(msgspec.structs.replace(setup, model=parsed.cost_model.stem), cost_model, parsed.noise)


def report(result: ExperimentResult) -> list[str]:
    """Markdown."""
    lines = [f"\n## {result.experiment}{result.remark}, {result.date}, {result.took_s:.0f} s\n"]
    for table in result.tables:
        lines += [table.markdown(result.remark), ""]
    return [*lines, *(f"- {target}" for target in result.targets), ""]


def save(result: ExperimentResult, folder: Path) -> list[Path]:
    document = {**msgspec.structs.asdict(result), "targets": judged(result.targets)}
    text = "\n".join([f"`{result.command}`", *report(result)])
    stem = write(folder, f"coserving-{result.name}-{result.date}", document, text, indent=-1)
    paths = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    try:
        return [*paths, *write_figures(result, stem)]
    except PlotsUnavailable as error:
        print(error)
        return paths


def _pair(text: str) -> Objectives:
    ttft_ms, _, tpot_ms = text.partition(":")
    return Objectives(float(ttft_ms) / 1000, float(tpot_ms) / 1000)


def _parser() -> argparse.ArgumentParser:
    defaults, scale, options = Setup(), Scale(), Options()
    parser = argparse.ArgumentParser(
        prog="python -m bench.coserving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    parser.add_argument("--short", action="store_true", help="fewer and shorter runs: whether all works, not how well")
    parser.add_argument("--virtual", action="store_true", help="in virtual time, without a model")
    parser.add_argument(
        "--noise", type=float, default=0.0, help="of virtual step times: standard deviation of their log"
    )
    parser.add_argument("--cost-model", type=Path, help="JSON, for virtual step times (SmolLM-135M on two cores)")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with the two traces")
    parser.add_argument("--online-trace", default=ONLINE_TRACE, metavar="FILE", help="of that folder (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--model", choices=SHAPES, help=f"shape, random weights ({defaults.model})")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", help=defaults.dtype)
    parser.add_argument("--threads", dest="num_threads", type=int, help=f"{defaults.num_threads}")
    parser.add_argument("--pool-tokens", type=int, help=f"KV pool ({defaults.pool_tokens})")
    parser.add_argument("--max-step-tokens", type=int, help=f"{defaults.max_step_tokens}; on CUDA 8192")
    parser.add_argument("--rows", dest="num_rows", type=int, help=f"sequences at once ({defaults.num_rows})")
    parser.add_argument("--ordering", help=f"of one class, in all systems ({defaults.ordering})")
    parser.add_argument("--profile-s", type=float, help=f"for the cost model ({defaults.profile_s:g})")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--length-divisor", type=float, default=scale.length_divisor, help="of prompts and outputs")
    parser.add_argument("--max-total-tokens", type=int, default=scale.max_total_tokens)
    parser.add_argument("--load", type=float, default=options.load, help="online load over the capacity (%(default)s)")
    parser.add_argument("--on-load", type=float, default=options.on_load, help="in ON phases (%(default)s)")
    parser.add_argument("--ttft-ms", type=float, default=0.0, help="objective (default: Online-Only's measured P99)")
    parser.add_argument("--tpot-ms", type=float, default=0.0, help="objective (default: Online-Only's measured P99)")
    parser.add_argument(
        "--pairs",
        type=_pair,
        nargs="+",
        metavar="TTFT_MS:TPOT_MS",
        help="fixed objectives of the experiment objectives",
    )
    parser.add_argument("--ablation-pool-share", type=float, default=options.ablation_pool_share)
    return parser


if __name__ == "__main__":
    sys.exit(main())
