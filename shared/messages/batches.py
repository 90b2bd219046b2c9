"""Files and batches, and how much offline work may be submitted."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.messages.requests import Count, Seconds


class OfflineDemand(msgspec.Struct, frozen=True, array_like=True):
    """What one batch could submit now."""

    batch_id: str
    tenant: str
    model: str
    wanted_tokens: Count
    """Prompt and output tokens of lines that are ready to be submitted."""
    unfinished_tokens: Count
    """Estimate for all lines that are not finished."""
    slack_s: Seconds
    """Time left to the batch's deadline."""
    weight: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    """Share of its tenant against others."""


class GrantQuery(msgspec.Struct, frozen=True, array_like=True):
    """A gateway asks how many offline tokens it may submit. All its batches at once."""

    gateway_id: str
    demands: list[OfflineDemand]


class OfflineGrant(msgspec.Struct, frozen=True, array_like=True):
    batch_id: str
    tokens: Count
    model: str = ""


class GrantReply(msgspec.Struct, frozen=True, array_like=True):
    grants: list[OfflineGrant]
    """Grants for the demands, in their order."""
    ask_again_s: Seconds
    """Delay after which asking again is worth while."""
    tokens_per_s: dict[str, float] = {}
    """Recent offline throughput of each model over the cluster, for the predicted finish time."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the Files API; its bytes lie in the object bucket under its id."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: float
    """Unix time."""
    expires_s: float | None = None
    tenant: str = ""
    is_deleted: bool = False


class BatchProblem(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchWait(msgspec.Struct, frozen=True):
    """Why a batch, or some of its lines, wait."""

    code: str
    """tokens_per_minute | storage | scheduler"""
    message: str
    """The same in words."""


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as the Batch API shows it; written by the gateway that owns it. Times are Unix seconds."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    deadline_s: float
    status: str
    created_s: float
    metadata: dict[str, str] = {}
    model: str = ""
    errors: list[BatchProblem] = []
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    output_file_id: str = ""
    error_file_id: str = ""
    status_s: dict[str, float] = {}
    """Time at which each status was entered."""
    predicted_finish_s: float | None = None
    output_expires_after_s: int | None = None
    reserved_bytes: int = 0
    """Set aside for all its results, in the store of results, before it begins."""
    waiting_for: BatchWait | None = None


class BatchLineResult(msgspec.Struct, frozen=True):
    """The answer to one line, written once (`create`): a line whose key exists is done."""

    is_success: bool
    line: bytes
    """The JSON line of the output or error file."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
