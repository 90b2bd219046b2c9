"""A day of five production models' request rates (ServeGen's table), with real lengths, on eight L4s: plans that are
searched for again and again, at fixed and at adaptive intervals, against the plan of the first hour.

The day has its whole length and all of its requests (some hundred thousand), which no step is simulated of: what comes of a
plan is what the estimator that the search goes by says (shared/placement/estimator.py), followed request by request, with
the groups that serve while a plan changes (shared/placement/rehearsal.py). The core of replacement is the live one. So the
day says how intervals and changes follow real traffic, not how good the estimate is: for that some stretches of the day are
simulated faithfully on the plans that served then, and both are shown side by side.

What is measured between two searches begins with the traffic of `LEAD_S` before it; what is told in the end is estimated
in one, from the first to the last request of the day. Shapes of rates are the table's; each model's mean is set so that all
have the same share of the devices' time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from bench.placement.experiments import Table
from bench.reporting import Target
from shared.placement.estimator import Estimator
from shared.placement.execution import alone_s, execution_s, step_tokens
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import L4
from shared.placement.places import places, pools
from shared.placement.plan import ModelPrediction, Prediction
from shared.placement.problem import Group, ModelFacts, Plan, Problem, Proposal, Traffic
from shared.placement.rehearsal import Episode, rehearse
from shared.placement.replacement import Replacement, ReplacementSettings
from shared.placement.search import search
from shared.placement.stretches import between
from shared.simulation import metrics
from shared.simulation.deployment import simulate
from tideway.bench.traces import read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACES = Path("../shared/traces")
MODELS = {
    "m-large": ("llama-2-13b", "azure_llm_2023_conv.csv"),
    "m-mid": ("llama-2-7b", "sharegpt_8k_lengths.csv"),
    "m-small": ("llama-3.1-8b", "azure_llm_2023_conv.csv"),
    "deepseek-r1": ("llama-2-13b", "sharegpt_8k_lengths.csv"),
    "mm-image": ("opt-6.7b", "arxiv_summarization_lengths.csv"),
}
"""Models of the table of rates: the shape that stands for it, and whose lengths its requests have."""
SEARCH_S = 10.0
"""Seconds that a search takes."""
DAY_S = 86400.0
WINDOW_S = 600.0
NUM_DEVICES = 8
LOAD = 4.0
"""Mean time of requests alone, times their devices, over the devices' time; they are served in batches."""
LEAD_S = 3600.0
"""Time over which requests gather where a plan is a little too slow."""
MOST_S = 3600.0
"""Most seconds of a stretch that is estimated at once."""
BIN_S = 2.5
INTERVALS_S = {"adaptive": 3600.0, "10 minutes": 600.0, "1 hour": 3600.0, "6 hours": 6 * 3600.0, "none": math.inf}
"""Adaptive: the first."""
CHECKED_S, NUM_CHECKED = 120.0, 4
"""Length and number of the stretches that are simulated faithfully, evenly over the day."""


class Course(NamedTuple):
    """How a day is played."""

    speed: float = 1.0
    """Times as fast as it was recorded: its windows, hours and intervals are shorter by that; requests, searches and changes
    take as long."""
    num_devices: int = NUM_DEVICES
    models: Mapping[str, tuple[str, str]] = MODELS
    shares: tuple[float, ...] = ()
    """Popularity of the models over the mean, in an order that is drawn anew at each turn; empty: alike throughout."""
    num_turns: int = 0

    @property
    def seconds(self) -> float:
        return DAY_S / self.speed


WHOLE = Course()
TURNS = Course(
    speed=6.0, num_devices=6, shares=(1.9, 0.8, 0.3), num_turns=3,
    models={
        "m-large": ("llama-3.1-8b", "azure_llm_2023_conv.csv"),
        "m-mid": ("llama-2-7b", "sharegpt_8k_lengths.csv"),
        "m-small": ("opt-6.7b", "azure_llm_2023_conv.csv"),
    },
)  # fmt: skip
"""A day on which the popularity of three models of one size turns three times, at times that a seed draws."""
TURNS_LOAD = 8.0
FIRST_TURN, LAST_TURN = 20, 136
"""Windows between which turns come."""


def settings(name: str, speed: float = 1.0) -> ReplacementSettings:
    initial_s = least_s = most_s = INTERVALS_S[name] / speed
    if name == "adaptive":
        least_s, most_s = INTERVALS_S["10 minutes"] / speed, INTERVALS_S["6 hours"] / speed
    return ReplacementSettings(initial_s=initial_s, least_s=least_s, most_s=most_s)


def read_rates(folder: Path) -> dict[str, np.ndarray]:
    """[windows] of each model, of the days that were recorded, in requests a second. A window without requests is one that
    was not recorded: it is as the one before."""
    found: dict[str, np.ndarray] = {}
    with (folder / "servegen_model_rates.csv").open() as file:
        rows = [
            (row["model"], int(float(row["window_start_s"]) / WINDOW_S), float(row["rate_rps"]))
            for row in csv.DictReader(file)
        ]
    for name in dict.fromkeys(model for model, _, _ in rows):
        own = {number: rate for model, number, rate in rows if model == name}
        values = np.zeros(int(DAY_S / WINDOW_S) * math.ceil((max(own) + 1) * WINDOW_S / DAY_S))
        values[list(own)] = list(own.values())
        known = np.flatnonzero(values)
        last = np.maximum.accumulate(np.where(values > 0, np.arange(len(values)), known[0]))
        found[name] = values[last]
    return found


def rates(folder: Path, number_of_day: int = 0) -> dict[str, np.ndarray]:
    """[windows of that day] of each model, over its mean; of the first one where only that was recorded."""
    per_day = int(DAY_S / WINDOW_S)
    days = {name: values.reshape(-1, per_day) for name, values in read_rates(folder).items()}
    chosen = {name: of_model[number_of_day if number_of_day < len(of_model) else 0] for name, of_model in days.items()}
    return {name: values / values.mean() for name, values in chosen.items()}


def popularity(course: Course, seed: int) -> np.ndarray:
    """[models, windows]: the factor of each model's rate."""
    num_windows = int(DAY_S / WINDOW_S)
    found = np.ones((len(course.models), num_windows))
    if course.shares:
        rng = np.random.default_rng([seed, 77])
        turns = rng.choice(np.arange(FIRST_TURN, LAST_TURN), course.num_turns, replace=False)
        for begin, end in pairwise([0, *sorted(turns.tolist()), num_windows]):
            found[:, begin:end] = rng.permutation(course.shares)[:, None]
    return found


def draw_day(
    folder: Path, seed: int, load: float, number_of_day: int = 0, course: Course = WHOLE
) -> tuple[Traffic, list[ModelFacts]]:
    shapes, factors = rates(folder, number_of_day), popularity(course, seed)
    window_s = WINDOW_S / course.speed
    columns, models = [], []
    for index, (name, (shape, lengths)) in enumerate(course.models.items()):
        rng = np.random.default_rng([seed, index])
        facts = model_facts(shape, SHAPES[shape], [L4])
        facts = msgspec.structs.replace(facts, name=name, weights=name)
        models.append(facts)
        trace = read_trace(folder / lengths)
        short = (trace.prompt_tokens + trace.output_tokens <= facts.max_model_len) & (trace.output_tokens > 0)
        prompts, outputs = trace.prompt_tokens[short], trace.output_tokens[short]
        num_ranks = 1 if facts.weight_bytes < 20e9 else 2
        cost = facts.costs[L4.kind, num_ranks]
        mean_s = float(alone_s(cost, prompts, outputs, step_tokens(L4.kind)).mean()) * num_ranks
        rate = load * course.num_devices / len(course.models) / mean_s
        num = rng.poisson(rate * shapes[name] * factors[index] * window_s)
        at_s = (np.repeat(np.arange(len(num)), num) + rng.uniform(0, 1, num.sum())) * window_s
        chosen = rng.integers(0, len(prompts), num.sum())
        columns.append(np.stack([np.full(num.sum(), index), at_s, prompts[chosen], outputs[chosen]]))
    model, at_s, prompt, output = np.concatenate(columns, axis=1)
    order = np.argsort(at_s, kind="stable")
    return Traffic(
        tuple(course.models), model[order].astype(np.int32), at_s[order], prompt[order].astype(np.int32),
        output[order].astype(np.int32), np.ones(len(order), np.bool_), course.seconds,
    ), models  # fmt: skip


class _Stretch(NamedTuple):
    """A stretch of requests that were followed, parallel over n."""

    at_s: np.ndarray
    """Seconds of the day."""
    model: np.ndarray
    weight: np.ndarray
    is_late: np.ndarray
    normalised: np.ndarray


class Way(NamedTuple):
    """To another plan."""

    begin_s: float
    seconds: float
    episodes: list[Episode]
    """From `begin_s` on."""
    plan: Plan


def timeline(first: Plan, ways: Sequence[Way], *, is_free: bool = False) -> list[Episode]:
    """Who serves when, of a whole day. `is_free`: as if another plan served at once when the way to it begins."""
    over: list[Episode] = []
    now = dict.fromkeys(first.groups, 0.0)
    for way in ways:
        coming = [Episode(group) for group in way.plan.groups] if is_free else way.episodes
        kept = {one.group for one in coming if not one.start_s and (not is_free or one.group in now)}
        over += [Episode(group, since_s, way.begin_s) for group, since_s in now.items() if group not in kept]
        later: dict[Group, float] = {}
        for one in coming:
            since_s = now[one.group] if one.group in kept and one.group in now and not one.start_s else way.begin_s
            since_s += one.start_s
            if math.isfinite(one.end_s):
                over.append(Episode(one.group, since_s, way.begin_s + one.end_s))
            else:
                later[one.group] = since_s
        now = later
    return over + [Episode(group, since_s) for group, since_s in now.items()]


class Day:
    """The day of one system."""

    def __init__(
        self, problem: Problem, plan: Plan, predicted: Prediction, settings: ReplacementSettings, speed: float = 1.0
    ) -> None:
        """`problem.traffic`: of the day. `plan`: that serves first, of which that is predicted. `speed`: of the course."""
        self._speed, self._seconds = speed, problem.traffic.interval_s
        self.core = Replacement(settings, 0.0)
        self.core.settled(0.0, predicted)
        self.num_searches, self.num_changes = 0, 0
        self.causes: dict[str, int] = {}
        self.changing_s, self.lost_device_s = 0.0, 0.0
        """Sums over all changes."""
        self.plans = [(0.0, plan)]
        """From when on each served."""
        self._problem, self._plan = problem, plan
        self._first, self._places = plan, places(problem, plan)
        self._stretches: list[_Stretch] = []
        self._ways: list[Way] = []

    def play(self) -> tuple[_Stretch, _Stretch]:
        """The whole day, as it was, and as if changes took no time."""
        now_s, first = 0.0, 0
        while now_s < self._seconds:
            end_s = min(self._seconds, self.core.next_s, self.core.look_s, now_s + MOST_S / self._speed)
            self._stretches.append(self._estimated(now_s, end_s))
            now_s = end_s
            if now_s >= self.core.look_s:
                # What was estimated since the last look, or the last search.
                self.core.watch(now_s, self._measured(self._stretches[-1]))
            if now_s < self._seconds and self.core.due(now_s):
                now_s = self._search(now_s, _joined(self._stretches[first:]))
                first = len(self._stretches)
        return self._whole()

    def _whole(self) -> tuple[_Stretch, _Stretch]:
        """In one, so that no request is forgotten that waits, wherever searches were."""
        estimator = Estimator(
            self._problem, num_bins=int(self._seconds / BIN_S), max_followed=self._problem.traffic.num_requests
        )
        served = estimator.served([timeline(self._first, self._ways, is_free=is_free) for is_free in (False, True)])
        was, free = (
            _Stretch(served.at_s, served.model, served.weight, served.is_late[number], served.normalised[number])
            for number in (0, 1)
        )
        return was, free

    def _search(self, now_s: float, seen: _Stretch) -> float:
        """The time at which the next interval begins: as in the service, when the search and the change that comes of it are
        over."""
        measured = self._measured(seen)
        self.core.begin(now_s, measured)
        window = between(self._problem.traffic, *self._known(*self.core.window(now_s)))
        evidence = between(self._problem.traffic, *self._known(*self.core.evidence(now_s)))
        problem = msgspec.structs.replace(
            self._problem, traffic=window, evidence=evidence, incumbent=self._plan,
            pools=pools(self._places),
        )  # fmt: skip
        proposal = search(problem)
        verdict = self.core.judge(proposal, problem, None)
        self.num_searches += 1
        self.causes[verdict.cause] = self.causes.get(verdict.cause, 0) + 1
        now_s += SEARCH_S
        if not verdict.is_worth:
            self.core.kept(now_s, proposal.incumbent, measured)
            return now_s
        rehearsal = rehearse(problem, self._plan, proposal.plan)
        self._ways.append(Way(now_s, rehearsal.seconds, rehearsal.episodes, proposal.plan))
        now_s += rehearsal.seconds
        self.num_changes += 1
        self.changing_s += rehearsal.seconds
        self.lost_device_s += rehearsal.lost_device_s
        self._plan, self._places = proposal.plan, places(problem, proposal.plan, self._places)
        self.plans.append((now_s, proposal.plan))
        self.core.settled(now_s, proposal.prediction)
        return now_s

    def _known(self, since_s: float, until_s: float) -> tuple[float, float]:
        return max(0.0, since_s), until_s

    def _estimated(self, now_s: float, until_s: float) -> _Stretch:
        """What would be measured."""
        since_s = max(0.0, now_s - LEAD_S / self._speed)
        problem = msgspec.structs.replace(self._problem, traffic=between(self._problem.traffic, since_s, until_s))
        course = [
            Episode(one.group, one.start_s - since_s if one.start_s > since_s else -math.inf, one.end_s - since_s)
            for one in timeline(self._first, self._ways)
            if one.end_s > since_s
        ]
        estimator = Estimator(problem, num_bins=max(96, int((until_s - since_s) / BIN_S)), max_followed=20_000)
        served = estimator.served([course])
        mine = served.at_s >= now_s - since_s
        return _Stretch(
            served.at_s[mine] + since_s, served.model[mine], served.weight[mine], served.is_late[0, mine],
            served.normalised[0, mine],
        )  # fmt: skip

    def _measured(self, seen: _Stretch) -> Prediction:
        models = {}
        for index, model in enumerate(self._problem.models):
            mine = seen.model == index
            if weight := float(seen.weight[mine].sum()):
                normalised = float(seen.normalised[mine] @ seen.weight[mine]) / weight
                models[model.name] = ModelPrediction(
                    num_requests=round(weight),
                    attainment=1.0 - float(seen.is_late[mine] @ seen.weight[mine]) / weight,
                    normalised_latency=normalised, mean_latency_s=0.0, p99_latency_s=0.0,
                )  # fmt: skip
        weight = float(seen.weight.sum())
        return Prediction(
            attainment=1.0 - float(seen.is_late @ seen.weight) / weight,
            normalised_latency=float(seen.normalised @ seen.weight) / weight, models=models,
        )  # fmt: skip


def _joined(stretches: list[_Stretch]) -> _Stretch:
    return _Stretch(*(np.concatenate(columns) for columns in zip(*stretches, strict=True)))


def _percentile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, share * passed[-1])])


class Played(NamedTuple):
    """What came of a day."""

    row: dict[str, object]
    attainment: float
    latency: float
    plans: list[tuple[float, Plan]]
    hourly: list[float]
    """Attainment."""


class Asked(NamedTuple):
    seed: int = 1
    load: float = LOAD
    number_of_day: int = 0
    """Number of the day in the table of rates."""
    folder: Path = TRACES
    course: Course = WHOLE


class Hours(NamedTuple):
    attainment: list[float]
    """Attainment of each hour."""
    changes: list[float]
    """Hours at which another plan began to serve."""


def begun(asked: Asked) -> tuple[Problem, Proposal]:
    """The day, and the plan for its first hour, with which all begin."""
    course = asked.course
    arrivals, models = draw_day(asked.folder, asked.seed, asked.load, asked.number_of_day, course)
    whole = Problem(nodes=(node_facts("node", L4, course.num_devices),), models=tuple(models), traffic=arrivals)
    problem = msgspec.structs.replace(whole, execution_s=execution_s(whole))
    return problem, search(msgspec.structs.replace(problem, traffic=between(arrivals, 0.0, 3600.0 / course.speed)))


def name_of(course: Course) -> str:
    return "turns" if course.num_turns else "day"


def play(name: str, asked: Asked, kept: Path | None = None) -> Played:
    """`name`: of the intervals. `kept`: folder in which the row is kept, and taken from where it is there already."""
    what = f"{name_of(asked.course)}{asked.number_of_day}-seed{asked.seed}-{asked.load:g}-{name}"
    path = None if kept is None else kept / f"{what}.json"
    if path is not None and path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Played)
    found = _played(name, asked)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(found))
    return found


def _played(name: str, asked: Asked) -> Played:
    problem, first = begun(asked)
    speed = asked.course.speed
    one = Day(problem, first.plan, first.prediction, settings(name, speed), speed)
    found, free = one.play()
    total = float(found.weight.sum())
    attainment = 1.0 - float(found.is_late @ found.weight) / total
    latency = float(found.normalised @ found.weight) / total
    interval_s = one.core.interval_s
    row: dict[str, object] = {
        "interval": name, "requests": problem.traffic.num_requests, "attainment": f"{attainment:.4f}",
        "normalised latency": round(latency, 3), "P99": round(_percentile(found.normalised, found.weight, 0.99), 2),
        "searches": one.num_searches, "changes": one.num_changes, "minutes of changes": round(one.changing_s / 60, 1),
        "device minutes that served nobody": round(one.lost_device_s / 60, 1),
        "attainment that changes cost": f"{float(found.is_late @ found.weight - free.is_late @ free.weight) / total:.4f}",
        "verdicts": ", ".join(f"{cause} {num}" for cause, num in sorted(one.causes.items())) or "-",
        "last interval, minutes": round(interval_s / 60) if math.isfinite(interval_s) else "-",
    }  # fmt: skip
    hour = (found.at_s * speed / 3600.0).astype(np.int64)
    late = np.bincount(hour, found.is_late * found.weight) / np.bincount(hour, found.weight)
    return Played(row, attainment, latency, one.plans, (1.0 - late).tolist())


def day(
    asked: Asked,
    num_processes: int = 2,
    names: Sequence[str] = tuple(INTERVALS_S),
    kept: Path | None = None,
) -> Table:
    """`names`: of intervals, with adaptive and none among them."""
    played: dict[str, Played] = {}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        # The one with most searches first.
        order = sorted(names, key=INTERVALS_S.__getitem__)
        waiting = {pool.submit(play, name, asked, kept): name for name in order}
        for one in as_completed(waiting):
            played[waiting[one]] = one.result()
            print(played[waiting[one]].row, flush=True)
    problem, _ = begun(asked)
    course = asked.course
    fixed = [found.attainment for name, found in played.items() if name not in ("adaptive", "none")]
    adaptive, none = played["adaptive"], played["none"]
    targets = [
        Target(name="attainment, adaptive over none", value=adaptive.attainment / none.attainment, limit=1.0, is_least=True),
        Target(name="attainment, adaptive over the best fixed interval", value=adaptive.attainment / max(fixed), limit=1.0,
               is_least=True),
        Target(name="normalised latency, adaptive over none", value=adaptive.latency / none.latency, limit=1.0),
    ]  # fmt: skip
    notes = (
        f"{course.num_devices} L4s, load {asked.load:g}, the whole of day {asked.number_of_day}, {course.speed:g} times as "
        f"fast as recorded, {course.num_turns} turns of popularity, by the estimator; a restart takes "
        f"{problem.times.restart_s:g} s beside loading, a drain {problem.times.drain_s:g} s, a search {SEARCH_S:g} s. "
        + _checked(problem, {"adaptive": adaptive.plans, "none": none.plans}, asked.seed)
    )
    shown = [name for name in INTERVALS_S if name in played]
    # Where all begin is no change.
    hours = {
        name: Hours(played[name].hourly, [since_s * course.speed / 3600.0 for since_s, _ in played[name].plans[1:]])
        for name in shown
    }
    which = f"-{asked.number_of_day}-seed{asked.seed}" if asked.number_of_day or asked.seed != 1 else ""
    return Table(
        name=f"{name_of(course)}{which}", rows=[played[name].row for name in shown], targets=targets, notes=notes,
        series=hours, draw=partial(draw, hours),
    )  # fmt: skip


def draw(hours: Mapping[str, Hours]) -> Figure:
    """Raises `PlotsUnavailable`."""
    from tideway.bench.plots import new_figure

    figure, (axis,) = new_figure(1, "A day of several models; triangles: another placement serves")
    for name, one in hours.items():
        (line,) = axis.step(range(len(one.attainment)), one.attainment, where="post", label=name)
        axis.plot(one.changes, [min(one.attainment)] * len(one.changes), "^", color=line.get_color())
    axis.set(xlabel="hour", ylabel="attainment")
    axis.legend(fontsize="x-small")
    return figure


def _checked(problem: Problem, days: dict[str, list[tuple[float, Plan]]], seed: int) -> str:
    """Stretches of the day on the plans that served then, faithfully and by the estimate."""
    told = []
    for number in range(NUM_CHECKED):
        at_s = (number + 0.5) * problem.traffic.interval_s / NUM_CHECKED
        stretch = msgspec.structs.replace(problem, traffic=between(problem.traffic, at_s, at_s + CHECKED_S))
        for name, plans in days.items():
            plan = [plan for since_s, plan in plans if since_s <= at_s][-1]
            faithful = metrics.prediction(simulate(stretch, plan, seed=seed).metrics)
            estimated = Estimator(stretch).predict(plan)
            told.append(
                f"{at_s / 3600:.1f} h {name} {faithful.attainment:.3f}, {faithful.normalised_latency:.2f} "
                f"(estimated {estimated.attainment:.3f}, {estimated.normalised_latency:.2f})"
            )
    head = f"Attainment and normalised latency of stretches of {CHECKED_S:g} s simulated faithfully: "
    return head + "; ".join(told)
