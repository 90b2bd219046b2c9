"""What all requests find alike on an instance: worked out once for each report of it, not once for each request."""

from __future__ import annotations

import math
from typing import NamedTuple

from shared.policies.dispatch import DispatchView, freeness_with_ledger
from shared.policies.token_cost import token_cost_s
from shared.scheduling.cluster import InstanceState, ServedModel
from shared.scheduling.in_flight import InFlightLedger


class Figures(NamedTuple):
    """An instance as all requests of a model and a priority find it alike, in one piece of memory."""

    state: InstanceState
    view: DispatchView
    served: ServedModel
    num_others: int
    """Requests that would run beside another one."""
    in_flight_merged: float
    left_merged: float
    share_left_merged: float
    """`ModelLoad.share_left_merged`, without what is on its way."""
    prompts_s: float
    """Predicted time until the prompt of one more request would be begun, when the instance was last heard of; the next: of
    what was sent there since."""
    sent_s: float
    heard_s: float
    prompt_cost: tuple[float, float] | None
    """`ModelLoad.prompt_cost`; None: the report does not name the model."""
    fetch_token_s: float
    """`ModelLoad.fetch_token_s`; 0: prefixes of the model neither come nor go."""
    token_s: float
    """`token_cost_s` of one more request among the online ones; for one of high priority, what others of that take is not
    counted."""


class Standing:
    """An instance by its last report and what is on its way there. Void as soon as either changes (`Ranking.standing`)."""

    __slots__ = (
        "_figures",
        "_in_flight_merged",
        "_instance_id",
        "_ledger",
        "_num_others",
        "_sent_s",
        "_views",
        "by_model",
        "num_in_flight",
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
        self._num_others = load.num_running
        self.num_in_flight, self._in_flight_merged, self._sent_s = 0, 0.0, 0.0
        if ledger.has_load(instance_id):
            self._num_others += ledger.num_requests(instance_id)
            self.num_in_flight = ledger.num_online(instance_id)
            self._in_flight_merged = ledger.demand_merged(instance_id)
            self._sent_s = ledger.prompts_s(instance_id)
        self._views: dict[bool, DispatchView] = {}
        self._figures: tuple[dict[str, Figures], dict[str, Figures]] = {}, {}
        """By model, for requests of normal and of high priority."""

    def view(self, is_high: bool) -> DispatchView:
        """View by which requests of high or of normal priority rank it."""
        view = self._views.get(is_high)
        if view is None:
            if self.num_in_flight:
                freeness = freeness_with_ledger(
                    self.state.freeness(is_high), self._in_flight_merged, self.num_in_flight
                )
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

    def fetch_token_s(self, model: str) -> float:
        """`ModelLoad.fetch_token_s`; 0: prefixes of the model neither come nor go."""
        load = self.by_model.get(model)
        return 0.0 if load is None else load.fetch_token_s

    def figures(self, model: str, is_high: bool) -> Figures:
        """`model`: one that it serves."""
        figures = self._figures[is_high].get(model)
        if figures is None:
            state, report, load = self.state, self.report, self.by_model.get(model)
            residents = state.load.residents
            if self.num_in_flight:
                residents = [(name, num + self._num_sent(name), cost) for name, num, cost in residents]
            share_left_merged = 0.0 if load is None else load.share_left_merged
            if share_left_merged:
                share_left_merged -= self._ledger.demand_merged_of(self._instance_id, model)
            figures = self._figures[is_high][model] = Figures(
                state=state,
                view=self.view(is_high),
                served=state.ready[model],
                num_others=self._num_others,
                in_flight_merged=self._in_flight_merged,
                left_merged=state.left_merged,
                share_left_merged=share_left_merged,
                prompts_s=report.prompts_s,
                sent_s=self._sent_s,
                heard_s=state.heard_s,
                prompt_cost=None if load is None else load.prompt_cost,
                fetch_token_s=0.0 if load is None else load.fetch_token_s,
                token_s=token_cost_s(model, residents, 0 if is_high else report.num_high),
            )
        return figures

    def _num_sent(self, model: str) -> int:
        return self._ledger.num_waiting(self._instance_id, model) if self.num_in_flight else 0
