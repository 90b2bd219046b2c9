"""Instances that come, change and go: by the registry, by their node agents' word, or by their silence."""

from __future__ import annotations

from shared.messages.cluster import InstanceExited, InstanceInfo
from shared.scheduling.actions import Action, InstanceLost, ProbeSilence
from shared.scheduling.cluster import ClusterView, Liveness
from shared.scheduling.dispatching import Dispatcher
from shared.scheduling.lifecycle import RequestLifecycle
from shared.scheduling.migrations import MigrationBook
from shared.scheduling.recovery import Inquiries
from shared.scheduling.requests import RequestState
from shared.scheduling.rescheduling import Rescheduler


class Membership:
    def __init__(
        self,
        cluster: ClusterView,
        dispatcher: Dispatcher,
        life: RequestLifecycle,
        migrations: MigrationBook,
        inquiries: Inquiries,
        rescheduler: Rescheduler,
        actions: list[Action],
    ) -> None:
        self._cluster = cluster
        self._dispatcher = dispatcher
        self._life = life
        self._migrations = migrations
        self._inquiries = inquiries
        self._rescheduler = rescheduler
        self._actions = actions

    def on_registry(self, instance_id: str, info: InstanceInfo | None, now: float) -> None:
        """See `OnRegistry`."""
        state = self._cluster.get(instance_id)
        before = list(state.ready) if state else []
        if state is not None and (info is None or info.incarnation != state.info.incarnation):
            how = "vanished" if info is None else "restarted"
            is_empty = not self._life.requests.on_instance(instance_id)
            self._lose(instance_id, "drained" if state.is_draining and is_empty else how, now)
        if info is not None:
            self._cluster.register(info, now)
        else:
            self._cluster.remove(instance_id)
        self._dispatcher.touch(instance_id, before)
        self._rescheduler.on_registry(instance_id, self._cluster.get(instance_id), now)

    def on_exited(self, exited: InstanceExited, now: float) -> None:
        state = self._cluster.get(exited.instance_id)
        if state is None or state.info.incarnation != exited.incarnation or state.liveness == Liveness.EXITED:
            return
        before = list(state.ready)
        self._lose(exited.instance_id, "drained" if state.is_draining and exited.exit_code == 0 else "exited", now)
        self._cluster.mark_exited(exited.instance_id)
        self._dispatcher.touch(exited.instance_id, before)

    def look_for_silence(self, now: float) -> None:
        if silent := self._cluster.fall_silent(now):
            for instance_id in silent:
                self._dispatcher.touch(instance_id)
            self._actions.append(ProbeSilence(silent))

    def declare_lost(self, instance_ids: list[str], now: float) -> None:
        """See `DeclareLost`."""
        for instance_id in self._cluster.still_silent(instance_ids):
            self._lose(instance_id, "silent", now)
            self._cluster.mark_lost(instance_id)

    def grant_grace(self, now: float) -> None:
        """See `GrantGrace`."""
        self._cluster.grant_grace(now)
        for instance_id, state in self._cluster:
            state.num_refusals, state.is_backing_off = 0, False
            self._dispatcher.touch(instance_id)

    def _lose(self, instance_id: str, reason: str, now: float) -> None:
        """Nothing on the instance will be finished. Requests that it had accepted go back to their gateways, which know
        the tokens so far; those on their way to it are placed again from here."""
        self._inquiries.give_up(instance_id)
        there = self._life.requests.on_instance(instance_id)
        state = self._cluster.get(instance_id)
        if there or (state is not None and state.is_known_alive):
            self._actions.append(InstanceLost(instance_id, reason, len(there)))
        for tracked in there:
            self._life.leave_ledger(tracked.request_id, instance_id)
        self._migrations.lose([tracked for tracked in there if tracked.state == RequestState.ASSIGNED], instance_id)
        for tracked in there:
            if tracked.state != RequestState.ASSIGNED:
                self._life.place_again(tracked, now, raise_epoch=True)
