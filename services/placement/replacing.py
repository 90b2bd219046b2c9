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
from services.placement.live_problem import live_problem
from services.placement.metrics import PlacementMetrics
from services.placement.monitor import PlacementMonitor
from services.placement.plan_store import PlanStore
from services.placement.requests import check_plan
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
)
from shared.messages.requests import ErrorCode
from shared.models.spec import refuse
from shared.monitor.request_log import MAX_AGE_S, SLOT_S
from shared.placement.carry_out import CarryOutSettings, Held, View
from shared.placement.plan import Group, Prediction, told_left_behind
from shared.placement.planner import DoesNotFit
from shared.placement.problem import Problem, ProblemError, Proposal
from shared.placement.replacement import IntervalState, Replacement, ReplacementSettings, Verdict
from shared.placement.rollout import (
    abandoned,
    assess,
    back_home,
    begin,
    by_id,
    change_of,
    confirmed,
    go_on,
    roll_back,
    stays_right,
    target_of,
)
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
        """Time at which metrics were last shown."""
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
        return change_of(self._plans.current)

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
            always = [model.spec.name for model in inputs.models if not model.spec.on_demand]
            self._core.notice(always, {node.node_id for node in inputs.nodes} | inputs.held_nodes)
        if self.change is not None:
            await self._go_on(inputs)
        elif (
            not await self._return_home(inputs)
            and (is_on and not self._searching)
            and (why := self._core.look(self._monitor.now(), lambda last_s: self._measured_in(max(SLOT_S, last_s))))
        ):
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
        now, plan, change = self._monitor.now(), self._plans.current, self.change
        if query.action == "roll_back":
            ready = await self._ready()
            await self._store_change(await asyncio.to_thread(roll_back, self._inputs().cluster(), now, ready))
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
        """Whether a change goes on to which these inputs make no difference (`rollout.stays_right`)."""
        change = self.change
        if change is None or change.stage != "fetch" or inputs.fleet != Fleet.of(self._plans.current):
            return False
        return await asyncio.to_thread(lambda: stays_right(inputs.cluster(), inputs.plan_now().instances))

    async def supersede(self, why: str) -> bool:
        """Another plan is to be made. A change that has changed nothing yet is over; else False: it comes first."""
        if self.may_give_way:
            await self._publish(abandoned(self._plans.current, "superseded", why, self._monitor.now()))
        return self.change is None

    # ------------------------------------------------------------------------------------------------- searching

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
        began_s, outcome, cause = self._monitor.now(), "failed", ""
        predicted = measured = None
        logger.info("searching for a placement: %s", why)
        try:
            with self._tracer.start_as_current_span("placement.search", attributes={"tideway.reason": why}):
                proposal, verdict = await self._found(why)
            self._proposal, predicted, measured = proposal, proposal.incumbent, proposal.measured
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
                self._core.kept(self._monitor.now(), predicted, measured)
            self._metrics.searches.labels(outcome).inc()
            if cause:
                self._metrics.verdicts.labels(cause).inc()
            self._metrics.search_seconds.observe(self._monitor.now() - began_s)

    async def _found(self, why: str) -> tuple[PlanProposal, Verdict]:
        inputs, plan, settings = self._inputs(), self._plans.current, self._settings
        now = self._monitor.now()
        lengths_s = (
            min(MAX_AGE_S, until_s - since_s) for since_s, until_s in (self._core.window(now), self._core.evidence(now))
        )
        window_s, evidence_s = self._monitor.searched_s(*lengths_s)
        self._core.begin(now, self._measured())
        traffic, execution_s = self._monitor.traffic(window_s), self._monitor.execution_s()
        evidence = self._monitor.traffic(evidence_s)
        seen = self._monitor.prediction(max(SLOT_S, window_s))
        stored = [entry.value for entry in (await self._costs.entries()).values()]
        problem = await asyncio.to_thread(
            live_problem, inputs.models, inputs.nodes, plan.instances, inputs.fleet.draining, stored, traffic,
            execution_s, gpu=settings.hardware, slo_scale=settings.slo_scale,
            max_models_per_group=settings.max_models_per_group, max_ranks=settings.max_ranks, evidence=evidence,
        )  # fmt: skip
        began_s = self._monitor.now()
        found = await self._run_search(problem)
        verdict, target, held_bytes = await asyncio.to_thread(
            assess, inputs.cluster(), problem, found, self._core, seen
        )
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
        """Raises `ProblemError`, or `DoesNotFit`, as `confirmed` does."""
        try:
            if not await asyncio.to_thread(confirmed, self._inputs().cluster(), proposal):
                return
        except ProblemError as error:
            if error.cause == "plan_changed":
                self._core.ask(str(error))
            raise
        await self._begin_change(f"{proposal.why}: {proposal.verdict}", proposal.target)

    async def _set(self, groups: Sequence[Group]) -> None:
        """Carries out a plan that an operator wrote; one that runs already is one that was chosen from then on. Groups that
        stay as they are keep their KV pools, and no search that began before changes them. Raises `ServiceError`."""
        plan, inputs = self._plans.current, self._inputs()
        try:
            target = await asyncio.to_thread(target_of, inputs.cluster(), check_plan(groups, inputs))
        except DoesNotFit as error:
            raise refuse(str(error), "groups", ErrorCode.CONFLICT) from None
        if plan.is_chosen and not plan.home and by_id(target) == by_id(plan.instances):
            return
        if self._search_task is not None:
            self._search_task.cancel()
        await self._begin_change("an operator set the plan", target)

    async def _return_home(self, inputs: Inputs) -> bool:
        """Begins the change to a chosen plan of which instances had been drained (`back_home`)."""
        plan = self._plans.current
        try:
            back = await asyncio.to_thread(back_home, inputs.cluster()) if plan.home else None
        except DoesNotFit as error:
            logger.warning("%s", error)
            await self._plans.publish(msgspec.structs.replace(plan, version=plan.version + 1, home=[]))
            return False
        if back is not None:
            await self._begin_change(*back, home=plan.home)
        return back is not None

    async def _ready(self) -> frozenset[tuple[str, str]]:
        return serving(entry.value for entry in (await self._registry.entries()).values())

    async def _begin_change(
        self, reason: str, target: Sequence[InstancePlan], *, home: Sequence[InstancePlan] = ()
    ) -> None:
        ready = await self._ready()
        await self._store_change(begin(self._inputs().cluster(), reason, target, self._monitor.now(), ready, home=home))

    async def _store_change(self, new: PlacementPlan) -> None:
        if not await self._publish(new):
            message = "another plan was stored meanwhile; nothing was changed"
            raise ServiceError.of(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0)

    async def _go_on(self, inputs: Inputs) -> None:
        before = self._plans.current
        assert before.change is not None
        view = await self._view(before.change)
        after = await asyncio.to_thread(
            go_on, inputs.cluster(), lambda: inputs.plan_now().instances, view, self._monitor.now(), self._carry_out
        )
        self._follow(before.change)
        if after is not before and after.change is not None:
            for step in after.change.steps[len(before.change.steps) :]:
                logger.info("replacement %d: %s", before.change.number, step)
                self._stage_span.add_event(step)
            await self._publish(after)

    async def _view(self, change: PlanChange) -> View:
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
            for instance_id, crash in node.crashes.items():
                problems.setdefault(instance_id, str(crash))
        return View(
            held=held,
            fetched={(node.node_id, source) for node in registered for source in node.fetched},
            fetch_problems={(n.node_id, source): text for n in registered for source, text in n.fetch_problems.items()},
            problems=problems,
        )

    async def _publish(self, new: PlacementPlan) -> bool:
        """False: another plan was stored meanwhile, which is looked at in the next tick. Raises `ProblemError`."""
        change, plan = new.change, self._plans.current
        assert change is not None
        is_new = plan.change is None or plan.change.number != change.number
        if is_new:
            # With room for what is told of its steps: it could neither go on nor back otherwise.
            if (size := len(msgspec.msgpack.encode(new))) > LARGEST_CHANGE * self._bus.max_payload_bytes:
                raise ProblemError(f"a plan of {size} bytes with its change is too large for NATS (max_payload)")
            change, new = self._traced(change, new)
        is_stored = await self._plans.publish(new)
        if is_stored:
            self._follow(change)
        return is_stored

    def _traced(self, change: PlanChange, new: PlacementPlan) -> tuple[PlanChange, PlacementPlan]:
        attributes: dict[str, str | int] = {"tideway.replacement": change.number, "tideway.reason": change.reason}
        self._span = self._tracer.start_span("placement.replacement", attributes=attributes)
        with trace.use_span(self._span):
            change = msgspec.structs.replace(change, trace=current_traceparent())
        logger.info("replacement %d begins: %s", change.number, change.reason)
        return change, msgspec.structs.replace(new, change=change)

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
        is_proposed = self._proposal is not None and by_id(self._proposal.target) == by_id(change.target)
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
