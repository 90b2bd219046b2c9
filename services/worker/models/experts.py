"""Mixture of experts in the place of a layer's MLP (Shazeer et al. 2017; Mixtral, Jiang et al. 2024): a router sends each
token to its best few experts, whose results are added with the router's weights.

Tokens are sorted by expert. On CUDA two grouped matrix products run over all experts at once, with offsets that stay on the
device; elsewhere, and with quantised weights, the experts that were hit run one after the other. A token's results are added
in the router's order, whoever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from services.worker.models.quantized_linear import AnyLinear

Activation = Callable[[torch.Tensor], torch.Tensor]


class Experts:
    def __init__(
        self,
        router: AnyLinear,
        gate_up: list[AnyLinear] | torch.Tensor,
        down: list[AnyLinear] | torch.Tensor,
        activation: Activation,
        *,
        num_experts: int,
        top_k: int,
        is_renormalised: bool,
    ) -> None:
        """`gate_up`, `down`: a linear for each expert, or all their weights `[experts, inputs, outputs]`."""
        self._router, self._activation = router, activation
        self._gate_up, self._down = gate_up, down
        self._num_experts, self._top_k, self._is_renormalised = num_experts, top_k, is_renormalised

    @property
    def can_be_captured(self) -> bool:
        """In a CUDA graph: which experts were hit is not asked by the host."""
        return not isinstance(self._gate_up, list)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        weights = self._router(x).softmax(-1, dtype=torch.float32)
        weights, chosen = weights.topk(self._top_k, -1)
        if self._is_renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        ordered, order = chosen.flatten().sort(stable=True)
        inputs = x.index_select(0, order // self._top_k)
        ends = torch.searchsorted(ordered, torch.arange(self._num_experts, device=x.device), right=True)
        results = self._looped(inputs, ends) if isinstance(self._gate_up, list) else self._grouped(inputs, ends.int())
        by_token = torch.empty_like(results).index_copy_(0, order, results).view(len(x), self._top_k, -1)
        return (by_token * weights.to(x.dtype)[..., None]).sum(1)

    def _grouped(self, inputs: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._gate_up, torch.Tensor) and isinstance(self._down, torch.Tensor)
        gate, up = F.grouped_mm(inputs, self._gate_up, offs=offsets).chunk(2, -1)
        return F.grouped_mm(self._activation(gate).mul_(up), self._down, offs=offsets)

    def _looped(self, inputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        results, begin = [], 0
        for gate_up, down, end in zip(self._gate_up, self._down, ends.tolist(), strict=True):
            if begin < end:
                gate, up = gate_up(inputs[begin:end]).chunk(2, -1)
                results.append(down(self._activation(gate).mul_(up)))
            begin = end
        return torch.cat(results)
