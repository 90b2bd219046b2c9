"""Instances that exist as their load reports alone: what they would say, encoded as on the bus.

Their freeness wanders, so that at any time some are short of memory and some have plenty, and requests that they are given
show in their reports as accepted and, later, as ended. Reports are put together from prepared pieces of bytes, because
making them is not what is measured, and should not fill the processor's caches either.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import NamedTuple

import msgspec

from shared.messages.cluster import FinishedStats, InstanceInfo, LoadedModel, LoadReport, ModelLoad
from shared.messages.requests import (
    FinishReason,
    GenerationRequest,
    Priority,
    RequestClass,
    SamplingParams,
    pack_tokens,
)

MODELS = ("llama", "opt", "qwen", "gemma")
REPORTS_PER_S = 50
"""Of one instance: the most that it makes."""
NUM_MERGED = 1000
BLOCK_SIZE, BLOCKS_PER_MERGED = 16, 1
SECONDS_OF_A_REQUEST = 2.0
NUM_STEPS = 64
"""Reports until the walk of an instance's freeness begins anew."""
NUM_WALKS = 20
"""Different ones; each instance begins somewhere in one of them."""
PROMPT = pack_tokens(list(range(512)))

encode = msgspec.msgpack.Encoder().encode

NUM_FIELDS = len(LoadReport.__struct_fields__)
HEADER = b"\xdc" + NUM_FIELDS.to_bytes(2, "big")
"""Of an array."""
UINT32 = b"\xce"
FIRST_SEQUENCE = 1 << 16
"""So that each number takes four bytes."""
NO_LISTS = encode([]) * 3
FINISHED = FinishedStats(
    model=MODELS[0],
    request_class=RequestClass.ONLINE,
    prompt_tokens=512,
    output_tokens=100,
    queued_s=0.01,
    execution_s=2.0,
    finish_reason=FinishReason.STOP,
    device_s=0.2,
)


class _Load(NamedTuple):
    """A load report without its first three fields and the lists of requests, in bytes."""

    before: bytes
    after: bytes


class Fleet:
    def __init__(self, num_instances: int, seed: int = 0) -> None:
        self.names = [f"node-{number:04}-0" for number in range(num_instances)]
        self.num_requests = 0
        random = Random(seed)
        walks = [_walk(random, is_short=number % 10 == 0) for number in range(NUM_WALKS)]
        self._walks = [random.choice(walks) for _ in self.names]
        self._sequences = [random.randrange(FIRST_SEQUENCE, FIRST_SEQUENCE + NUM_STEPS) for _ in self.names]
        self._heads = [HEADER + encode(name) + encode("1") + UINT32 for name in self.names]
        self._accepted: list[list[str]] = [[] for _ in self.names]
        self._running: list[deque[tuple[float, str]]] = [deque() for _ in self.names]

    def info(self, index: int) -> InstanceInfo:
        models = [
            LoadedModel(
                name=model,
                state="ready",
                max_model_len=8192,
                block_size=BLOCK_SIZE,
                blocks_per_merged=BLOCKS_PER_MERGED,
            )
            for model in MODELS
        ]
        name = self.names[index]
        return InstanceInfo(
            instance_id=name,
            incarnation="1",
            node_id=name[:-2],
            state="ready",
            models=models,
            num_merged=NUM_MERGED,
            kv_address="10.0.0.1:7000",
        )

    def report(self, index: int, now: float) -> bytes:
        """The instance's next one."""
        self._sequences[index] += 1
        sequence = self._sequences[index]
        load = self._walks[index][sequence % NUM_STEPS]
        accepted, running = self._accepted[index], self._running[index]
        lists = NO_LISTS
        if accepted or (running and running[0][0] <= now):
            ended: list[str] = []
            while running and running[0][0] <= now:
                ended.append(running.popleft()[1])
            running.extend((now + SECONDS_OF_A_REQUEST, request_id) for request_id in accepted)
            self._accepted[index] = []
            lists = encode(accepted) + encode(ended) + encode([FINISHED] * len(ended))
        return b"%b%b%b%b%b" % (self._heads[index], sequence.to_bytes(4, "big"), load.before, lists, load.after)

    def accept(self, index: int, request_id: str) -> None:
        self._accepted[index].append(request_id)

    def request(self) -> GenerationRequest:
        """Every tenth of high priority."""
        self.num_requests += 1
        number = self.num_requests
        priority = Priority.HIGH if number % 10 == 0 else Priority.NORMAL
        model = MODELS[number % len(MODELS)]
        return GenerationRequest(
            request_id=f"request-{number}",
            gateway_id="gateway",
            model=model,
            prompt=PROMPT,
            sampling=SamplingParams(max_tokens=256),
            priority=priority,
        )


def _walk(random: Random, *, is_short: bool) -> list[_Load]:
    """The last one is near to the first. `is_short`: of an instance that has too little memory most of the time. Each has
    more requests of some models than of others, so that a request costs more turns here than there."""
    centre = 30.0 if is_short else random.uniform(100.0, 500.0)
    shares = [random.random() ** 3 for _ in MODELS]
    left, there = 0.0, []
    for _ in range(NUM_STEPS // 2):
        left += random.gauss(0.0, 8.0)
        there.append(left)
    walk = []
    for offset in there + there[::-1]:
        freeness = centre + offset
        merged = freeness / (BLOCK_SIZE * BLOCKS_PER_MERGED)
        running = Counter(random.choices(MODELS, shares, k=random.randint(14, 18)))
        num_running = running.total()
        loads = [
            ModelLoad(
                model=model,
                num_running=running[model],
                num_waiting=int(random.random() < 0.1),
                num_offline=0,
                num_waiting_online=0,
                offline_room_tokens=1000,
                budgets=(3.5, 0.2),
                decode_cost=(0.02, 0.0002),
            )
            for model in MODELS
        ]
        report = LoadReport(
            instance_id="", incarnation="", sequence=0, dispatch_freeness=merged, free_merged=merged * num_running,
            num_running=num_running, models=tuple(loads), admitted=(), ended=(), finished=(),
            dispatch_freeness_high=merged - 20.0, migration_freeness=freeness, scaling_freeness=freeness,
            next_migration_tokens=random.randint(100, 800), running_freeness=freeness + 5.0,
            next_migration_model=random.choice(list(running)),
        )  # fmt: skip
        fields = [getattr(report, name) for name in LoadReport.__struct_fields__]
        walk.append(_Load(b"".join(map(encode, fields[3:7])), b"".join(map(encode, fields[10:]))))
    return walk
