"""Encoders (BERT, XLM-R and others of transformers): whole texts, whose tokens see each other.

There is no KV to keep: a text's chunks are planned like those of any prompt, but nothing is computed before its last one,
with which all of it is. So a step costs what the texts cost that end in it; those shorter than a chunk, which most are,
cost what the step was planned for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from services.worker.models.deterministic import FAST
from services.worker.models.transformers_model import in_dtype
from services.worker.models.weights import WeightReader
from shared.models.checkpoint import CheckpointError, CheckpointShape

MAX_PADDED_TOKENS = 8192
"""Most tokens of texts that are computed at once, shorter ones padded."""
_UNUSED = ("pooler.",)
"""Parts of bare models that no pooling of ours reads, and that checkpoints may lack."""


class EncoderModel(DecoderModel):
    def __init__(
        self, reader: WeightReader, config: Mapping[str, Any], shape: CheckpointShape, max_model_len: int
    ) -> None:
        self._named = f"{reader.path} ({shape.architecture}, run by transformers)"
        assert shape.pooling is not None
        if reader.group.size > 1 or reader.group.num_stages > 1:
            raise CheckpointError(f"{self._named}: encoders run on one device.")
        if reader.numerics is not FAST:
            raise CheckpointError(f"{self._named} cannot run{reader.numerics.asks}.")
        if reader.quantization:
            raise CheckpointError(f"{self._named}: quantization is not supported.")
        self.dtype, self.device = reader.dtype, reader.device
        self.vocab_size, self.hidden_size = shape.vocab_size, shape.hidden_size
        self.num_layers, self.num_kv_heads, self.head_dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        self.num_heads, self.can_be_captured = 1, False
        self._scores = shape.pooling.task == "score"
        self._model = _load(reader, self._named, scores=self._scores)
        self._has_types = int(getattr(self._model.config, "type_vocab_size", 0) or 0) > 1

    def begin(self, batch: ForwardBatch, hidden: torch.Tensor | None = None) -> ForwardState:
        return ForwardState(torch.zeros(len(batch.token_ids), 1, dtype=self.dtype, device=self.device))

    def run_layers(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        """Nothing: see `encoded`."""

    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        return state.hidden if tokens is None else state.hidden.index_select(0, tokens)

    def encoded(self, texts: Sequence[torch.Tensor], num_first: Sequence[int], mode: str) -> torch.Tensor:
        """`texts`: of each its tokens, [n] int; `num_first`: those of the first of two texts, or 0. What is pooled of each,
        [S, hidden_size], or its score before the activation, [S, 1]; float32. `mode`: as of `Pooling`."""
        results: list[torch.Tensor | None] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        while order:
            batch = [order.pop()]
            while order and len(texts[batch[0]]) * (len(batch) + 1) <= MAX_PADDED_TOKENS:
                batch.append(order.pop())
            for i, result in zip(batch, self._encoded([texts[i] for i in batch], [num_first[i] for i in batch], mode),
                                 strict=True):  # fmt: skip
                results[i] = result
        found = [result for result in results if result is not None]
        return torch.stack(found) if found else torch.empty(0, 1, device=self.device)

    def _encoded(self, texts: Sequence[torch.Tensor], num_first: Sequence[int], mode: str) -> torch.Tensor:
        """Vectors of texts that are computed at once; the first is the longest."""
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        at = torch.arange(len(texts[0]), device=self.device)
        mask = at < lengths[:, None]
        padding = self._model.config.pad_token_id or 0
        ids = torch.full(mask.shape, padding, dtype=torch.int64, device=self.device)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        more = {}
        if self._has_types:
            firsts = torch.tensor([first or len(texts[0]) for first in num_first], device=self.device)
            more["token_type_ids"] = (mask & (at >= firsts[:, None])).long()
        output = self._model(input_ids=ids, attention_mask=mask.long(), **more)
        if self._scores:
            scores: torch.Tensor = output.logits.float()
            return scores
        hidden = output.last_hidden_state.float()
        if mode == "mean":
            pooled: torch.Tensor = (hidden * mask[..., None]).sum(1) / lengths[:, None]
            return pooled
        index = torch.zeros_like(lengths) if mode == "cls" else lengths - 1
        chosen: torch.Tensor = hidden[torch.arange(len(texts), device=self.device), index]
        return chosen


def _load(reader: WeightReader, named: str, *, scores: bool) -> Any:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(reader.path, local_files_only=True)
        kind = (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if scores else MODEL_MAPPING)[type(config)]
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{named}: not known to the installed transformers: {error}") from error
    try:
        model, found = in_dtype(kind, reader.dtype).from_pretrained(
            reader.path, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise CheckpointError(f"{named} cannot be loaded: {type(error).__name__}: {error}") from error
    unused = () if scores else _UNUSED
    if missing := sorted(str(key) for key in found.get("missing_keys") or () if not str(key).startswith(unused)):
        raise CheckpointError(f"{named} has no tensor {', '.join(missing[:4])}.")
    if wrong := found.get("mismatched_keys"):
        raise CheckpointError(f"{named} has other shapes for {', '.join(map(str, sorted(wrong)[:4]))}.")
    return model.eval().to(reader.device)
