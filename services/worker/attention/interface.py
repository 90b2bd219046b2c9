"""The seam between models and attention kernels: ragged batches over paged KV.

Once per step the executor describes the batch (`BatchLayout`) and the back end turns that into its own metadata
(`prepare`); then every layer calls `write_kv` and `attend` with it. All back ends pass one parity suite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from services.worker.kv.kv_store import LayerKv
from services.worker.kv.transfer import Field
from shared.messages.cluster import AttentionFacts


class Heads(NamedTuple):
    """Heads of a model's attention, on one rank."""

    queries: int
    keys: int
    """And as many of values."""
    dim: int
    softcap: float = 0.0
    """Scores become cap * tanh(score / cap) before the softmax (Gemma 2), in all layers; 0: they stay."""


@dataclass(frozen=True)
class BatchLayout:
    """One step's sequences, on the host. S sequences, T tokens in all; sequence i's tokens are consecutive."""

    starts: np.ndarray
    """[S] int64: tokens already in the cache, which is the position of the first token computed now."""
    counts: np.ndarray
    """[S] int64: tokens computed now, at least 1."""
    block_tables: np.ndarray
    """[S, P] int32: flat blocks; entries past a sequence's last page repeat its first block, so that padding reads memory
    of the same model."""
    block_size: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int, ...] = ()
    """Sliding windows that layers of the model use; layers without one attend to everything."""
    heads: Heads | None = None
    """Heads, for back ends that plan a step before its queries are there."""

    @property
    def softcap(self) -> float:
        return 0.0 if self.heads is None else self.heads.softcap

    @cached_property
    def contexts(self) -> np.ndarray:
        """[S] int64: tokens in the cache after this step's are written."""
        result: np.ndarray = self.starts + self.counts
        return result

    @cached_property
    def query_starts(self) -> np.ndarray:
        """[S + 1] int64: where each sequence's tokens begin in the flat batch."""
        return np.concatenate(([0], np.cumsum(self.counts)))

    @cached_property
    def all_decode(self) -> bool:
        return bool((self.counts == 1).all())

    @cached_property
    def sequence_of_token(self) -> np.ndarray:
        """[T] int64"""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def positions(self) -> np.ndarray:
        """[T] int64"""
        if self.all_decode:
            return self.starts
        shifts = np.repeat(self.starts - self.query_starts[:-1], self.counts)
        result: np.ndarray = np.arange(self.query_starts[-1]) + shifts
        return result

    @cached_property
    def blocks(self) -> np.ndarray:
        """[T] int32: the flat block that each token's keys and values go to."""
        taken: np.ndarray = self.block_tables[self.sequence_of_token, self.positions // self.block_size]
        return taken

    @cached_property
    def offsets(self) -> np.ndarray:
        """[T] int64: the token's place in its block."""
        result: np.ndarray = self.positions % self.block_size
        return result


class AttentionBackend(ABC):
    """One object an executor; used from its thread only."""

    facts: AttentionFacts
    """Its name, the blocks, heads and dtypes that it takes."""

    @abstractmethod
    def prepare(self, layout: BatchLayout) -> Any:
        """Metadata of one step, shared by all its layers; valid until the next `prepare`."""

    def write_kv(self, kv: LayerKv, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> None:
        """Stores this step's keys and values `[T, kv_heads, head_dim]` in their blocks."""
        kv.put(metadata.blocks, metadata.offsets, keys, values)

    @abstractmethod
    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv: LayerKv,
        metadata: Any,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of `queries [T, heads, head_dim]` over each one's sequence, scaled by head_dim ** -0.5;
        after `write_kv` of the same keys and values. -> [T, heads, head_dim]"""

    # ---- captured graphs: decode batches of fixed numbers of rows, whose inputs lie in static memory ----

    def replay_fields(self, layout: BatchLayout, max_pages: int) -> Mapping[str, Field] | None:
        """What a replay is told, for as many rows as `layout` has, with block tables of up to `max_pages`; None: this back
        end's work cannot be captured."""
        return None

    def replay_values(self, layout: BatchLayout) -> Mapping[str, np.ndarray]:
        """The fields' values for a decode batch, padded by the caller to the captured size. Only the last may have less than
        its size."""
        raise NotImplementedError(f"{self.facts.name} has no graphs")

    def allocate_replay(
        self, layout: BatchLayout, fields: Mapping[str, torch.Tensor], max_pages: int, larger: Any | None
    ) -> Any:
        """Metadata for captured steps of as many rows as `layout` has, over the static memory of the fields, which have
        `layout`'s values. `larger`: of the model's next larger size, whose working memory may be shared; None: this is the
        largest. Called while the model is being loaded, in another thread than the rest, as are the calls that are
        captured."""
        raise NotImplementedError(f"{self.facts.name} has no graphs")

    def begin_replay(self, static: Any, layout: BatchLayout) -> None:
        """Once the fields are filled, before what was captured with this metadata is replayed."""
        raise NotImplementedError(f"{self.facts.name} has no graphs")
