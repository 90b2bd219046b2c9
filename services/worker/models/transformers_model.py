"""Any causal language model of transformers whose attention can be replaced: its own forward pass, over our KV blocks.

transformers calls the function that is registered for an attention implementation with each layer's queries, keys and
values; ours writes them to the cache and attends over it. Models get tokens of all sequences in one row, with positions, so
whatever mixes tokens outside of attention (convolutions, recurrences) cannot work and is refused. Linear layers are replaced
by ours. Slower than a model of this package: its layers are not fused. They run all at once, so that a step of it is not
suspended within.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from services.worker.models.deterministic import FAST
from services.worker.models.weights import WeightReader
from shared.models.checkpoint import CheckpointError, CheckpointShape

_IMPLEMENTATION = "tideway"
_LARGEST_CHANGE = 0.1
"""Largest change of a token's hidden state by rounding, where tokens before it are others and attention does not see
them."""
_CHANGES_SCORES = ("s_aux", "position_bias", "attention_bias", "alibi", "head_mask")
"""Arguments of an attention function that ours cannot heed."""


class _Call(NamedTuple):
    """One layer's attention; tensors `[T, heads, head_dim]`, queries scaled so that head_dim ** -0.5 is what is left."""

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    window: int | None
    softcap: float
    unsupported: str
    """What of its arguments is not heeded."""


_Attend = Callable[[_Call], torch.Tensor]


class TransformersModel(DecoderModel):
    def __init__(
        self, reader: WeightReader, config: Mapping[str, Any], shape: CheckpointShape, max_model_len: int
    ) -> None:
        """`config`: transformers reads it again, with the defaults of the architecture."""
        self._named = f"{reader.path} ({shape.architecture}, run by transformers)"
        if reader.group.size > 1 or reader.group.num_stages > 1:
            raise CheckpointError(f"{self._named}: only models with layers of Tideway's own run on several devices.")
        if reader.numerics is not FAST:
            raise CheckpointError(f"{self._named} cannot run{reader.numerics.asks}.")
        self.dtype, self.device = reader.dtype, reader.device
        self.vocab_size, self.hidden_size, self.num_layers = shape.vocab_size, shape.hidden_size, shape.num_layers
        self.num_kv_heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        self.layers_at_once = shape.num_layers
        self.can_be_captured = not _asks_the_device(config)
        self._outer = _load(reader, self._named)
        self._inner: Any = getattr(self._outer, self._outer.base_model_prefix)
        self._embedding: Any = self._inner.get_input_embeddings()
        self._local = _local_layers(self._outer.config.get_text_config(), max_model_len)
        self._max_model_len = max_model_len
        calls = self._probe()
        self.num_heads = calls[0].queries.shape[1]
        self.windows = tuple(sorted({w for w in map(self._window, calls) if w is not None}))
        self.softcap = calls[0].softcap
        setattr(self._outer, self._outer.base_model_prefix, _Given())

    def begin(self, batch: ForwardBatch, hidden: torch.Tensor | None = None) -> ForwardState:
        return ForwardState(self._embedding(batch.token_ids.long()))

    def run_layers(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        assert (start, stop) == (0, self.num_layers)

        def attend(call: _Call) -> torch.Tensor:
            return batch.attend(call.layer, call.queries, call.keys, call.values, self._window(call))

        state.hidden = self._run(state.hidden, batch.positions, attend)

    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        hidden = state.hidden if tokens is None else state.hidden.index_select(0, tokens)
        logits: torch.Tensor = self._outer(inputs_embeds=hidden[None]).logits[0]
        return logits.to(self.dtype)

    def _run(self, hidden: torch.Tensor, positions: torch.Tensor, attend: _Attend) -> torch.Tensor:
        """[T, hidden] after all layers and the final norm."""
        result = self._inner(
            inputs_embeds=hidden[None], position_ids=positions[None], use_cache=False, tideway_attend=attend
        )
        last: torch.Tensor = result.last_hidden_state[0]
        return last

    def _window(self, call: _Call) -> int | None:
        window = call.window or self._local.get(call.layer)
        return window if window is not None and window < self._max_model_len else None

    def _probe(self) -> list[_Call]:
        """What each layer asks of attention, found by running a few tokens. Raises `CheckpointError` where it is not to be
        had."""
        calls: list[_Call] = []

        def record(call: _Call) -> torch.Tensor:
            calls.append(call)
            found = (call.keys.shape[1:], call.values.shape[1:])
            expected = (self.num_kv_heads, self.head_dim)
            if call.unsupported:
                raise CheckpointError(f"{self._named}: attention with {call.unsupported} is not supported.")
            if found != (expected, expected) or call.queries.shape[2] != self.head_dim:
                raise CheckpointError(
                    f"{self._named}: layer {call.layer} has keys of {list(found[0])} and values of {list(found[1])} (heads, "
                    f"size), but KV blocks hold {list(expected)} for each."
                )
            # each token sees itself alone
            return call.values.repeat_interleave(call.queries.shape[1] // self.num_kv_heads, 1)

        def last_of(*tokens: int) -> torch.Tensor:
            embedded = self._embedding(torch.tensor(tokens, device=self.device))
            return self._run(embedded, torch.arange(len(tokens), device=self.device), record)[-1].float()

        try:
            hidden = last_of(0, 1, 2)
            layers = [call.layer for call in calls]
            change = (last_of(3, 4, 2) - hidden).norm() / hidden.norm()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self._named} cannot be run: {type(error).__name__}: {error}") from error
        if layers != list(range(self.num_layers)):
            wrong = [i for i in range(self.num_layers) if layers.count(i) != 1] or layers
            raise CheckpointError(
                f"{self._named}: layers {wrong[:8]} do not attend once each through transformers' attention interface."
            )
        if change > _LARGEST_CHANGE:
            raise CheckpointError(f"{self._named}: its layers mix tokens outside of attention.")
        if len({call.softcap for call in calls}) > 1:
            raise CheckpointError(f"{self._named}: layers differ in how attention scores are capped.")
        return calls[: self.num_layers]


class _Given(nn.Module):
    """In the place of the layers: hands on what they gave, so that the outer model computes logits of it."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        return _Result(inputs_embeds)


class _Result(tuple[torch.Tensor]):
    """Stands for a model's output object: all but the hidden states is None."""

    def __new__(cls, last_hidden_state: torch.Tensor) -> _Result:
        return super().__new__(cls, (last_hidden_state,))

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _Projection(nn.Module):
    def __init__(self, linear: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tideway_attend: _Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: `[1, heads, T, head_dim]` each -> `[1, T, heads, head_dim]`."""
    if tideway_attend is None:
        raise TypeError("its layers hand no arguments on to their attention")
    unsupported = [name for name in _CHANGES_SCORES if others.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("a mask of its own")
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        unsupported.append("is_causal=False")
    queries, keys, values = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    usual = queries.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        queries = queries * (scaling / usual)
    layer: Any = module.layer_idx
    call = _Call(layer, queries, keys, values, sliding_window, softcap or 0.0, ", ".join(unsupported))
    return tideway_attend(call)[None], None


def _load(reader: WeightReader, named: str) -> Any:
    """The model with its weights, and our attention and linears in it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig
    from transformers.pytorch_utils import Conv1D

    AttentionInterface.register(_IMPLEMENTATION, _attention)
    try:
        config = AutoConfig.from_pretrained(reader.path, local_files_only=True)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{named}: not known to the installed transformers: {error}") from error
    if not getattr(kind, "_supports_attention_backend", False):
        raise CheckpointError(f"{named}: its attention in transformers cannot be replaced.")
    try:
        model, found = in_dtype(kind, reader.dtype).from_pretrained(
            reader.path, config=config, dtype=torch.float32, attn_implementation=_IMPLEMENTATION,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:
        raise CheckpointError(f"{named} cannot be loaded: {type(error).__name__}: {error}") from error
    for what, problem in (("missing_keys", "has no tensor"), ("mismatched_keys", "has other shapes for")):
        if found.get(what):
            raise CheckpointError(f"{named} {problem} {', '.join(map(str, sorted(found[what])[:4]))}.")
    model.eval().to(reader.device)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D):
                is_tied = child is head and child.weight is embedding.weight
                weight = child.weight.data if type(child) is nn.Linear else child.weight.data.T.contiguous()
                bias = None if child.bias is None else child.bias.data
                linear = reader.made(weight, bias, is_head=child is head, shared=is_tied)
                setattr(parent, name, _Projection(linear))
    return model


def in_dtype(kind: Any, dtype: torch.dtype) -> Any:
    """The class with parameters of this dtype. transformers would change torch's default dtype meanwhile, which threads that
    compute steps have too."""

    class InDtype(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for parameter in self.parameters():
                parameter.data = parameter.data.to(dtype)

    # by these transformers finds what names the weights have in files
    InDtype.__name__, InDtype.__module__ = kind.__name__, kind.__module__
    return InDtype


def _asks_the_device(config: Mapping[str, Any]) -> bool:
    """Whether its forward pass may look at values on the device: at positions, to choose among rotary embeddings, or at
    which experts were hit."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = {str(of.get("rope_type") or of.get("type")) for of in (rope, *rope.values()) if isinstance(of, Mapping)}
    return bool(kinds & {"dynamic", "longrope"}) or any("expert" in key for key in config)


def _local_layers(config: Any, max_model_len: int) -> dict[int, int]:
    """Sliding windows of layers by the configuration, for models that leave them to the mask."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or ()
    return {i: window for i, kind in enumerate(kinds) if kind == "sliding_attention" and window}
