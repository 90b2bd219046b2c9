"""Deterministic mode: what is computed for a token is a function of its own sequence up to it, to the last bit.

Floating-point sums depend on their order, and libraries choose the order by the shape of what they are given, so that in
bfloat16 a token's keys and values come out otherwise in another batch, or when they are computed again as part of a prompt
(He et al. 2025, "Defeating Nondeterminism in LLM Inference"). Here nothing that is computed takes its shape from the step:

| | how |
|---|---|
| linear layers | tiles of fixed numbers of rows; which ones give the same bits is found out when a model is loaded |
| activations | groups of rows in which each element takes the same path through the vector loops |
| rotary angles | read from a table by position |
| attention | tiles of queries over segments of keys, both cut at fixed positions (attention/tile_backend.py) |
| sampling, log-probabilities | row by row (`SamplingRows`) |
| sums over ranks | in their order (`Ranks`) |

Norms, embeddings, residual sums and masks do each row alone in any case. Bits may differ between kinds of processors,
numbers of threads or of devices, and releases of libraries: instances compare fingerprints (`LoadedModel.fingerprint`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from services.worker.attention.interface import AttentionBackend
from services.worker.attention.invariance import is_invariant
from services.worker.models.decoder import DecoderModel
from services.worker.models.linear import Linear
from services.worker.models.ops import TorchOps, choose_ops
from services.worker.models.rope import RotaryEmbedding

logger = logging.getLogger(__name__)

RowFunction = Callable[[torch.Tensor], torch.Tensor]
"""[rows, width] -> [rows, width], each row by itself."""

BASE_ROWS = {"cpu": 32, "cuda": 64}
"""Rows of the tile with which the other sizes have to agree with."""
OTHER_ROWS = {"cpu": (1, 2, 4, 8, 16, 64, 128, 256, 512), "cuda": (1, 2, 4, 8, 16, 32, 512, 2048)}
MAX_PROBE_OPERATIONS = 2e10
"""Multiplications and additions of one probe."""
SHIFTS = (0, 1, 6, 13, 23)
"""By how many places rows are moved in probes."""
SERIAL_ELEMENTS = 16384
"""Most elements of a tensor on CPU that torch does not divide over threads (GELU's kernel from more on, others from
32,768)."""
VECTOR_ELEMENTS = 64
"""A multiple of what any vector loop of torch takes at a time: what is left over takes another path."""


class Numerics:
    """How layers compute. These do it as fast as they can."""

    asks = ""
    """What is asked of attention, in a refusal."""

    def suits(self, backend: AttentionBackend, model: DecoderModel) -> bool:
        """Whether the model may be computed with it."""
        return True

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: bool = False) -> Linear:
        """Arguments as of `Linear`."""
        return Linear(weight, bias, shared=shared)

    def by_rows(self, function: RowFunction) -> RowFunction:
        """`function` does the same to each element."""
        return function

    def rope(self, rope: RotaryEmbedding, num_positions: int) -> RotaryEmbedding:
        """`num_positions`: of the longest sequence."""
        return rope

    def ops(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> TorchOps:
        return choose_ops(device, dtype, head_dim)


class InvariantNumerics(Numerics):
    """Numerics of deterministic mode."""

    asks = " with the same bits in every batch (TIDEWAY_DETERMINISTIC)"

    def suits(self, backend: AttentionBackend, model: DecoderModel) -> bool:
        suits = not model.softcap and is_invariant(backend, model)
        if not suits:
            logger.info("not used, as attention has other bits in other batches: %s", type(backend).__name__)
        return suits

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: bool = False) -> Linear:
        return InvariantLinear(weight, bias, shared=shared)

    def by_rows(self, function: RowFunction) -> RowFunction:
        return functools.partial(_in_groups, function)

    def rope(self, rope: RotaryEmbedding, num_positions: int) -> RotaryEmbedding:
        rope.tabulate(num_positions)
        return rope

    def ops(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> TorchOps:
        return TorchOps()


FAST = Numerics()
INVARIANT = InvariantNumerics()


class InvariantLinear(Linear):
    """In tiles of rows; a row's result does not depend on its tile's size or on its place there."""

    __slots__ = ("_sizes",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: bool = False) -> None:
        super().__init__(weight, bias, shared=shared)
        self._sizes: tuple[int, ...] = ()
        if self.compiled is None:
            self._sizes = tile_sizes(weight.shape, weight.dtype, weight.device, bias is not None, shared)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.compiled is not None:  # each row's sums have their own fixed order (native/kernels.c)
            return super().__call__(x)
        parts = []
        for start, stop, size in tiles(len(x), self._sizes):
            part = x[start:stop]
            if stop - start < size:
                part = F.pad(part, (0, 0, 0, size - (stop - start)))
            elif part.data_ptr() % 64:
                part = part.clone()  # libraries may treat the first elements up to a cache line otherwise
            parts.append(super().__call__(part)[: stop - start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def tiles(num_rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(first row, row behind the last, rows with padding) of each tile. `sizes`: ascending."""
    start = 0
    while start < num_rows:
        left = num_rows - start
        larger = next((size for size in sizes if size >= left), 0)
        smaller = next((size for size in reversed(sizes) if size <= left), 0)
        # padding costs less than many small tiles, but not more than a tile is worth
        size = larger if larger and (not smaller or larger < 2 * left) else smaller
        yield start, min(start + size, num_rows), size
        start += size


@functools.cache
def tile_sizes(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, has_bias: bool, shared: bool
) -> tuple[int, ...]:
    """Ascending: tiles of which a `Linear` of a weight like this gives the same bits for a row at every place.

    They are found by weights whose halves cancel each other but for rounding, so that hardly an element of the result
    survives another order of its sum."""
    (out_features, in_features), generator = shape, torch.Generator().manual_seed(0)

    def random(rows: int) -> torch.Tensor:
        return torch.randn(rows, -(-in_features // 2), generator=generator)

    half = random(out_features)
    weight = torch.cat((half, half), 1)[:, :in_features].to(device, dtype)
    bias = torch.zeros(out_features, dtype=dtype, device=device) if has_bias else None
    linear = Linear(weight, bias, shared=shared)
    base = BASE_ROWS[device.type]
    half = random(base) * 2.0 ** torch.randint(0, 9, (base, half.shape[1]), generator=generator)
    rows = torch.cat((half, -half), 1)[:, :in_features].to(device, dtype)
    expected = linear(rows)

    def agrees(size: int) -> bool:
        """Whether sums agree at several places."""
        if 2.0 * size * in_features * out_features > MAX_PROBE_OPERATIONS and size != base:
            return False
        places = torch.arange(size, device=device)
        for shift in SHIFTS:
            chosen = (places + shift) % base
            if not torch.equal(linear(rows[chosen]), expected[chosen]):
                return False
        return True

    found: tuple[int, ...] = (1,)  # it has only one place
    if agrees(base):
        found = tuple(sorted({base, *(size for size in OTHER_ROWS[device.type] if agrees(size))}))
    logger.debug("linear %d x %d in %s: tiles of %s rows", in_features, out_features, dtype, found)
    return found


def _in_groups(function: RowFunction, x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return function(x)
    # a single row of a wider tensor counts as contiguous, for which torch may have another kernel
    x, width = x.contiguous(), x.shape[1]
    rows = max(1, SERIAL_ELEMENTS // width) if width % VECTOR_ELEMENTS == 0 else 1
    return function(x) if len(x) <= rows else torch.cat([function(part) for part in torch.split(x, rows)])
