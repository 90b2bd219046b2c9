"""An executor's copy of the sequences that the engine runs, a row each: tokens on the device, so that a sampled one feeds
the next step without a round trip; block tables and sampling parameters on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from services.worker.attention.interface import BatchLayout
from services.worker.executor.grammars import Masks
from services.worker.executor.prompt_logprobs import PromptLogprobs, packed_logprobs
from services.worker.executor.sampling import SampledTokens, SamplingRows
from services.worker.kv.transfer import to_device
from services.worker.models.decoder import DecoderModel, ForwardState
from shared.engine.plan import NO_TOKEN, NewSequence, StepPlan


class SequenceRows:
    def __init__(self, num_rows: int, device: torch.device, *, one_by_one: bool = False) -> None:
        """`one_by_one`: as of `SamplingRows`."""
        self._device = device
        self._tokens = torch.zeros(num_rows, 1, dtype=torch.int32, device=device)
        self._tables = np.zeros((num_rows, 1), np.int32)
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._sampling = SamplingRows(num_rows, one_by_one=one_by_one)
        self.prompts = PromptLogprobs(num_rows)
        self.versions = np.zeros(num_rows, np.int64)
        """By row: how many sequences have taken it."""
        self.adapters = [""] * num_rows
        """By row: version of the adapter that its sequence is computed with; empty: none."""
        self.is_adapted = np.zeros(num_rows, bool)

    def widen(self, max_model_len: int, max_blocks: int) -> None:
        """Rows long enough for `max_model_len` tokens and the one sampled after the last."""
        missing = max_model_len + 1 - self._tokens.shape[1]
        if missing > 0:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, missing))
        missing = max_blocks - self._tables.shape[1]
        if missing > 0:
            self._tables = np.pad(self._tables, ((0, 0), (0, missing)))

    def take(self, new: NewSequence, max_model_len: int, vocab_size: int) -> None:
        """A sequence takes a row, without blocks yet."""
        tokens = np.frombuffer(new.tokens, np.int32)
        if len(tokens) > max_model_len:
            raise ValueError(f"{len(tokens)} tokens exceed the model's {max_model_len}")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            # on a GPU it would be more than this step that fails: the whole context is lost
            raise ValueError(f"token ids {tokens.min()}..{tokens.max()} of a vocabulary of {vocab_size}")
        self._tokens[new.row, : len(tokens)] = to_device(tokens.copy(), self._device)
        self._sampling.set(new.row, new.sampling, new.prompt_tokens)
        self.prompts.set(new.row, new.sampling, new.prompt_tokens, has_output=len(tokens) > new.prompt_tokens)
        self._num_blocks[new.row] = 0
        self.versions[new.row] += 1
        self.adapters[new.row], self.is_adapted[new.row] = new.adapter, bool(new.adapter)

    def append_blocks(self, row: int, blocks: np.ndarray) -> None:
        begin = self._num_blocks[row]
        self._tables[row, begin : begin + len(blocks)] = blocks
        self._num_blocks[row] = begin + len(blocks)

    def replace_block(self, row: int, index: int, block: int) -> None:
        """Block `index` of the row's sequence is in another block. A row whose step failed before it was told of the block
        stays as it is: its sequence will be preempted."""
        if index < self._num_blocks[row]:
            self._tables[row, index] = block

    def layout(self, plan: StepPlan, rows: np.ndarray, block_size: int, model: DecoderModel) -> BatchLayout:
        """`rows`: those of the plan. Raises if they lack blocks for what is planned."""
        starts, counts = np.array(plan.starts, np.int64), np.array(plan.counts, np.int64)
        pages = -(-(starts + counts) // block_size)
        if (pages > self._num_blocks[rows]).any():
            short = rows[pages > self._num_blocks[rows]].tolist()
            raise ValueError(f"rows {short} lack KV blocks for the tokens planned")
        num_pages = int(pages.max())
        tables = self._tables[rows, :num_pages]
        tables = np.where(np.arange(num_pages) < pages[:, None], tables, tables[:, :1])
        return BatchLayout(starts, counts, tables, block_size, model.dtype, self._device, model.windows, model.heads)

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens of all rows, flat, int32 on the device; another tensor after `widen`."""
        return self._tokens.view(-1)

    def token_places(self, rows: np.ndarray, layout: BatchLayout) -> np.ndarray:
        """[T] int64: where in `tokens` those are that a step computes."""
        token_rows = rows if layout.all_decode else rows[layout.sequence_of_token]
        places: np.ndarray = token_rows * self._tokens.shape[1] + layout.positions
        return places

    def prompt_logprobs(
        self, model: DecoderModel, state: ForwardState, rows: np.ndarray, layout: BatchLayout
    ) -> list[tuple[int, torch.Tensor]]:
        """Log-probabilities for the sequences of a step that want them: their index in it, and what `packed_logprobs` makes
        of the prompt's tokens after each that it computed."""
        found = []
        for index, num_positions, num_top in self.prompts.wanted(rows, layout):
            start, first = int(layout.starts[index]), int(layout.query_starts[index])
            following = self._tokens[int(rows[index]), start + 1 : start + 1 + num_positions]
            found.append((index, packed_logprobs(model, state, first, following, num_top)))
        return found

    def are_plain(self, rows: np.ndarray) -> bool:
        """Whether the most likely token is all that is asked for in these rows."""
        return self._sampling.are_plain(rows)

    def sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        masks: Masks | None = None,
        *,
        tells_logprobs: bool = True,
    ) -> SampledTokens:
        """Chooses the tokens at these positions and enters them. `logits`: [S, vocab]; `rows`, `positions`: [S] int64;
        `masks`: of those that follow a grammar; `tells_logprobs`: of those that asked for log-probabilities."""
        sampled = self._sampling.sample(logits, rows, positions, self._tokens, masks, tells_logprobs=tells_logprobs)
        self.enter_sampled(rows, positions, sampled.tokens)
        return sampled

    def choose(
        self,
        model: DecoderModel,
        rows: np.ndarray,
        layout: BatchLayout,
        state: ForwardState,
        sampled_of: np.ndarray,
        masks: Callable[[], Masks | None],
        *,
        tells_logprobs: bool = True,
    ) -> SampledTokens:
        """Chooses and enters the tokens after a forward pass, the cheapest way. `sampled_of`: after which of its sequences;
        `masks`: asked when the model's part is on the device; the rest as of `sample`."""
        sampled_rows, positions = rows[sampled_of], layout.contexts[sampled_of]
        is_plain = self.are_plain(sampled_rows)
        if is_plain and state.most_likely is not None and len(sampled_of) == len(rows):
            return SampledTokens(state.most_likely())
        last_tokens = layout.query_starts[1:][sampled_of] - 1
        every_token = len(last_tokens) == len(state.hidden)
        index = None if every_token else to_device(last_tokens, self._device)
        if is_plain and (tokens := model.most_likely(state, index)) is not None:
            self.enter_sampled(sampled_rows, positions, tokens)
            return SampledTokens(tokens)
        logits = model.logits(state, index)
        return self.sample(logits, sampled_rows, positions, masks(), tells_logprobs=tells_logprobs)

    def enter_sampled(self, rows: np.ndarray, positions: np.ndarray, tokens: torch.Tensor) -> None:
        """[S] each, `tokens` int64 on the device; for `NO_TOKEN` any token, as a step that computes it may be under way."""
        self.tokens.index_copy_(0, self._places(rows, positions), tokens.int().clamp_(min=0))

    def enter_drafts(self, expanded: StepPlan) -> None:
        """The guessed tokens of a plan (`StepPlan.expanded`), at the positions of their columns, which are its last. In the
        place of those that the draft model will make stands any token."""
        tokens = np.array([token for _, drafted in expanded.drafts for token in drafted], np.int32)
        rows = np.array(expanded.rows[-len(tokens) :], np.int64)
        self.enter(rows, np.array(expanded.starts[-len(tokens) :], np.int64), tokens)

    def drafted(self, expanded: StepPlan) -> torch.Tensor | None:
        """What the draft model has made, [D] int32 on the device, before anything is sampled in its place."""
        tokens = np.array([token for _, drafted in expanded.drafts for token in drafted], np.int32)
        made = np.flatnonzero(tokens == NO_TOKEN) + len(expanded.rows) - len(tokens)
        if not len(made):
            return None
        places = self._places(np.array(expanded.rows, np.int64)[made], np.array(expanded.starts, np.int64)[made])
        return self.tokens.index_select(0, places)

    def enter(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Tokens that were sampled elsewhere. [S] each, `tokens` int32; as of `enter_sampled`."""
        self.tokens.index_copy_(0, self._places(rows, positions), to_device(np.maximum(tokens, 0), self._device))

    def _places(self, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        return to_device(rows * self._tokens.shape[1] + positions, self._device)
