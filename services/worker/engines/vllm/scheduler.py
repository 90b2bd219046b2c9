"""vLLM's scheduler with Tideway's order: offline work fills what online objectives leave, and gives way at the next step.

Loaded in the engine's process by its name (`scheduler_cls`); no file of vLLM is changed. What is decided is decided by
`shared/engines/harvest.py`; here is what of vLLM's state it is told, and how it is carried out:

    victims    leave `running` by `_preempt_request`, before the step
    held       are passed over by `next_decode_eligible_step`, with which vLLM staggers decodes of pipelines
    max_tokens `max_num_scheduled_tokens`, for this step
    patience_s goes to the worker with the step, which may be given up there (`interrupting.py`)
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from services.worker.engines.vllm.extensions import install
from services.worker.engines.vllm.interrupting import INTERRUPTED, WATCH, Rewinding, Watch
from services.worker.engines.vllm.staging import Staging
from shared.costs.live import LiveCosts
from shared.costs.model import StepShape, shape_of
from shared.engines.harvest import MOST_INTERRUPTIONS, SequenceView, StepShare, Victim, decide, victims
from shared.engines.messages import OFFLINE_PRIORITY
from shared.policies.slo_budget import SloTokenBudget
from shared.scheduling.queue import Outflow

STATS = "tideway"
"""Key under which a step's shape travels with vLLM's statistics."""
ARRIVALS_WINDOW_S = 30.0


install()


class _Harvesting:
    """Mixed into either of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        told = (self.vllm_config.additional_config or {}).get(STATS, {})  # type: ignore[attr-defined]
        self._ttft_s = float(told.get("ttft_s") or math.inf)
        self._tpot_s = float(told.get("tpot_s") or math.inf)
        self._most_tokens: int = self.max_num_scheduled_tokens  # type: ignore[has-type]
        self._policy = SloTokenBudget(self._most_tokens)
        self._costs = LiveCosts()
        self._first_token_s: dict[str, float] = {}
        self._planned: tuple[StepShape, float] | None = None
        self._last: tuple[StepShape, float] | None = None
        """The last step: its shape, and the seconds that it took."""
        self._arrivals = Outflow(ARRIVALS_WINDOW_S)
        """Online requests."""
        self._step_share = StepShare()
        self._last_number = 0
        """The greatest number of an online request that came."""
        self._num_interruptions = 0
        """Interruptions since then."""
        self._is_interrupted = False
        """Whether the last step was."""
        self.tideway_staging: Staging | None = None
        """None: KV does not move."""
        self.tideway_rewinding: Rewinding | None = None
        """None: steps cannot be interrupted."""

    # ------------------------------------------------------------------------------------------------ a step

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        self._make_room(now)
        self.running: list[Any]
        self.running.sort(key=lambda one: (one.priority, one.arrival_time))
        waiting = sorted((*self.kv_holding_waiting, *self.waiting), key=lambda one: (one.priority, one.arrival_time))  # type: ignore[attr-defined]
        views = [self._view(one, now, is_running=True) for one in self.running]
        views += [self._view(one, now, is_running=False) for one in waiting if not self._is_blocked(one)]
        cost = self._costs.cost_model if self._costs.is_known else None
        rate = None if self.tideway_rewinding is None else self._arrivals.per_second(now)
        share = self._step_share.share
        decision = decide(views, self._policy, cost, now, self._most_tokens, self._ttft_s, rate, share)
        held = set(decision.held)
        for one in self.running:
            if one.request_id in held:
                one.next_decode_eligible_step = self.current_step + 2  # type: ignore[attr-defined]
        self.max_num_scheduled_tokens = decision.max_tokens
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = self._most_tokens
        if decision.patience_s < math.inf and self.tideway_rewinding is not None:
            self.tideway_rewinding.note(output.num_scheduled_tokens)
            setattr(output, WATCH, Watch(self._last_number, decision.patience_s))
        self._note(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if number := getattr(model_runner_output, INTERRUPTED, 0):
            scheduler_output = self._rewound(scheduler_output, number)
        elif hasattr(scheduler_output, WATCH):
            self._step_share.on_done()
        now = time.monotonic()
        if self._planned is not None and scheduler_output.total_num_scheduled_tokens:
            shape, planned_s = self._planned
            self._last = (shape, now - planned_s)
            self._costs.observe(shape, now - planned_s)
            self._planned = None
        made = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for key in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(key)  # type: ignore[attr-defined]
            if request is None:
                self._first_token_s.pop(key, None)
            elif request.num_output_tokens and key not in self._first_token_s:
                self._first_token_s[key] = now
        return made

    def _rewound(self, scheduler_output: Any, number: int) -> Any:
        """The output of `schedule` as if the step had had nothing in it."""
        assert self.tideway_rewinding is not None
        self.tideway_rewinding.rewind(scheduler_output.num_scheduled_tokens)
        self._planned, self._is_interrupted = None, True
        self._step_share.on_lost()
        self._num_interruptions += 1
        if self._num_interruptions >= MOST_INTERRUPTIONS:
            self._last_number = number  # vLLM has refused it, or it is on its way for too long
        return dataclasses.replace(scheduler_output, num_scheduled_tokens={})

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        last, self._last = self._last, None
        is_interrupted, self._is_interrupted = self._is_interrupted, False
        if stats is not None and stats.kv_connector_stats is None:
            if last is not None:
                stats.kv_connector_stats = {STATS: [*last[0], last[1]]}
            elif is_interrupted:
                stats.kv_connector_stats = {STATS: []}
        return stats

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        found = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        for key in self._first_token_s.keys() - self.requests.keys():  # type: ignore[attr-defined]
            del self._first_token_s[key]
        return found

    def add_request(self, request: Any) -> None:
        """One that comes with KV has it from the beginning."""
        told = _told(request)
        if (number := int(told.get("number") or 0)) > self._last_number:
            self._last_number, self._num_interruptions = number, 0
        if request.priority < OFFLINE_PRIORITY:
            self._arrivals.count(time.monotonic())
        if (slots := told.get("slots")) and self.tideway_staging is not None:
            self.tideway_staging.bring_in(request, list(slots), int(told["num_computed"]))
        super().add_request(request)  # type: ignore[misc]

    # --------------------------------------------------------------------------------------------- what it sees

    def _view(self, request: Any, now: float, *, is_running: bool) -> SequenceView:
        computed = request.num_computed_tokens
        return SequenceView(
            key=request.request_id,
            is_online=request.priority < OFFLINE_PRIORITY,
            is_running=is_running,
            num_new=max(1, request.num_tokens_with_spec + request.num_output_placeholders - computed),
            context=computed,
            num_output=request.num_output_tokens,
            arrived_s=now - max(0.0, time.time() - request.arrival_time),
            first_token_s=self._first_token_s.get(request.request_id),
            ttft_s=self._objective(request, "ttft_s", self._ttft_s),
            tpot_s=self._objective(request, "tpot_s", self._tpot_s),
        )

    def _objective(self, request: Any, name: str, default: float) -> float:
        return float(_told(request).get(name) or default)

    def _is_blocked(self, request: Any) -> bool:
        return bool(self._is_blocked_waiting_status(request.status))  # type: ignore[attr-defined]

    def _note(self, output: Any) -> None:
        """What the step is, as the cost model has it."""
        counts = output.num_scheduled_tokens
        if not counts:
            self._planned = None
            return
        starts = [self.requests[key].num_computed_tokens - count for key, count in counts.items()]  # type: ignore[attr-defined]
        self._planned = (shape_of([max(0, one) for one in starts], list(counts.values())), time.monotonic())

    # --------------------------------------------------------------------------------------------- who gives way

    def _make_room(self, now: float) -> None:
        wanting = [
            one
            for one in (*self.kv_holding_waiting, *self.waiting)  # type: ignore[attr-defined]
            if one.priority < OFFLINE_PRIORITY and not self._is_blocked(one)
        ]
        if not wanting:
            return
        wanting.sort(key=lambda one: (one.priority, one.arrival_time))
        block_size: int = self.block_size  # type: ignore[attr-defined]
        offline = {
            one.request_id: one
            for one in self.running
            if one.priority >= OFFLINE_PRIORITY
            and one.num_in_flight_tokens == 0
            and self._request_blocks_can_be_freed(one)  # type: ignore[attr-defined]
        }
        found = victims(
            [-(-(one.num_tokens - one.num_computed_tokens) // block_size) + 1 for one in wanting],
            self.max_num_active_reqs - len(self.running),  # type: ignore[attr-defined]
            self.kv_cache_manager.block_pool.get_num_free_blocks(),  # type: ignore[attr-defined]
            [
                Victim(key, -(-one.num_computed_tokens // block_size), one.num_computed_tokens)
                for key, one in offline.items()
            ],
        )
        for key in found:
            self.running.remove(offline[key])
            self._preempt_request(offline[key], now)  # type: ignore[attr-defined]

    # -------------------------------------------------------------------------------------------------- grammars

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """A grammar follows the output so far, which came as the prompt's end."""
        is_ready = bool(super()._handle_blocked_waiting_request(request))  # type: ignore[misc]
        num_fed = int(_told(request).get("num_fed") or 0)
        if is_ready and num_fed and request.use_structured_output and not getattr(request, "tideway_fed", False):
            request.tideway_fed = True
            tokens = list(request.prompt_token_ids[-num_fed:])
            if not request.structured_output_request.grammar.accept_tokens(request.request_id, tokens):
                raise RuntimeError(f"{request.request_id}: its output so far does not follow its grammar")
        return is_ready


def _told(request: Any) -> dict[str, Any]:
    params = request.sampling_params
    extra = params.extra_args if params is not None else request.pooling_params.extra_kwargs
    found: dict[str, Any] = (extra or {}).get("tideway", {})
    return found


class HarvestingScheduler(_Harvesting, Scheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    pass


class HarvestingAsyncScheduler(_Harvesting, AsyncScheduler):  # type: ignore[misc]
    pass
