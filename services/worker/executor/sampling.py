"""Choosing tokens from logits, vectorised over the rows of a step, on the device.

Noise is counter-based: a pure function of (seed, position, token id), so what a sequence draws does not depend on which
others share its batch, nor on preemption, retries or the instance it runs on. Choosing is Gumbel-max: the argmax of
logits plus Gumbel noise is a draw from their softmax, with no synchronisation and no cumulative sums.

Order as in vLLM: penalties, bias, masked stop ids, the grammar's mask, then temperature, min-p, top-k, top-p.
Log-probabilities are those of the logits as the model gave them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.executor.grammars import Masks
from services.worker.executor.nucleus import by_bisection, by_sorting
from services.worker.kv.transfer import to_device, to_host
from services.worker.native.library import DTYPES, kernels
from shared.engine.plan import NO_TOKEN
from shared.messages.requests import SamplingParams, TokenLogprob

_NEGATIVE_INFINITY = float("-inf")

MAX_SORTED = 1024
"""Largest scores of a row that are sorted on CUDA."""


@dataclass
class SampledTokens:
    """Sampled tokens of one step, on the device."""

    tokens: torch.Tensor
    """[S] int64; `NO_TOKEN` where the logits are not finite"""
    logprobs: LogprobTensors | None = None


@dataclass
class LogprobTensors:
    """Log-probabilities of those of the S samples that asked."""

    indices: np.ndarray
    """[L] which of the S"""
    wanted: np.ndarray
    """[L] how many alternatives each asked for"""
    chosen: torch.Tensor
    """[L] float32"""
    ranks: torch.Tensor
    """[L] int64, 1 is the most likely"""
    top_logprobs: torch.Tensor
    """[L, k] float32, descending"""
    top_ids: torch.Tensor
    """[L, k] int64"""

    def on_host(self) -> LogprobTensors:
        """There when the stream has come so far."""
        return replace(
            self,
            chosen=to_host(self.chosen),
            ranks=to_host(self.ranks),
            top_logprobs=to_host(self.top_logprobs),
            top_ids=to_host(self.top_ids),
        )

    def to_messages(self, num_samples: int) -> list[TokenLogprob | None]:
        """Blocks until the tensors are computed, if they are on a device."""
        result: list[TokenLogprob | None] = [None] * num_samples
        columns = (self.chosen.tolist(), self.ranks.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist())
        for index, k, chosen, rank, ids, values in zip(self.indices, self.wanted, *columns, strict=True):
            result[index] = TokenLogprob(chosen, tuple(ids[:k]), tuple(values[:k]), rank)
        return result


class SamplingRows:
    """Sampling parameters of every row of an executor, as host columns."""

    def __init__(self, num_rows: int, *, one_by_one: bool = False) -> None:
        """`one_by_one`: what is done to the logits of one sample takes none of its shapes from others of the step."""
        self._one_by_one = one_by_one
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._repetition = np.ones(num_rows, np.float32)
        self._presence = np.zeros(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.int64)
        self._logprobs = np.full(num_rows, -1, np.int64)
        self._prompt_tokens = np.zeros(num_rows, np.int64)
        self._min_tokens = np.zeros(num_rows, np.int64)
        self._plain = np.ones(num_rows, bool)
        """Greedy, with unchanged logits and no log-probabilities."""
        self._penalised = np.zeros(num_rows, bool)
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Token ids and what is added to their logits, of rows that have any."""
        self._stops: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Stop tokens and what keeps them out, of rows that have any, until the least output is reached."""

    def set(self, row: int, params: SamplingParams, prompt_tokens: int) -> None:
        """A sequence takes the row."""
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._repetition[row] = params.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._seed[row] = _signed64(params.seed)
        self._logprobs[row] = params.logprobs
        self._prompt_tokens[row] = prompt_tokens
        self._min_tokens[row] = params.min_tokens
        penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        self._penalised[row] = penalised
        self._biases.pop(row, None)
        self._stops.pop(row, None)
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias, strict=True)
            self._biases[row] = np.array(tokens, np.int64), np.array(values, np.float32)
        if params.min_tokens and params.stop_token_ids:
            stops = np.array(params.stop_token_ids, np.int64)
            self._stops[row] = stops, np.full(len(stops), _NEGATIVE_INFINITY, np.float32)
        self._plain[row] = (
            params.temperature == 0 and params.logprobs < 0 and not penalised and row not in self._biases
            and row not in self._stops and not params.grammar
        )  # fmt: skip

    def are_plain(self, rows: np.ndarray) -> bool:
        return bool(self._plain[rows].all())

    def sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        token_table: torch.Tensor,
        masks: Masks | None = None,
        *,
        tells_logprobs: bool = True,
    ) -> SampledTokens:
        """Chooses a token for each of S sequences.

        `logits`: [S, vocab]. `rows`, `positions`: [S] int64, the sequences' rows and the positions of the new tokens.
        `token_table`: [num_rows, width] int32, every row's tokens so far, on the device of the logits. `masks`: of those
        that follow a grammar. `tells_logprobs`: of those that asked for log-probabilities."""
        if self.are_plain(rows):
            return SampledTokens(most_likely(logits))
        if self._one_by_one and len(rows) > 1:
            return _joined(
                [
                    self.sample(
                        logits[i : i + 1],
                        rows[i : i + 1],
                        positions[i : i + 1],
                        token_table,
                        masks and masks.of(i),
                        tells_logprobs=tells_logprobs,
                    )
                    for i in range(len(rows))
                ]
            )
        adjusted = self._adjust(logits, rows, positions, token_table)
        if masks is not None:
            if adjusted is logits and (self._logprobs[rows] >= 0).any():
                adjusted = logits.clone()
            _mask_out(adjusted, masks)
        drawn = np.flatnonzero(self._temperature[rows] > 0)
        if len(drawn) == len(rows):
            tokens = self._draw(adjusted, rows, positions)
        else:
            tokens = most_likely(adjusted)
            if len(drawn):
                index = _to(drawn, logits)
                scores = adjusted.index_select(0, index)
                tokens.index_copy_(0, index, self._draw(scores, rows[drawn], positions[drawn]))
        return SampledTokens(tokens, self._logprob_tensors(logits, rows, tokens) if tells_logprobs else None)

    def _adjust(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, token_table: torch.Tensor
    ) -> torch.Tensor:
        """Penalties, biases and masked stop ids; a float32 copy if any applies, else `logits` itself."""
        penalised = np.flatnonzero(self._penalised[rows])
        biased: list[int] = []
        biases: list[tuple[np.ndarray, np.ndarray]] = []
        if self._biases or self._stops:
            early = positions - self._prompt_tokens[rows] < self._min_tokens[rows]
            for i, row in enumerate(rows.tolist()):
                for changes in (self._biases, self._stops) if early[i] else (self._biases,):
                    if row in changes:
                        biased.append(i)
                        biases.append(changes[row])
        if not len(penalised) and not biases:
            return logits
        adjusted = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if len(penalised):
            index = _to(penalised, logits)
            changed = self._penalise(
                adjusted.index_select(0, index), rows[penalised], positions[penalised], token_table
            )
            adjusted.index_copy_(0, index, changed)
        if biases:
            at = np.repeat(biased, [len(ids) for ids, _ in biases])
            token, value = (np.concatenate(column) for column in zip(*biases, strict=True))
            is_known = (token >= 0) & (token < logits.shape[1])
            place = at[is_known] * logits.shape[1] + token[is_known]
            # A fifth of the time of `index_put_`: 128 rows of 1,024 biases each are in one step.
            adjusted.view(-1).scatter_add_(0, _to(place, logits), _to(value[is_known], logits))
        return adjusted

    def _penalise(
        self, logits: torch.Tensor, rows: np.ndarray, lengths: np.ndarray, token_table: torch.Tensor
    ) -> torch.Tensor:
        """Repetition counts prompt and output; presence and frequency the output only. `logits` is overwritten."""
        longest = int(lengths.max())
        history = token_table[:, :longest].index_select(0, _to(rows, logits)).long()
        place = torch.arange(longest, device=logits.device)
        known = place < _to(lengths, logits)[:, None]
        output = known & (place >= _to(self._prompt_tokens[rows], logits)[:, None])
        history = history.masked_fill_(~known, 0)
        seen = torch.zeros_like(logits).scatter_add_(1, history, known.float()) > 0
        counts = torch.zeros_like(logits).scatter_add_(1, history, output.float())

        repetition, presence, frequency = (
            _to(column[rows], logits)[:, None] for column in (self._repetition, self._presence, self._frequency)
        )
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(seen, repeated, logits) - frequency * counts - presence * (counts > 0)

    def _draw(self, scores: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """[R, vocab] -> [R] int64"""
        scores = scores.float() / _to(self._temperature[rows], scores)[:, None]
        threshold = self._threshold(scores, rows)
        if threshold is not None:
            # a row without restrictions has the threshold -inf, so the comparison keeps all of it
            scores = scores.masked_fill_(scores < threshold, _NEGATIVE_INFINITY)
        return most_likely(scores.add_(gumbel_noise(self._seed[rows], positions, scores)))

    def _threshold(self, scores: torch.Tensor, rows: np.ndarray) -> torch.Tensor | None:
        """[R, 1]: the lowest score that min-p, top-k and top-p leave in; None where nothing restricts."""
        vocab = scores.shape[1]
        min_p, top_k, top_p = self._min_p[rows], self._top_k[rows], self._top_p[rows]
        top_k = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
        nucleus = top_p < 1
        threshold: torch.Tensor | None = None
        if min_p.any():
            threshold = scores.amax(-1, keepdim=True) + _to(np.log(np.maximum(min_p, 1e-38)), scores)[:, None]
        limited = nucleus | (top_k < vocab)
        if not limited.any():
            return threshold
        num_kept = int(top_k[limited].max())
        of_k = _to(top_k, scores)[:, None]
        of_p = _to(np.where(nucleus, top_p, 2).astype(np.float32), scores)[:, None]
        if scores.device.type == "cpu" or num_kept <= MAX_SORTED:
            last = by_sorting(scores, _largest(scores, num_kept), of_k, of_p, threshold)
        else:
            last = by_bisection(scores, of_k if (top_k < vocab).any() else None, of_p, threshold)
        last = last.masked_fill(_to(~limited, scores)[:, None], _NEGATIVE_INFINITY)
        return last if threshold is None else torch.maximum(last, threshold)

    def _logprob_tensors(self, logits: torch.Tensor, rows: np.ndarray, tokens: torch.Tensor) -> LogprobTensors | None:
        wanted = self._logprobs[rows]
        indices = np.flatnonzero(wanted >= 0)
        if not len(indices):
            return None
        index = _to(indices, logits)
        logprobs = logits.index_select(0, index).float().log_softmax(-1)
        chosen = logprobs.gather(1, tokens.index_select(0, index).clamp_(min=0)[:, None])
        ranks = (logprobs > chosen).sum(-1) + 1
        top = logprobs.topk(min(int(wanted.max()), logits.shape[1]), -1)
        return LogprobTensors(indices, wanted[indices], chosen[:, 0], ranks, top.values, top.indices)


def _joined(samples: list[SampledTokens]) -> SampledTokens:
    """Joins the tokens of one sequence each."""
    tokens = torch.cat([sample.tokens for sample in samples])
    reported = [(i, sample.logprobs) for i, sample in enumerate(samples) if sample.logprobs is not None]
    if not reported:
        return SampledTokens(tokens)
    parts = [part for _, part in reported]
    widest = max(part.top_ids.shape[1] for part in parts)
    return SampledTokens(
        tokens,
        LogprobTensors(
            np.array([i for i, _ in reported]),
            np.concatenate([part.wanted for part in parts]),
            torch.cat([part.chosen for part in parts]),
            torch.cat([part.ranks for part in parts]),
            torch.cat([F.pad(part.top_logprobs, (0, widest - part.top_logprobs.shape[1])) for part in parts]),
            torch.cat([F.pad(part.top_ids, (0, widest - part.top_ids.shape[1])) for part in parts]),
        ),
    )


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """[R, vocab] float32 Gumbel noise; element (r, t) depends on (seeds[r], positions[r], t) alone.

    A 32-bit multiply-xorshift hash (the finaliser of MurmurHash3) of the token id, entered with 64 bits of key that a
    splitmix64 step makes from seed and position. `like`: [R, vocab], for shape and device."""
    keys = _splitmix64(_splitmix64(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    first, second = (
        _to(half.astype(np.uint32).view(np.int32), like)[:, None] for half in (keys, keys >> np.uint64(32))
    )
    tokens = torch.arange(like.shape[1], dtype=torch.int32, device=like.device)
    x = tokens.mul_(_as_int32(0x9E3779B1)).bitwise_xor(first)
    # >> on int32 keeps the sign; the mask makes it a logical shift
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_as_int32(0x85EBCA6B)).add_(second)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_as_int32(0xC2B2AE35))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0x7FFFFFFF)
    uniform = x.float().add_(0.5).mul_(2.0**-31)
    # -log(-log(1 - u)) resolves the upper tail, which decides, as finely as floats near 0 are
    return uniform.neg_().clamp_(min=-1 + 2.0**-24).log1p_().neg_().log_().neg_()


def _mask_out(scores: torch.Tensor, masks: Masks) -> None:
    """Leaves what the masks allow, in `scores` [S, vocab]."""
    if len(masks.indices) == len(scores):
        _mask_rows(scores, masks.words)
        return
    index = _to(masks.indices, scores)
    masked = scores.index_select(0, index)
    _mask_rows(masked, masks.words)
    scores.index_copy_(0, index, masked)


def _mask_rows(scores: torch.Tensor, words: np.ndarray) -> None:
    """`scores` [G, vocab], `words` [G, ceil(vocab / 32)] int32."""
    vocab = scores.shape[1]
    if scores.device.type != "cpu":
        places = torch.arange(32, dtype=torch.int32, device=scores.device)
        forbidden = (_to(words, scores)[:, :, None] >> places & 1).flatten(1)[:, :vocab] == 0
        scores.masked_fill_(forbidden, _NEGATIVE_INFINITY)
        return
    compiled = kernels() if scores.dtype in DTYPES and scores.is_contiguous() else None
    if compiled is not None:
        compiled.mask(scores, words)
        return
    # On CPU torch chooses element by element, ten times slower than by the bits of the numbers.
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab, bitorder="little")
    integers = torch.int16 if scores.itemsize == 2 else torch.int32
    keep = torch.from_numpy(np.negative(bits.view(np.int8))).to(integers)
    infinity = int(torch.tensor(_NEGATIVE_INFINITY, dtype=scores.dtype).view(integers))
    scores.view(integers).bitwise_and_(keep).bitwise_or_(keep.bitwise_not_().bitwise_and_(infinity))


def most_likely(scores: torch.Tensor) -> torch.Tensor:
    """[R, vocab] -> [R] int64: the first of the largest, or `NO_TOKEN` where one is NaN or infinite. On CPU numpy's
    vectorised argmax takes a tenth of torch's time."""
    compiled = kernels() if scores.device.type == "cpu" and scores.dtype in DTYPES else None
    if compiled is not None:
        return compiled.argmax(scores.contiguous())
    if scores.device.type == "cpu":
        best = torch.from_numpy(scores.float().numpy().argmax(-1))
        largest = scores.gather(1, best[:, None])[:, 0]
    else:
        largest, best = scores.max(-1)
    return where_finite(largest, best)


def where_finite(largest: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """[R] each: the largest score and its place. torch and numpy take NaN for the largest, and NaN is below nothing."""
    return torch.where(largest < math.inf, best, NO_TOKEN)


def _largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[R, vocab] -> [R, k], descending. On CPU numpy's vectorised sort takes a tenth of torch's time."""
    vocab = scores.shape[1]
    if scores.device.type == "cpu":
        values = scores.numpy()
        if k < vocab // 4:
            values = np.partition(values, vocab - k, -1)[:, vocab - k :]
        return torch.from_numpy(np.sort(values, -1)[:, : -k - 1 : -1].copy())
    return scores.topk(k, -1).values if k < vocab else scores.sort(-1, descending=True).values


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood 2014; uint64, wraps."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = x ^ (x >> np.uint64(31))
    return result


def _as_int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _signed64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _to(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return to_device(array, like.device)
