"""Steps of a model by itself, apart from requests: before it serves, and to find out whether it is sound."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.kv.kv_store import KvStore
from services.worker.kv.transfer import to_device
from services.worker.models.decoder import DecoderModel, ForwardBatch
from services.worker.models.encoder import EncoderModel
from services.worker.ranks.group import ALONE, RankGroup
from shared.engine.memory import slab
from shared.models.checkpoint import CheckpointError

WARM_UP = {"cpu": ((1, 0, 2), (1, 2, 1)), "cuda": ((1, 0, 2), (1, 2, 1), (1, 0, 512), (257, 2, 1))}
"""(sequences, tokens in the cache, tokens computed) of the steps before a model serves. On CUDA kernels come in variants for
long prompts and for many sequences."""

NUM_CHECKED = 2
"""Tokens by whose logits a model is judged."""
UNSOUND = "its logits are NaN: weights that are no numbers, or too large for their dtype."


@torch.inference_mode()
def warm_up(
    model: DecoderModel, backend: AttentionBackend, block_size: int, max_model_len: int, group: RankGroup
) -> None:
    """Prefills and decodes: compiles and initialises kernels before the model serves. Each stage by itself. Raises
    `CheckpointError` where no logits of few tokens are numbers (among many one may be odd, which ends its requests alone).
    Of a group, whose other ranks would wait for the one that sees it, rank 0 asks all (`Executor.is_sound`)."""
    for num_rows, start, count in WARM_UP[model.device.type]:
        if (length := min(count, max_model_len - start)) < 1:
            continue
        logits = lone_step(model, backend, block_size, group, num_rows, start, length)
        if group is ALONE and length <= NUM_CHECKED and logits is not None and are_nan(logits):
            raise CheckpointError(UNSOUND)


def are_nan(logits: torch.Tensor) -> bool:
    """Whether each row of `[S, vocab]` has a NaN."""
    return bool(torch.isnan(logits).any(dim=-1).all())


@torch.inference_mode()
def fingerprint_of(model: DecoderModel, backend: AttentionBackend, block_size: int, max_model_len: int) -> str:
    """16 hexadecimal digits of a prompt's logits: the same where the model makes the same bits."""
    logits = lone_step(model, backend, block_size, ALONE, 1, 0, min(block_size, max_model_len, model.vocab_size))
    assert logits is not None
    return hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()[:16]


def lone_step(
    model: DecoderModel,
    backend: AttentionBackend,
    block_size: int,
    group: RankGroup,
    num_rows: int,
    start: int,
    count: int,
) -> torch.Tensor | None:
    """Computes `count` tokens of each row behind `start` others, in a cache of its own, whose blocks are all the same one.
    Returns the rows' logits `[num_rows, vocab]`, on the last stage; of an encoder, which has neither cache nor logits, what
    it makes of texts of few tokens."""
    if isinstance(model, EncoderModel):
        text = torch.arange(min(count, NUM_CHECKED), device=model.device)
        return model.encoded([text] * num_rows, [0] * num_rows, "cls")
    shape, device = model.kv_shape(block_size), model.device
    store = KvStore(1, -(-shape.block_bytes // slab.ALIGNMENT_BYTES) * slab.ALIGNMENT_BYTES, device)
    views = store.attach(shape, 1)
    store.claim(views, np.zeros(1, np.int64))
    tables = np.zeros((num_rows, -(-(start + count) // block_size)), np.int32)
    layout = BatchLayout(
        np.full(num_rows, start), np.full(num_rows, count), tables, block_size, model.dtype, device, model.windows,
        model.heads,
    )  # fmt: skip
    positions = to_device(layout.positions, device)
    batch = ForwardBatch(positions % model.vocab_size, positions, views, backend, backend.prepare(layout))
    hidden = torch.zeros(len(positions), model.hidden_size, dtype=model.dtype, device=device)
    state = model.forward(batch, None if group.is_first_stage else hidden)
    if not group.is_last_stage:
        return None
    return model.logits(state, to_device(layout.query_starts[1:] - 1, device))
