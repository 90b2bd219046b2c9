"""What the processes of a Tideway hold, by role, and what of it may be left when nothing is asked of them. Judging is
pure."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.reporting import Target
from bench.soak import rows
from shared.bus.interface import BusError, StreamUse
from shared.bus.nats_bus import NatsBus
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.e2e.stack import Stack

MIB = 1 << 20
STREAMS_TIMEOUT_S = 10.0
SETTLED_WITHIN_S = 240.0
"""Answers under a key are kept for a minute, and two sweeps remove what is deleted."""
TREND_S = 900.0
"""A run that is shorter shows no trend: what processes remember of late (timelines, windows) has not filled up."""
WARM_S = 240.0
"""What a process loads and remembers in its first minutes is no trend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the processes of a role may hold more at the end than after the warm-up, each; one that was restarted is compared
    with its predecessor."""

    memory_mib: float
    trend_mib_a_minute: float
    """In the second half of a run of `TREND_S` or more."""
    descriptors: int = 12
    threads: int = 8
    tasks: int = 12


LIMITS: Mapping[str, Limits] = {
    # Timelines of 2,048 requests, windows, and tokenizers fill up in the first minutes.
    "gateway": Limits(memory_mib=64, trend_mib_a_minute=0.5),
    "scheduler": Limits(memory_mib=24, trend_mib_a_minute=0.3),
    # The log of requests is bounded (shared/monitor) and fills up for as long as a run of this length lasts.
    "placement": Limits(memory_mib=48, trend_mib_a_minute=1.0),
    "worker": Limits(memory_mib=24, trend_mib_a_minute=0.3),
    # Torch's allocator keeps what its largest step took.
    "instance": Limits(memory_mib=320, trend_mib_a_minute=2.0, threads=24),
    # Its caches of blocks of JetStream's files.
    "nats": Limits(memory_mib=128, trend_mib_a_minute=4.0, descriptors=48),
}

MAX_MORE_CONSUMERS = 24
"""Consumers of JetStream's streams that may be there more at the end: those of processes that were killed go within
seconds, and each restart may have others."""

ZERO_METRICS = {
    "gateway": (
        "tideway_gateway_in_flight_requests",
        "tideway_gateway_open_streams",
        "tideway_gateway_text_characters",
        "tideway_gateway_batch_lines_in_flight",
        "tideway_gateway_background_responses",
        "tideway_gateway_kept_calls",
        "tideway_gateway_waiting_submissions",
    ),
    "scheduler": (
        "tideway_scheduler_queue_length",
        "tideway_scheduler_ledger_requests",
        "tideway_scheduler_tracked_requests",
    ),
}
"""Counts of what is under way, which end at 0."""


@dataclass(slots=True)
class Held:
    """By one process."""

    memory_mib: float
    """Resident."""
    descriptors: int
    threads: int
    tasks: float | None
    """Unfinished tasks of its event loop; None: it has none, or does not say."""
    pid: int = 0


@dataclass(slots=True)
class Sample:
    at_s: float
    held: dict[str, list[Held]] = field(default_factory=dict)
    """By role."""
    under_way: dict[str, float] = field(default_factory=dict)
    """Counts that end at 0, by name."""
    num_files: int = 0
    """Files that the Files API lists."""
    num_consumers: int = 0
    """Consumers of all streams of JetStream."""
    num_messages: dict[str, int] = field(default_factory=dict)
    """Rows of each bucket and object store, by stream."""
    kv_disk_bytes: int = 0
    """In the folders of KV on disk."""

    def most(self, role: str, name: str) -> float:
        """What the process of the role that holds most has of `name`; 0 where there is none."""
        return max((getattr(each, name) or 0.0 for each in self.held.get(role, ())), default=0.0)


def server_of(stack: Stack) -> NatsServer:
    """The only one."""
    assert isinstance(stack.nats, NatsServer)
    return stack.nats


def metric(text: str, name: str) -> float | None:
    """The sum over all labels; None: there is none."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None


def _held(pid: int, tasks: float | None) -> Held | None:
    """None: it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    if "VmRSS" not in found:
        return None  # a zombie
    return Held(int(found["VmRSS"]) / 1024, descriptors, int(found["Threads"]), tasks, pid)


async def streams(url: str) -> dict[str, StreamUse]:
    """What each stream of that NATS holds; nothing while it cannot say."""
    with contextlib.suppress(TimeoutError, BusError):
        async with asyncio.timeout(STREAMS_TIMEOUT_S):
            bus = await NatsBus.connect(BusSettings(nats_url=url), "soak", "soak")
            try:
                return await bus.stream_uses()
            finally:
                await bus.close()
    return {}


def _bytes_of(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it is being replaced
            total += file.stat().st_size if file.is_file() else 0
    return total


async def sample(stack: Stack, client: httpx.AsyncClient, at_s: float, kv_disk: Path) -> Sample:
    """`client` sends the admin key; `kv_disk`: the folder of KV on disk. Processes that are being restarted are left out."""
    taken = Sample(at_s)

    async def metrics(port: int) -> str:
        try:
            return (await client.get(f"http://127.0.0.1:{port}/metrics", timeout=10)).text
        except httpx.HTTPError:
            return ""

    def add(role: str, pid: int, tasks: float | None) -> None:
        if (held := _held(pid, tasks)) is not None:
            taken.held.setdefault(role, []).append(held)

    texts = {name: await metrics(port) for name, port in stack.metrics_ports.items()}
    for name, process in stack.processes.items():
        role, text = name.partition("-")[0], texts.get(name, "")
        add(role, process.pid, metric(text, "tideway_event_loop_tasks"))
        for each in ZERO_METRICS.get(role, ()):
            taken.under_way[each] = taken.under_way.get(each, 0.0) + (metric(text, each) or 0.0)
    if server_of(stack).is_running:
        add("nats", server_of(stack).pid, None)
    answer = await client.get(f"{stack.url}/admin/instances")
    for instance in answer.raise_for_status().json()["instances"]:
        load, name = instance["load"], instance["instance_id"]
        text = await metrics(instance["metrics_port"])
        add("instance", instance["pid"], metric(text, "tideway_event_loop_tasks"))
        if load is not None:
            for each in ("num_running", "num_waiting", "pool_use", "num_migrating_in", "num_migrating_out"):
                taken.under_way[f"{name} {each}"] = load[each] or 0.0
    uses = await streams(stack.nats.url)
    taken.num_consumers = sum(use.num_consumers for use in uses.values())
    taken.num_messages = {name: use.num_messages for name, use in sorted(uses.items())}
    taken.kv_disk_bytes = _bytes_of(kv_disk)
    taken.num_files = len((await client.get(f"{stack.url}/v1/files")).json()["data"])
    return taken


async def settled(take: Callable[[], Awaitable[Sample]], within_s: float = SETTLED_WITHIN_S) -> Sample:
    """Sample taken when nothing is under way any more and what was deleted is swept, or after `within_s`."""
    deadline_s = time.monotonic() + within_s
    while True:
        taken = await take()
        is_settled = not any(taken.under_way.values()) and rows.is_swept(taken.num_messages)
        if is_settled or time.monotonic() > deadline_s:
            return taken
        await asyncio.sleep(1.0)


def targets(
    before: Sample, after: Sample, during: Sequence[Sample], *, num_kept: int, kv_disk_bytes: int
) -> list[Target]:
    """What is left of what was taken, each against its limit. `before`: after the warm-up, with nothing under way.
    `num_kept`: see `rows`; `kv_disk_bytes`: what KV on disk may have."""
    found = [Target(name=name, value=value, limit=0.0) for name, value in sorted(after.under_way.items())]
    found.append(Target(name="files", value=after.num_files, limit=before.num_files))
    found.append(
        Target(
            name="more consumers of NATS",
            value=after.num_consumers - before.num_consumers,
            limit=MAX_MORE_CONSUMERS,
            note=f"{before.num_consumers} to {after.num_consumers}",
        )
    )
    found += rows.targets(before.num_messages, after.num_messages, after.at_s - before.at_s, num_kept)
    most = max(each.kv_disk_bytes for each in (before, *during, after))
    found.append(
        Target(name="KV on disk, at most at any time", value=most / MIB, limit=kv_disk_bytes / MIB, unit=" MiB")
    )
    for role, limits in LIMITS.items():
        for name, limit, unit in (
            ("memory_mib", limits.memory_mib, " MiB"),
            ("descriptors", limits.descriptors, ""),
            ("threads", limits.threads, ""),
            ("tasks", limits.tasks, ""),
        ):
            was, now = before.most(role, name), after.most(role, name)
            if name == "tasks" and not was:
                continue  # it has no such loop, or no port that says
            found.append(
                Target(
                    name=f"{role}: more {name.partition('_')[0]}",
                    value=now - was,
                    limit=limit,
                    unit=unit,
                    note=f"{was:g} to {now:g}",
                )
            )
        if (slope := trend(role, during)) is not None:
            found.append(
                Target(name=f"{role}: memory a minute", value=slope, limit=limits.trend_mib_a_minute, unit=" MiB")
            )
    return found


def trend(role: str, during: Sequence[Sample]) -> float | None:
    """MiB a minute in the second half, by least squares: one slope for all processes of the role, each at its own level,
    without its first `WARM_S`. None: too short to tell."""
    if len(during) < 4 or during[-1].at_s - during[0].at_s < TREND_S:
        return None
    begun_s: dict[int, float] = {}
    points: dict[int, list[tuple[float, float]]] = {}
    for index, each in enumerate(during):
        for held in each.held.get(role, ()):
            warm_s = begun_s.setdefault(held.pid, each.at_s) + WARM_S
            if index >= len(during) // 2 and each.at_s >= warm_s:
                points.setdefault(held.pid, []).append((each.at_s / 60, held.memory_mib))
    if not points:
        return None
    product = spread = 0.0
    for own in points.values():
        mean_x, mean_y = (sum(column) / len(own) for column in zip(*own, strict=True))
        product += sum((x - mean_x) * (y - mean_y) for x, y in own)
        spread += sum((x - mean_x) ** 2 for x, _ in own)
    return product / spread if spread else 0.0
