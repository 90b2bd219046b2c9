"""Instances that exist as their load reports alone: what they would say, when they would say it, encoded as on the bus.

They report as live ones (`load_reports`): soon after a request came, its prompt was computed or it ended, else every
`drift_interval_s`, as something always runs; flat out they report every `REPORT_INTERVAL_S`. Their freeness wanders, so that
at any time some are short of memory and some have plenty. Their caches are full: a new block takes the place of the oldest,
and each report repeats a few. Requests begin with their model's system prompt, and half of them go on with a conversation.
Reports are put together from prepared pieces of bytes, because making them is not what is measured, and should not fill the
processor's caches either.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

import msgspec

from shared.engine.load_reports import REPORT_INTERVAL_S, drift_interval_s
from shared.engine.memory.cache_news import NUM_REPEATED
from shared.messages.cluster import (
    KEY_BYTES,
    FinishedStats,
    InstanceInfo,
    LoadedModel,
    LoadReport,
    ModelLoad,
    NextMove,
    mark_positions,
)
from shared.messages.requests import (
    FinishReason,
    GenerationRequest,
    Priority,
    RequestClass,
    SamplingParams,
)
from shared.scheduling.prefixes import prompt_keys

MODELS = ("llama", "opt", "qwen", "gemma")
MOST_REPORTS_PER_S = 1.0 / REPORT_INTERVAL_S
"""The most that one instance sends."""
NUM_MERGED = 1000
BLOCK_SIZE, BLOCKS_PER_MERGED = 16, 1
SECONDS_OF_A_PROMPT, SECONDS_OF_A_REQUEST = 0.05, 2.0
"""From its coming."""
NUM_STEPS = 64
"""Reports until the walk of an instance's freeness begins anew."""
NUM_WALKS = 20
"""Different ones; each instance begins somewhere in one of them."""
SYSTEM_BLOCKS, OWN_BLOCKS, TURN_BLOCKS, MAX_OWN_BLOCKS = 16, 16, 6, 64
"""Blocks of a prompt: those that all requests of its model have in common, those of a new conversation and of each further
turn of one, and those of the longest."""
NUM_CONVERSATIONS = 1000
"""Conversations that go on at a time."""
CACHED_BLOCKS = 800
"""Blocks that an instance has in its cache."""

encode = msgspec.msgpack.Encoder().encode

NUM_FIELDS = len(LoadReport.__struct_fields__)
HEADER = b"\xdc" + NUM_FIELDS.to_bytes(2, "big")
"""Header of an array."""
UINT32 = b"\xce"
FIRST_SEQUENCE = 1 << 16
"""So that each number takes four bytes."""
NO_LISTS = encode([]) * 3
CACHE_FIELDS = LoadReport.__struct_fields__.index("cache_held"), LoadReport.__struct_fields__.index("cache_round") + 1
"""The first, and the one after the last."""
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
    """A load report without its first three fields, the lists of requests and what it says of caches, in bytes."""

    before: bytes
    after: bytes
    end: bytes
    drift_s: float
    """Until the next report if nothing happens."""


class _Instance:
    """What one instance tells next."""

    def __init__(self, name: str, random: Random, walk: list[_Load]) -> None:
        self.head = HEADER + encode(name) + encode("1") + UINT32
        self.sequence = random.randrange(FIRST_SEQUENCE, FIRST_SEQUENCE + NUM_STEPS)
        self.reported_s = -math.inf
        self.due_s = math.inf
        self.accepted: list[str] = []
        self.ended: list[str] = []
        self._walk = walk
        self._blocks = bytearray(random.randbytes(KEY_BYTES * CACHED_BLOCKS))
        """Keys of those that it holds, but for the system prompts."""
        self._oldest = random.randrange(CACHED_BLOCKS)
        self._repeated, self._round = random.randrange(CACHED_BLOCKS), 1
        self._system: set[bytes] = set()
        self._held: list[bytes] = []
        self._lost: list[bytes] = []

    @property
    def load(self) -> _Load:
        """The load that was reported last."""
        return self._walk[self.sequence % NUM_STEPS]

    def hold(self, keys: list[bytes]) -> None:
        """The blocks of a sequence, the first ones maybe held already."""
        for key in keys[:SYSTEM_BLOCKS]:
            if key not in self._system:
                self._system.add(key)
                self._held.append(key)
        for key in keys[SYSTEM_BLOCKS:]:
            at = KEY_BYTES * self._oldest
            self._lost.append(bytes(self._blocks[at : at + KEY_BYTES]))
            self._held.append(key)
            self._blocks[at : at + KEY_BYTES] = key
            self._oldest = (self._oldest + 1) % CACHED_BLOCKS

    def report(self) -> bytes:
        self.sequence += 1
        load = self.load
        lists = NO_LISTS
        if self.accepted or self.ended:
            lists = encode(self.accepted) + encode(self.ended) + encode([FINISHED] * len(self.ended))
            self.accepted, self.ended = [], []
        at = KEY_BYTES * self._repeated
        repeated = self._blocks[at : at + KEY_BYTES * NUM_REPEATED]
        self._repeated += NUM_REPEATED
        if self._repeated >= CACHED_BLOCKS:
            self._repeated, self._round = 0, self._round + 1
        cache = [b"".join(self._held), b"".join(self._lost), False, repeated, self._round]
        self._held.clear()
        self._lost.clear()
        sequence = self.sequence.to_bytes(4, "big")
        return b"".join((self.head, sequence, load.before, lists, load.after, *map(encode, cache), load.end))


class Fleet:
    def __init__(self, num_instances: int, seed: int = 0, *, began_s: float = 0.0, is_flat_out: bool = False) -> None:
        """`began_s`: from when on they report, each at its own moment. `is_flat_out`: each as often as it may."""
        self.names = [f"node-{number:04}-0" for number in range(num_instances)]
        random = Random(seed)
        walks = [_walk(random, is_short=number % 10 == 0) for number in range(NUM_WALKS)]
        self._instances = [
            _Instance(name, random, walks[(index + 1) % NUM_WALKS]) for index, name in enumerate(self.names)
        ]
        self._is_flat_out = is_flat_out
        self._due: list[tuple[float, int]] = []
        """Times and instances of reports: a heap with lazy deletion."""
        self._news: list[tuple[float, int, str, list[bytes]]] = []
        """Times and instances at which a request ends, or has the blocks of its prompt ("")."""
        for index, instance in enumerate(self._instances):
            instance.reported_s = began_s - random.uniform(0.0, self._drift_s(instance))
            self._report_within(index, self._drift_s(instance))

    def info(self, index: int) -> InstanceInfo:
        models = [
            LoadedModel(
                name=model,
                state="ready",
                max_model_len=8192,
                block_size=BLOCK_SIZE,
                blocks_per_merged=BLOCKS_PER_MERGED,
                num_running=self._instances[index].sequence % 4,  # new with each entry, as it is live
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
        """The instance's next one, now."""
        instance = self._instances[index]
        instance.reported_s, instance.due_s = now, math.inf
        report = instance.report()
        self._report_within(index, self._drift_s(instance))
        return report

    def _drift_s(self, instance: _Instance) -> float:
        return REPORT_INTERVAL_S if self._is_flat_out else instance.load.drift_s

    def due_s(self) -> float:
        """Time at which the next report is due, at the latest."""
        return min(self._due[0][0], self._news[0][0] if self._news else math.inf)

    def due(self, now: float, limit: int) -> list[bytes]:
        """The reports that are due, as many as `limit`, in order."""
        while self._news and self._news[0][0] <= now:
            _, index, request_id, keys = heappop(self._news)
            instance = self._instances[index]
            if request_id:
                instance.ended.append(request_id)
            instance.hold(keys)
            self._report_within(index, REPORT_INTERVAL_S, now)
        reports: list[bytes] = []
        while self._due and self._due[0][0] <= now and len(reports) < limit:
            due_s, index = heappop(self._due)
            if self._instances[index].due_s == due_s:
                reports.append(self.report(index, now))
        return reports

    def _report_within(self, index: int, interval_s: float, now: float = -math.inf) -> None:
        instance = self._instances[index]
        due_s = max(instance.reported_s + interval_s, now)
        if due_s < instance.due_s:
            instance.due_s = due_s
            heappush(self._due, (due_s, index))

    def accept(self, index: int, request: GenerationRequest, now: float) -> None:
        """The request came to the instance."""
        self._instances[index].accepted.append(request.request_id)
        self._report_within(index, REPORT_INTERVAL_S, now)
        heappush(self._news, (now + SECONDS_OF_A_PROMPT, index, "", list(prompt_keys(request, BLOCK_SIZE))))
        heappush(self._news, (now + SECONDS_OF_A_REQUEST, index, request.request_id, []))


class Clients:
    """What they ask for, through one gateway."""

    def __init__(self, seed: int = 0) -> None:
        self.num_requests = 0
        self._random = Random(seed)
        self._system = {model: self._random.randbytes(4 * BLOCK_SIZE * SYSTEM_BLOCKS) for model in MODELS}
        self._conversations: deque[tuple[str, bytes]] = deque()

    def request(self) -> GenerationRequest:
        """Every tenth of high priority."""
        self.num_requests += 1
        number, random = self.num_requests, self._random
        if len(self._conversations) > NUM_CONVERSATIONS and number % 2:
            model, own = self._conversations.popleft()
            own += random.randbytes(4 * BLOCK_SIZE * TURN_BLOCKS)
        else:
            model, own = random.choice(MODELS), random.randbytes(4 * BLOCK_SIZE * OWN_BLOCKS)
        if len(own) <= 4 * BLOCK_SIZE * (MAX_OWN_BLOCKS - TURN_BLOCKS):
            self._conversations.append((model, own))
        return GenerationRequest(
            request_id=f"request-{number}",
            gateway_id="gateway",
            model=model,
            prompt=self._system[model] + own,
            sampling=SamplingParams(max_tokens=256),
            priority=Priority.HIGH if number % 10 == 0 else Priority.NORMAL,
        )


def _next_moves(random: Random, models: Iterable[str]) -> tuple[NextMove, ...]:
    """One request of each model, whose prefix nobody holds."""
    moves = []
    for model in models:
        num_blocks = random.randint(6, 50)
        marks = random.randbytes(KEY_BYTES * len(mark_positions(num_blocks)))
        moves.append(
            NextMove(model, BLOCK_SIZE * num_blocks, random.randbytes(16).hex(), BLOCK_SIZE, num_blocks, marks)
        )
    return tuple(sorted(moves, key=lambda move: move.num_tokens))


def _walk(random: Random, *, is_short: bool) -> list[_Load]:
    """The last one is near to the first. `is_short`: of an instance that has too little memory most of the time. Each has
    more requests of some models than of others, so that a request costs more turns here than there."""
    centre = 30.0 if is_short else random.uniform(100.0, 500.0)
    shares = [random.random() ** 3 for _ in MODELS]
    left, there = 0.0, []
    for _ in range(NUM_STEPS // 2):
        left += random.gauss(0.0, 8.0)
        there.append(left)
    walk: list[_Load] = []
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
                prompt_cost=(1e-4, 1e-8),
                decode_cost=(0.02, 0.0002),
            )
            for model in MODELS
        ]
        report = LoadReport(
            instance_id="", incarnation="", sequence=0, dispatch_freeness=merged, free_merged=merged * num_running,
            num_running=num_running, models=tuple(loads), admitted=(), ended=(), finished=(),
            dispatch_freeness_high=merged - 20.0, migration_freeness=freeness, scaling_freeness=freeness,
            running_freeness=freeness + 5.0, num_high=random.randint(0, 3),
            prompts_s=random.uniform(0.0, 0.2), ttft_s=1.5, next_moves=_next_moves(Random(len(walk)), running),
        )  # fmt: skip
        fields = [encode(getattr(report, name)) for name in LoadReport.__struct_fields__]
        parts = map(b"".join, (fields[3:7], fields[10 : CACHE_FIELDS[0]], fields[CACHE_FIELDS[1] :]))
        walk.append(_Load(*parts, drift_interval_s(report)))
    return walk
