"""The executors of a group of ranks as one: rank 0's in the test's process, the others' in processes that do as it does."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from services.worker.executor.executor import Executor, region_bytes
from services.worker.kv.kv_store import BlockParts
from services.worker.ranks.group import RankGroup, Ranks
from services.worker.ranks.shared_memory import RankMemory
from shared.engine.plan import EndedCopy, KvCopy, ModelShape, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from shared.messages.requests import Adapter

TIMEOUT_S = 60.0
CPU = torch.device("cpu")


class Followers:
    """Ranks 1 to `size` - 1: processes, each with as many executors as are asked for."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        rendezvous = folder / f"ranks-{size}"
        self._pipes, self._processes = [], []
        for rank in range(1, size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_follow, args=(theirs, rank, size, rendezvous), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)
        self.group = Ranks(0, size, rendezvous, CPU, timeout_s=TIMEOUT_S)
        self._keys = itertools.count()

    def tell(self, key: int, name: str, *args: Any) -> None:
        for pipe in self._pipes:
            pipe.send((key, name, args))

    def answers(self) -> list[Any]:
        """One of each, to the oldest call that was not answered."""
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(TIMEOUT_S), "a rank does not answer"
            answers.append(pipe.recv())
            if isinstance(answers[-1], Exception):
                raise answers[-1]
        return answers

    def executor(
        self, num_merged: int, merged_bytes: int, num_rows: int, *, num_host_merged: int = 0, **options: Any
    ) -> GroupOfExecutors:
        """`merged_bytes`: of the whole group."""
        part, key = merged_bytes // self.size, next(self._keys)
        shared = RankMemory.create(self.size, region_bytes(num_merged, part, num_host_merged))
        options |= {"num_host_merged": num_host_merged}
        self.tell(key, "make", shared.path, shared.region_bytes, (num_merged, part, num_rows), options)
        leader = Executor("cpu", num_merged, part, num_rows, group=self.group, shared=shared, **options)
        self.answers()
        return GroupOfExecutors(self, key, leader)

    def close(self) -> None:
        self.group.close()
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextmanager
def followers(size: int, folder: Path) -> Iterator[Followers]:
    them = Followers(size, folder)
    yield them
    them.close()


class GroupOfExecutors:
    """What an `Executor` does, on all ranks; that they say the same is asserted."""

    def __init__(self, followers: Followers, key: int, leader: Executor) -> None:
        self.leader = leader
        self._followers = followers
        self._key = key
        self._copied: Counter[int] = Counter()
        self._failed: set[int] = set()
        self._on_finished: Callable[[], None] = lambda: None

    def _on_all(self, name: str, *args: Any) -> list[Any]:
        self._followers.tell(self._key, name, *args)
        mine = getattr(self.leader, name)(*args)
        return [mine, *self._followers.answers()]

    def load(self, path: Path, name: str = "") -> ModelShape:
        spec = ModelSpec(name or path.name, str(path))
        self._followers.tell(self._key, "load", spec)
        shape = self.leader.add_model(self.leader.prepare_model(spec))
        assert self._followers.answers() == [shape] * (self._followers.size - 1)
        return shape

    def load_adapter(self, model: str, adapter: Adapter) -> None:
        self._on_all("load_adapter", model, adapter)

    def launch(self, plan: StepPlan) -> None:
        self._followers.tell(self._key, "launch", plan)
        self.leader.launch(plan)

    def collect(self) -> StepResult:
        result = self.leader.collect()
        assert all(answer == (None, result) for answer in self._followers.answers())
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    def interrupt(self, step_id: int) -> None:
        self.leader.interrupt(step_id)

    def start_copy(self, copy: KvCopy) -> None:
        self._on_all("start_copy", copy)

    def finished_copies(self) -> list[EndedCopy]:
        """Those that ended on all ranks."""
        done: list[EndedCopy] = []
        for copy_id, ok, _ in itertools.chain.from_iterable(self._on_all("finished_copies")):
            self._copied[copy_id] += 1
            if not ok:
                self._failed.add(copy_id)
            if self._copied[copy_id] == self._followers.size:
                done.append(EndedCopy(copy_id, copy_id not in self._failed))
                del self._copied[copy_id]
        if self._copied:  # by some ranks: the others do not say when
            threading.Timer(0.005, self._on_finished).start()
        return done

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        self._on_finished = callback
        self.leader.on_copy_finished(callback)

    def claim_blocks(self, model: str, blocks: list[int]) -> None:
        self._on_all("claim_blocks", model, blocks)

    def block_rows(self, model: str, on_host: bool) -> torch.Tensor | BlockParts:
        return self.leader.block_rows(model, on_host)

    def remove_model(self, name: str) -> None:
        self._on_all("remove_model", name)

    def set_layers_per_safepoint(self, name: str, num_layers: int) -> None:
        self._on_all("set_layers_per_safepoint", name, num_layers)

    def close(self) -> None:
        self._on_all("close")


def _follow(pipe: Connection, rank: int, size: int, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    group = Ranks(rank, size, rendezvous, CPU, timeout_s=TIMEOUT_S)
    executors: dict[int, Executor] = {}
    with suppress(EOFError):
        while (call := pipe.recv()) is not None:
            key, name, args = call
            try:
                pipe.send(_do(executors, group, key, name, args))
            except Exception as error:
                pipe.send(error)


def _do(executors: dict[int, Executor], group: RankGroup, key: int, name: str, args: tuple[Any, ...]) -> Any:
    if name == "make":
        path, bytes_of_region, sizes, options = args
        shared = RankMemory(path, group.size, bytes_of_region)
        executors[key] = Executor("cpu", *sizes, group=group, shared=shared, **options)
        return None
    executor = executors[key]
    if name == "load":
        return executor.add_model(executor.prepare_model(args[0]))
    answer = getattr(executor, name)(*args)
    return (answer, executor.collect()) if name == "launch" else answer
