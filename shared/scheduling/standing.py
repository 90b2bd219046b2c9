"""What all requests find alike on an instance: worked out once for each report of it, not once for each request."""

from __future__ import annotations

import math

from shared.policies.dispatch import DispatchView, freeness_with_ledger
from shared.policies.token_cost import token_cost_s
from shared.scheduling.cluster import InstanceState
from shared.scheduling.in_flight import InFlightLedger


class Standing:
    """An instance by its last report and what is on its way there. Void as soon as either changes (`Ranking.standing`)."""

    __slots__ = (
        "_instance_id",
        "_ledger",
        "_sent_s",
        "_tokens_s",
        "_views",
        "by_model",
        "in_flight_merged",
        "left_merged",
        "num_in_flight",
        "num_others",
        "report",
        "state",
    )

    def __init__(self, instance_id: str, state: InstanceState, ledger: InFlightLedger) -> None:
        """`state` of an instance that has reported."""
        assert state.report is not None
        self._instance_id = instance_id
        self._ledger = ledger
        self.state = state
        self.report = state.report
        load = state.load
        self.by_model = load.by_model
        self.num_others = load.num_running
        """Requests that would run beside another one."""
        self.num_in_flight, self.in_flight_merged, self._sent_s = 0, 0.0, 0.0
        if ledger.has_load(instance_id):
            self.num_others += ledger.num_requests(instance_id)
            self.num_in_flight = ledger.num_online(instance_id)
            self.in_flight_merged = ledger.demand_merged(instance_id)
            self._sent_s = ledger.prompts_s(instance_id)
        self.left_merged = state.left_merged
        self._views: dict[bool, DispatchView] = {}
        self._tokens_s: dict[tuple[str, bool], float] = {}

    def view(self, is_high: bool) -> DispatchView:
        """View by which requests of high or of normal priority rank it."""
        view = self._views.get(is_high)
        if view is None:
            if self.num_in_flight:
                freeness = freeness_with_ledger(self.state.freeness(is_high), self.in_flight_merged, self.num_in_flight)
            else:
                freeness = self.report.dispatch_freeness_high if is_high else self.report.dispatch_freeness
                freeness = freeness if freeness == freeness else -math.inf  # not a number
            num_requests = self.state.load.num_requests + self.num_in_flight
            view = self._views[is_high] = DispatchView(freeness, num_requests, self.state.last_turn)
        return view

    def num_waiting(self, model: str) -> int:
        """Online requests of the model that wait there or are on their way."""
        load = self.by_model.get(model)
        num_waiting = 0 if load is None else load.num_waiting_online
        return num_waiting + self._num_sent(model) if self.num_in_flight else num_waiting

    def start_s(self, now: float) -> float:
        """Predicted time from `now` until the prompt of one more request would be begun."""
        return max(0.0, self.report.prompts_s - (now - self.state.heard_s)) + self._sent_s

    def prompt_cost(self, model: str) -> tuple[float, float]:
        """`ModelLoad.prompt_cost`; zeros: not known."""
        load = self.by_model.get(model)
        return (0.0, 0.0) if load is None else load.prompt_cost

    def share_left_merged(self, model: str) -> float:
        """`ModelLoad.share_left_merged`, without what is on its way."""
        load = self.by_model.get(model)
        if load is None or not load.share_left_merged:
            return 0.0
        return load.share_left_merged - self._ledger.demand_merged_of(self._instance_id, model)

    def fetch_token_s(self, model: str) -> float:
        """`ModelLoad.fetch_token_s`; 0: prefixes of the model neither come nor go."""
        load = self.by_model.get(model)
        return 0.0 if load is None else load.fetch_token_s

    def token_s(self, model: str, is_high: bool) -> float:
        """`token_cost_s` of one more request among the online ones; for one of high priority, what others of that take is
        not counted."""
        token_s = self._tokens_s.get((model, is_high))
        if token_s is None:
            residents = self.state.load.residents
            if self.num_in_flight:
                residents = [(name, num + self._num_sent(name), cost) for name, num, cost in residents]
            num_high = 0 if is_high else self.report.num_high
            token_s = self._tokens_s[model, is_high] = token_cost_s(model, residents, num_high)
        return token_s

    def _num_sent(self, model: str) -> int:
        return self._ledger.num_waiting(self._instance_id, model) if self.num_in_flight else 0
