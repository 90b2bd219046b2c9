"""Adaptive replacement, live (SeaLLM, section 4.3): hosts the cores of `shared.placement`, which decide.

    PlacementMonitor -> Replacement -> a search elsewhere -> proposal -> planning.chosen -> PlanChange
    INSTANCES, NODES -> View -> advance -> PLANS "current", a step at a time

What is stored is what counts: the stage of a change is in the plan, the interval and the last proposal in REPLACEMENT.
Whoever leads next goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from services.placement.fleet import Fleet, serving
from services.placement.inputs import Inputs
from services.placement.live_problem import ProblemError, live_problem
from services.placement.metrics import PlacementMetrics
from services.placement.monitor import PlacementMonitor
from services.placement.plan_store import PlanStore
from services.placement.planning import chosen, fits
from services.placement.requests import check_plan, refuse
from shared.bus.interface import Bus, BusError, KeyValue, ServiceError, UnreadableEntry
from shared.messages.admin import ChangePlan, PlanProposal, ReplacementState
from shared.messages.catalogue import COST_MODELS, INSTANCES, REPLACEMENT
from shared.messages.cluster import (
    InstanceInfo,
    InstancePlan,
    NodeInfo,
    PlacementPlan,
    PlanChange,
    StoredCostModel,
    instance_devices,
)
from shared.messages.requests import ErrorCode
from shared.monitor.request_log import MAX_AGE_S, SLOT_S
from shared.placement import carry_out
from shared.placement.carry_out import CarryOutSettings, Held, View, advance
from shared.placement.demand import kv_bytes
from shared.placement.plan import Group, Plan, Prediction, group_of, plan_of, told_left_behind
from shared.placement.planner import DoesNotFit
from shared.placement.problem import Problem, Proposal
from shared.placement.replacement import IntervalState, Replacement, ReplacementSettings, Verdict, judge, losers
from shared.placement.stretches import evidence_s
from shared.runtime.settings import PlacementSettings, SettingsError
from shared.runtime.tasks import TaskSet
from shared.runtime.telemetry import context_of, current_traceparent

logger = logging.getLogger(__name__)

MODES = ("off", "advise", "auto")
STATE_KEY = "current"
SHOWN_REJECTED = 8
STORED_SHARE, LARGEST_CHANGE = 0.9, 0.75
"""Shares of the largest message of NATS: what is stored of a search at most, and a plan with a change that begins."""
SHOW_INTERVAL_S = 10.0
"""Between two looks at what was measured, for metrics."""

Search = Callable[[Problem], Awaitable[Proposal]]


def replacement_settings(settings: PlacementSettings) -> ReplacementSettings:
    """Raises `SettingsError`."""
    if settings.replacement not in MODES:
        raise SettingsError(f"TIDEWAY_REPLACEMENT={settings.replacement!r}: expected {', '.join(MODES)}")
    if settings.replacement_least_s > settings.replacement_most_s:
        raise SettingsError(
            f"TIDEWAY_REPLACEMENT_LEAST_S={settings.replacement_least_s:g} is more than TIDEWAY_REPLACEMENT_MOST_S"
        )
    return ReplacementSettings(
        initial_s=settings.replacement_interval_s,
        least_s=settings.replacement_least_s,
        most_s=settings.replacement_most_s,
        beta=settings.replacement_beta,
    )


class Replacing:
    """Replacement in the placement that leads."""

    def __init__(
        self,
        bus: Bus,
        settings: PlacementSettings,
        metrics: PlacementMetrics,
        tracer: Tracer,
        plans: PlanStore,
        monitor: PlacementMonitor,
        inputs: Callable[[], Inputs],
        registered: Callable[[], Mapping[str, NodeInfo]],
        alone: asyncio.Lock,
        search: Search,
        carry_out_settings: CarryOutSettings | None = None,
    ) -> None:
        """`registered`: the nodes as they say they are now. `alone`: held by whoever changes the plan; `tick` is called
        with it."""
        self._bus, self._settings, self._metrics, self._tracer = bus, settings, metrics, tracer
        self._plans, self._monitor, self._alone = plans, monitor, alone
        self._inputs, self._registered = inputs, registered
        self._run_search, self._carry_out = search, carry_out_settings or CarryOutSettings()
        self._core = Replacement(replacement_settings(settings), monitor.now())
        self._proposal: PlanProposal | None = None
        self._searching = ""
        self._problem = ""
        self._stored: ReplacementState | None = None
        self._shown_s = 0.0
        """When metrics were."""
        self._seen: tuple[frozenset[str], frozenset[str]] | None = None
        """Models and nodes at the last tick."""
        self._span: Span = trace.INVALID_SPAN
        self._stage_span: Span = trace.INVALID_SPAN
        self._stage = ""
        self._tasks = TaskSet()
        self._search_task: asyncio.Task[None] | None = None
        """The last one."""
        self._bucket: KeyValue[ReplacementState]
        self._registry: KeyValue[InstanceInfo]
        self._costs: KeyValue[StoredCostModel]

    async def open(self) -> None:
        """Takes over what is stored. Raises `BusError`."""
        self._bucket = await self._bus.key_value(REPLACEMENT)
        self._registry = await self._bus.key_value(INSTANCES)
        self._costs = await self._bus.key_value(COST_MODELS)
        try:
            entry = await self._bucket.get(STATE_KEY)
        except UnreadableEntry as error:
            logger.error("%s; the interval of replacement begins anew", error)
            return
        if entry is not None:
            self._stored, self._proposal = entry.value, entry.value.proposal
            state = IntervalState(
                interval_s=entry.value.interval_s, since_s=entry.value.since_s, predicted=entry.value.predicted,
                deviation=entry.value.deviation, change_s=entry.value.change_s,
            )  # fmt: skip
            self._core = Replacement(self._core.settings, self._monitor.now(), state)

    async def close(self) -> None:
        await self._tasks.end_all()
        for span in (self._stage_span, self._span):
            span.end()

    @property
    def change(self) -> PlanChange | None:
        """The change that is under way."""
        change = self._plans.current.change
        return None if change is None or change.is_over else change

    @property
    def may_give_way(self) -> bool:
        """A change is under way that has changed nothing yet."""
        return (change := self.change) is not None and change.stage == "fetch"

    def state(self) -> ReplacementState:
        return msgspec.structs.replace(self._to_store(), searching=self._searching, measured=self._measured())

    def _to_store(self) -> ReplacementState:
        """What another leader needs; not what changes by itself."""
        return ReplacementState(
            mode=self._settings.replacement, interval_s=self._core.interval_s, since_s=self._core.since_s,
            problem=self._problem, predicted=self._core.state.predicted, deviation=self._core.state.deviation,
            proposal=self._proposal, change_s=self._core.state.change_s,
        )  # fmt: skip

    async def tick(self) -> bool:
        """Whether a change is under way, so that no other plan is to be made. Call it each second, and when nodes change.
        Raises `BusError`."""
        inputs = self._inputs()
        is_on = self._settings.replacement != "off"
        if is_on:
            self._notice(inputs)
        if (change := self.change) is not None:
            await self._go_on(change, inputs)
        elif not await self._return_home(inputs) and is_on and not self._searching:
            now = self._monitor.now()
            if now >= self._core.look_s:
                self._core.watch(now, self._measured_in(max(SLOT_S, self._core.settings.least_s)))
            if why := self._core.due(now):
                self._begin_search(why, is_applied=False)
        await self._store()
        self._metrics.interval.set(self._core.interval_s)
        self._metrics.show_stage(self.change)
        if is_on and self._monitor.now() >= self._shown_s + SHOW_INTERVAL_S:
            self._shown_s = self._monitor.now()
            self._metrics.show_interval(self._core.state.predicted, self._measured())
        return self.change is not None

    async def on_change_plan(self, query: ChangePlan) -> ReplacementState:
        """Call it with the lock that `tick` is called with."""
        await self._plans.refresh()
        try:
            await self._do(query)
        except (ProblemError, DoesNotFit) as error:
            raise refuse(str(error), "action", ErrorCode.CONFLICT) from None
        return self.state()

    async def _do(self, query: ChangePlan) -> None:
        now, plan = self._monitor.now(), self._plans.current
        change = self.change
        if query.action == "roll_back":
            if change is not None:
                await self._publish(carry_out.abandon(change, "operator", "the operator asked for it", now))
            elif plan.change is None or plan.change.stage != "carried_out":
                raise refuse("no replacement was carried out that could be rolled back", "action", ErrorCode.CONFLICT)
            else:
                reason, target = (
                    f"the operator rolls replacement {plan.change.number} back",
                    self._as_before(plan.change.before),
                )
                # It had room, but models and adapters may have been added since.
                if (place := await self._without_room(target, self._inputs())) is not None:
                    names = ", ".join(spec.name for spec in place.models)
                    raise ProblemError(f"{place.instance_id} has no room for {names} at once, as far as is known now")
                await self._begin_change(reason, target, is_chosen=plan.change.was_chosen)
            return
        if change is not None:
            message = f"replacement {change.number} is under way (stage {change.stage}); roll it back, or wait"
            raise refuse(message, "action", ErrorCode.CONFLICT)
        if query.action == "set":
            await self._set(query.groups)
            return
        found = self._proposal if query.action == "apply" else None
        if found is not None and found.version != plan.version:
            found = None
        if found is not None and found.is_change:
            await self._apply(found)
        elif not self._searching:
            if found is not None and now - found.found_s <= self._core.interval_s:
                return  # the plan that runs was the best a moment ago
            self._begin_search("an operator asked for it", is_applied=query.action == "apply")
        else:
            raise refuse(f"a search is under way ({self._searching})", "action", ErrorCode.CONFLICT)

    async def stays_right(self, inputs: Inputs) -> bool:
        """Whether weights are fetched for a change to which these inputs make no difference: it begins with the plan that
        follows from them, and what it goes to has room."""
        change, plan = self.change, self._plans.current
        if change is None or change.stage != "fetch" or inputs.fleet != Fleet.of(plan):
            return False
        if _by_id((await inputs.plan()).instances) != _by_id(plan.instances):
            return False
        return not _is_certain(change, inputs) or await self._without_room(change.target, inputs) is None

    async def supersede(self, why: str) -> bool:
        """Another plan is to be made. A change that has changed nothing yet is over; else False: it comes first."""
        change = self.change
        if change is not None and self.may_give_way:
            await self._publish(carry_out.abandon(change, "superseded", why, self._monitor.now()))
        return self.change is None

    # ------------------------------------------------------------------------------------------------- searching

    def _notice(self, inputs: Inputs) -> None:
        models = frozenset(model.spec.name for model in inputs.models if not model.spec.on_demand)
        nodes = frozenset(node.node_id for node in inputs.nodes) | inputs.held_nodes
        if self._seen is not None:
            for names, what in (
                (models - self._seen[0], "model {} was added"),
                (self._seen[1] - nodes, "node {} is gone"),
                (nodes - self._seen[1], "node {} came"),
            ):
                if names:
                    self._core.ask(what.format(", ".join(sorted(names))))
        self._seen = (models, nodes)

    def _measured(self) -> Prediction:
        """In this interval so far."""
        return self._measured_in(self._monitor.now() - self._core.since_s)

    def _measured_in(self, last_s: float) -> Prediction:
        """In the last time of that length, as far as the log knows it."""
        return self._monitor.prediction(min(MAX_AGE_S, last_s))

    def _begin_search(self, why: str, *, is_applied: bool) -> None:
        self._searching, self._problem = why, ""
        self._search_task = self._tasks.start(self._search(why, is_applied))

    async def _search(self, why: str, is_applied: bool) -> None:
        began_s, outcome, cause, predicted = self._monitor.now(), "failed", "", None
        logger.info("searching for a placement: %s", why)
        try:
            with self._tracer.start_as_current_span("placement.search", attributes={"tideway.reason": why}):
                proposal, verdict = await self._found(why)
            self._proposal, predicted = proposal, proposal.incumbent
            outcome, cause = "better" if verdict.is_worth else "kept", verdict.cause
            logger.info("a search over %d requests took %.1f s: %s", proposal.num_requests, proposal.search_s,
                        verdict.reason)  # fmt: skip
            served = proposal.prediction if verdict.is_worth else proposal.incumbent
            if served is not None and (behind := told_left_behind(served)):
                logger.warning("left behind by the placement: %s", behind)
            if is_applied or (verdict.is_worth and self._settings.replacement == "auto"):
                async with self._alone:
                    await self._apply(proposal)
        except (ProblemError, DoesNotFit, BusError) as error:
            self._problem = str(error)
            if isinstance(error, ProblemError):
                cause = error.cause or cause
            logger.info("no placement was found: %s", error)
        except asyncio.CancelledError:
            outcome = "superseded"
            raise
        except Exception as error:
            self._problem = f"the search failed: {error!r}"
            logger.exception("the search failed")
        finally:
            self._searching = ""
            if self.change is None:
                self._core.settled(self._monitor.now(), predicted)
            self._metrics.searches.labels(outcome).inc()
            if cause:
                self._metrics.verdicts.labels(cause).inc()
            self._metrics.search_seconds.observe(self._monitor.now() - began_s)

    async def _found(self, why: str) -> tuple[PlanProposal, Verdict]:
        inputs, plan, settings = self._inputs(), self._plans.current, self._settings
        window_s = self._monitor.window_s(min(MAX_AGE_S, self._core.window_s))
        self._core.begin(self._monitor.now(), self._measured())
        traffic, execution_s = self._monitor.traffic(window_s), self._monitor.execution_s()
        evidence = self._monitor.traffic(min(MAX_AGE_S, evidence_s(window_s)))
        seen = self._monitor.prediction(max(SLOT_S, window_s))
        stored = [entry.value for entry in (await self._costs.entries()).values()]
        problem = await asyncio.to_thread(
            live_problem, inputs.models, inputs.nodes, plan.instances, inputs.fleet.draining, stored, traffic,
            execution_s, gpu=settings.hardware, slo_scale=settings.slo_scale,
            max_models_per_group=settings.max_models_per_group, max_ranks=settings.max_ranks, evidence=evidence,
        )  # fmt: skip
        began_s = self._monitor.now()
        found = await self._run_search(problem)
        verdict = await asyncio.to_thread(judge, found, problem, self._core.interval_s, self._core.settings, seen)
        self._core.tried(found)
        held_bytes = await asyncio.to_thread(kv_bytes, problem, found.plan, verdict.starved)
        target = await asyncio.to_thread(
            chosen, inputs.models, inputs.nodes, plan, found.plan.groups, kv_bytes=held_bytes
        )
        if verdict.cause == "larger_pools" and (reason := why_no_larger_pools(plan, target)):
            verdict = Verdict(is_worth=False, cause="same_plan", reason=reason)
        assert problem.incumbent is not None
        proposal = PlanProposal(
            found_s=self._monitor.now(), why=why, version=plan.version, is_worth=verdict.is_worth, verdict=verdict.reason,
            cause=verdict.cause, trial=found.trial, plan=found.plan, prediction=found.prediction, before=problem.incumbent,
            incumbent=found.incumbent, measured=seen, rejected=list(found.rejected[:SHOWN_REJECTED]),
            unplaced=found.unplaced, search_s=self._monitor.now() - began_s, interval_s=window_s,
            num_requests=traffic.num_requests, target=target, kv_bytes=held_bytes, floor_cost=found.floor_cost,
        )  # fmt: skip
        return proposal, verdict

    # ---------------------------------------------------------------------------------------------- carrying out

    async def _apply(self, proposal: PlanProposal) -> None:
        """Raises `ProblemError`, or `DoesNotFit`, where the plan is another than it was made for, or leaves models out."""
        plan, inputs = self._plans.current, self._inputs()
        is_same = plan.version == proposal.version
        if is_same and not proposal.is_change:
            return
        if fewer := losers(proposal.before, proposal.plan, {model.spec.name for model in inputs.resident}):
            raise ProblemError(f"{', '.join(fewer)} would be on no group", "places_fewer")
        # What is drained shows in the version alone, what an adapter takes in the choice alone.
        if not is_same or proposal.target != await asyncio.to_thread(
            chosen, inputs.models, inputs.nodes, plan, proposal.plan.groups, kv_bytes=proposal.kv_bytes
        ):
            changed = "models, nodes or drained instances changed while a better plan was searched for"
            self._core.ask(changed)
            raise ProblemError(changed, "plan_changed")
        reason = f"{proposal.why}: {proposal.verdict}"
        await self._begin_change(reason, proposal.target, is_chosen=True)

    async def _set(self, groups: Sequence[Group]) -> None:
        """Carries out a plan that an operator wrote; one that runs already is one that was chosen from then on. Groups that
        stay as they are keep their KV pools, and no search that began before changes them. Raises `ServiceError`."""
        plan, inputs = self._plans.current, self._inputs()
        try:
            target = await self._target(check_plan(groups, inputs), inputs)
        except DoesNotFit as error:
            raise refuse(str(error), "groups", ErrorCode.CONFLICT) from None
        if plan.is_chosen and not plan.home and _by_id(target) == _by_id(plan.instances):
            return
        if self._search_task is not None:
            self._search_task.cancel()
        await self._begin_change("an operator set the plan", target, is_chosen=True)

    async def _target(self, wanted: Plan, inputs: Inputs) -> list[InstancePlan]:
        """Its instances; groups that stay as they are keep their KV pools. Raises `DoesNotFit`."""
        plan = self._plans.current
        there = set(map(group_of, plan.instances))
        kept = {group.instance_id: 0 for group in wanted.groups if group in there}
        return await asyncio.to_thread(chosen, inputs.models, inputs.nodes, plan, wanted.groups, kv_bytes=kept)

    async def _return_home(self, inputs: Inputs) -> bool:
        """Begins the change to a chosen plan of which instances had been drained, as soon as any is not any more. Models
        that went elsewhere meanwhile leave again when theirs serve; those that were added since stay where they are."""
        plan = self._plans.current
        if not plan.home or inputs.held_nodes:
            return False
        there, nodes = {place.instance_id for place in plan.instances}, {node.node_id for node in inputs.nodes}
        home = [place for place in plan.home if place.instance_id not in inputs.fleet.draining]
        back = [place.instance_id for place in home if place.instance_id not in there and place.node_id in nodes]
        if not back:
            return False
        wanted = plan_of(map(group_of, [*self._as_before(home), *self._added_beside(home)]))
        try:
            known = {model.spec.name for model in inputs.resident}
            if fewer := losers(plan_of(map(group_of, plan.instances)), wanted, known):
                raise DoesNotFit(f"{', '.join(fewer)} would be on no group")
            target = await self._target(wanted, inputs)
        except DoesNotFit as error:
            logger.warning("%s cannot have the models of before again: %s", ", ".join(back), error)
            await self._plans.publish(msgspec.structs.replace(plan, version=plan.version + 1, home=[]))
            return False
        await self._begin_change(f"{', '.join(back)} came back", target, is_chosen=True, home=plan.home)
        return True

    def _as_before(self, before: Sequence[InstancePlan]) -> list[InstancePlan]:
        """These instances with their models, as they are configured now; models that were added since stay where they are,
        as far as their instances are to be there."""
        configured = {model.spec.name: model.spec for model in self._inputs().resident}
        had = _names(before)
        now = {place.instance_id: place for place in self._plans.current.instances}
        places = []
        for place in before:
            there = now[place.instance_id].models if place.instance_id in now else []
            added = [spec for spec in there if spec.name not in had]
            # A model may have been removed and added as another one.
            known = [configured[spec.name] for spec in place.models if spec.name in configured]
            specs = [msgspec.structs.replace(spec, replicas=None) for spec in known] + added
            if specs:
                places.append(msgspec.structs.replace(place, models=sorted(specs, key=lambda spec: spec.name)))
        return places

    def _added_beside(self, before: Sequence[InstancePlan]) -> list[InstancePlan]:
        """Instances on other devices, with the models that were added since."""
        had, taken = _names(before), {device for place in before for device in _devices_of(place)}
        return [
            msgspec.structs.replace(place, models=[spec for spec in place.models if spec.name not in had])
            for place in self._plans.current.instances
            if not taken & _devices_of(place)
        ]

    async def _without_room(self, target: Sequence[InstancePlan], inputs: Inputs) -> InstancePlan | None:
        """One of these that has none for its models, as far as is known now."""
        can_hold = fits(inputs.models, inputs.nodes)

        def find() -> InstancePlan | None:
            return next((place for place in target if not can_hold(place, place.models)), None)

        return await asyncio.to_thread(find)

    async def _begin_change(
        self, reason: str, target: Sequence[InstancePlan], *, is_chosen: bool, home: Sequence[InstancePlan] = ()
    ) -> None:
        """`home`: to which it leads, where it leads there."""
        plan, now = self._plans.current, self._monitor.now()
        number = 1 if plan.change is None else plan.change.number + 1
        ready = serving(entry.value for entry in (await self._registry.entries()).values())
        planned = {(spec.name, place.instance_id) for place in plan.instances for spec in place.models}
        change = carry_out.begin(number, reason, plan.instances, target, now, planned - ready)
        # With room for what is told of its steps: it could neither go on nor back otherwise.
        size = len(msgspec.msgpack.encode(msgspec.structs.replace(plan, change=change)))
        if size > LARGEST_CHANGE * self._bus.max_payload_bytes:
            raise ProblemError(f"a plan of {size} bytes with its change is too large for NATS (max_payload)")
        self._span = self._tracer.start_span(
            "placement.replacement", attributes={"tideway.replacement": number, "tideway.reason": reason}
        )
        with trace.use_span(self._span):
            traced = current_traceparent()
        change = msgspec.structs.replace(change, is_chosen=is_chosen, was_chosen=plan.is_chosen, trace=traced)
        logger.info("replacement %d begins: %s", number, reason)
        if not await self._publish(change, home=home):
            message = "another plan was stored meanwhile; nothing was changed"
            raise ServiceError.of(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0)

    async def _go_on(self, change: PlanChange, inputs: Inputs) -> None:
        plan = self._plans.current
        if change.stage == "fetch" and not await self.stays_right(inputs):
            await self.supersede("models, nodes or drained instances changed")
            return
        there = {spec.name for place in (*change.before, *change.target, *plan.instances) for spec in place.models}
        removed = there - {model.spec.name for model in inputs.resident}
        known, running = carry_out.forget(change, plan.instances, removed) if removed else (change, plan.instances)
        view = await self._view(known, inputs)
        can_hold = await asyncio.to_thread(fits, inputs.models, inputs.nodes)
        after, instances = await asyncio.to_thread(
            advance, known, running, view, self._monitor.now(), can_hold, self._carry_out
        )
        self._follow(change)
        if after != change or _by_id(instances) != _by_id(plan.instances):
            for step in after.steps[len(change.steps) :]:
                logger.info("replacement %d: %s", change.number, step)
                self._stage_span.add_event(step)
            await self._publish(after, instances)

    async def _view(self, change: PlanChange, inputs: Inputs) -> View:
        held, problems = {}, {}
        for entry in (await self._registry.entries()).values():
            info = entry.value
            states = {model.name: model.state for model in info.models}
            held[info.instance_id] = Held(info.group.num_ranks, states, info.state == "draining")
            failed = [
                f"could not load {model.name!r}: {model.error}"
                for model in info.models
                if model.state == "failed" and f"{model.name} on {info.instance_id}" not in change.unready
            ]
            if failed:
                problems[info.instance_id] = "; ".join(failed)
        registered = self._registered().values()
        for node in registered:
            for text in filter(None, node.problem.split("; ")):
                instance_id, _, reason = text.partition(" ")
                if not reason.startswith("could not load"):  # which the instance says itself
                    problems.setdefault(instance_id, reason)
        nodes = {place.node_id for place in (*change.before, *change.target)}
        return View(
            held=held,
            fetched={(node.node_id, source) for node in registered for source in node.fetched},
            fetch_problems={(n.node_id, source): text for n in registered for source, text in n.fetch_problems.items()},
            problems=problems,
            gone_nodes=nodes - {node.node_id for node in inputs.nodes} - inputs.held_nodes,
            is_certain=_is_certain(change, inputs),
        )

    async def _publish(
        self,
        change: PlanChange,
        instances: Sequence[InstancePlan] | None = None,
        home: Sequence[InstancePlan] | None = None,
    ) -> bool:
        """False: another plan was stored meanwhile, which is looked at in the next tick."""
        plan = self._plans.current
        home = plan.home if home is None else home
        if change.is_over and change.cause != "superseded":
            out = [place for place in home if place.instance_id in plan.draining]
            home = home if out and change.stage == "carried_out" else out
        match change.stage:
            case "fetch":
                is_chosen = change.was_chosen
            case "rolled_back":
                is_chosen = change.was_chosen
            case "carried_out":
                is_chosen = change.is_chosen
            case _:
                is_chosen = True  # a plan between the two stays as it is
        new = msgspec.structs.replace(
            plan, version=plan.version + 1, instances=plan.instances if instances is None else list(instances),
            is_chosen=is_chosen, change=change, fetch={} if change.is_over else carry_out.to_fetch(change), home=list(home),
        )  # fmt: skip
        is_stored = await self._plans.publish(new)
        if is_stored:
            self._follow(change)
        return is_stored

    def _follow(self, change: PlanChange) -> None:
        """Traces and metrics of the stage that is stored now; also of one that another leader began."""
        if change.stage == self._stage:
            return
        self._stage = change.stage
        self._stage_span.end()
        attributes: dict[str, AttributeValue] = {
            "tideway.replacement": change.number,
            "tideway.reason": change.failure or change.reason,
        }
        if not change.is_over:
            context = context_of(change.trace)
            self._stage_span = self._tracer.start_span(f"replacement.{change.stage}", context, attributes=attributes)
            logger.info("replacement %d: stage %s", change.number, change.stage)
            return
        self._metrics.replacements.labels(change.stage).inc()
        if change.stage == "rolled_back":
            self._metrics.roll_backs.labels(change.cause).inc()
            self._span.set_status(Status(StatusCode.ERROR, change.failure))
            logger.warning("replacement %d is rolled back: %s", change.number, change.failure)
        else:
            logger.info("replacement %d is carried out", change.number)
        self._span.set_attribute("tideway.end", change.stage)
        self._span.end()
        is_proposed = self._proposal is not None and _by_id(self._proposal.target) == _by_id(change.target)
        predicted = None
        if self._proposal is not None and is_proposed:
            predicted = self._proposal.prediction if change.stage == "carried_out" else self._proposal.incumbent
        self._core.settled(self._monitor.now(), predicted)

    async def _store(self) -> None:
        state = self._to_store()
        if state != self._stored:
            # A proposal for hundreds of groups may be too large for an entry: then the next leader searches anew.
            is_large = len(msgspec.msgpack.encode(state)) > STORED_SHARE * self._bus.max_payload_bytes
            stored = msgspec.structs.replace(state, proposal=None) if is_large else state
            await self._bucket.put(STATE_KEY, stored)
            self._stored = state


def why_no_larger_pools(plan: PlacementPlan, target: Sequence[InstancePlan]) -> str:
    """Empty: `target` has larger ones than the plan, and is not what was rolled back last."""
    if _by_id(target) == _by_id(plan.instances):
        return "the plan that runs has the pools that it can have"
    last = plan.change
    if last is not None and last.stage == "rolled_back" and _by_id(last.target) == _by_id(target):
        return f"larger KV pools were rolled back: {last.failure}"
    return ""


def _is_certain(change: PlanChange, inputs: Inputs) -> bool:
    """Whether it is known of all models and nodes of a change what fits."""
    places = (*change.before, *change.target)
    nodes, names = {place.node_id for place in places}, {spec.name for place in places for spec in place.models}
    is_known = all(model.shape is not None for model in inputs.models if model.spec.name in names)
    return is_known and not nodes & inputs.held_nodes


def _names(places: Sequence[InstancePlan]) -> set[str]:
    return {spec.name for place in places for spec in place.models}


def _devices_of(place: InstancePlan) -> set[tuple[str, int]]:
    return instance_devices(place.instance_id, place.group.num_ranks)


def _by_id(places: Sequence[InstancePlan]) -> list[InstancePlan]:
    return sorted(places, key=lambda place: place.instance_id)
