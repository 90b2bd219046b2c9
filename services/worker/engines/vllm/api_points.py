"""The points of vLLM that the adapter and its scheduler use, checked when they start.

vLLM's scheduler is no public interface and may change with any version. Where a point is not what it was, the adapter
falls back to the stock scheduler, with fewer capabilities, or does not start, and says which point it was.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import NamedTuple

KNOWN_VERSIONS = ("0.32.",)
"""Beginnings of the versions with which this was tried."""


class Point(NamedTuple):
    module: str
    path: str
    """Attributes, with dots between."""
    parameters: tuple[str, ...] = ()
    """Names that it takes, among others: parameters of a function, or fields of a struct."""


CLIENT = (
    Point("vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config"),
    Point(
        "vllm.v1.engine.core_client", "EngineCoreClient.make_async_mp_client",
        ("vllm_config", "executor_class", "log_stats"),
    ),
    Point("vllm.v1.engine.core_client", "AsyncMPClient.get_output_async"),
    Point("vllm.v1.engine.core_client", "AsyncMPClient.add_request_async", ("request",)),
    Point("vllm.v1.engine.core_client", "AsyncMPClient.abort_requests_async", ("request_ids",)),
    Point("vllm.v1.engine.core_client", "AsyncMPClient.reset_prefix_cache_async"),
    Point("vllm.v1.engine.core_client", "AsyncMPClient.add_lora_async", ("lora_request",)),
    Point("vllm.lora.request", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    Point(
        "vllm.v1.engine", "EngineCoreRequest",
        (
            "request_id", "prompt_token_ids", "sampling_params", "pooling_params", "arrival_time", "lora_request",
            "cache_salt", "priority",
        ),
    ),
    Point(
        "vllm.v1.engine", "EngineCoreOutput",
        (
            "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "finish_reason",
            "events", "prefill_stats",
        ),
    ),
    Point("vllm.v1.executor", "Executor.get_class"),
)  # fmt: skip
"""Without which nothing can be hosted."""

SCHEDULER = (
    Point("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Point("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", ("request", "timestamp")),
    Point("vllm.v1.core.sched.scheduler", "Scheduler._handle_blocked_waiting_request", ("request",)),
    Point("vllm.v1.core.sched.scheduler", "Scheduler._is_blocked_waiting_status"),
    Point("vllm.v1.core.sched.scheduler", "Scheduler._request_blocks_can_be_freed", ("request",)),
    Point("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    Point("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("request",)),
    Point("vllm.v1.core.sched.scheduler", "Scheduler.finish_requests"),
    Point("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks"),
    Point("vllm.v1.core.block_pool", "BlockPool.get_new_blocks", ("num_blocks",)),
    Point("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    Point(
        "vllm.v1.core.block_pool",
        "BlockPool.cache_full_blocks",
        ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"),
    ),
    Point("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids"),
    Point("vllm.v1.core.kv_cache_manager", "KVCacheManager.evict_blocks", ("block_ids",)),
    Point("vllm.v1.outputs", "ModelRunnerOutput", ("req_ids", "req_id_to_index")),
    Point("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", ("method",)),
)
"""Without which the stock scheduler runs."""


IMAGES = (
    Point(
        "vllm.v1.engine.input_processor", "InputProcessor.process_inputs",
        ("request_id", "prompt", "params", "supported_tasks"),
    ),
    Point("vllm.multimodal.media.image", "ImageMediaIO.load_bytes", ("data",)),
    Point("vllm.v1.engine", "EngineCoreRequest", ("mm_features",)),
)  # fmt: skip
"""Without which prompts have no images."""


def missing(points: Iterable[Point]) -> list[str]:
    """What is not as expected, a phrase each."""
    found = []
    for point in points:
        name = f"{point.module}.{point.path}"
        try:
            thing: object = importlib.import_module(point.module)
            for attribute in point.path.split("."):
                thing = getattr(thing, attribute)
        except (ImportError, AttributeError):
            found.append(f"{name} is not there")
            continue
        if point.parameters:
            has = _names(thing)
            if lacking := [one for one in point.parameters if one not in has]:
                found.append(f"{name} has no {', '.join(lacking)}")
    return found


def _names(thing: object) -> frozenset[str]:
    fields = getattr(thing, "__struct_fields__", None)
    if fields is not None:
        return frozenset(fields)
    return frozenset(inspect.signature(thing).parameters)  # type: ignore[arg-type]  # what is no callable has no parameters
