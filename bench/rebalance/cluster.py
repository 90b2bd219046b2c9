"""Four instances and the real scheduler's core, with what travels between them taking `CONTROL_S`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from bench.rebalance.devices import MODEL, Device
from bench.rebalance.instance import Instance
from bench.rebalance.journal import Journal, RunFailed
from bench.rebalance.moving import CONTROL_S, Movers
from bench.rebalance.workloads import Job
from shared.engine.calls import SetStatistics
from shared.messages.cluster import LoadReport
from shared.messages.requests import GenerationRequest, Priority, SamplingParams
from shared.policies.dispatch import TIMED_POLICY
from shared.scheduling.actions import (
    Action,
    AskHeld,
    Dispatch,
    InstanceLost,
    LeftQueue,
    MoveEnded,
    Paired,
    ProbeSilence,
    SendRebalance,
)
from shared.scheduling.calls import OnDispatched, OnHeld, OnRegistry, OnReport, OnTime, Submit, TakeExecutionStatistics
from shared.scheduling.core import SchedulerCore
from shared.settings import InstanceSettings, SchedulerSettings
from shared.simulation.events import Events

STATISTICS_S = 1.0
"""Between two tellings of execution times."""
PATIENCE_S = 3000.0
"""After the last arrival, for all to end."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the cluster."""

    name: str
    dispatch: str = TIMED_POLICY
    is_late: bool = True
    """Requests wait in the scheduler's queue until an instance has room for them; else they are dispatched at once."""
    migrates: bool = True
    has_priorities: bool = True
    """Else all requests are normal ones."""
    order: str = "doubling_budget"
    scheduler: dict[str, float] = {}
    """Settings of the scheduler that differ from its defaults."""

    def settings(self) -> SchedulerSettings:
        settings = SchedulerSettings(
            dispatch_policy=self.dispatch,
            migration="auto" if self.migrates else "off",
            order_policy=self.order,
            max_queued=1 << 20,
        )
        if not self.is_late:
            settings = msgspec.structs.replace(
                settings, max_waiting_per_model=1 << 20, dispatch_growth_steps=0.0, max_gathering_share=1.0
            )
        return msgspec.structs.replace(settings, **self.scheduler)


class Cluster:
    """`run` once."""

    def __init__(
        self,
        device: Device,
        system: System,
        jobs: Sequence[Job],
        *,
        num_instances: int = 4,
        noise: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.device, self.system = device, system
        self.events = Events()
        self.journal = Journal(list(jobs))
        self.core = SchedulerCore(system.settings(), 1)
        self.instances: dict[str, Instance] = {}
        self.movers = Movers(self.events, self.journal, self.instances, InstanceSettings().max_migrations)
        self.num_pairings = 0
        self.emptied_s: dict[str, float] = {}
        """When each instance that was drained held nothing any more."""
        self._jobs = jobs
        self._noise, self._seed = noise, seed
        self._timer_s = -1.0
        self._num_instances = 0
        """Made so far."""
        for index in range(num_instances):
            self.add_instance(f"instance-{index}")

    def add_instance(self, instance_id: str, state: str = "ready") -> Instance:
        instance = Instance(
            instance_id, self.device, self.events, self.journal, self._send_report,
            order=self.system.order, noise=self._noise, seed=self._seed * 1000 + len(self.instances),
        )  # fmt: skip
        self._num_instances += 1
        instance.state = state
        self.instances[instance_id] = instance
        self._register(instance)
        instance.wake()
        return instance

    def drain_at(self, at_s: float, instance_id: str) -> None:
        self.events.at(at_s, self._drain, self.instances[instance_id])

    def _drain(self, instance: Instance) -> None:
        instance.state = "draining"
        self.events.after(CONTROL_S, self._register, instance)
        instance.wake()
        self._watch_drain(instance)

    def _watch_drain(self, instance: Instance) -> None:
        if instance.state != "draining":
            return
        if instance.engine.all_held():
            self.events.after(0.01, self._watch_drain, instance)
        else:
            self.emptied_s[instance.instance_id] = self.events.now

    def mean_instances(self) -> float:
        """Over the run."""
        return float(len(self.instances))

    def run(self) -> Journal:
        for number, job in enumerate(self._jobs):
            self.events.at(job.at_s, self._submit, number, job)
        self.events.after(STATISTICS_S, self._tell_statistics)
        limit_s = self._jobs[-1].at_s + PATIENCE_S
        if not self.events.run(lambda: self.journal.num_left == 0, limit_s):
            raise RunFailed(f"{self.journal.num_left} of {len(self._jobs)} requests have not ended by {limit_s:.0f} s")
        return self.journal

    # --------------------------------------------------------------------------------------- to the scheduler

    def _submit(self, number: int, job: Job) -> None:
        prompt = np.full(job.prompt_tokens, 7, np.int32)
        prompt[0] = number  # the executor knows requests by it, and no prefix is another's
        # The length of the answer is nobody's knowledge: it ends with a token.
        sampling = SamplingParams(max_tokens=self.device.max_length + 1, temperature=0.0, stop_token_ids=(2,))
        is_high = job.is_high and self.system.has_priorities
        request = GenerationRequest(
            request_id=str(number), gateway_id="bench", model=MODEL, prompt=prompt.tobytes(), sampling=sampling,
            timeout_s=1e6, priority=Priority.HIGH if is_high else Priority.NORMAL,
        )  # fmt: skip
        if refused := self.core.apply(Submit(request), self.events.now):
            raise RunFailed(f"request {number} was refused: {refused.message}")
        self._act()

    def _send_report(self, report: LoadReport) -> None:
        self.events.after(CONTROL_S, self._on_report, report)

    def _on_report(self, report: LoadReport) -> None:
        self.core.apply(OnReport(report), self.events.now)
        self._act()

    def _register(self, instance: Instance) -> None:
        self.core.apply(OnRegistry(instance.instance_id, instance.info()), self.events.now)
        self._act()

    def _tell_statistics(self) -> None:
        for statistics in self.core.apply(TakeExecutionStatistics(), self.events.now):
            for instance in self.instances.values():
                instance.engine.apply(SetStatistics(statistics), 0.0)
        self.events.after(STATISTICS_S, self._tell_statistics)

    def _on_timer(self, at_s: float) -> None:
        if at_s == self._timer_s:
            self._timer_s = -1.0
            self.core.apply(OnTime(), self.events.now)
            self._act()

    # ------------------------------------------------------------------------------------- from the scheduler

    def _act(self) -> None:
        for action in self.core.actions(self.events.now):
            self._carry_out(action)
        wakeup_s = self.core.next_wakeup()
        if wakeup_s is not None and (self._timer_s < 0 or wakeup_s < self._timer_s):
            self._timer_s = max(wakeup_s, self.events.now)
            self.events.at(self._timer_s, self._on_timer, self._timer_s)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Dispatch():
                self.events.after(CONTROL_S, self._dispatch, action)
            case AskHeld():
                self.events.after(2 * CONTROL_S, self._tell_held, action)
            case SendRebalance(instance_id, rebalance):
                self.events.after(CONTROL_S, self.movers.on_rebalance, instance_id, rebalance)
            case Paired():
                self.num_pairings += 1
            case ProbeSilence() | LeftQueue() | MoveEnded() | InstanceLost(num_requests=0):
                pass
            case _:
                raise RunFailed(f"the scheduler wants {action}")

    def _dispatch(self, action: Dispatch) -> None:
        refused = self.instances[action.instance_id].submit(action.request)
        self.events.after(CONTROL_S, self._on_dispatched, action, refused)

    def _on_dispatched(self, action: Dispatch, refused: object) -> None:
        self.core.apply(OnDispatched.to(action, refused), self.events.now)  # type: ignore[arg-type]
        self._act()

    def _tell_held(self, action: AskHeld) -> None:
        if action.instance_id not in self.instances:
            return
        self.core.apply(OnHeld(action, self.instances[action.instance_id].held()), self.events.now)
        self._act()
