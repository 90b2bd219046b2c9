"""Pooling of hidden states into vectors and scores, for requests that want one in place of output.

A decoder's hidden states come chunk by chunk, in the place of logits: the last one is taken as it is, for a mean they are
summed row by row. An encoder's texts are computed whole, with the last of their chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError

from services.worker.attention.interface import BatchLayout
from services.worker.kv.transfer import to_device
from services.worker.models.decoder import DecoderModel, ForwardState
from services.worker.models.encoder import EncoderModel
from services.worker.models.weights import SCORE_WEIGHT, rows_of
from shared.messages.requests import Pooled, SamplingParams
from shared.models.checkpoint import CheckpointError, CheckpointShape
from shared.models.pooling import Pooling

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_WHOLE = Pooled()
_HEADS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")


class _Layer(NamedTuple):
    weight: torch.Tensor
    """[outputs, inputs] float32"""
    bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]


class Pooler:
    """The steps of a checkpoint behind its layers, in float32."""

    def __init__(self, pooling: Pooling, layers: Sequence[_Layer]) -> None:
        self.mode = pooling.mode
        self._layers = layers
        self._is_normalized = pooling.is_normalized

    def finished(self, pooled: torch.Tensor, wishes: Sequence[Pooled]) -> list[torch.Tensor]:
        """`pooled`: [S, hidden_size] -> of each its vector, float32 of as many dimensions as it wants."""
        result = pooled.float()
        for layer in self._layers:
            result = layer.activation(F.linear(result, layer.weight, layer.bias))
        vectors = []
        for vector, wish in zip(result, wishes, strict=True):
            vector = vector[: wish.num_dimensions] if wish.num_dimensions else vector
            vectors.append(F.normalize(vector, dim=0) if self._is_normalized else vector.contiguous())
        return vectors


def load_pooler(path: Path, shape: CheckpointShape, device: torch.device) -> Pooler | None:
    """Pooler of the checkpoint in `path`; None: it generates text. Blocking. Raises `CheckpointError`."""
    pooling = shape.pooling
    if pooling is None:
        return None
    layers = [
        (
            rows_of_folder(path / dense.folder, "linear.weight"),
            rows_of_folder(path / dense.folder, "linear.bias", is_optional=True),
            dense.activation,
        )
        for dense in pooling.dense
    ]
    if pooling.token_ids:
        rows = rows_of(path, _HEADS, pooling.token_ids)
        layers.append((rows[:1] - rows[1:].sum(0, keepdim=True), None, pooling.activation))
    elif pooling.task == "score" and shape.is_divisible:
        layers.append((rows_of(path, [SCORE_WEIGHT]), None, pooling.activation))
    elif pooling.task == "score":
        layers.append((torch.eye(1), None, pooling.activation))
    moved, size = [], 1 if pooling.task == "score" and not shape.is_divisible else shape.hidden_size
    for weight, bias, activation in layers:
        assert weight is not None
        if weight.ndim != 2 or weight.shape[1] != size:
            raise CheckpointError(
                f"{path}: a layer behind the pooling has shape {list(weight.shape)}, but {size} inputs."
            )
        size = len(weight)
        moved.append(_Layer(weight.to(device), None if bias is None else bias.to(device), _ACTIVATIONS[activation]))
    if size != pooling.num_dimensions:
        raise CheckpointError(f"{path}: vectors have {size} dimensions, but {pooling.num_dimensions} are told of.")
    return Pooler(pooling, moved)


def rows_of_folder(folder: Path, name: str, *, is_optional: bool = False) -> torch.Tensor | None:
    """A tensor of a module of sentence-transformers. Raises `CheckpointError`."""
    try:
        return rows_of(folder, [name])
    except (CheckpointError, SafetensorError):
        if is_optional:
            return None
        raise


class PooledRows:
    """What the rows of an executor want pooled, and what has been summed of them so far."""

    def __init__(self) -> None:
        self._wishes: dict[int, Pooled] = {}
        self._sums: dict[int, torch.Tensor] = {}
        """[hidden_size] float32 of a row: of the tokens that were computed."""

    def take(self, row: int, sampling: SamplingParams) -> None:
        """A sequence takes the row; it is computed from its first token on where a mean is wanted."""
        self._sums.pop(row, None)
        self._wishes.pop(row, None)
        if sampling.pooled is not None:
            self._wishes[row] = sampling.pooled

    @torch.inference_mode()
    def pooled(
        self,
        model: DecoderModel,
        pooler: Pooler,
        state: ForwardState,
        rows: np.ndarray,
        layout: BatchLayout,
        ended: np.ndarray,
        tokens: torch.Tensor,
    ) -> list[tuple[int, torch.Tensor]]:
        """Index and vector of each sequence of a step that has `ended` with it (their indices). `tokens`:
        [rows, length] int32, of all rows."""
        wishes = [self._wishes.get(int(row), _WHOLE) for row in rows[ended]]
        if isinstance(model, EncoderModel):
            texts = [tokens[int(rows[i]), : int(layout.contexts[i])] for i in ended]
            hidden = model.encoded(texts, [wish.num_first for wish in wishes], pooler.mode)
        elif pooler.mode == "mean":
            hidden = self._means(model, state, rows, layout, ended)
        elif len(ended):
            hidden = model.logits(state, to_device(layout.query_starts[1:][ended] - 1, model.device))
        if not len(ended):
            return []
        return list(zip(ended.tolist(), pooler.finished(hidden, wishes), strict=True))

    def _means(
        self, model: DecoderModel, state: ForwardState, rows: np.ndarray, layout: BatchLayout, ended: np.ndarray
    ) -> torch.Tensor:
        """Adds the step's tokens; the means of those that have ended, [S, hidden_size]."""
        ends = np.cumsum(layout.counts)
        hidden = model.logits(state, torch.arange(int(ends[-1]), device=model.device)).float()
        for row, start, end, count in zip(rows.tolist(), layout.starts, ends, layout.counts, strict=True):
            added = hidden[end - count : end].sum(0)
            before = self._sums.get(row) if start else None
            if start and before is None and row in self._wishes:
                raise ValueError("a mean is wanted of tokens that were not computed here")
            self._sums[row] = added if before is None else before + added
        means = [self._sums.pop(int(rows[i])) / int(layout.contexts[i]) for i in ended]
        return torch.stack(means) if means else hidden[:0]
