"""Models that were put away: their weights in host memory, until they are loaded again or make room.

Where the device is the CPU a model is kept as it is, which costs no more than not freeing it. On other devices the memory of
its tensors is copied to page-locked memory, a tensor at a time, and freed there (`Storages`); coming back is the same the
other way. Neither happens in the thread of the steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.kv.transfer import beside_steps
from services.worker.models.decoder import DecoderModel
from services.worker.models.loading import Identity

logger = logging.getLogger(__name__)

FREE_SHARE = 0.5
"""Share of the host memory that would be free without them which these weights may take."""


_MODEL_CODE = ("services.worker.models", "services.worker.models.linear", "services.worker.models.quantized_linear",
               "services.worker.models.fp8_linear", "torch.nn", "transformers")  # fmt: skip
"""Whose objects are a model's own. What ranks and steps share is none of them."""


def tensors_of(root: object) -> Iterator[torch.Tensor]:
    """All that a model reaches by attributes and containers, each once."""
    stack, seen = [root], set[int]()
    while stack:
        found = stack.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            yield found
        elif isinstance(found, dict):
            stack += found.values()
        elif isinstance(found, list | tuple | set):
            stack += found
        elif type(found).__module__.startswith(_MODEL_CODE):
            stack += vars(found).values() if hasattr(found, "__dict__") else ()
            names = (name for kind in type(found).__mro__ for name in _slots(kind))
            stack += [getattr(found, name) for name in names if hasattr(found, name)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = getattr(kind, "__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class Storages:
    """The memory of a model's tensors on a device. The tensors stay what they are, views of each other included: their
    memory is emptied and filled again."""

    def __init__(self, model: object, device: torch.device) -> None:
        found = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()
            for tensor in tensors_of(model)
            if tensor.device.type == device.type
        }
        self._storages = list(found.values())
        self._host: list[torch.Tensor] = []
        self._device = device

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._host)) or sum(storage.nbytes() for storage in self._storages)

    def to_host(self) -> None:
        """Blocking. Raises `RuntimeError` without host memory for it; all is as it was then."""
        host: list[torch.Tensor] = []
        with beside_steps(self._device):
            for storage in self._storages:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
                copy.copy_(_bytes_of(storage, self._device))
                host.append(copy)
        self._host = host
        for storage in self._storages:
            storage.resize_(0)

    def to_device(self) -> None:
        """Blocking. Raises `RuntimeError` without memory on the device; all is as it was then."""
        filled = []
        try:
            with beside_steps(self._device):
                for storage, copy in zip(self._storages, self._host, strict=True):
                    storage.resize_(len(copy))
                    filled.append(storage)
                    _bytes_of(storage, self._device).copy_(copy)
        except RuntimeError:
            for storage in filled:
                storage.resize_(0)
            raise
        self._host = []


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


@dataclass
class _Kept:
    identity: Identity
    model: DecoderModel
    extra: Any
    num_bytes: int
    storages: Storages | None


class HostWeights:
    """By the names of the models, the one put away first first. From any thread."""

    def __init__(self, device: torch.device, max_bytes: int, free_bytes: Callable[[], int]) -> None:
        """`max_bytes`: of all of them; below 0: half of the host memory that would be free without them. `free_bytes`: of
        host memory."""
        self._device = device
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def keep(self, name: str, identity: Identity, model: DecoderModel, extra: Any) -> bool:
        """Whether there is room for the model's weights, which are in host memory then; those put away before make room.
        `extra`: what is to be had with it. Blocking."""
        with self._lock:
            self._kept.pop(name, None)
            storages = None if self._device.type == "cpu" else Storages(model, self._device)
            num_bytes = sum(size for _, size, _ in identity.files) if storages is None else storages.num_bytes
            held_bytes = sum(one.num_bytes for one in self._kept.values())
            # On a CPU they are there already.
            free_bytes = self._free_bytes() + held_bytes + (num_bytes if storages is None else 0)
            limit_bytes = self._max_bytes if self._max_bytes >= 0 else int(FREE_SHARE * free_bytes)
            if num_bytes > limit_bytes:
                return False
            self._drop_until(limit_bytes - num_bytes)
            if storages is not None:
                try:
                    storages.to_host()
                except RuntimeError as error:
                    logger.warning("the weights of %s are not kept in host memory: %s", name, error)
                    return False
            self._kept[name] = _Kept(identity, model, extra, num_bytes, storages)
            return True

    def take(self, name: str, identity: Identity) -> tuple[DecoderModel, Any] | None:
        """The model, back on its device, with what was kept with it; None where those of this identity are not here.
        Blocking. Raises `RuntimeError` without memory on the device."""
        with self._lock:
            kept = self._kept.pop(name, None)
            if kept is None or kept.identity != identity:
                return None
            if kept.storages is not None:
                try:
                    kept.storages.to_device()
                except RuntimeError:
                    self._kept[name] = kept
                    raise
            return kept.model, kept.extra

    def make_room(self, num_bytes: int) -> None:
        """So much host memory is about to be needed."""
        with self._lock:
            while self._kept and self._free_bytes() < num_bytes:
                self._drop_first()

    def drop(self, name: str) -> None:
        with self._lock:
            self._kept.pop(name, None)

    def _drop_until(self, limit_bytes: int) -> None:
        while self._kept and sum(one.num_bytes for one in self._kept.values()) > limit_bytes:
            self._drop_first()

    def _drop_first(self) -> None:
        name = next(iter(self._kept))
        del self._kept[name]
        logger.info("the weights of %s left host memory, to make room", name)
