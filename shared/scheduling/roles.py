"""The roles of the instances, as the scheduler prefers them (`shared.policies.roles`): those that operators chose, and,
where settings say so, those that follow the load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from shared.messages.cluster import Role
from shared.policies.roles import RoleView, next_role, patience_s
from shared.scheduling.actions import TellRole
from shared.scheduling.cluster import ClusterView, InstanceState

LOOK_S = 0.5
"""Between two looks at roles that follow the load; each changes one of them at most, and its effect shows in the reports at
the next."""


class Roles:
    def __init__(self, mode: Literal["off", "fixed", "adaptive"], cluster: ClusterView) -> None:
        """`mode`: off: all instances do both | fixed: those of operators | adaptive: the others' roles follow the load."""
        self.mode = mode
        self._cluster = cluster
        self._chosen: dict[str, tuple[str, Role]] = {}
        """Incarnations and roles of instances that follow the load."""
        self._look_s = 0.0
        self._wanted_since_s: float | None = None
        """Since when one more prefill instance is wanted at each look."""
        self.prefills: set[str] = set()
        """Instances that are to compute prompts for others."""

    @property
    def is_split(self) -> bool:
        """Whether some instance is to compute prompts for others."""
        return bool(self.prefills)

    def of(self, instance_id: str) -> Role:
        state = self._cluster.get(instance_id)
        if state is None or self.mode == "off" or not state.info.takes_roles:
            return Role.BOTH
        if state.info.is_role_fixed:
            return state.info.role
        if self.mode == "fixed":
            return Role.BOTH
        incarnation, role = self._chosen.get(instance_id, ("", Role.BOTH))
        if incarnation != state.info.incarnation:
            # A new leader goes on from what the last one told.
            role = state.info.role
            self._chosen[instance_id] = state.info.incarnation, role
        return role

    def is_prefill(self, instance_id: str) -> bool:
        return instance_id in self.prefills

    def is_decoder(self, instance_id: str) -> bool:
        return instance_id not in self.prefills

    def on_registry(self, instance_id: str) -> None:
        """The instance came, went, or says something else of itself."""
        state = self._cluster.get(instance_id)
        if state is None or state.info.is_role_fixed:
            self._chosen.pop(instance_id, None)
        self._note(instance_id)

    def _note(self, instance_id: str) -> None:
        if self.of(instance_id) is Role.PREFILL:
            self.prefills.add(instance_id)
        else:
            self.prefills.discard(instance_id)

    @property
    def follow_load(self) -> bool:
        """Whether roles that no operator chose change with the load."""
        return self.mode == "adaptive"

    def next_wakeup(self) -> float | None:
        return self._look_s if self.follow_load else None

    def due(self, work_at: Callable[[float], float], now: float) -> list[TellRole]:
        """What to tell instances, if it is time to look. `work_at`: seconds of long prompts that come each second, at a
        time."""
        if not self.follow_load or now < self._look_s:
            return []
        self._look_s = now + LOOK_S
        views = [view for name, state in self._cluster if (view := self._view_of(name, state)) is not None]
        change = next_role(views, work_at(now))
        if change is None or change[1] is not Role.PREFILL:
            self._wanted_since_s = None
        elif self._wanted_since_s is None:
            self._wanted_since_s = now
        if change is None or (
            self._wanted_since_s is not None and now < self._wanted_since_s + patience_s(len(self.prefills))
        ):
            return []
        self._wanted_since_s = None
        instance_id, role = change
        state = self._cluster.get(instance_id)
        assert state is not None
        self._chosen[instance_id] = state.info.incarnation, role
        self._note(instance_id)
        return [TellRole(instance_id, role)]

    def _view_of(self, instance_id: str, state: InstanceState) -> RoleView | None:
        """None: it takes no requests."""
        report = state.report
        if report is None or not state.can_take:
            return None
        load = state.load
        costs = [cost for _, num, cost in load.residents if num] or [cost for _, _, cost in load.residents]
        step_s, request_s = max(costs, default=(0.0, 0.0))
        return RoleView(
            instance_id=instance_id,
            role=self.of(instance_id),
            is_fixed=state.info.is_role_fixed or not state.info.takes_roles,
            models=state.names,
            num_running=load.num_running,
            used_merged=max(0.0, state.info.num_merged - state.left_merged),
            num_merged=state.info.num_merged,
            prompts_s=report.prompts_s,
            step_s=step_s,
            request_s=request_s,
            tpot_s=report.tpot_s,
        )
