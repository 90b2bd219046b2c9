"""The compiled kernels as functions of tensors. `kernels()` is None where there are none: then torch's operators run.

Structures are those of kernels.c, field by field. All tensors are on the CPU; those of a call must live until it returns,
and no call keeps any. A call releases the interpreter's lock. Calls from several threads run one after the other.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from copy import copy
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch

from services.worker.native.building import BuildError, cpu_flags, find_or_build

logger = logging.getLogger(__name__)

PANEL = 32
LANES = 16
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "relu": 2}
"""By their names in config.json."""


class LinearStruct(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("in_words", c_int64), ("num_outputs", c_int64)]


class ProductStruct(ctypes.Structure):
    _fields_ = [
        ("linear", POINTER(LinearStruct)), ("x", c_void_p), ("num_rows", c_int64), ("x_stride", c_int64),
        ("out", c_void_p), ("out_stride", c_int64), ("gated", c_int32), ("activation", c_int32), ("is_bf16", c_int32),
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
        ("ranks", POINTER(RanksStruct)),
    ]  # fmt: skip


class AttentionStruct(ctypes.Structure):
    _fields_ = [
        ("batch", POINTER(BatchStruct)), ("kv", POINTER(KvStruct)), ("heads", POINTER(HeadsStruct)),
        ("queries", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("query_stride", c_int64),
        ("key_stride", c_int64), ("value_stride", c_int64), ("out", c_void_p),
    ]  # fmt: skip


class ArgmaxStruct(ctypes.Structure):
    _fields_ = [
        ("scores", c_void_p), ("num_rows", c_int64), ("width", c_int64), ("is_bf16", c_int64), ("best", c_void_p),
    ]  # fmt: skip


class Kernels:
    """`team`: threads that compute together."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._library = library
        library.tideway_team.restype = c_void_p
        self._team = c_void_p(library.tideway_team(num_threads))
        if not self._team:
            raise OSError(f"no {num_threads} threads can be started")

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        if x.stride(-1) != 1 or x.stride(0) * x.itemsize % 4:
            x = x.contiguous()
        out = torch.empty(len(x), weight.out_features, dtype=x.dtype)
        call = ProductStruct(
            weight.pointer, x.data_ptr(), len(x), x.stride(0) * x.itemsize // 4, out.data_ptr(), weight.out_features,
            weight.activation is not None, weight.activation or 0, x.dtype == torch.bfloat16,
        )  # fmt: skip
        self._library.tideway_linear(self._team, ctypes.byref(call))
        return out

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
        call = ArgmaxStruct(
            scores.data_ptr(), len(scores), scores.shape[1], scores.dtype == torch.bfloat16, best.data_ptr()
        )
        self._library.tideway_argmax(self._team, ctypes.byref(call))
        return best


class PackedWeight:
    """`[out_features, in_features]` as panels of 32 outputs, in words of 32 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Neither is kept."""
        words = weight.contiguous().view(torch.int32)
        self._set(words, None if bias is None else bias.float(), None)

    def _set(self, words: torch.Tensor, bias: torch.Tensor | None, activation: int | None) -> None:
        """`words`: [out_features, in_words]"""
        num_outputs, num_words = words.shape
        missing = -num_outputs % PANEL
        panels = torch.nn.functional.pad(words, (0, 0, 0, missing)).view(-1, PANEL, num_words)
        self._panels = panels.transpose(1, 2).contiguous()
        self._bias = None if bias is None else torch.nn.functional.pad(bias, (0, missing))
        self._num_outputs = num_outputs
        self.activation = activation
        self.out_features = num_outputs if activation is None else num_outputs // 2
        self.struct = LinearStruct(address(self._panels), address(self._bias), num_words, num_outputs)
        self.pointer = ctypes.pointer(self.struct)

    def can_be_gated(self, activation: str) -> bool:
        return activation in ACTIVATIONS and self._num_outputs % (2 * LANES) == 0

    def gated(self, activation: str) -> PackedWeight:
        """The first half of the outputs are gates of the second: what comes out is the product of both, after `activation`
        (its name in config.json) of the gates."""
        words = self._panels.transpose(1, 2).reshape(-1, self._panels.shape[1])[: self._num_outputs]
        bias = None if self._bias is None else _interleaved(self._bias[: self._num_outputs])
        gated = PackedWeight.__new__(PackedWeight)
        gated._set(_interleaved(words), bias, ACTIVATIONS[activation])
        return gated

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        """Of one that is `gated`: [rows, in_features] -> [rows, 2 * out_features], without the activation, gates first."""
        plain = copy(self)
        plain.activation, plain.out_features = None, self._num_outputs
        return plain(x).view(len(x), -1, 2, LANES).transpose(1, 2).reshape(len(x), -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        compiled = kernels()
        assert compiled is not None  # `packs` has seen to it
        return compiled.linear(x, self)


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    """16 of the first half, their 16 of the second, and so on."""
    return rows.view(2, -1, LANES, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def packs(weight: torch.Tensor) -> bool:
    """Whether `PackedWeight` takes it, and its product is no slower than torch's here: bfloat16 needs the processor's own
    instructions; those for whole tiles (AMX) torch uses and these kernels do not."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or kernels() is None:
        return False
    needs = "avx512f" if weight.dtype == torch.float32 else "avx512_bf16"
    if needs not in cpu_flags() or "amx_bf16" in cpu_flags():
        return False
    return weight.shape[1] * weight.itemsize % 4 == 0


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("TIDEWAY_COMPILED_KERNELS", "auto") == "off":
        return None
    try:
        return ctypes.CDLL(str(find_or_build()))
    except (BuildError, OSError) as error:
        logger.warning("compiled kernels are not used: %s", error)
        return None


@functools.cache
def _team_of(num_threads: int) -> Kernels | None:
    library = _library()
    return None if library is None else Kernels(library, num_threads)


def kernels() -> Kernels | None:
    """With as many threads as torch uses."""
    return _team_of(torch.get_num_threads())


# Threads are not there in a forked process.
os.register_at_fork(after_in_child=_team_of.cache_clear)


def address(tensor: Any) -> int | None:
    """Of a tensor or a numpy array; None for none."""
    if tensor is None:
        return None
    return int(tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor.ctypes.data)
