"""An instance's engine and executor, as its settings and its plan say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.worker.instance.engine_loop import COMPUTE_NICENESS
from services.worker.node.machine import free_memory_bytes
from services.worker.ranks.messages import SetUp
from services.worker.ranks.starting import RankProcess, join_ranks
from shared.engine.engine import Engine
from shared.engine.load import GIVE_UP_S
from shared.engine.recording import Configuration, recorded
from shared.messages.cluster import InstancePlan
from shared.policies.catalogue import ORDERING_POLICIES, TOKEN_BUDGET_POLICIES
from shared.policies.prompt_lookup import LookupSettings
from shared.recording import file_writer
from shared.runtime.settings import InstanceSettings, SettingsError, check_part

if TYPE_CHECKING:
    from services.worker.executor.executor import Executor
    from services.worker.kv_disk.store import DiskStore
    from services.worker.ranks.group_executor import GroupExecutor

log = logging.getLogger(__name__)

WINDOW_BYTES = 1 << 20
"""Bytes of host memory that the ranks of GPUs share: KV blocks that move to other instances pass through it."""


def pool_merged(plan: InstancePlan) -> int:
    """Merged blocks of the KV pool."""
    return max(1, plan.pool_bytes // plan.merged_bytes)


def host_pool_merged(settings: InstanceSettings, plan: InstancePlan, device: str) -> int:
    """Merged blocks of host memory for checkpoints. Left to us: as many as the KV pool has, within a quarter of the memory
    that is free (on CPU: when the pool will be full)."""
    wanted = settings.host_memory_bytes
    if wanted < 0:
        free = free_memory_bytes() - (plan.pool_bytes if device == "cpu" else 0)
        wanted = min(plan.pool_bytes, max(0, free) // 4)
    return wanted // plan.merged_bytes


def offload_of(settings: InstanceSettings, num_host_merged: int) -> str:
    """`EngineConfig.offload`. Raises `SettingsError` for settings that contradict each other."""
    offload, folder = settings.kv_offload, settings.kv_disk_folder
    if offload == "disk" and not folder:
        raise SettingsError("TIDEWAY_KV_OFFLOAD=disk needs a folder: set TIDEWAY_KV_DISK_FOLDER")
    if offload != "disk" and folder:
        message = "TIDEWAY_KV_DISK_FOLDER is set, but nothing is written to it"
        raise SettingsError(f"{message}: set TIDEWAY_KV_OFFLOAD=disk, not {offload}")
    if offload != "off" and settings.host_memory_bytes == 0:
        message = f"TIDEWAY_KV_OFFLOAD={offload} needs host memory, through which all blocks pass"
        raise SettingsError(f"{message}, but TIDEWAY_HOST_MEMORY_BYTES=0")
    if offload != "off" and not num_host_merged:
        log.warning("KV blocks of ended requests are not kept: there is no host memory for them")
        return "off"
    return offload


def open_disk(settings: InstanceSettings) -> DiskStore | None:
    """The folder for KV blocks; None: there is to be none. Raises `SettingsError` where it cannot be used."""
    from services.worker.kv_disk.store import DiskStore

    if settings.kv_offload != "disk":
        return None
    try:
        return DiskStore(Path(settings.kv_disk_folder), settings.kv_disk_bytes)
    except OSError as error:
        message = f"TIDEWAY_KV_DISK_FOLDER={settings.kv_disk_folder!r} cannot be used"
        raise SettingsError(f"{message}: {error.strerror or error}") from None


def max_step_tokens(settings: InstanceSettings) -> int:
    """`settings.device` is a device, not "auto"."""
    return settings.token_budget or (8192 if settings.device == "cuda" else 512)


def build_engine(
    settings: InstanceSettings, num_merged: int, device: str, num_host_merged: int = 0, num_stages: int = 1
) -> Engine:
    """The engine as settings say; recorded where they name a file. Raises `SettingsError`."""
    on_cuda = device == "cuda"
    check_part("TIDEWAY_ORDER_POLICY", settings.order_policy, ORDERING_POLICIES)
    check_part("TIDEWAY_CO_SERVING", settings.co_serving, TOKEN_BUDGET_POLICIES)
    for name, value, known in (
        ("INTERRUPTION", settings.interruption, ("suspend", "discard", "off")),
        ("PROFILE", settings.profile, ("auto", "live", "off")),
    ):
        if value not in known:
            raise SettingsError(f"TIDEWAY_{name}={value!r}: expected one of {', '.join(known)}")
    lookup = LookupSettings(settings.prompt_lookup, settings.prompt_lookup_min, settings.prompt_lookup_max)
    if lookup.min_ngram > lookup.max_ngram:
        message = f"TIDEWAY_PROMPT_LOOKUP_MIN={lookup.min_ngram} is more than TIDEWAY_PROMPT_LOOKUP_MAX"
        raise SettingsError(f"{message}={lookup.max_ngram}")
    configuration = Configuration(
        num_merged=num_merged,
        num_rows=settings.max_running,
        ordering=settings.order_policy,
        token_budget=max_step_tokens(settings),
        steps_in_flight=settings.steps_in_flight or (num_stages if num_stages > 1 else 2 if on_cuda else 1),
        co_serving=settings.co_serving,
        interruption=settings.interruption,
        mix_phases=settings.mix_phases,
        num_host_merged=num_host_merged,
        checkpoint_start=settings.checkpoint_start,
        prefetch=settings.prefetch,
        ttft_s=settings.ttft_ms / 1000,
        tpot_s=settings.tpot_ms / 1000,
        migration_cooldown_s=settings.migration_cooldown_s,
        give_up_s=GIVE_UP_S,
        high_priority_load=settings.high_priority_load,
        fits_costs=settings.profile != "off",
        least_share=settings.least_share,
        num_stages=num_stages,
        lookup=lookup,
        max_drafts=settings.draft_tokens,
        backup_share=settings.kv_backup_share,
        offload=offload_of(settings, num_host_merged),
        offload_start=settings.kv_offload_start,
    )
    if settings.record_file:
        path = f"{settings.record_file}.{settings.instance_id}"
        try:
            return recorded(configuration, file_writer(path, settings.record_max_bytes))
        except OSError as error:
            raise SettingsError(f"TIDEWAY_RECORD_FILE: {path!r} cannot be written: {error}") from None
    return configuration.build()


def make_executor(
    settings: InstanceSettings, plan: InstancePlan, num_host_merged: int, other_ranks: Sequence[RankProcess]
) -> Executor | GroupExecutor:
    """Makes the executor of the plan's devices, when all are there (blocking). `settings.device` is a device, not
    "auto"; `other_ranks`: started for the plan's group. Raises `GroupError`."""
    from services.worker.executor.executor import Executor

    merged_bytes = plan.merged_bytes // plan.group.num_ranks
    if not other_ranks:
        return Executor(
            settings.device,
            pool_merged(plan),
            merged_bytes,
            settings.max_running,
            num_host_merged=num_host_merged,
            deterministic=settings.deterministic,
            host_weights_bytes=settings.host_weights_bytes,
        )
    setup = SetUp(
        device=settings.device,
        num_merged=pool_merged(plan),
        merged_bytes=merged_bytes,
        num_rows=settings.max_running,
        deterministic=settings.deterministic,
        host_weights_bytes=settings.host_weights_bytes
        // (plan.group.num_ranks if settings.host_weights_bytes > 0 else 1),
        num_host_merged=num_host_merged,
        num_window_merged=0 if settings.device == "cpu" else -(-WINDOW_BYTES // plan.merged_bytes),
        num_threads=settings.num_threads,
        niceness=COMPUTE_NICENESS if settings.device == "cpu" else 0,
        log_level=settings.log_level,
        log_format=settings.log_format,
        num_stages=plan.group.num_stages,
    )
    return join_ranks(other_ranks, setup)
