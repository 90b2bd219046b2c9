"""The compiled kernels as functions of tensors. `kernels()` is None where there are none: then torch's operators run.

Structures are those of kernels.c, field by field. All tensors are on the CPU; those of a call must live until it returns,
and no call keeps any. A call releases the interpreter's lock. Calls from several threads run one after the other.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from abc import ABC, abstractmethod
from copy import copy
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
import torch

from services.worker.native.building import BuildError, cpu_flags, find_or_build

logger = logging.getLogger(__name__)

PANEL = 32
LANES = 16
TILE_INPUTS = 32
"""Inputs of a tile."""
NARROW = 256
"""Inputs of a weight with which it does not matter much how it is multiplied."""
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "relu": 2}
"""By their names in config.json."""


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p), ("bias", c_void_p), ("scales", c_void_p), ("zeros", c_void_p), ("in_words", c_int64),
        ("num_outputs", c_int64), ("group_words", c_int64), ("kind", c_int32),
    ]  # fmt: skip


class ChangeStruct(ctypes.Structure):
    _fields_ = [("a", LinearStruct), ("b", LinearStruct)]


class ChangesStruct(ctypes.Structure):
    _fields_ = [("of_rows", c_void_p), ("lowered", c_void_p), ("stride", c_int64)]


class ProductStruct(ctypes.Structure):
    _fields_ = [
        ("linear", POINTER(LinearStruct)), ("x", c_void_p), ("num_rows", c_int64), ("x_stride", c_int64),
        ("out", c_void_p), ("out_stride", c_int64), ("gated", c_int32), ("activation", c_int32),
        ("changes", POINTER(ChangesStruct)), ("change", c_int64), ("is_bf16", c_int32),
    ]  # fmt: skip


class BatchStruct(ctypes.Structure):
    _fields_ = [
        ("num_sequences", c_int64), ("num_tokens", c_int64), ("table_width", c_int64), ("block_size", c_int64),
        ("starts", c_void_p), ("counts", c_void_p), ("query_starts", c_void_p), ("tables", c_void_p),
        ("blocks", c_void_p), ("offsets", c_void_p),
    ]  # fmt: skip


class KvStruct(ctypes.Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("block_stride", c_int64), ("head_stride", c_int64)]


class HeadsStruct(ctypes.Structure):
    _fields_ = [
        ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32), ("is_bf16", c_int32),
        ("window", c_int64), ("scale", c_float), ("soft_cap", c_float),
    ]  # fmt: skip


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("input_norm", c_void_p), ("post_norm", c_void_p), ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("qkv", LinearStruct), ("out", LinearStruct), ("gate_up", LinearStruct), ("down", LinearStruct),
        ("window", c_int64),
    ]  # fmt: skip


class DecoderStruct(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(LayerStruct)), ("hidden_size", c_int64), ("inner_size", c_int64), ("num_heads", c_int32),
        ("num_kv_heads", c_int32), ("head_dim", c_int32), ("is_bf16", c_int32), ("activation", c_int32), ("eps", c_float),
    ]  # fmt: skip


class RanksStruct(ctypes.Structure):
    _fields_ = [
        ("arrivals", c_void_p), ("slots", c_void_p), ("slot_bytes", c_int64), ("timeout_ns", c_int64), ("rank", c_int32),
        ("size", c_int32), ("calls", c_uint32), ("is_lost", c_int32),
    ]  # fmt: skip


class PassStruct(ctypes.Structure):
    _fields_ = [
        ("batch", POINTER(BatchStruct)), ("kv", POINTER(KvStruct)), ("hidden", c_void_p), ("pending", c_void_p),
        ("cosines", c_void_p), ("sines", c_void_p), ("normed", c_void_p), ("heads", c_void_p), ("attended", c_void_p),
        ("inner", c_void_p), ("first", c_int64), ("last", c_int64), ("has_pending", c_int32),
        ("ranks", POINTER(RanksStruct)), ("changes", POINTER(ChangesStruct)),
    ]  # fmt: skip


class AttentionStruct(ctypes.Structure):
    _fields_ = [
        ("batch", POINTER(BatchStruct)), ("kv", POINTER(KvStruct)), ("heads", POINTER(HeadsStruct)),
        ("queries", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("query_stride", c_int64),
        ("key_stride", c_int64), ("value_stride", c_int64), ("out", c_void_p),
    ]  # fmt: skip


class NormStruct(ctypes.Structure):
    _fields_ = [
        ("hidden", c_void_p), ("pending", c_void_p), ("weight", c_void_p), ("out", c_void_p), ("num_rows", c_int64),
        ("width", c_int64), ("is_bf16", c_int64), ("eps", c_float),
    ]  # fmt: skip


class ArgmaxStruct(ctypes.Structure):
    _fields_ = [
        ("scores", c_void_p), ("num_rows", c_int64), ("width", c_int64), ("is_bf16", c_int64), ("best", c_void_p),
    ]  # fmt: skip


class MostLikelyStruct(ctypes.Structure):
    _fields_ = [("norm", NormStruct), ("head", ProductStruct), ("argmax", ArgmaxStruct)]


class MaskStruct(ctypes.Structure):
    _fields_ = [
        ("scores", c_void_p), ("num_rows", c_int64), ("width", c_int64), ("is_bf16", c_int64), ("allowed", c_void_p),
    ]  # fmt: skip


class Kernels:
    """`team`: threads that compute together."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._library = library
        library.tideway_team.restype = c_void_p
        self._team = c_void_p(library.tideway_team(num_threads))
        if not self._team:
            raise OSError(f"no {num_threads} threads can be started")
        self.has_tiles = bool(library.tideway_has_tiles())
        """Whether products of bfloat16 are made of whole tiles."""

    def linear(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        if x.stride(-1) != 1 or x.stride(0) * x.itemsize % 4:
            x = x.contiguous()
        out = torch.empty(len(x), weight.out_features, dtype=x.dtype)
        self._library.tideway_linear(self._team, ctypes.byref(_product(x, weight, out)))
        return out

    def add_rms_norm(
        self, hidden: torch.Tensor, pending: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """The norm over the last axis of hidden + pending, which are [R, width], contiguous, of a width that `LANES`
        divides; `hidden` becomes the sum."""
        out = torch.empty_like(hidden)
        self._library.tideway_norm(self._team, ctypes.byref(_norm(hidden, pending, weight, eps, out)))
        return out

    def most_likely(
        self, hidden: torch.Tensor, pending: torch.Tensor | None, weight: torch.Tensor, eps: float, head: Packed
    ) -> torch.Tensor:
        """[R] int64: `argmax` of `linear` of `add_rms_norm`."""
        normed, num_rows = torch.empty_like(hidden), len(hidden)
        logits = torch.empty(num_rows, head.out_features, dtype=hidden.dtype)
        best = torch.empty(num_rows, dtype=torch.int64)
        call = MostLikelyStruct(
            _norm(hidden, pending, weight, eps, normed), _product(normed, head, logits), _argmax(logits, best)
        )
        self._library.tideway_most_likely(self._team, ctypes.byref(call))
        return best

    def attention(self, call: AttentionStruct) -> None:
        self._library.tideway_attention(self._team, ctypes.byref(call))

    def run_parts(self, decoder: DecoderStruct, forward: PassStruct) -> None:
        self._library.tideway_run_parts(self._team, ctypes.byref(decoder), ctypes.byref(forward))

    def sum_over_ranks(self, ranks: RanksStruct, tensor: torch.Tensor) -> bool:
        """In place, contiguous. False: a rank is lost."""
        return bool(
            self._library.tideway_sum_over_ranks(
                ctypes.byref(ranks),
                c_void_p(tensor.data_ptr()),
                c_int64(tensor.numel()),
                tensor.dtype == torch.bfloat16,
            )
        )

    def join_over_ranks(self, ranks: RanksStruct, tensor: torch.Tensor) -> torch.Tensor | None:
        """`[..., n]`, contiguous -> `[..., size * n]`. None: a rank is lost."""
        *outer, width = tensor.shape
        out = torch.empty(*outer, ranks.size * width, dtype=tensor.dtype)
        row_bytes = width * tensor.itemsize
        num_rows = tensor.numel() // width
        call = self._library.tideway_join_over_ranks
        came = call(
            ctypes.byref(ranks),
            c_void_p(tensor.data_ptr()),
            c_int64(num_rows),
            c_int64(row_bytes),
            c_void_p(out.data_ptr()),
        )
        return out if came else None

    def argmax(self, scores: torch.Tensor) -> torch.Tensor:
        """[R, width] contiguous -> [R] int64: the first of the largest."""
        best = torch.empty(len(scores), dtype=torch.int64)
        self._library.tideway_argmax(self._team, ctypes.byref(_argmax(scores, best)))
        return best

    def mask(self, scores: torch.Tensor, allowed: np.ndarray) -> None:
        """`scores` [R, width], contiguous, are -infinity where bit t % 32 of word t // 32 of `allowed` is 0, which is
        [R, ceil(width / 32)] int32."""
        allowed = np.ascontiguousarray(allowed)
        call = MaskStruct(
            scores.data_ptr(), len(scores), scores.shape[1], scores.dtype == torch.bfloat16, allowed.ctypes.data
        )
        self._library.tideway_mask(self._team, ctypes.byref(call))


def _product(x: torch.Tensor, weight: Packed, out: torch.Tensor) -> ProductStruct:
    size = x.itemsize
    assert x.shape[1] * size == 4 * weight.struct.in_words, "the kernels would read beyond it"
    return ProductStruct(
        weight.pointer, x.data_ptr(), len(x), x.stride(0) * size // 4, out.data_ptr(), weight.out_features,
        weight.activation is not None, weight.activation or 0, is_bf16=x.dtype == torch.bfloat16,
    )  # fmt: skip


def _norm(
    hidden: torch.Tensor, pending: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> NormStruct:
    return NormStruct(
        hidden.data_ptr(), address(pending), weight.data_ptr(), out.data_ptr(), *hidden.shape,
        hidden.dtype == torch.bfloat16, eps,
    )  # fmt: skip


def _argmax(scores: torch.Tensor, best: torch.Tensor) -> ArgmaxStruct:
    return ArgmaxStruct(scores.data_ptr(), *scores.shape, scores.dtype == torch.bfloat16, best.data_ptr())


class Packed(ABC):
    """A linear layer's weight in the form of the kernels, for an activation of its outputs or none."""

    struct: LinearStruct

    def __init__(self, num_outputs: int, bias: torch.Tensor | None, activation: int | None) -> None:
        self._num_outputs = num_outputs
        self._bias = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -num_outputs % PANEL))
        self.activation = activation
        self.out_features = num_outputs if activation is None else num_outputs // 2

    @property
    def pointer(self) -> ctypes._Pointer[LinearStruct]:
        return ctypes.pointer(self.struct)

    def can_be_gated(self, activation: str) -> bool:
        return activation in ACTIVATIONS and self._num_outputs % (2 * LANES) == 0

    @abstractmethod
    def gated(self, activation: str) -> Packed:
        """The first half of the outputs are gates of the second: what comes out is the product of both, after `activation`
        (its name in config.json) of the gates."""

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        """The product of a `gated` weight: [rows, in_features] -> [rows, 2 * out_features], without the activation,
        `interleaved`."""
        plain = copy(self)
        plain.activation, plain.out_features = None, self._num_outputs
        return plain(x)

    def _interleaved_bias(self) -> torch.Tensor | None:
        return None if self._bias is None else interleaved(self._bias[: self._num_outputs])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        compiled = kernels()
        assert compiled is not None  # `packs` has seen to it
        return compiled.linear(x, self)


class PackedWeight(Packed):
    """`[out_features, in_features]` as panels of 32 outputs, in words of 32 bits."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: int | None = None
    ) -> None:
        """Neither is kept."""
        super().__init__(len(weight), bias, activation)
        self._dtype = weight.dtype
        self._panels = _panels(weight.contiguous().view(torch.int32)).contiguous()
        self.struct = LinearStruct(
            address(self._panels), address(self._bias), in_words=self._panels.shape[1], num_outputs=len(weight)
        )

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """[R] of 0 to out_features - 1, which is not checked -> [R, in_features], as it was given."""
        words: torch.Tensor = self._panels[indices // PANEL, :, indices % PANEL]
        return words.view(self._dtype)

    def gated(self, activation: str) -> PackedWeight:
        words = self._panels.transpose(1, 2).flatten(0, 1)[: self._num_outputs]
        return PackedWeight(interleaved(words), self._interleaved_bias(), activation=ACTIVATIONS[activation])


class PackedIntegers(Packed):
    """`(values[n, k] - zeros[n, k // group]) * scales[n, k // group]` for inputs in bfloat16, G groups: panels of 32 outputs
    in 4 or 8 bits each."""

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        *,
        activation: int | None = None,
    ) -> None:
        """`values`: [out_features, in_features], int8, or uint8 below 16 with `zeros`, [out_features, G], whole numbers from
        0 to 16. `scales`: [out_features, G]. Groups have an even number of inputs. None is kept."""
        super().__init__(len(values), bias, activation)
        num_outputs, num_inputs = values.shape
        # [panels, in_words, 32 outputs, 2 inputs]
        pairs = _panels(values.view(num_outputs, -1, 2))
        if zeros is None:
            packed = pairs.view(*pairs.shape[:2], 2, LANES, 2).transpose(3, 4)
        else:
            low, high = pairs[:, :, :LANES], pairs[:, :, LANES:]
            packed = low | high << 4
        self._packed = packed.contiguous()
        self._scales = _panels(scales.float()).contiguous()
        self._zeros = None if zeros is None else _panels((16 - zeros).int() * 0x10001).contiguous()
        self.struct = LinearStruct(
            address(self._packed), address(self._bias), address(self._scales), address(self._zeros), num_inputs // 2,
            num_outputs, num_inputs // 2 // scales.shape[1], 1 if zeros is None else 2,
        )  # fmt: skip

    def gated(self, activation: str) -> PackedIntegers:
        if self._zeros is None:
            pairs, zeros = self._packed.transpose(3, 4).flatten(2, 3), None
        else:
            pairs, zeros = torch.cat((self._packed & 15, self._packed >> 4), 2), 16 - (self._rows(self._zeros) & 0xFFFF)
        values, scales = self._rows(pairs).flatten(1), self._rows(self._scales)
        return PackedIntegers(
            interleaved(values),
            interleaved(scales),
            None if zeros is None else interleaved(zeros),
            self._interleaved_bias(),
            activation=ACTIVATIONS[activation],
        )

    def _rows(self, panels: torch.Tensor) -> torch.Tensor:
        return panels.transpose(1, 2).flatten(0, 1)[: self._num_outputs]


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """`[out_features, n, ...]` -> `[panels, n, 32, ...]`, zeros behind the last."""
    missing = rows.new_zeros(-len(rows) % PANEL, *rows.shape[1:])
    return torch.cat((rows, missing)).view(-1, PANEL, *rows.shape[1:]).transpose(1, 2)


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """16 of the first half, their 16 of the second, and so on."""
    return rows.view(2, -1, LANES, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """`[rows, n]`, of which the outputs are `interleaved`: gates, then ups."""
    return x.view(len(x), -1, 2, LANES).transpose(1, 2).reshape(len(x), -1)


def packs(weight: torch.Tensor) -> bool:
    """Whether `PackedWeight` takes it, and its product is no slower than torch's here. That needs vectors that multiply and
    add at once (torch is slow without the processor's own instructions for bfloat16, these kernels widen it) and, for
    bfloat16 on a processor with AMX, whole tiles, unless the weight is as narrow as those of adapters."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or not _multiplies(weight.dtype):
        return False
    num_inputs = weight.shape[1]
    if weight.dtype == torch.bfloat16 and _has_amx() and num_inputs > NARROW and num_inputs % TILE_INPUTS:
        return False
    return num_inputs * weight.itemsize % 4 == 0


def packs_integers(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether `PackedIntegers` takes these, [out_features, in_features] and [out_features, G], for inputs of `dtype`."""
    if values.device.type != "cpu" or dtype != torch.bfloat16 or not _multiplies(dtype):
        return False
    if values.shape[1] // scales.shape[1] % (TILE_INPUTS if _has_amx() else 2):
        return False
    return zeros is None or bool(((zeros >= 0) & (zeros <= 16) & (zeros == zeros.round())).all())


def _multiplies(dtype: torch.dtype) -> bool:
    compiled = kernels()
    if compiled is None or not {"avx2", "fma"} <= cpu_flags():
        return False
    return dtype != torch.bfloat16 or compiled.has_tiles or not _has_amx()


def _has_amx() -> bool:
    return "amx_bf16" in cpu_flags()


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("TIDEWAY_COMPILED_KERNELS", "auto") == "off":
        return None
    try:
        return ctypes.CDLL(str(find_or_build()))
    except (BuildError, OSError) as error:
        logger.warning("compiled kernels are not used: %s", str(error))
        return None


@functools.cache
def _team_of(num_threads: int) -> Kernels | None:
    library = _library()
    if library is None:
        return None
    compiled = Kernels(library, num_threads)
    if _has_amx() and not compiled.has_tiles:
        logger.warning(
            "compiled kernels multiply no tiles (AMX), so torch multiplies bfloat16: the compiler does not know them, or the"
            " system refuses them to this process"
        )
    return compiled


def kernels() -> Kernels | None:
    """The compiled kernels, with as many threads as torch uses."""
    return _team_of(torch.get_num_threads())


# Threads are not there in a forked process.
os.register_at_fork(after_in_child=_team_of.cache_clear)


def address(tensor: Any) -> int | None:
    """Address of a tensor or a numpy array; None for none."""
    if tensor is None:
        return None
    return int(tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor.ctypes.data)
