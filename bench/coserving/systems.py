"""What is compared: one engine, put together differently by its configuration alone."""

from __future__ import annotations

import msgspec

from shared.engine.recording import Configuration


class System(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str
    co_serving: str
    """As `Configuration` has it, and so are the next ones."""
    interruption: str = "off"
    checkpoints: bool = False
    """Has host memory for them."""
    prefetch: bool = False
    step_tokens: int = 0
    """At most; 0: as the setup says."""

    @property
    def serves_offline(self) -> bool:
        return self.co_serving != "online_only"

    def configuration(
        self,
        *,
        num_merged: int,
        num_rows: int,
        num_host_merged: int,
        max_step_tokens: int,
        steps_in_flight: int,
        ordering: str,
        ttft_s: float,
        tpot_s: float,
    ) -> Configuration:
        return Configuration(
            num_merged=num_merged,
            num_rows=num_rows,
            ordering=ordering,
            token_budget=self.step_tokens or max_step_tokens,
            steps_in_flight=steps_in_flight,
            co_serving=self.co_serving,
            interruption=self.interruption,
            num_host_merged=num_host_merged if self.checkpoints else 0,
            prefetch=self.prefetch,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )


ONLINE_ONLY = System(name="online_only", description="online requests alone", co_serving="online_only")
VLLM_PP = System(
    name="vllm++",
    description="online first, offline in all that the token budget leaves; who is preempted computes again",
    co_serving="priority_only",
)
SCHEDULER = System(
    name="scheduler",
    description="SLO token budget; an arrival stops an offline step, which is thrown away",
    co_serving="slo",
    interruption="discard",
)
CHECKPOINT = System(
    name="+checkpoint",
    description="and incremental checkpoints in host memory; steps wait for restores",
    co_serving="slo",
    interruption="discard",
    checkpoints=True,
)
PREFETCH = System(
    name="+prefetch",
    description="and restores beside other steps",
    co_serving="slo",
    interruption="discard",
    checkpoints=True,
    prefetch=True,
)
TIDEWAY = System(
    name="tideway",
    description="and stopped steps are suspended and go on later: everything",
    co_serving="slo",
    interruption="suspend",
    checkpoints=True,
    prefetch=True,
)

ABLATION = (VLLM_PP, SCHEDULER, CHECKPOINT, PREFETCH, TIDEWAY)
"""Each adds one thing to the one before: ConServe's figure 8, and suspension."""
