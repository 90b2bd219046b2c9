"""What all requests find alike on an instance: worked out once for each report of it, not once for each request."""

from __future__ import annotations

from shared.policies.dispatch import DispatchView, freeness_with_ledger
from shared.policies.token_cost import token_cost_s
from shared.scheduling.cluster import InstanceState
from shared.scheduling.in_flight import InFlightLedger


class Standing:
    """An instance by its last report and what is on its way there. Void as soon as either changes (`Ranking.standing`)."""

    __slots__ = (
        "_instance_id",
        "_ledger",
        "_prompt_costs",
        "_sent_s",
        "_tokens_s",
        "_views",
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
        self.num_in_flight = ledger.num_online(instance_id)
        self.num_others = state.load.num_running + ledger.num_requests(instance_id)
        """Requests that would run beside another one."""
        self.in_flight_merged = ledger.demand_merged(instance_id)
        self.left_merged = state.left_merged
        self._sent_s = ledger.prompts_s(instance_id)
        self._views: dict[bool, DispatchView] = {}
        self._tokens_s: dict[tuple[str, bool], float] = {}
        self._prompt_costs: dict[str, tuple[float, float]] = {}

    def view(self, is_high: bool) -> DispatchView:
        """View by which requests of high or of normal priority rank it."""
        view = self._views.get(is_high)
        if view is None:
            freeness = freeness_with_ledger(self.state.freeness(is_high), self.in_flight_merged, self.num_in_flight)
            num_requests = self.state.load.num_requests + self.num_in_flight
            view = self._views[is_high] = DispatchView(freeness, num_requests, self.state.last_turn)
        return view

    def num_waiting(self, model: str) -> int:
        """Online requests of the model that wait there or are on their way."""
        return self.state.load.num_waiting_online.get(model, 0) + self._num_sent(model)

    def start_s(self, now: float) -> float:
        """Predicted time from `now` until the prompt of one more request would be begun."""
        return max(0.0, self.report.prompts_s - (now - self.state.heard_s)) + self._sent_s

    def prompt_cost(self, model: str) -> tuple[float, float]:
        """`ModelLoad.prompt_cost`; zeros: not known."""
        if not self._prompt_costs:
            self._prompt_costs = {load.model: load.prompt_cost for load in self.report.models}
        return self._prompt_costs.get(model, (0.0, 0.0))

    def fetch_token_s(self, model: str) -> float:
        """`ModelLoad.fetch_token_s`; 0: prefixes of the model neither come nor go."""
        return next((load.fetch_token_s for load in self.report.models if load.model == model), 0.0)

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
