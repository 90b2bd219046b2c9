"""The family's torch module, imported by instances alone."""

import torch

from services.worker.models.decoder import ForwardState
from services.worker.models.llama import LlamaModel

TEMPERATURE = 0.5


class ExampleModel(LlamaModel):
    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        return super().logits(state, tokens) / TEMPERATURE
