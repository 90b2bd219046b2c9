"""Paged attention with torch's own operators: runs on any device, and is the back end of CPUs.

The pages of a group of sequences are gathered into a workspace and one `scaled_dot_product_attention` runs over the
group; there is no loop over sequences. Groups are chosen so that padding to the longest member stays small, so the cost
follows the real context lengths. First chunks of prompts need no gather: their keys are all in this step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.attention.facts import TORCH_CPU, TORCH_CUDA
from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.kv.kv_store import LayerKv
from services.worker.kv.transfer import to_device

_MAX_PADDING = 0.25
"""Padded work allowed on top of a group's own, as a share."""
_GROUP_COST_KEYS = 2048
"""What starting another group costs (gather, attention, scatter), in keys read."""
_SCORES_BYTES = 256 << 20
"""Most bytes of float32 scores that are written out at once on CUDA."""


@dataclass
class Pages:
    """Blocks whose keys and values are gathered, as many of each sequence."""

    num_sequences: int
    blocks: torch.Tensor
    """[num_sequences * pages] int64"""
    rows: torch.Tensor | None = None
    """[2 * kv_heads * num_sequences * pages] of `LayerKv.runs`, the same for all layers; None: not known yet."""
    behind: torch.Tensor | None = None
    """Which of the [num_sequences * keys] lie behind the sequences' own; None: none does."""


class Gathering:
    """Brings pages of sequences together, in a workspace reused by all layers: fresh memory of this size would cost more in
    page faults than the copy itself."""

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None

    def gather(self, kv: LayerKv, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [sequences, kv_heads, keys, head_dim], until the next call; 0 behind the sequences' own. What lies there
        is of others that had the blocks before: masks give it the weight 0, but 0 * NaN is NaN."""
        num_kv_heads, head_dim = kv.keys.shape[-2:]
        if pages.rows is None:
            halves_and_heads = torch.arange(2 * num_kv_heads, device=pages.blocks.device)[:, None]
            pages.rows = (halves_and_heads * kv.head_rows + pages.blocks * kv.block_rows).flatten()
        shape = (len(pages.rows), kv.runs.shape[1])
        space = self._workspace
        if space is None or space.numel() < shape[0] * shape[1] or space.dtype != kv.runs.dtype:
            space = self._workspace = torch.empty(shape, dtype=kv.runs.dtype, device=kv.runs.device)
        out = space.view(-1)[: shape[0] * shape[1]].view(shape)
        torch.index_select(kv.runs, 0, pages.rows, out=out)
        if pages.behind is not None:
            out.view(2 * num_kv_heads, -1, head_dim).index_fill_(1, pages.behind, 0)
        keys, values = out.view(2, num_kv_heads, pages.num_sequences, -1, head_dim).transpose(1, 2).unbind(0)
        return keys, values


@dataclass
class _Group:
    """Sequences that attend together, padded to `num_queries` queries and `num_pages` pages each."""

    num_sequences: int
    num_queries: int
    num_pages: int
    pages: Pages | None
    """Pages of the group's sequences; None: the keys are those of this step alone."""
    masks: dict[int | None, torch.Tensor | None]
    """Per window: [num_sequences, 1, num_queries, keys] to add to the scores; None where `is_causal` says it all."""
    tokens: torch.Tensor | None
    """[num_sequences * num_queries] flat token of each padded query; None: the flat batch is already that."""
    valid: torch.Tensor | None
    """Indices of the real ones among the padded queries; None: all are."""


@dataclass
class _Metadata:
    blocks: torch.Tensor
    offsets: torch.Tensor
    groups: list[_Group]
    softcap: float


class TorchBackend(AttentionBackend):
    def __init__(self, device: torch.device) -> None:
        self.facts = TORCH_CPU if device.type == "cpu" else TORCH_CUDA
        self._gathering = Gathering()
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            # cuDNN's attention makes a plan for each new shape, and most prompts have one
            torch.backends.cuda.enable_cudnn_sdp(False)

    def prepare(self, layout: BatchLayout) -> _Metadata:
        order, bounds = _grouping(layout)
        groups = [_group(layout, order[begin:end], len(bounds) == 1) for begin, end in bounds]
        return _Metadata(_tensor(layout.blocks, layout), _tensor(layout.offsets, layout), groups, layout.softcap)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv: LayerKv,
        metadata: _Metadata,
        window: int | None,
    ) -> torch.Tensor:
        if len(metadata.groups) == 1 and metadata.groups[0].tokens is None:
            return self._attend_group(queries, keys, values, kv, metadata.groups[0], window, metadata.softcap)
        out = torch.empty_like(queries)
        for group in metadata.groups:
            assert group.tokens is not None
            chosen = queries.index_select(0, group.tokens)
            if group.pages is None:
                own = keys.index_select(0, group.tokens), values.index_select(0, group.tokens)
                result = self._attend_group(chosen, *own, kv, group, window, metadata.softcap)
            else:
                result = self._attend_group(chosen, keys, values, kv, group, window, metadata.softcap)
            if group.valid is None:
                out.index_copy_(0, group.tokens, result)
            else:
                out.index_copy_(0, group.tokens[group.valid], result.index_select(0, group.valid))
        return out

    def _attend_group(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv: LayerKv,
        group: _Group,
        window: int | None,
        softcap: float,
    ) -> torch.Tensor:
        """All tensors [num_sequences * num_queries, heads, head_dim]."""
        num_heads, head_dim = queries.shape[-2:]
        num_kv_heads = kv.keys.shape[-2]
        sequences, length = group.num_sequences, group.num_queries
        if group.pages is not None:
            keys, values = self._gathering.gather(kv, group.pages)
        else:
            shape = (sequences, -1, num_kv_heads, head_dim)
            keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        mask = group.masks.get(window, group.masks[None])
        if softcap:
            grouped = queries.view(sequences, length, num_heads, head_dim).transpose(1, 2)
            at_once = max(1, _SCORES_BYTES // (4 * sequences * num_heads * keys.shape[2])) if self._is_cuda else length
            parts = [
                _capped_attention(grouped, begin, min(begin + at_once, length), keys, values, mask, softcap)
                for begin in range(0, length, at_once)
            ]
            return torch.cat(parts, 2).transpose(1, 2).reshape(queries.shape)
        if length == 1:
            # the query heads that share a KV head are that head's rows: no expansion of K and V
            grouped = queries.view(sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(queries.shape)
        if self._is_cuda and num_heads != num_kv_heads and (mask is not None or queries.dtype == torch.float32):
            return _attention_of_shared_heads(queries.view(sequences, length, num_heads, head_dim), keys, values, mask)
        out = F.scaled_dot_product_attention(
            queries.view(sequences, length, num_heads, head_dim).transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=num_heads != num_kv_heads,
        )
        return out.transpose(1, 2).reshape(queries.shape)


def _attention_of_shared_heads(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Without `enable_gqa`, beside which CUDA has no kernel for masks or float32 but one that writes all scores out. One
    sequence at a time its KV heads are the batch, and each is read by its query heads by a stride of 0: nothing is repeated.
    `queries` [sequences, tokens, heads, head_dim], `keys` and `values` [sequences, kv_heads, keys, head_dim]; `mask` None:
    causal. -> [sequences * tokens, heads, head_dim]"""
    num_sequences, length, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for index in range(num_sequences):
        grouped = queries[index].view(length, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        near, far = (x[index][:, None].expand(-1, num_heads // num_kv_heads, -1, -1) for x in (keys, values))
        own = None if mask is None else mask[index][None]
        result = F.scaled_dot_product_attention(grouped, near, far, attn_mask=own, is_causal=mask is None)
        out[index].view(length, num_kv_heads, -1, head_dim).copy_(result.permute(2, 0, 1, 3))
    return out.flatten(0, 1)


def _capped_attention(
    queries: torch.Tensor,
    begin: int,
    end: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Gemma 2's, which torch has no operator for: scores are capped before the softmax. `[sequences, heads, tokens,
    head_dim]` each, with fewer heads of keys and values; `mask` None: causal. Of the tokens from `begin` to before `end`."""
    num_sequences, _, _, head_dim = queries.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    num_queries = end - begin
    chosen = queries[:, :, begin:end]
    grouped = chosen.reshape(num_sequences, num_kv_heads, -1, num_queries, head_dim) * head_dim**-0.5
    scores = torch.tanh(grouped @ keys[:, :, None].mT / softcap) * softcap
    if mask is None:
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device).triu_(1 + begin)
        scores = scores.masked_fill_(hidden, float("-inf"))
    else:
        scores = scores + mask[:, :, None, begin:end]
    return (scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values[:, :, None]).flatten(1, 2)


def _tensor(array: np.ndarray, layout: BatchLayout) -> torch.Tensor:
    return to_device(array.astype(np.int64, copy=False), layout.device)


def _grouping(layout: BatchLayout) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """An order of the sequences and the bounds of the groups in it.

    Sequences are sorted by (chunk or first chunk or decode, queries, pages), all descending; a group is closed when
    padding its next member to the group's first would waste more than the group's share and a new group's cost.
    """
    pages = -(-layout.contexts // layout.block_size)
    fresh = (layout.starts == 0) & (layout.counts > 1)
    kind = np.where(layout.counts == 1, 0, np.where(fresh, 1, 2))
    order = np.lexsort((-pages, -layout.counts, -kind))
    kinds, counts = kind[order], layout.counts[order]
    work = counts * pages[order] * layout.block_size
    bounds, begin = [], 0
    while begin < len(order):
        same = kinds[begin:] == kinds[begin]
        limit = begin + (len(same) if same.all() else int(np.argmin(same)))
        longest = np.maximum.accumulate(pages[order][begin:limit]) * layout.block_size * counts[begin]
        real = np.cumsum(work[begin:limit])
        padded = longest * np.arange(1, limit - begin + 1)
        too_much = padded - real > real * _MAX_PADDING + _GROUP_COST_KEYS
        end = begin + int(np.argmax(too_much)) if too_much.any() else limit
        bounds.append((begin, max(end, begin + 1)))
        begin = bounds[-1][1]
    if len(bounds) == 1 and (layout.counts == layout.counts[0]).all():
        return np.arange(len(order)), bounds
    return order, bounds


def _group(layout: BatchLayout, members: np.ndarray, only: bool) -> _Group:
    starts, counts, contexts = layout.starts[members], layout.counts[members], layout.contexts[members]
    num_queries = int(counts.max())
    uniform = bool((counts == num_queries).all())
    fresh = num_queries > 1 and not starts.any()
    query = np.arange(num_queries)
    # padded queries repeat the sequence's last token; their results are dropped
    tokens = layout.query_starts[members][:, None] + np.minimum(query, counts[:, None] - 1)
    flat = only and uniform and bool((members[1:] > members[:-1]).all())
    valid = None if uniform else _tensor(np.flatnonzero((query < counts[:, None]).ravel()), layout)
    if fresh:
        num_pages, num_keys, pages = 0, num_queries, None
    else:
        num_pages = int(-(-contexts.max() // layout.block_size))
        num_keys = num_pages * layout.block_size
        tables = layout.block_tables[members, :num_pages]
        pages = pages_of(layout, tables, contexts)
    positions = starts[:, None] + query
    masks: dict[int | None, torch.Tensor | None] = {}
    masks[None] = None if fresh else _mask(layout, positions, num_keys, None)
    for window in layout.windows:
        if contexts.max() > window:
            masks[window] = _mask(layout, positions, num_keys, window)
    return _Group(
        len(members), num_queries, num_pages, pages, masks, None if flat else _tensor(tokens.ravel(), layout), valid
    )


def pages_of(layout: BatchLayout, tables: np.ndarray, contexts: np.ndarray) -> Pages:
    """`tables` [sequences, pages]; `contexts` [sequences]: keys that each has."""
    num_keys = tables.shape[1] * layout.block_size
    behind = np.flatnonzero((np.arange(num_keys) >= contexts[:, None]).ravel())
    return Pages(len(tables), _tensor(tables.ravel(), layout), behind=_tensor(behind, layout) if len(behind) else None)


def _mask(layout: BatchLayout, positions: np.ndarray, num_keys: int, window: int | None) -> torch.Tensor:
    """[sequences, 1, queries, keys] of 0 and -inf: a query sees the keys up to its own position, and with a window only
    the last `window` of them."""
    query = to_device(positions, layout.device)[:, None, :, None]
    key = torch.arange(num_keys, device=layout.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=layout.dtype, device=layout.device).masked_fill_(hidden, float("-inf"))
