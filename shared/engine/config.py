"""Options of an engine: what the scenarios, recordings and settings of instances say of it."""

from __future__ import annotations

import msgspec

from shared.policies.prompt_lookup import LookupSettings


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does with its memory and policies; seconds, and shares of its KV pool."""

    steps_in_flight: int = 2
    max_waiting: int = 1024
    interruption: str = "suspend"
    """Interruption of offline steps by online arrivals: suspend | discard | off."""
    mix_phases: bool = True
    num_host_merged: int = 0
    """Merged blocks of host memory for checkpoints."""
    prefetch: bool = True
    """Whether sequences are restored beside other steps of the model, not before them."""
    ttft_s: float = 1.5
    """Objective where model and request name none; likewise the next one."""
    tpot_s: float = 0.11
    migration_cooldown_s: float = 1.0
    """How long a request stays that moved, or was to."""
    high_priority_load: float = 0.0
    """Share that is used beside requests of high priority; 0: from the cost model."""
    fits_costs: bool = True
    """Whether step times are learnt from the steps where no cost model is set; else only the token budget bounds a step."""
    least_share: float = 0.25
    """Share that is divided evenly over the models and kept for their online requests."""
    num_stages: int = 1
    """Stages of the pipeline that computes a step. With several none is interrupted, and as many should be in flight."""
    give_up_s: float = 0.0
    """Time without a turn beside online work after which a model's offline requests are given up, for somebody to place them
    again; 0: they wait."""
    lookup: LookupSettings = LookupSettings()
    """Which tokens are guessed; pipelines guess none."""
    max_drafts: int = 5
    """Most tokens that a draft model guesses for a sequence in a step; pipelines guess none."""
    backup_share: float = 0.5
    """Share of host memory that copies for other instances may take."""
    offload: str = "off"
    """Tier to which blocks of ended requests go before they are evicted: off | host | disk (through host memory)."""
    offload_start: float = 0.75
    """Share of the KV pool, and of host memory, with something in it from which on they do."""
