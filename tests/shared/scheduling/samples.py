"""Messages to test with: requests, registry entries and load reports with plain defaults."""

from __future__ import annotations

import math

from shared.messages.cluster import (
    FinishedStats,
    InstanceInfo,
    LoadedModel,
    LoadReport,
    MigrationOutcome,
    ModelLoad,
    NextMove,
)
from shared.messages.requests import (
    GenerationRequest,
    HeldRequest,
    Priority,
    RequestClass,
    SamplingParams,
    pack_tokens,
)

BLOCK_SIZE = 16
BLOCKS_PER_MERGED = 4


def make_request(
    request_id: str,
    *,
    model: str = "m",
    num_prompt: int = 10,
    max_tokens: int = 20,
    gateway_id: str = "g0",
    online: bool = True,
    high: bool = False,
    timeout_s: float = 60.0,
    waited_s: float = 0.0,
    epoch: int = 0,
    num_prior: int = 0,
    traceparent: str = "",
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        gateway_id=gateway_id,
        model=model,
        prompt=pack_tokens(list(range(num_prompt))),
        sampling=SamplingParams(max_tokens=max_tokens),
        request_class=RequestClass.ONLINE if online else RequestClass.OFFLINE,
        priority=Priority.HIGH if high else Priority.NORMAL,
        timeout_s=timeout_s,
        epoch=epoch,
        prior=pack_tokens(list(range(num_prior))),
        waited_s=waited_s,
        traceparent=traceparent,
    )


def make_info(
    instance_id: str,
    *models: str,
    incarnation: str = "1",
    state: str = "ready",
    model_state: str = "ready",
    num_merged: int = 100,
    max_model_len: int = 1024,
    kv_address: str = "here",
    lacks: tuple[str, ...] = (),
    block_size: int = BLOCK_SIZE,
) -> InstanceInfo:
    loaded = [
        LoadedModel(
            name=name,
            state=model_state,
            max_model_len=max_model_len,
            block_size=block_size,
            blocks_per_merged=BLOCKS_PER_MERGED,
        )
        for name in models or ("m",)
    ]
    return InstanceInfo(
        instance_id=instance_id,
        incarnation=incarnation,
        node_id="node",
        state=state,
        models=loaded,
        num_merged=num_merged,
        kv_address=kv_address,
        lacks=lacks,
    )


def make_report(
    instance_id: str,
    sequence: int,
    *,
    incarnation: str = "1",
    freeness: float = math.inf,
    free_merged: float = 100.0,
    num_running: int = 0,
    waiting: dict[str, int] | None = None,
    offline: dict[str, int] | None = None,
    room: int | dict[str, int] = 100_000,
    admitted: list[str] | None = None,
    ended: list[str] | None = None,
    finished: list[FinishedStats] | None = None,
    freeness_high: float | None = None,
    migration_freeness: float = math.inf,
    num_high: int = 0,
    migrations: list[MigrationOutcome] | None = None,
    migrated_in: list[HeldRequest] | None = None,
    prompts_s: float = 0.0,
    token_s: float = 0.0,
    running: dict[str, int] | None = None,
    decode_s: float = 0.0,
    fetch_token_s: float = 0.0,
    cache_held: bytes = b"",
    cache_lost: bytes = b"",
    next_moves: tuple[NextMove, ...] = (),
) -> LoadReport:
    """`waiting`: all that wait, of which `offline` are offline; `room` for offline tokens, per model or of each alike;
    `token_s`: predicted, of a token of a prompt; `running`: of each model, all of them online; `decode_s`: of a step of
    one of them."""
    loads = []
    for model, num in ({"m": 0, "n": 0} | (waiting or {})).items():
        num_offline = (offline or {}).get(model, 0)
        tokens = room if isinstance(room, int) else room.get(model, 0)
        loads.append(
            ModelLoad(
                model=model,
                num_running=(running or {}).get(model, 0),
                num_waiting=num,
                num_offline=num_offline,
                num_waiting_online=num - num_offline,
                offline_room_tokens=tokens,
                prompt_cost=(token_s, 0.0),
                decode_cost=(decode_s, 0.0),
                fetch_token_s=fetch_token_s,
            )
        )
    return LoadReport(
        instance_id=instance_id,
        incarnation=incarnation,
        sequence=sequence,
        dispatch_freeness=freeness,
        free_merged=free_merged,
        num_running=num_running + sum((running or {}).values()),
        models=loads,
        admitted=admitted or [],
        ended=ended or [],
        finished=finished or [],
        dispatch_freeness_high=freeness if freeness_high is None else freeness_high,
        migration_freeness=migration_freeness,
        cache_held=cache_held,
        cache_lost=cache_lost,
        next_moves=next_moves,
        num_high=num_high,
        migrations=migrations or [],
        migrated_in=migrated_in or [],
        prompts_s=prompts_s,
    )
