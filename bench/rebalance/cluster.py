"""What instances run on (step times, KV pool, link; none of it is measured by this benchmark), and a cluster of instances of
one kind with the real scheduler's core.

Instances are as live ones with their defaults: merged blocks of several KV blocks, host memory for as many checkpoints as
the pool has blocks, two steps in flight on a GPU, offline requests within the objectives that are given up where they get no
turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np

from shared.costs.model import CostModel
from shared.engine.load import GIVE_UP_S
from shared.engine.memory.slab import blocks_per_merged, choose_merged_bytes
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.placement import hardware
from shared.placement.facts import SHAPES
from shared.placement.hardware import cost_model
from shared.placement.planner import LEAST_MERGED_BYTES
from shared.runtime.settings import InstanceSettings, SchedulerSettings
from shared.simulation import fleet
from shared.simulation.batches import Batches
from shared.simulation.disk import VirtualDisk
from shared.simulation.gateway import MODEL, Gateway, Job, Record
from shared.simulation.migration import FleetMigrations
from shared.simulation.scaling import Scaling

LINES_RPS = 40.0
"""Lines of a batch for each second of arrivals; more than any cluster gets done."""
LINE_TOKENS = (1024, 128)
"""Prompt and answer, where the device takes so much."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: Literal["cpu", "cuda"]
    cost_model: CostModel
    block_size: int
    num_blocks: int
    """KV blocks that the pool of one instance has memory for."""
    num_rows: int
    max_step_tokens: int
    block_bytes: int
    bandwidth_bytes_s: float
    """Bandwidth of the link between two instances."""
    max_length: int
    """Tokens of a prompt, and of an output, at most."""
    high_load: float
    """Share of the pool up to which an instance with requests of high priority is loaded."""
    ttft_s: float
    tpot_s: float

    @property
    def merged_bytes(self) -> int:
        return choose_merged_bytes([self.block_bytes], at_least=LEAST_MERGED_BYTES[self.kind])

    @property
    def blocks_per_merged(self) -> int:
        return blocks_per_merged(self.merged_bytes, self.block_bytes)

    @property
    def num_merged(self) -> int:
        return self.num_blocks // self.blocks_per_merged

    @property
    def pool_tokens(self) -> int:
        return self.num_merged * self.blocks_per_merged * self.block_size

    def simulated(self, order: str) -> fleet.Device:
        configuration = Configuration(
            num_merged=self.num_merged, num_rows=self.num_rows, ordering=order, token_budget=self.max_step_tokens,
            steps_in_flight=2 if self.kind == "cuda" else 1, max_waiting=1 << 20, num_host_merged=self.num_merged,
            ttft_s=self.ttft_s, tpot_s=self.tpot_s, high_priority_load=self.high_load, give_up_s=GIVE_UP_S,
        )  # fmt: skip
        return fleet.Device(
            configuration=configuration, merged_bytes=self.merged_bytes, bandwidth_bytes_s=self.bandwidth_bytes_s,
            rate_share=InstanceSettings(device=self.kind).copy_rate_share,
        )  # fmt: skip

    def models(self, num: int) -> list[fleet.Model]:
        """`num` of one shape, as fine-tuned ones are."""
        return [
            fleet.Model(
                shape=ModelShape(
                    name=name, block_size=self.block_size, blocks_per_merged=self.blocks_per_merged,
                    max_model_len=1 << 20, num_layers=self.cost_model.num_layers,
                ),
                cost_model=self.cost_model,
            )
            for name in model_names(num)
        ]  # fmt: skip


def model_names(num: int) -> list[str]:
    return [MODEL, *(f"{MODEL}-{number}" for number in range(1, num))]


A10 = Device(
    name="a10",
    kind="cuda",
    cost_model=CostModel(
        fixed_s=0.020, prefill_token_s=2e-5, prefill_attention_s=9e-9, decode_s=2e-4, decode_context_s=1e-6,
        over_knee_s=2e-4, knee_tokens=100, checkpoint_block_s=4e-4, restore_block_s=4e-4, num_layers=32,
        layers_per_safepoint=4,
    ),
    block_size=16,
    num_blocks=851,
    num_rows=256,
    max_step_tokens=8192,
    block_bytes=16 * 32 * 2 * 4096 * 2,
    bandwidth_bytes_s=8e9,
    max_length=6000,
    high_load=1600 / 13616,
    ttft_s=1.5,
    tpot_s=0.11,
)  # fmt: skip
"""LLaMA-7B on one A10, made to fit Llumnix's figures, not measured: a pool of 851 blocks of 16 tokens (13,616 tokens of
0.5 MB, of which merged blocks of four hold 13,568), decode steps of 20 ms alone and about 2.3 times that with a pool full of
short sequences, 8k prompt tokens in 2.1 s (13.5 GFLOP a token at some 65 TFLOP/s), 64 Gb/s between instances, at most 1,600
tokens beside a request of high priority."""

A100 = Device(
    name="a100",
    kind="cuda",
    cost_model=CostModel(
        fixed_s=0.010, prefill_token_s=2e-5, prefill_attention_s=2e-9, decode_s=2e-5, decode_context_s=1.2e-7,
        over_knee_s=2e-5, knee_tokens=200, checkpoint_block_s=4e-4, restore_block_s=4e-4, num_layers=32,
        layers_per_safepoint=4,
    ),
    block_size=16,
    num_blocks=7500,
    num_rows=256,
    max_step_tokens=8192,
    block_bytes=16 * 32 * 2 * 4096 * 2,
    bandwidth_bytes_s=20e9,
    max_length=8192,
    high_load=0.3,
    ttft_s=1.5,
    tpot_s=0.11,
)  # fmt: skip
"""LLaMA-7B on an A100 of 80 GB, reckoned, not measured: 60 GB of KV (120,000 tokens), weights read in 10 ms, KV at 2 TB/s,
8k prompt tokens in 0.2 to 0.4 s."""

CPU = Device(
    name="cpu",
    kind="cpu",
    cost_model=CostModel(
        fixed_s=0.025, prefill_token_s=3.5e-4, prefill_attention_s=1e-6, decode_s=2.5e-3, decode_context_s=1e-6,
        mixed_s=0.006, checkpoint_block_s=1.7e-4, restore_block_s=1.7e-4, num_layers=30,
    ),
    block_size=32,
    num_blocks=256,
    num_rows=64,
    max_step_tokens=512,
    block_bytes=32 * 30 * 2 * 192 * 2,
    bandwidth_bytes_s=1.5e9,
    max_length=3600,
    high_load=0.25,
    ttft_s=1.5,
    tpot_s=0.11,
)  # fmt: skip
"""A 135M-parameter Llama shape in bfloat16 on two x86 cores, rounded from profiles of a quiet machine; the link is
shared memory. A pool of 8,192 tokens. Decodes are a tenth of a step's fixed cost each, so arithmetic runs out first."""

H100 = Device(
    name="h100",
    kind="cuda",
    cost_model=cost_model(hardware.H100, SHAPES["llama-3.1-8b"], block_size=16),
    block_size=16,
    num_blocks=26_000,
    num_rows=256,
    max_step_tokens=8192,
    block_bytes=16 * 32 * 2 * 1024 * 2,
    bandwidth_bytes_s=hardware.H100.link_bytes_s,
    max_length=8192,
    high_load=0.3,
    ttft_s=1.5,
    tpot_s=0.11,
)  # fmt: skip
"""Llama-3.1-8B on an H100 of 80 GB, from published measurements (`shared.placement.hardware`): 54 GB of KV (416,000 tokens,
a quarter of a 7B model's bytes each), 400 Gb/s between instances."""

DEVICES = {device.name: device for device in (A10, A100, H100, CPU)}


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the cluster."""

    name: str
    dispatch: str = "first_token"
    is_late: bool = True
    """Requests wait in the scheduler's queue until an instance has room for them; else they are dispatched at once."""
    migrates: bool = True
    has_priorities: bool = True
    """Else all requests are normal ones."""
    order: str = "doubling_budget"
    fetches: bool = False
    """Prefixes travel between instances."""
    offload: Literal["off", "host", "disk"] = "off"
    """Tier to which KV blocks of ended requests go."""
    host_share: float = 1.0
    """Host memory of an instance over its KV pool."""
    disk_bytes: float = 0.0
    disk_bytes_s: float = 0.0
    """Bandwidth of the disk that all instances share, in each direction."""
    scheduler: dict[str, float | str] = {}
    """Settings of the scheduler that differ from its defaults."""

    def settings(self) -> SchedulerSettings:
        settings = SchedulerSettings(
            dispatch_policy=self.dispatch,
            migration="auto" if self.migrates else "off",
            order_policy=self.order,
            max_queued=1 << 20,
        )
        if not self.is_late:
            settings = msgspec.structs.replace(
                settings, max_waiting_per_model=1 << 20, dispatch_growth_steps=0.0, max_defragmenting_share=1.0
            )
        return msgspec.structs.replace(settings, **self.scheduler)


def with_tiers(simulated: fleet.Device, device: Device, system: System) -> fleet.Device:
    """`simulated` with the tiers of KV that the system has."""
    configuration = msgspec.structs.replace(
        simulated.configuration,
        num_host_merged=int(system.host_share * device.num_merged),
        offload=system.offload,
    )
    disk = None
    if system.offload == "disk":
        block_s = device.block_bytes / system.disk_bytes_s
        disk = VirtualDisk(int(system.disk_bytes / device.block_bytes), block_s, block_s)
    return msgspec.structs.replace(simulated, configuration=configuration, disk=disk)


class Cluster:
    """`run` once."""

    def __init__(
        self,
        device: Device,
        system: System,
        jobs: Sequence[Job],
        *,
        num_instances: int = 4,
        noise: float = 0.05,
        seed: int = 0,
        start_s: float | None = None,
        num_models: int = 1,
        num_asked: int | None = None,
        has_batch: bool = False,
    ) -> None:
        """`start_s`: the cluster grows and shrinks by its freeness, and an instance starts in so long. `num_models`: on each
        instance; the requests are divided alike over the first `num_asked` of them, by default over all. `has_batch`: one
        of all models, that does not end, is in the background."""
        settings = msgspec.structs.replace(system.settings(), autoscale=start_s is not None)
        self.fleet = fleet.Fleet(
            settings,
            noise=noise,
            seed=seed,
            migrations=partial(FleetMigrations, fetches=system.fetches),
            has_priorities=system.has_priorities,
        )
        simulated, models = with_tiers(device.simulated(system.order), device, system), device.models(num_models)
        for index in range(num_instances):
            self.fleet.add_instance(f"instance-{index}", simulated, models)
        self.scaling = None
        if start_s is not None:
            self.scaling = Scaling(
                self.fleet, lambda name: self.fleet.add_instance(name, simulated, models, start_s=start_s)
            )
        names = model_names(num_models)
        num_asked = num_asked or num_models
        chosen = np.random.default_rng([seed, num_asked]).integers(num_asked, size=len(jobs)).tolist()
        # The length of an answer is nobody's knowledge.
        self.jobs = [
            msgspec.structs.replace(job, model=names[number], max_tokens=device.max_length + 1)
            for job, number in zip(jobs, chosen, strict=True)
        ]
        self._has_batch = has_batch
        if has_batch:
            prompt, output = (min(tokens, device.max_length) for tokens in LINE_TOKENS)
            num_lines = int(LINES_RPS * (jobs[-1].at_s + 1.0))
            lines = [Job(0.0, prompt, output, model=names[number % num_models]) for number in range(num_lines)]
            Batches(self.fleet).begin_at(0.0, "batch", lines)

    @property
    def gateway(self) -> Gateway:
        return self.fleet.gateway

    @property
    def migrations(self) -> FleetMigrations:
        assert isinstance(self.fleet.migrations, FleetMigrations)
        return self.fleet.migrations

    @property
    def records(self) -> list[Record]:
        """Records of the jobs that it was given, in their order."""
        return self.gateway.records[: len(self.jobs)]

    @property
    def offline_tokens_s(self) -> float:
        """Prompts and answers of the batch, a second."""
        lines = self.gateway.records[len(self.jobs) :]
        tokens = sum(record.prompt_tokens + record.num_tokens for record in lines if record.num_tokens)
        return tokens / self.fleet.events.now

    def mean_instances(self) -> float:
        """Over the run."""
        return float(len(self.fleet.instances)) if self.scaling is None else self.scaling.mean_instances()

    def run(self) -> Gateway:
        return self.fleet.run(self.jobs, has_endless_batches=self._has_batch)
