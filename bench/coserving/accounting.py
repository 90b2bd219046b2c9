"""Accounting of a device's time, by the cost model, and what could be had of it while objectives are kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

from shared.costs.model import CostModel, StepShape, shape_of
from tideway.bench.workload import PlannedRequest


class StepParts(msgspec.Struct, frozen=True, array_like=True):
    """Parts of a step's time, in seconds."""

    begin_s: float = 0.0
    """What it takes however little it computes; all that no token alone is the reason for."""
    online_s: float = 0.0
    offline_prompts_s: float = 0.0
    offline_decodes_s: float = 0.0


def parts_of(cost: CostModel, starts: list[int], counts: list[int], online_tokens: int, real_s: float) -> StepParts:
    """`starts` and `counts` as in a step's plan, online sequences first, which have `online_tokens` of its tokens. The step
    took `real_s` as a whole."""
    num_online, left = 0, online_tokens
    while left > 0:
        left -= counts[num_online]
        num_online += 1
    whole = shape_of(starts, counts)
    online = shape_of(starts[:num_online], counts[:num_online])
    scale = real_s / cost.predict(whole)
    decodes = whole.num_decodes - online.num_decodes
    decodes_s = cost.decode_s * decodes + cost.decode_context_s * (
        whole.decode_context_tokens - online.decode_context_tokens
    )
    online_s, all_s = _tokens_s(cost, online), _tokens_s(cost, whole)
    return StepParts(
        scale * (cost.predict(whole) - all_s),
        scale * online_s,
        scale * (all_s - online_s - decodes_s),
        scale * decodes_s,
    )


def _tokens_s(cost: CostModel, shape: StepShape) -> float:
    """What tokens add to a step, each for itself."""
    return (
        cost.prefill_token_s * shape.prefill_tokens
        + cost.prefill_attention_s * shape.prefill_attention
        + cost.decode_s * shape.num_decodes
        + cost.decode_context_s * shape.decode_context_tokens
    )


def request_s(cost: CostModel, planned: PlannedRequest) -> float:
    """What all tokens of a request add to steps."""
    prompt, decodes = planned.prompt_tokens, planned.output_tokens - 1
    context = decodes * prompt + decodes * (decodes - 1) // 2
    return _tokens_s(cost, StepShape(prompt, prompt * prompt / 2, decodes, context + decodes))


def fewest_steps(requests: Iterable[tuple[float, int]], ttft_s: float, tpot_s: float) -> int:
    """The least number of steps in which requests (arrival, output tokens) can have each token in time:
    the k-th after the first within `ttft_s + k * tpot_s` of the arrival, one a step. A step may serve all of them.

    Token k asks for k + 1 steps between arrival and due time; taken by due time, with what is missing put at that time, as
    late as it may be, where it serves most (stabbing of intervals; the greedy choice is optimal)."""
    due = sorted(
        (arrival_s + ttft_s + k * tpot_s, arrival_s, k + 1) for arrival_s, tokens in requests for k in range(tokens)
    )
    steps: list[float] = []
    for due_s, arrival_s, count in due:
        missing = count - (len(steps) - bisect_left(steps, arrival_s))
        steps += [due_s] * missing
    return len(steps)


def most_offline_tokens(
    cost: CostModel,
    duration_s: float,
    online: Sequence[PlannedRequest],
    kept: Sequence[PlannedRequest],
    offline: Sequence[PlannedRequest],
    max_step_tokens: int,
    ttft_s: float,
    tpot_s: float,
) -> float:
    """No scheduler has more tokens of `offline`, in its mix of prompts and outputs, in `duration_s`, that has `online` done
    and keeps the objectives of `kept` at each token, as it cannot know which is the last. This one foresees all arrivals, is
    never idle, computes nothing twice, has endless memory, and no more steps than `fewest_steps`, or than all tokens need
    if each takes `max_step_tokens`."""
    num_steps = fewest_steps(((one.at_s, one.output_tokens) for one in kept), ttft_s, tpot_s)
    begin_s = cost.predict(StepShape())
    online_s = sum(request_s(cost, one) for one in online)
    online_tokens = sum(one.prompt_tokens + one.output_tokens - 1 for one in online)
    offline_tokens = sum(one.prompt_tokens + one.output_tokens for one in offline)
    computed_share = 1 - len(offline) / offline_tokens  # the last token of an output is not computed with
    token_s = sum(request_s(cost, one) for one in offline) / offline_tokens
    by_objectives = (duration_s - online_s - begin_s * num_steps) / token_s
    step_share_s = begin_s / max_step_tokens
    by_step_tokens = (duration_s - online_s - step_share_s * online_tokens) / (token_s + computed_share * step_share_s)
    return max(0.0, min(by_objectives, by_step_tokens))
