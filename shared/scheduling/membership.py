"""Instances that come, change and go: by the registry, by their node agents' word, or by their silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.messages.cluster import InstanceExited, InstanceInfo
from shared.scheduling.actions import InstanceLost, ProbeSilence
from shared.scheduling.cluster import InstanceState, Liveness, ServedModel
from shared.scheduling.requests import RequestState

if TYPE_CHECKING:
    from shared.scheduling.core import SchedulerCore

Ways = dict[str, tuple[frozenset[ServedModel], frozenset[ServedModel]]]
"""By model: see `ClusterView.ways`."""


class Membership:
    def __init__(self, core: SchedulerCore) -> None:
        self._core = core

    def on_registry(self, instance_id: str, info: InstanceInfo | None, now: float) -> None:
        state = self._core.cluster.get(instance_id)
        if state is not None and info is not None and state.is_renewed_by(info):
            state.info = info
            return
        before = list(state.ready) if state else []
        ways = self._ways(state, info)
        if state is not None and (info is None or info.incarnation != state.info.incarnation):
            how = "vanished" if info is None else "restarted"
            is_empty = not self._core.life.requests.on_instance(instance_id)
            self._lose(instance_id, "drained" if state.is_draining and is_empty else how, now)
        if info is not None:
            self._core.cluster.register(info, now)
        else:
            self._core.cluster.remove(instance_id)
        self._core.roles.on_registry(instance_id)
        self._core.dispatcher.touch(instance_id, before)
        self._core.rescheduler.on_registry(instance_id, self._core.cluster.get(instance_id), now)
        self._look_through(ways, now)

    def on_exited(self, exited: InstanceExited, now: float) -> None:
        state = self._core.cluster.get(exited.instance_id)
        if state is None or state.info.incarnation != exited.incarnation or state.liveness == Liveness.EXITED:
            return
        before, ways = list(state.ready), self._ways(state, None)
        self._lose(exited.instance_id, "drained" if state.is_draining and exited.exit_code == 0 else "exited", now)
        self._core.cluster.mark_exited(exited.instance_id)
        self._core.dispatcher.touch(exited.instance_id, before)
        self._look_through(ways, now)

    def look_for_silence(self, now: float) -> None:
        if silent := self._core.cluster.fall_silent(now):
            for instance_id in silent:
                self._core.dispatcher.touch(instance_id)
            self._core.say(ProbeSilence(silent))

    def declare_lost(self, instance_ids: list[str], now: float) -> None:
        for instance_id in self._core.cluster.still_silent(instance_ids):
            self._lose(instance_id, "silent", now)
            self._core.cluster.mark_lost(instance_id)

    def grant_grace(self, now: float) -> None:
        self._core.cluster.grant_grace(now)
        for instance_id, state in self._core.cluster:
            state.num_refusals, state.is_backing_off = 0, False
            self._core.dispatcher.touch(instance_id)

    def _ways(self, state: InstanceState | None, info: InstanceInfo | None) -> Ways:
        """How the models of the instance, and of its new entry, are served until now."""
        models = {model.name for model in info.models} if info is not None else set()
        if state is not None:
            models |= state.ready.keys() | state.coming.keys()
        return {model: self._core.cluster.ways(model) for model in models}

    def _look_through(self, before: Ways, now: float) -> None:
        """What waits for a model that is served in other ways by now may have become too long, or fit again."""
        for model, ways in before.items():
            if self._core.cluster.ways(model) != ways:
                self._core.life.look_through(model, now)

    def _lose(self, instance_id: str, reason: str, now: float) -> None:
        """Nothing on the instance will be finished. Requests that it had accepted go back to their gateways, which know
        the tokens so far; those on their way to it are placed again from here."""
        self._core.inquiries.give_up(instance_id)
        there = self._core.life.requests.on_instance(instance_id)
        state = self._core.cluster.get(instance_id)
        if there or (state is not None and state.is_known_alive):
            self._core.say(InstanceLost(instance_id, reason, len(there)))
        for tracked in there:
            self._core.life.leave_ledger(tracked.request_id, instance_id)
        self._core.migrations.lose(
            [tracked for tracked in there if tracked.state == RequestState.ASSIGNED], instance_id
        )
        for tracked in there:
            if tracked.state != RequestState.ASSIGNED:
                self._core.life.place_again(tracked, now, raise_epoch=True)
