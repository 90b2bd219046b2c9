"""Ranks that compute one model together: what they say to each other while they do.

Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM") sums the ranks' parts of a layer's result and joins their parts of
the logits. Pipeline parallelism (Narayanan et al. 2021) hands hidden states from one stage to the next: rank r of a stage
talks to rank r of the others.

Calls are collective: all ranks of a stage make the same ones in the same order, from one thread at a time. On CUDA they are
queued on the current stream and return at once.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from services.worker.ranks.exchange import Exchange, meet

JOIN_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 60.0
STAGES_SHARE = 2.5
"""Multiple of the time limit between stages: one waits for all before it, for longer than a step may take (STUCK_STEP_S)."""
LOOPBACK = "127.0.0.1"
"""The ranks of a group are on one machine."""


class GroupError(Exception):
    """The ranks did not find together, or one is lost: the group is of no more use."""


class RankGroup(ABC):
    """This process's place among the ranks, and its calls to them."""

    rank: int = 0
    """Among those that have a part of each weight."""
    size: int = 1
    stage: int = 0
    """Which run of layers this rank has."""
    num_stages: int = 1
    exchange: Exchange | None = None
    """Through which compiled kernels may sum by themselves; then `raise_if_lost` is to be asked."""

    def raise_if_lost(self) -> None:
        """Raises `GroupError` if a sum through `exchange` was not made."""
        if self.exchange is not None and self.exchange.is_lost:
            raise GroupError(f"rank {self.rank} of {self.size} (stage {self.stage}) lost the others: they did not come")

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums the stage's tensors of one shape, in place, and returns `tensor`. Raises `GroupError`."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[..., n]` of each rank of the stage -> `[..., size * n]`, in their order. Raises `GroupError`."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Sends to this rank's counterpart in another stage; returns when `tensor` may be changed. Raises `GroupError`."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Into `tensor`, of the shape and dtype that is sent; returns it. Raises `GroupError`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connections; calls under way on other ranks fail."""

    def layers_of(self, num_layers: int, stage: int | None = None) -> range:
        """The model's layers of a stage (None: this rank's): stages differ by one layer at most, the first have more."""
        stage = self.stage if stage is None else stage
        least, rest = divmod(num_layers, self.num_stages)
        start = stage * least + min(stage, rest)
        return range(start, start + least + (stage < rest))

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1


class Alone(RankGroup):
    """One rank: there is nobody to ask."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        raise GroupError(f"there is no stage {stage}")

    def receive(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        raise GroupError(f"there is no stage {stage}")

    def close(self) -> None:
        pass


ALONE = Alone()


class Ranks(RankGroup):
    """Several processes of one machine, over torch.distributed's process groups: gloo between CPUs, NCCL between GPUs. They
    are made directly, not as the process's default group, so that a process can be in several. CPUs with compiled kernels
    sum and join through memory that they share."""

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: Path,
        device: torch.device,
        *,
        stage: int = 0,
        num_stages: int = 1,
        in_order: bool = False,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Blocks until all ranks are there. `rendezvous`: a file that is new to this group, the same for all; nobody else
        may write to its folder. `in_order`: sums are taken in the order of the ranks, so that an element's does not depend
        on its place; of two ranks it does not in any case. `timeout_s`: of a call. Raises `GroupError`."""
        if not (0 <= rank < size and 0 <= stage < num_stages):
            raise ValueError(f"rank {rank} of {size} in stage {stage} of {num_stages}")
        self.rank, self.size, self.stage, self.num_stages = rank, size, stage, num_stages
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._in_order = in_order and size > 2
        self._across: Any = None
        try:
            store: Any = dist.FileStore(str(rendezvous), size * num_stages)  # type: ignore[attr-defined]
            store.set_timeout(datetime.timedelta(seconds=join_timeout_s))
            of_stage = PrefixStore(f"stage {stage}", store)
            self._within = self._join(of_stage, rank, size, timeout_s)
            if device.type == "cpu" and size > 1:
                self.exchange = meet(of_stage, rank, size, timeout_s)
            if num_stages > 1:
                self._across = self._join(
                    PrefixStore(f"rank {rank}", store), stage, num_stages, STAGES_SHARE * timeout_s
                )
        except (RuntimeError, OSError) as error:
            raise GroupError(f"rank {rank} of {size} did not find the others: {error}") from error

    def _join(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        timeout = datetime.timedelta(seconds=timeout_s)
        if self._device.type == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            # Else the first call makes the communicator, which cannot be captured in a graph.
            group.eager_connect_single_device(self._device)
            return group
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout
        return gloo(store, rank, size, options)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.exchange is not None and self.exchange.takes(tensor):
            self.exchange.sum(tensor)
            self.raise_if_lost()
            return tensor
        if self._in_order:
            first, *others = self._gathered(tensor)
            total = first.float()
            for part in others:
                total += part
            return tensor.copy_(total)
        self._call(lambda: self._within.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.exchange is not None and self.exchange.takes(tensor, whole_rows=True):
            joined = self.exchange.join(tensor)
            self.raise_if_lost()
            assert joined is not None
            return joined
        return torch.cat(self._gathered(tensor), -1)

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._call(lambda: self._within.allgather([parts], [own]))
        return parts

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        self._call(lambda: self._across.send([tensor.contiguous()], stage, 0))

    def receive(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        self._call(lambda: self._across.recv([tensor], stage, 0))
        return tensor

    def _call(self, begin: Callable[[], Any]) -> None:
        """Waits for the call; on CUDA the current stream waits, not this thread."""
        try:
            begin().wait()
        except RuntimeError as error:
            raise GroupError(
                f"rank {self.rank} of {self.size} (stage {self.stage}) lost the others: {error}"
            ) from error

    def close(self) -> None:
        for group in (self._across, self._within):
            if group is not None:
                group.shutdown()
