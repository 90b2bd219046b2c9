"""A policy of each kind. All are pure: time and state come in as arguments."""

from dataclasses import replace

from shared.policies.autoscaling import Autoscaling, ScalingBounds
from shared.policies.dispatch import Candidate, Candidates, DispatchKey, DispatchPolicy, DispatchView, Wanted
from shared.policies.ordering import ModelView, OrderingPolicy, SequenceView, model_of_first
from shared.policies.rebalancing import Rebalancer
from shared.policies.token_budget import Limits, StepView, TokenBudgetPolicy


class ShortestPromptFirst(OrderingPolicy):
    """Within an instance, and in the scheduler's queue."""

    is_static = True

    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        return (sequence.num_prompt,)

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        return model_of_first(self, candidates, now)


class FullestThatFits(DispatchPolicy):
    """Among instances: so that others stay free for what needs much room."""

    def rank(self, view: DispatchView) -> DispatchKey:
        return (view.freeness,)

    def choose(self, request: Wanted, candidates: Candidates) -> Candidate | None:
        looked_at = candidates.first(64, lambda candidate: candidate.missing_merged <= 0)
        return looked_at[-1] if looked_at[-1].missing_merged <= 0 or not candidates.may_wait else None


class HalfStep(TokenBudgetPolicy):
    """Half as many tokens a step as the instance could take, whatever they are."""

    def __init__(self, num_tokens: int) -> None:
        self._limits = Limits(max(1, num_tokens // 2))

    def limits(self, view: StepView) -> Limits:
        return self._limits


class DrainOnly(Rebalancer):
    """Requests move away from instances that are drained, and never for balance."""

    def __init__(self, low: float, high: float, pairings_per_s: float) -> None:
        super().__init__(-1e9, high, pairings_per_s)


class OneByOne(Autoscaling):
    """Waits three times as long between two changes as the settings say."""

    def __init__(self, bounds: ScalingBounds) -> None:
        super().__init__(replace(bounds, settle_s=3 * bounds.settle_s))
