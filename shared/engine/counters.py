"""What one engine has done since it was made; all only grow. Metrics are made of these."""

from __future__ import annotations

from collections import Counter, defaultdict

from shared.policies.tenant_labels import TenantLabels


class EngineCounters:
    """Blocks are counted per model, because a block's bytes are the model's."""

    def __init__(self) -> None:
        self.preemptions: Counter[tuple[str, str]] = Counter()
        """By cause (memory, rows, failure) and mode (checkpointed, recompute). `checkpointed`: all filled blocks had host
        copies, so at most the partly filled last block is computed again."""
        self.steps_suspended = 0
        self.steps_resumed = 0
        self.steps_discarded = 0
        """Suspended steps that were given up; their tokens are computed again."""
        self.checkpointed_blocks: Counter[str] = Counter()
        self.restored_blocks: Counter[str] = Counter()
        self.dropped_checkpoint_blocks: Counter[str] = Counter()
        """Given up because host memory was full."""
        self.offloaded_blocks: Counter[str] = Counter()
        """Blocks of ended requests, copied to host memory."""
        self.written_blocks: Counter[str] = Counter()
        """Blocks that went on from host memory to disk."""
        self.read_blocks: Counter[str] = Counter()
        """Blocks that came back from disk."""
        self.unreadable_blocks: Counter[str] = Counter()
        """Blocks that were not on disk any more, or not as they were written."""
        self.cached_tokens: Counter[str] = Counter()
        """Tokens of prompts that were not computed, by the tier that had them: device, host, disk."""
        self.backed_up_blocks: Counter[str] = Counter()
        """Blocks of other instances' requests, copied into the host memory of this one."""
        self.rescued_tokens: Counter[str] = Counter()
        """Known tokens of requests that were placed here after another instance had lost them: `kept`, whose KV was found
        here, and `recomputed`."""
        self.moved_blocks: Counter[str] = Counter()
        """Within the device, so that another model could have a merged block."""
        self.freed_merged = 0
        """Merged blocks that were freed by that."""
        self.discarded_tokens = 0
        """Lost with them: tokens of the step times the share of its layers that were done."""
        self.recomputed_tokens = 0
        """Computed once more after a preemption."""
        self.recomputed_partial_tokens = 0
        """Part of these: tokens of partly filled last blocks, which are never checkpointed."""
        self.online_tokens = 0
        """Computed (prompt and output) for online requests."""
        self.harvested_tokens = 0
        """Computed for offline requests."""
        self.unserved: Counter[str] = Counter()
        """Offline requests of each model that were given up because online work left them no turn."""
        self.without_token: Counter[str] = Counter()
        """Requests of each model that ended since their logits were not finite."""
        self.drafts: Counter[str] = Counter()
        """By model: how often tokens of a sequence were guessed in a step, how many, and how many of them were kept."""
        self.drafted_tokens: Counter[str] = Counter()
        self.accepted_tokens: Counter[str] = Counter()
        self._tenant_labels = TenantLabels()
        self.tenant_service_s: defaultdict[str, float] = defaultdict(float)
        """By a tenant's label; a step's time is divided over those in it."""
        self.tenant_tokens: Counter[tuple[str, str]] = Counter()
        """Computed, by a tenant's label and phase (prefill, decode)."""

    def serve(self, tenant: str, service_s: float, num_tokens: int, *, is_prefill: bool) -> None:
        """Counts for the tenant."""
        label = self._tenant_labels.of(tenant)
        self.tenant_service_s[label] += service_s
        self.tenant_tokens[label, "prefill" if is_prefill else "decode"] += num_tokens

    @property
    def num_preemptions(self) -> int:
        return self.preemptions.total()
