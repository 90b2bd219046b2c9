"""Which kernels of others are used, with packages that are stand-ins: the real ones need a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from services.worker.attention.choice import choose_backends
from services.worker.attention.flash_backend import FlashUnavailable, _choose_kernels

HOPPER, AMPERE = 9, 8


def current(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    seqused_k: Any = None, page_table: Any = None, causal: bool = False, window_size: Any = None, num_splits: int = 1,
    softcap: float = 0.0,
) -> None:  # fmt: skip
    """Signature of flash-attn-4."""


def early(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, seqused_k: Any = None, page_table: Any = None,
    causal: bool = False, window_size: Any = None,
) -> None:  # fmt: skip
    """Signature that flash-attn 2.8.3 brings along."""


class Broken(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise TypeError("the compiler does not know this device")


def install(monkeypatch: pytest.MonkeyPatch, *, second: bool, fourth: Any) -> None:
    """`fourth`: the function of flash_attn.cute, a module, or None."""
    package: Any = ModuleType("flash_attn")
    if second:
        package.flash_attn_varlen_func = package.flash_attn_with_kvcache = lambda: None
    cute = fourth
    if fourth is not None and not isinstance(fourth, ModuleType):
        cute = ModuleType("flash_attn.cute")
        cute.flash_attn_varlen_func = fourth
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)  # None: importing it fails


@pytest.mark.parametrize(
    ("major", "second", "fourth", "name", "block_size"),
    [
        (HOPPER, True, current, "flash-attention 4", 128),
        (HOPPER, False, current, "flash-attention 4", 128),
        (HOPPER, True, early, "flash-attention 2", 256),
        (HOPPER, True, None, "flash-attention 2", 256),
        (HOPPER, True, Broken("flash_attn.cute"), "flash-attention 2", 256),
        (AMPERE, True, current, "flash-attention 2", 256),
    ],
)
def test_the_newest_that_works_here_is_used(
    monkeypatch: pytest.MonkeyPatch, major: int, second: bool, fourth: Any, name: str, block_size: int
) -> None:
    install(monkeypatch, second=second, fourth=fourth)
    facts = _choose_kernels(major)[1]
    assert (facts.name, facts.block_sizes) == (name, (block_size,))


def test_why_none_is_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, second=False, fourth=early)
    with pytest.raises(
        FlashUnavailable, match=r"no max_seqlen_k, max_seqlen_q, num_splits, softcap\); flash-attn cannot"
    ):
        _choose_kernels(HOPPER)
    with pytest.raises(FlashUnavailable, match="compute capability 7 is too old"):
        _choose_kernels(7)


@pytest.mark.parametrize(
    ("flash", "deterministic", "names"),
    [
        (None, False, ["FlashInfer", "torch"]),
        (current, False, ["FlashInfer, flash-attention 4 for prompts", "flash-attention 4", "torch"]),
        (None, True, ["torch", "torch"]),
        (current, True, ["flash-attention 4", "torch", "torch"]),
    ],
)
def test_flashinfer_goes_first_and_computes_prompts_too_where_nothing_is_made_for_them(
    monkeypatch: pytest.MonkeyPatch, flash: Any, deterministic: bool, names: list[str]
) -> None:
    install(monkeypatch, second=False, fourth=flash)
    package: Any = ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (HOPPER, 0))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    found = choose_backends(torch.device("cuda"), deterministic=deterministic)
    assert [backend.facts.name for backend in found] == names
    assert {backend.facts.block_sizes[0] for backend in found} == {128}
