"""Adaptive replacement in virtual time: the cores that the placement service hosts, on a fleet that serves meanwhile.

    deploy(fleet, problem, plan)
    replacement = FleetReplacement(fleet, problem, plan, search)
    fleet.run(jobs)
    replacement.searches, replacement.changes

Modelled are times: a search takes `search_s`, weights are fetched at `fetch_bytes_s` by each node (at once where that is
infinite: they are on its disk), a group that is made anew restarts in `Problem.times.restart_s` and loads its models,
one that stays loads what it lacks, each device its part at the node's rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from shared.messages.cluster import InstancePlan, PlacementPlan, PlanChange
from shared.messages.requests import RequestClass
from shared.placement.carry_out import CarryOutSettings, Held, View
from shared.placement.execution import execution_s
from shared.placement.lengths import drawn_like
from shared.placement.memory import planner_of
from shared.placement.places import places, pools, with_new_models
from shared.placement.plan import group_of, plan_of
from shared.placement.planner import DoesNotFit
from shared.placement.problem import ModelFacts, Plan, Prediction, Problem, Proposal, Traffic, traffic
from shared.placement.replacement import Replacement, ReplacementSettings, Verdict
from shared.placement.rollout import Cluster, assess, begin, change_of, go_on
from shared.placement.stretches import between
from shared.simulation import metrics
from shared.simulation.deployment import LIVE, Serving, instance_models
from shared.simulation.fleet import Device, Fleet, Model
from shared.simulation.nodes import FleetNodes

CHECK_S = 1.0
"""Between two looks at whether something is due."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """One that has ended."""

    at_s: float
    """Time at which it began."""
    why: str
    interval_s: float
    """Length of the interval that began with it."""
    deviation: float | None
    """Deviation in the interval that ended with it; None: nothing was compared."""
    measured: Prediction
    verdict: Verdict
    num_groups: int
    """Groups of the plan that it found."""


class FleetReplacement:
    """Replacement in a fleet that has a plan deployed, from now on."""

    def __init__(
        self,
        fleet: Fleet,
        problem: Problem,
        plan: Plan,
        search: Callable[[Problem], Proposal],
        *,
        settings: ReplacementSettings | None = None,
        carry_out: CarryOutSettings | None = None,
        serving: Serving = LIVE,
        search_s: float = 10.0,
        fetch_bytes_s: float = math.inf,
        predicted: Prediction | None = None,
        past: Traffic | None = None,
    ) -> None:
        """`problem`: nodes, models and SLOs; its traffic is not used. Where it has no execution times, each search reckons
        them from its own traffic. `predicted`: of the plan that is deployed. `past`: traffic that ended when the run began,
        for searches to go by."""
        self.core = Replacement(settings or ReplacementSettings(), fleet.events.now)
        self.core.settled(fleet.events.now, predicted)
        self.searches: list[Search] = []
        self.changes: list[PlanChange] = []
        """Changes that are over."""
        self.problems: list[str] = []
        """Why what a search found could not be had, of each such search."""
        self._fleet, self._problem, self._search, self._serving = fleet, problem, search, serving
        self._carry_out, self._search_s, self._fetch_bytes_s = carry_out or CarryOutSettings(), search_s, fetch_bytes_s
        self._past = past or traffic([], 0.0, [])
        self._models = {model.name: model for model in problem.models}
        self._nodes = {node.node_id: node for node in problem.nodes}
        self._alone_s = dict(problem.execution_s)
        self._plan = PlacementPlan(1, places(problem, plan), is_chosen=True)
        self._predicted: dict[bool, Prediction | None] = {}
        """Predictions for the target of the change (True) and for the plan before it (False)."""
        self._agents = FleetNodes(fleet, self._nodes, self._device, self._place_models, self._start_s)
        self._agents.bring_about(self._plan)
        self._fetched: set[tuple[str, str]] = set()
        self._is_searching = False
        self._arrivals = np.empty(0)
        """Arrivals of all requests that the gateway knows."""
        self._notice()
        fleet.events.after(CHECK_S, self._check)

    @property
    def interval_s(self) -> float:
        return self.core.interval_s

    @property
    def plan(self) -> Plan:
        """Plan that serves, or did before the change that is under way."""
        change = change_of(self._plan)
        return plan_of(map(group_of, self._plan.instances if change is None else change.before))

    def add_model(self, model: ModelFacts) -> None:
        """It is placed at once, on the smallest group that holds it; then a search is due."""
        self._models[model.name] = model
        self._problem = msgspec.structs.replace(self._problem, models=tuple(self._models.values()))
        self._notice()
        self._add_places()

    def _notice(self) -> None:
        self.core.notice(self._models, self._nodes)

    def _cluster(self) -> Cluster:
        return Cluster(self._plan, planner_of(self._problem, self._plan.instances))

    def _planned(self) -> list[InstancePlan]:
        return with_new_models(self._problem, self._plan.instances)

    def _add_places(self) -> None:
        # A change that is under way comes first.
        if change_of(self._plan) is None:
            self._bring_about(msgspec.structs.replace(self._plan, instances=self._planned()))

    # ------------------------------------------------------------------------------------------------ searching

    def _check(self) -> None:
        now, change = self._fleet.events.now, change_of(self._plan)
        self._agents.step()
        if change is not None:
            self._go_on()
        elif not self._is_searching and (why := self.core.look(now, lambda last_s: self.measured(now - last_s, now))):
            window, evidence = self._traffic(*self.core.window(now)), self._traffic(*self.core.evidence(now))
            measured, seen = self.measured(self.core.since_s, now), self._of_window(*self.core.window(now))
            self.core.begin(now, measured)
            if window.num_requests:
                self._is_searching = True
                self._fleet.events.after(self._search_s, self._end_search, now, why, window, evidence, measured, seen)
            else:
                self.core.kept(now, None)
        self._fleet.events.after(CHECK_S, self._check)

    def _end_search(
        self, at_s: float, why: str, window: Traffic, evidence: Traffic, measured: Prediction, seen: Prediction
    ) -> None:
        """`measured`: in the interval; `seen`: in the window."""
        self._is_searching = False
        problem = msgspec.structs.replace(
            self._problem, traffic=window, evidence=evidence, incumbent=self.plan,
            pools=pools(self._plan.instances),
        )  # fmt: skip
        if not self._problem.execution_s:
            self._alone_s |= execution_s(problem)
            problem = msgspec.structs.replace(problem, execution_s=dict(self._alone_s))
        proposal, now = self._search(problem), self._fleet.events.now
        try:
            verdict, target, _ = assess(self._cluster(), problem, proposal, self.core, seen)
        except DoesNotFit as error:
            self.problems.append(str(error))
            self.core.kept(now, None)
            return
        self.searches.append(
            Search(
                at_s=at_s, why=why, interval_s=self.core.interval_s, deviation=self.core.state.deviation,
                measured=measured, verdict=verdict, num_groups=len(proposal.plan.groups),
            )
        )  # fmt: skip
        if not verdict.is_worth:
            self.core.kept(now, proposal.incumbent, seen)
            return
        self._predicted = {True: proposal.prediction, False: proposal.incumbent}
        ready = {
            (name, one) for one, held in self._held().items() for name, state in held.models.items() if state == "ready"
        }
        self._plan = begin(self._cluster(), verdict.reason, target, now, ready)
        for node_id, sources in self._plan.fetch.items():
            num_bytes = 0
            for source in sources:
                num_bytes += max(model.weight_bytes for model in self._models.values() if model.weights == source)
                self._fleet.events.after(num_bytes / self._fetch_bytes_s, self._fetched.add, (node_id, source))

    def _go_on(self) -> None:
        now, view = self._fleet.events.now, View(self._held(), frozenset(self._fetched))
        self._bring_about(go_on(self._cluster(), self._planned, view, now, self._carry_out))
        change = self._plan.change
        if change is not None and change.is_over:
            self.changes.append(change)
            self.core.settled(now, self._predicted[change.stage == "carried_out"])
            if self._models.keys() - self.plan.models:
                self._add_places()

    # ------------------------------------------------------------------------------------------------- the fleet

    def _held(self) -> dict[str, Held]:
        held = {}
        for instance_id, instance in self._fleet.instances.items():
            is_starting = instance.state == "starting"
            states = {name: "loading" if is_starting else state for name, state in instance.model_states.items()}
            held[instance_id] = Held(self._agents.num_ranks[instance_id], states, instance.state == "draining")
        return held

    def _bring_about(self, plan: PlacementPlan) -> None:
        had, self._plan = self._plan, plan
        if plan.instances != had.instances:
            self._agents.bring_about(plan)

    def _start_s(self, place: InstancePlan) -> float:
        models = self._place_models(place)
        load_s = {spec.source: models[spec.name].load_s for spec in place.models}
        return self._problem.times.restart_s + sum(load_s.values())

    def _device(self, place: InstancePlan) -> Device:
        return self._serving.device(self._problem, place)

    def _place_models(self, place: InstancePlan) -> dict[str, Model]:
        return instance_models(self._problem, place)

    # ---------------------------------------------------------------------------------------------- what was seen

    def _window(self, since_s: float, until_s: float) -> list[int]:
        """Numbers of the requests that arrived then."""
        records = self._fleet.gateway.records
        if len(records) > len(self._arrivals):
            new = [record.arrival_s for record in records[len(self._arrivals) :]]
            self._arrivals = np.concatenate([self._arrivals, new])
        there = (self._arrivals >= since_s) & (self._arrivals < until_s)
        return [number for number in np.flatnonzero(there).tolist() if records[number].num_placements]

    def _traffic(self, since_s: float, until_s: float) -> Traffic:
        """Lengths of answers that have not ended are drawn from all of the model's, as the log's are (lengths.py)."""
        jobs, numbers = self._fleet.gateway.jobs, self._window(since_s, until_s)
        since_s = max(since_s, -self._past.interval_s)
        past = between(self._past, since_s + self._past.interval_s, self._past.interval_s)
        lengths = self._lengths(self._window(-math.inf, until_s))
        columns = (past.arrival_s, past.model, past.prompt_tokens, past.output_tokens, past.is_online)
        rows = [
            (at_s, past.models[model], prompt, output, is_online)
            for at_s, model, prompt, output, is_online in zip(*(one.tolist() for one in columns), strict=True)
        ]
        for number in numbers:
            job = jobs[number]
            rows.append(
                (
                    job.at_s - since_s,
                    job.model,
                    job.prompt_tokens,
                    lengths[number],
                    job.request_class is RequestClass.ONLINE,
                )
            )
        return traffic(rows, until_s - since_s, sorted(self._models))

    def _lengths(self, numbers: Sequence[int]) -> dict[int, int]:
        """Output tokens by number."""
        gateway, found = self._fleet.gateway, dict[int, int]()
        models: dict[str, list[int]] = {}
        for number in numbers:
            models.setdefault(gateway.jobs[number].model, []).append(number)
        rng = np.random.default_rng(0)
        for _, own in sorted(models.items()):
            tokens = np.array([gateway.records[number].num_tokens for number in own], np.int64)
            has_ended = np.array([gateway.records[number].ended_s >= 0 for number in own], np.bool_)
            if has_ended.any():
                tokens = np.maximum(tokens, tokens[drawn_like(tokens, has_ended, rng)])
            found |= zip(own, np.maximum(1, tokens).tolist(), strict=True)
        return found

    def measured(self, since_s: float, until_s: float) -> Prediction:
        """What was measured of the requests that were decided then, as the service monitor counts: each once, when it
        ended or its SLO had passed before. Of those that arrived in a time shorter than SLOs only the fast ones would be
        known."""
        records, limits = self._fleet.gateway.records, self._limits()
        numbers = []
        for number in self._window(since_s - max(limits.values(), default=0.0), until_s):
            record = records[number]
            decided_s = record.arrival_s + limits.get(self._fleet.gateway.jobs[number].model, math.inf)
            if since_s <= (min(record.ended_s, decided_s) if record.ended_s >= 0 else decided_s) < until_s:
                numbers.append(number)
        return self._measured(numbers, until_s - since_s)

    def _of_window(self, since_s: float, until_s: float) -> Prediction:
        """What was measured of the requests that arrived then, as a prediction is; without those whose kind is not
        decided yet as a whole."""
        gateway, now, limits = self._fleet.gateway, self._fleet.events.now, self._limits()
        return self._measured(
            [
                number
                for number in self._window(since_s, until_s)
                if now - gateway.records[number].arrival_s >= limits.get(gateway.jobs[number].model, math.inf)
            ],
            until_s - since_s,
        )

    def _limits(self) -> dict[str, float]:
        """Latencies by which SLOs are met, by model; infinite where no execution time is known."""
        return {name: self._problem.slo_scale_of(name) * self._alone_s.get(name, math.inf) for name in self._models}

    def _measured(self, numbers: Sequence[int], seconds: float) -> Prediction:
        gateway, now = self._fleet.gateway, self._fleet.events.now
        rows = []
        for number in numbers:
            job, record = gateway.jobs[number], gateway.records[number]
            rows.append((job, record, (record.ended_s if record.ended_s >= 0 else now) - record.arrival_s))
        names = tuple(sorted(self._models))
        index = {name: number for number, name in enumerate(names)}
        requests = metrics.Requests(
            models=names,
            model=np.array([index[job.model] for job, _, _ in rows], np.int32),
            is_online=np.array([job.request_class is RequestClass.ONLINE for job, _, _ in rows], np.bool_),
            arrival_s=np.array([record.arrival_s for _, record, _ in rows]),
            prompt_tokens=np.array([job.prompt_tokens for job, _, _ in rows], np.int32),
            output_tokens=np.array([job.output_tokens for job, _, _ in rows], np.int32),
            num_tokens=np.array([record.num_tokens for _, record, _ in rows], np.int32),
            ttft_s=np.array([record.ttft_s if record.first_s >= 0 else np.nan for _, record, _ in rows]),
            tpot_s=np.array([np.nan if record.tpot_s is None else record.tpot_s for _, record, _ in rows]),
            latency_s=np.array([age_s for _, _, age_s in rows]),
            is_done=np.array([record.ended_s >= 0 and not record.error for _, record, _ in rows], np.bool_),
        )
        return metrics.prediction(
            metrics.measure(requests, self._alone_s, self._problem.slo_scale_of, {}, max(seconds, 1e-9))
        )
