"""Which flash-attention is used, with packages that are stand-ins: the real ones need a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from services.worker.attention.flash_backend import FlashUnavailable, _choose_kernels

HOPPER, AMPERE = 9, 8


def current(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    seqused_k: Any = None, page_table: Any = None, causal: bool = False, window_size: Any = None, num_splits: int = 1,
    softcap: float = 0.0,
) -> None:  # fmt: skip
    """As flash-attn-4 has it."""


def early(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, seqused_k: Any = None, page_table: Any = None,
    causal: bool = False, window_size: Any = None,
) -> None:  # fmt: skip
    """As flash-attn 2.8.3 brings it along."""


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
