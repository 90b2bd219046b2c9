"""Whether a back end gives a token's attention the same bits in a chunk of any length, in a decode step and in any batch:
what kernels do with other shapes is found out on the device, before a model is served in deterministic mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.kv.kv_store import KvShape, KvStore
from services.worker.models.decoder import DecoderModel
from shared.engine.memory import slab

_LENGTHS = (600, 210, 37)
"""Lengths of the sequences that share steps; the first is longer than a segment of keys."""
_DECODE_EVERY = 5
"""Tokens; one of them is computed by itself, the others together."""

Work = list[tuple[int, int, int]]
"""(sequence, tokens in the cache, tokens computed) of a step."""


@torch.inference_mode()
def is_invariant(backend: AttentionBackend, model: DecoderModel) -> bool:
    """Whether the back end is invariant for the model's heads and windows."""
    probe = _Probe(backend, model)
    expected = probe.outputs([[(i, 0, length)] for i, length in enumerate(_LENGTHS)])
    return all(
        torch.equal(expected, probe.outputs(schedule))
        for schedule in (_together(_chunks(64)), _together(_chunks(50)), _together(_decodes()))
    )


def _chunks(size: int) -> list[list[int]]:
    return [[*range(0, length, size), length] for length in _LENGTHS]


def _decodes() -> list[list[int]]:
    return [
        sorted({length, *range(0, length, _DECODE_EVERY), *range(_DECODE_EVERY - 1, length, _DECODE_EVERY)})
        for length in _LENGTHS
    ]


def _together(bounds: list[list[int]]) -> Iterator[Work]:
    """Steps in which all sequences go from each of their bounds to the next."""
    for step in range(max(map(len, bounds)) - 1):
        yield [
            (i, own[step], own[step + 1] - own[step])
            for i, own in reversed(list(enumerate(bounds)))
            if step + 1 < len(own)
        ]


class _Probe:
    """One layer with random queries, keys and values."""

    def __init__(self, backend: AttentionBackend, model: DecoderModel) -> None:
        self._backend, self._model = backend, model
        self._block_size = backend.facts.block_sizes[0]
        shape = KvShape(1, self._block_size, model.num_kv_heads, model.head_dim, model.dtype)
        pages = [-(-length // self._block_size) for length in _LENGTHS]
        stride = -(-shape.block_bytes // slab.ALIGNMENT_BYTES) * slab.ALIGNMENT_BYTES
        store = KvStore(sum(pages), stride, model.device)
        self._kv = store.attach(shape, 1).layers[0]
        store.slab.zero_()
        order, width = np.random.default_rng(0).permutation(sum(pages)), max(pages)
        ends = np.cumsum(pages)
        self._tables = np.stack(
            [
                np.pad(order[end - count : end], (0, width - count), constant_values=order[end - count])
                for end, count in zip(ends, pages, strict=True)
            ]
        ).astype(np.int32)
        generator = torch.Generator().manual_seed(0)

        def random(num_heads: int) -> list[torch.Tensor]:
            sizes = [(length, num_heads, model.head_dim) for length in _LENGTHS]
            return [torch.randn(size, generator=generator).to(model.device, model.dtype) for size in sizes]

        self._queries, self._keys, self._values = (
            random(count) for count in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
        )

    def outputs(self, schedule: Iterable[Work]) -> torch.Tensor:
        """Outputs for all tokens, [tokens of all sequences, windows, heads, head_dim]."""
        results = [
            torch.zeros(len(q), 1 + len(self._model.windows), *q.shape[1:], dtype=q.dtype, device=q.device)
            for q in self._queries
        ]
        for work in schedule:
            which, starts, counts = (np.array(column, np.int64) for column in zip(*work, strict=True))
            layout = BatchLayout(
                starts, counts, self._tables[which], self._block_size, self._model.dtype, self._model.device,
                self._model.windows, self._model.heads,
            )  # fmt: skip
            metadata = self._backend.prepare(layout)
            queries, keys, values = (
                torch.cat([tensors[i][start : start + count] for i, start, count in work])
                for tensors in (self._queries, self._keys, self._values)
            )
            self._backend.write_kv(self._kv, keys, values, metadata)
            for index, window in enumerate((None, *self._model.windows)):
                out = self._backend.attend(queries, keys, values, self._kv, metadata, window)
                for (i, start, count), part in zip(work, torch.split(out, counts.tolist()), strict=True):
                    results[i][start : start + count, index] = part
        return torch.cat(results)
