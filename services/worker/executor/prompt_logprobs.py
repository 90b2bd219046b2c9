"""Log-probabilities of the tokens of prompts, for requests that ask for them; steps of others do nothing here.

A step gives those that follow the tokens it computes. Logits are made for some positions at a time, so that a chunk of a
prompt takes no more memory than a batch of decodes does, and what is kept of them is packed on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from services.worker.attention.interface import BatchLayout
from services.worker.models.decoder import DecoderModel, ForwardState
from shared.messages.requests import SamplingParams

LOGITS_BYTES = 32 << 20
"""Most bytes of one piece of logits, in float32."""


class PromptLogprobs:
    """Which rows of an executor want them."""

    def __init__(self, num_rows: int) -> None:
        self._num_prompt = np.zeros(num_rows, np.int64)
        """Tokens of their prompts; 0: not wanted."""
        self._num_top = np.zeros(num_rows, np.int64)
        self._num_wanting = 0

    def set(self, row: int, params: SamplingParams, num_prompt: int, *, has_output: bool) -> None:
        """A sequence takes the row. One that `has_output` has given its prompt's before."""
        is_wanting = params.prompt_logprobs >= 0 and not has_output
        self._num_wanting += is_wanting - bool(self._num_prompt[row])
        self._num_prompt[row] = num_prompt if is_wanting else 0
        self._num_top[row] = params.prompt_logprobs

    def wanted(self, rows: np.ndarray, layout: BatchLayout) -> Iterator[tuple[int, int, int]]:
        """What a step's sequences want: (index of a sequence, positions from its first on that a token of its prompt
        follows, alternatives)."""
        if self._num_wanting:
            num_positions = np.minimum(layout.counts, self._num_prompt[rows] - 1 - layout.starts)
            for index in np.flatnonzero(num_positions > 0).tolist():
                yield index, int(num_positions[index]), int(self._num_top[rows[index]])


def packed_logprobs(
    model: DecoderModel, state: ForwardState, first: int, following: torch.Tensor, num_top: int
) -> torch.Tensor:
    """[P, 2 + 2 * num_top] int32, rows as `shared.messages.requests.unpack_logprobs` reads them.

    `first`: the first of P consecutive tokens of the step. `following`: [P] int, the token after each."""
    num_rows = max(1, LOGITS_BYTES // (4 * model.vocab_size))
    pieces = []
    for begin in range(0, len(following), num_rows):
        tokens = following[begin : begin + num_rows].long()[:, None]
        at = torch.arange(first + begin, first + begin + len(tokens), device=tokens.device)
        logprobs = model.logits(state, at).float().log_softmax(-1)
        chosen = logprobs.gather(1, tokens)
        ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
        top = logprobs.topk(min(num_top, logprobs.shape[1]), -1)
        columns = (chosen.view(torch.int32), ranks.int(), top.indices.int(), top.values.view(torch.int32))
        pieces.append(torch.cat(columns, 1))
    return torch.cat(pieces)
