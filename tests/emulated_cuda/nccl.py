"""NCCL between ranks that are threads of this process, each with a device of its own: as much of `ProcessGroupNCCL` as the
worker calls.

Ranks that make other calls, or the same in another order, or of other shapes, would hang or mix their data up on GPUs. Here
that is a report, and an error on all of them.
"""

from __future__ import annotations

import datetime
import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.emulated_cuda.clocks import Clock
from tests.emulated_cuda.device import place
from tests.emulated_cuda.tensors import device, inner_of, kernel

_keys = itertools.count()
_meetings: dict[str, Meeting] = {}


class Meeting:
    """Meeting point of the ranks of one communicator, call after call."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._calls: dict[Any, dict[int, tuple[Any, list[torch.Tensor], Clock]]] = {}
        self._done: dict[Any, str] = {}

    def meet(
        self, call: Any, rank: int, ranks: Sequence[int], what: Any, tensors: list[torch.Tensor],
        compute: Callable[[dict[int, list[torch.Tensor]]], None], timeout_s: float,
    ) -> None:  # fmt: skip
        """`call`: which of the calls it is; `what`: what must be the same on all. Raises `RuntimeError`."""
        stream = device.stream()
        with self._condition:
            arrived = self._calls.setdefault(call, {})
            arrived[rank] = what, tensors, dict(stream.clock)
            if set(arrived) == set(ranks):
                if len({entry[0] for entry in arrived.values()}) > 1:
                    told = "; ".join(f"rank {r} calls {entry[0]}" for r, entry in sorted(arrived.items()))
                    device.report("collective", f"ranks make different calls: {told}")
                    self._done[call] = told
                else:
                    compute({r: entry[1] for r, entry in arrived.items()})
                    self._done[call] = ""
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: call in self._done, timeout_s):
                raise RuntimeError(f"NCCL: rank {rank} waited {timeout_s:g} s for others at {what}")
            if self._done[call]:
                raise RuntimeError(f"NCCL: {self._done[call]}")
            for _, _, clock in arrived.values():
                stream.learn(clock)


class ProcessGroupNCCL:
    class Options:
        def __init__(self) -> None:
            self._timeout = datetime.timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._rank, self._size, self._timeout_s = rank, size, options._timeout.total_seconds()
        if rank == 0:
            key = f"emulated {next(_keys)}"
            _meetings[key] = Meeting()
            store.set("emulated nccl", key)
        self._meeting = _meetings[store.get("emulated nccl").decode()]
        self._calls: dict[Any, itertools.count[int]] = {}

    def eager_connect_single_device(self, where: torch.device) -> None:
        if where.index is None:
            raise ValueError("a communicator needs a device with an index")

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        (tensor,) = tensors

        def compute(by_rank: dict[int, list[torch.Tensor]]) -> None:
            total = sum(by_rank[rank][0].float() for rank in sorted(by_rank))
            for (own,) in by_rank.values():
                own.copy_(total)

        return self._collective("all_reduce", [tensor], [tensor], compute)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        def compute(by_rank: dict[int, list[torch.Tensor]]) -> None:
            for own in by_rank.values():
                for rank, part in enumerate(own[1:]):
                    part.copy_(by_rank[rank][0])

        return self._collective("all_gather", [inputs[0], *outputs[0]], outputs[0], compute)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._between(self._rank, rank, tensors[0], [])

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._between(rank, self._rank, tensors[0], tensors)

    def _between(self, source: int, target: int, tensor: torch.Tensor, written: list[torch.Tensor]) -> Any:
        def compute(by_rank: dict[int, list[torch.Tensor]]) -> None:
            by_rank[target][0].copy_(by_rank[source][0])

        return self._call((source, target), [source, target], "send and recv", [tensor], written, compute)

    def _collective(self, name: str, tensors: list[torch.Tensor], written: list[torch.Tensor], compute: Any) -> Any:
        return self._call("all", list(range(self._size)), name, tensors, written, compute)

    def _call(
        self, channel: Any, ranks: Sequence[int], name: str, tensors: list[torch.Tensor], written: list[torch.Tensor],
        compute: Any,
    ) -> Any:  # fmt: skip
        first = tensors[0]
        if first.device != torch.device("cuda", device.index):
            device.report("collective", f"{name} of a tensor on {first.device} by the rank of cuda:{device.index}")
        what = (name, tuple(first.shape), str(first.dtype))
        own = [inner_of(x) for x in tensors]
        numbers = self._calls.setdefault(channel, itertools.count())

        def run(*given: torch.Tensor) -> None:
            call = channel, next(numbers)
            self._meeting.meet(call, self._rank, ranks, what, list(given), compute, self._timeout_s)

        def spans(*given: torch.Tensor) -> Any:
            return device.spans(given), device.spans(inner_of(x) for x in written)

        kernel(f"{name} {place()}", run, own, [], spans, waits_for_others=True)
        return SimpleNamespace(wait=lambda: None)

    def shutdown(self) -> None:
        pass


def install() -> None:
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc, assignment]
