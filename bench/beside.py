"""Steps of two models on one CPU: in turn on all cores, as an instance runs them, or beside each other, each on half of the
cores.

    python -m bench.beside [--pairs 30m,30m 135m,30m 135m,135m] [--rounds 24] [--seconds 0.4] [--processor-time]

Three processes have the same checkpoints: one computes both models on all cores, two compute one model each on half of them.
Turns of `--seconds` alternate:

    in turn   a step of one, a step of the other, on all cores
    beside    steps of both at the same time, each on its half
    alone     steps of one on all cores; the other has nothing to do
    half      steps of one on its half; the other half does nothing

    gain      of work a second: sum over both models of (step in turn / step beside); 1: as much as in turn
    gap       between two tokens of a stream: step beside / (sum of both steps in turn)
    cores     step on a half / step on all cores: what doubling the cores brings
    slowed    step beside / step on a half: what both cost each other

A step counts if no thread of it waited for a core longer than 2 % of its time (by the kernel's run queues), and, beside, if
the same is true of the other's steps meanwhile. Other work on the machine thus costs samples, and does not favour the
arrangement whose steps have fewer threads. Figures are medians over rounds; each round has its own ratios. What the engine
does between steps is left out.

`--processor-time` is for a machine where no step is undisturbed. All steps count, with the time that they would take if all
their threads had a core each:

    time of the calling thread outside the kernels + (processor time of all threads - that) / threads

Threads take a kernel's work piece by piece and spin for some 60 us before they sleep, so one that is held up leaves its work
to the others and adds little. What steps beside each other cost in caches and memory is then what the machine's other work
costs, in all arrangements alike.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from bench.coserving.testbed import SHAPES
from bench.devices import kv_block
from bench.reporting import Target, judged, machine, table_of, write
from bench.sharing_overhead import Held, Place, make_checkpoints, pool_bytes
from services.worker.executor.executor import Executor
from services.worker.native.library import kernels
from shared.engine.memory.slab import choose_merged_bytes
from shared.messages.cluster import ModelSpec

CONTEXT, PROMPT = 256, 256
MOST_WAITED = 0.02
"""Share of a step that its threads may have waited for a core."""
PARALLEL = ("linear", "add_rms_norm", "most_likely", "attention", "run_parts", "argmax", "mask")
"""Kernels that all threads run together."""
PAYS = 1.1
"""Gain from which a policy of its own would pay."""
START_S = 0.01
"""From a command to the beginning of a turn, so that both halves begin together."""
STEPS = ("decode 1", "decode 8", "decode 32", "prefill")
MIXES = (("decode 1", "decode 1"), ("decode 8", "decode 8"), ("decode 32", "decode 32"), ("prefill", "decode 8"),
         ("prefill", "decode 1"), ("prefill", "prefill"))  # fmt: skip
WHOLE, FIRST, SECOND = "whole", "first", "second"


class Step(NamedTuple):
    """A step that ran. Seconds of the machine's monotonic clock."""

    model: int
    start_s: float
    end_s: float
    waited_s: float
    """Time that its process's threads, in sum, waited for a core; 0 where processor time is counted."""
    processor_s: float = 0.0
    """By processor time, as above; 0 where the clock is."""

    @property
    def seconds(self) -> float:
        return self.processor_s or self.end_s - self.start_s

    @property
    def is_undisturbed(self) -> bool:
        return self.waited_s <= MOST_WAITED * self.seconds


class Turn(NamedTuple):
    start_s: float
    seconds: float
    """By processor time where that is counted."""
    steps: tuple[tuple[int, str], ...]
    """Models' numbers and kinds of steps, run in a circle, each at least once."""


def counted(steps: Sequence[Step], beside: Sequence[Step] | None = None) -> dict[int, list[float]]:
    """Seconds of the undisturbed steps, by model. `beside`: what ran at the same time on other cores; steps that it does not
    cover, or during which it was disturbed, do not count."""
    found: dict[int, list[float]] = {}
    for step in steps:
        if not step.is_undisturbed:
            continue
        if beside is not None:
            meanwhile = [one for one in beside if one.start_s < step.end_s and step.start_s < one.end_s]
            is_covered = beside and beside[0].start_s <= step.start_s and step.end_s <= beside[-1].end_s
            if not is_covered or not all(one.is_undisturbed for one in meanwhile):
                continue
        found.setdefault(step.model, []).append(step.seconds)
    return found


class Round(NamedTuple):
    """Seconds of each model's steps in one round, by arrangement; models as a pair."""

    in_turn: tuple[float, float]
    beside: tuple[float, float]
    alone: tuple[float, float]
    half: tuple[float, float]

    @property
    def gain(self) -> float:
        return sum(turn_s / beside_s for turn_s, beside_s in zip(self.in_turn, self.beside, strict=True))


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of two models with a kind of step each; pairs are of both models."""

    models: tuple[str, str]
    steps: tuple[str, str]
    num_rounds: int
    """Rounds in which steps of all arrangements counted."""
    in_turn_ms: tuple[float, float]
    beside_ms: tuple[float, float]
    gain: float
    spread: float
    """Half the range between the quartiles of the rounds' gains."""
    gap: tuple[float, float]
    cores: tuple[float, float]
    slowed: tuple[float, float]


def measured(models: tuple[str, str], steps: tuple[str, str], rounds: Sequence[Round]) -> Measured:
    """Raises `ValueError` with fewer than two rounds."""
    if len(rounds) < 2:
        raise ValueError(f"{' and '.join(steps)}: only {len(rounds)} undisturbed rounds; more --rounds are needed")
    gains = [one.gain for one in rounds]
    quartiles = statistics.quantiles(gains, n=4)

    def ratio(above: str, below: str) -> tuple[float, float]:
        first, second = (
            statistics.median(getattr(one, above)[model] / getattr(one, below)[model] for one in rounds)
            for model in (0, 1)
        )
        return first, second

    def milliseconds(name: str) -> tuple[float, float]:
        first, second = (1e3 * statistics.median(getattr(one, name)[model] for one in rounds) for model in (0, 1))
        return first, second

    first, second = (statistics.median(one.beside[model] / sum(one.in_turn) for one in rounds) for model in (0, 1))
    return Measured(
        models=models, steps=steps, num_rounds=len(rounds), in_turn_ms=milliseconds("in_turn"),
        beside_ms=milliseconds("beside"), gain=statistics.median(gains), spread=(quartiles[2] - quartiles[0]) / 2,
        gap=(first, second), cores=ratio("half", "alone"), slowed=ratio("beside", "half"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the processes


def _waited_s() -> float:
    """Time that threads of this process have waited for a core, in sum."""
    total = 0
    for name in os.listdir("/proc/self/task"):
        total += int(Path(f"/proc/self/task/{name}/schedstat").read_text().split()[1])
    return total / 1e9


class Processor:
    """Processor time of this process's steps, as if all threads had a core each."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._in_kernels_s = 0.0
        """Processor time of the calling thread in kernels, which all threads run together."""
        self._since = (0.0, 0.0, 0.0)
        team = kernels()
        if team is None:
            raise ValueError("without compiled kernels it is not known what all threads run together")
        for name in PARALLEL:
            setattr(team, name, self._watched(getattr(team, name)))

    def _watched(self, kernel: Callable[..., object]) -> Callable[..., object]:
        def run(*given: object) -> object:
            before_s = time.thread_time()
            try:
                return kernel(*given)
            finally:
                self._in_kernels_s += time.thread_time() - before_s

        return run

    def begin(self) -> None:
        self._since = (time.process_time(), time.thread_time(), self._in_kernels_s)

    def seconds(self) -> float:
        """Seconds since `begin`."""
        all_s, own_s, in_kernels_s = (
            now - then
            for now, then in zip(
                (time.process_time(), time.thread_time(), self._in_kernels_s), self._since, strict=True
            )
        )
        alone_s = own_s - in_kernels_s
        return alone_s + (all_s - alone_s) / self._num_threads


def _serve(
    connection: Connection,
    cores: Sequence[int],
    checkpoints: Mapping[int, Path],
    kinds: Sequence[str],
    by_processor: bool,
) -> None:
    """A process with models, by number, that runs the turns it is sent, on some cores."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    processor = Processor(len(cores)) if by_processor else None
    held = {kind: Held(int(kind.partition(" ")[2] or 1), CONTEXT, PROMPT) for kind in kinds}
    blocks = [kv_block(path, torch.device("cpu")) for path in checkpoints.values()]
    merged_bytes = choose_merged_bytes([block_bytes for block_bytes, _ in blocks])
    num_merged = sum(pool_bytes(blocks, merged_bytes, one) for one in held.values()) // merged_bytes
    num_rows = len(checkpoints) * sum(one.num_sequences + 1 for one in held.values())
    executor = Executor("cpu", num_merged, merged_bytes, num_rows)
    places: dict[tuple[int, str], Place] = {}
    for number, path in checkpoints.items():
        shape = executor.add_model(executor.prepare_model(ModelSpec(f"model-{number}", str(path))))
        for kind, one in held.items():
            row = sum(place.held.num_sequences + 1 for place in places.values())
            first = sum(place.num_merged for place in places.values())
            places[number, kind] = Place(executor, shape, row, first, one)
    connection.send(None)
    while (turn := connection.recv()) is not None:
        connection.send(_run(places, turn, processor))
    executor.close()


def _run(places: Mapping[tuple[int, str], Place], turn: Turn, processor: Processor | None) -> list[Step]:
    calls = [
        (model, places[model, kind].prefill_s if kind == "prefill" else places[model, kind].decode_s)
        for model, kind in turn.steps
    ]
    for _, call in calls:  # caches as a turn leaves them
        call()
    while time.monotonic() < turn.start_s:
        pass
    steps: list[Step] = []
    for number, (model, call) in enumerate(itertools.cycle(calls)):
        start_s = time.monotonic()
        spent_s = start_s - turn.start_s if processor is None else sum(step.seconds for step in steps)
        if number >= len(calls) and spent_s >= turn.seconds:
            return steps
        if processor is None:
            waited_s = _waited_s()
            call()
            steps.append(Step(model, start_s, time.monotonic(), _waited_s() - waited_s))
        else:
            processor.begin()
            call()
            steps.append(Step(model, start_s, time.monotonic(), 0.0, processor.seconds()))
    raise AssertionError("a cycle does not end")


class Processes:
    """The three processes, ready."""

    def __init__(self, connections: Mapping[str, Connection]) -> None:
        self._connections = connections

    def run(self, seconds: float, **asked: tuple[tuple[int, str], ...]) -> dict[str, list[Step]]:
        """Steps that each of the named processes ran in a turn at the same time."""
        start_s = time.monotonic() + START_S + seconds / 4
        for name, steps in asked.items():
            self._connections[name].send(Turn(start_s, seconds, steps))
        return {name: self._connections[name].recv() for name in asked}


@contextmanager
def processes(checkpoints: Sequence[Path], kinds: Sequence[str], *, by_processor: bool) -> Iterator[Processes]:
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if not half:
        raise ValueError("one core cannot be split: expected two or more")
    parts = {
        WHOLE: (cores[: 2 * half], dict(enumerate(checkpoints))),
        FIRST: (cores[:half], {0: checkpoints[0]}),
        SECOND: (cores[half : 2 * half], {1: checkpoints[1]}),
    }
    context, connections, started = get_context("spawn"), {}, []
    for name, (own, models) in parts.items():
        connections[name], theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, own, models, kinds, by_processor), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
    try:
        for connection in connections.values():
            connection.recv()
        yield Processes(connections)
        for connection in connections.values():
            connection.send(None)
    finally:
        for process in started:
            process.join(timeout=10.0)
            process.terminate()


def one_round(
    of: Processes, steps: tuple[str, str], seconds: float, number: int, *, by_processor: bool
) -> Round | None:
    """One turn of each arrangement, the order turned with the round's number. None: some model had no undisturbed step."""
    # The kernel adds the time of threads that run now to a process's at its next tick: of single steps it is not exact.
    middle = statistics.fmean if by_processor else statistics.median
    first, second = ((0, steps[0]),), ((1, steps[1]),)
    found: dict[str, dict[int, list[float]]] = {}
    names = ("in_turn", "beside", "alone", "half")
    for name in names[number % 4 :] + names[: number % 4]:
        match name:
            case "in_turn":
                found[name] = counted(of.run(seconds, whole=(*first, *second))[WHOLE])
            case "beside":
                ran = of.run(seconds, first=first, second=second)
                if by_processor:
                    found[name] = counted(ran[FIRST]) | counted(ran[SECOND])
                else:
                    found[name] = counted(ran[FIRST], ran[SECOND]) | counted(ran[SECOND], ran[FIRST])
            case "alone":
                alone = [of.run(seconds / 2, whole=own)[WHOLE] for own in (first, second)]
                found[name] = counted(alone[0]) | counted(alone[1])
            case "half":
                found[name] = counted(of.run(seconds / 2, first=first)[FIRST])
                found[name] |= counted(of.run(seconds / 2, second=second)[SECOND])
    medians = [tuple(middle(found[name][model]) for model in (0, 1)) for name in names if len(found[name]) == 2]
    return Round(*medians) if len(medians) == len(names) else None  # type: ignore[arg-type]


def measure(
    checkpoints: Sequence[Path],
    models: tuple[str, str],
    mixes: Sequence[tuple[str, str]],
    rounds: int,
    seconds: float,
    *,
    by_processor: bool = False,
) -> list[Measured]:
    found = []
    kinds = [kind for kind in STEPS if any(kind in mix for mix in mixes)]
    with processes(checkpoints, kinds, by_processor=by_processor) as running:
        kept: dict[tuple[str, str], list[Round]] = {mix: [] for mix in mixes}
        for number in range(rounds):  # a mix's rounds are spread over all of the time
            for mix in mixes:
                if (one := one_round(running, mix, seconds, number, by_processor=by_processor)) is not None:
                    kept[mix].append(one)
    for mix in mixes:
        found.append(measured(models, mix, kept[mix]))
    return found


def row(one: Measured) -> dict[str, object]:
    def both(values: tuple[float, float], digits: int = 2) -> str:
        return f"{values[0]:.{digits}f}, {values[1]:.{digits}f}"

    return {
        "models": ", ".join(one.models), "steps": ", ".join(one.steps), "rounds": one.num_rounds,
        "in turn ms": both(one.in_turn_ms), "beside ms": both(one.beside_ms),
        "gain": f"{one.gain:.3f} ± {one.spread:.3f}", "gap": both(one.gap), "cores": both(one.cores),
        "slowed": both(one.slowed),
    }  # fmt: skip


def _pair(text: str) -> tuple[str, str]:
    first, _, second = text.partition(",")
    if first not in SHAPES or second not in SHAPES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected two of {', '.join(sorted(SHAPES))}, such as 30m,135m")
    return first, second


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--pairs", nargs="+", type=_pair, default=[("30m", "30m"), ("135m", "30m"), ("135m", "135m")],
                        help="shapes of both models; default: 30m,30m 135m,30m 135m,135m")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a turn")
    parser.add_argument("--processor-time", action="store_true", help="for a machine that others use")
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"))
    options = parser.parse_args(arguments)
    before, began_s, found = machine(), time.monotonic(), []
    for models in options.pairs:
        with tempfile.TemporaryDirectory(prefix="tideway-beside-") as folder:
            checkpoints = make_checkpoints(Path(folder), models, "cpu", None)
            found += measure(
                checkpoints, models, MIXES, options.rounds, options.seconds, by_processor=options.processor_time
            )
        print(*table_of([row(one) for one in found[-len(MIXES) :]]), sep="\n", flush=True)
    gains = [one.gain for one in found]
    targets = [
        Target(name="gain, mean", value=statistics.fmean(gains), limit=PAYS, is_least=True),
        Target(name="gain, least", value=min(gains), limit=1.0, is_least=True),
    ]
    date, took_s = time.strftime("%Y-%m-%d"), time.monotonic() - began_s
    text = "\n".join([
        f"# Steps beside each other, {date}", "", f"{before}, {took_s:.0f} s", "", *table_of([row(one) for one in found]),
        "", *map(str, targets),
    ])  # fmt: skip
    print(text)
    result = {
        "date": date,
        "machine": {"before": before, "after": machine()},
        "measured": found,
        "targets": judged(targets),
    }
    stem = write(options.output, f"beside-{date}", result, text)
    print(f"written: {stem}.json, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
