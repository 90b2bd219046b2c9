"""Sampling: supports, distributions, determinism, penalties and log-probabilities against naive references."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.executor.grammars import Masks
from services.worker.executor.sampling import SampledTokens, SamplingRows, gumbel_noise
from shared.messages.requests import SamplingParams

torch.set_num_threads(1)

VOCAB = 64


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100} | changes)


def sample(
    logits: torch.Tensor,
    wishes: list[SamplingParams],
    positions: list[int] | None = None,
    histories: list[list[int]] | None = None,
    prompt_tokens: list[int] | None = None,
) -> SampledTokens:
    """Samples row i of `logits` with wish i, in rows given out backwards."""
    count = len(wishes)
    rows = SamplingRows(count)
    histories = histories or [[] for _ in wishes]
    positions = positions or [len(h) for h in histories]
    # a token id out of range wherever a row has no token
    table = torch.full((count, max(positions) + 1), 10**6, dtype=torch.int32)
    for i, wish in enumerate(wishes):
        row = count - 1 - i
        rows.set(row, wish, prompt_tokens[i] if prompt_tokens else 0)
        table[row, : len(histories[i])] = torch.tensor(histories[i], dtype=torch.int32)
    with torch.inference_mode():
        return rows.sample(logits, np.arange(count)[::-1].copy(), np.array(positions), table)


def draws(logits: torch.Tensor, count: int, **changes: Any) -> np.ndarray:
    """`count` draws from one distribution, at different seeds and positions."""
    wishes = [params(seed=i % 97, **changes) for i in range(count)]
    return sample(logits.expand(count, -1), wishes, [i // 97 for i in range(count)]).tokens.numpy()


def allowed_by(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Tokens left in, by the definitions: min-p, then top-k, then the nucleus of what is left."""
    order = logits.double().argsort(descending=True).tolist()
    probabilities = logits.double().softmax(-1).tolist()
    kept = [t for t in order if probabilities[t] >= min_p * probabilities[order[0]]]
    kept = kept[: top_k or None]
    total, mass, nucleus = sum(probabilities[t] for t in kept), 0.0, []
    for token in kept:
        if nucleus and mass >= top_p * total:
            break
        nucleus.append(token)
        mass += probabilities[token]
    return set(nucleus)


def test_greedy_rows_take_the_first_maximum_in_any_dtype() -> None:
    logits = torch.randn(5, VOCAB)
    logits[2, 7] = logits[2, 30] = 9.0
    for dtype in (torch.float32, torch.bfloat16):
        got = sample(logits.to(dtype), [params(temperature=0.0)] * 5)
        assert torch.equal(got.tokens, logits.to(dtype).float().argmax(-1)) and got.tokens[2] == 7
        assert got.logprobs is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("restriction", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(temperature: float, restriction: dict[str, Any]) -> None:
    """Chi-square of 20,000 draws against the renormalised softmax; 0.999 quantile by Wilson and Hilferty."""
    torch.manual_seed(1)
    logits = torch.randn(VOCAB) * 1.5
    allowed = allowed_by(logits / temperature, **restriction)
    got = draws(logits, 20_000, temperature=temperature, **restriction)
    assert set(got.tolist()) <= allowed
    outside = torch.tensor([t not in allowed for t in range(VOCAB)])
    expected = (logits.double() / temperature).masked_fill(outside, -math.inf).softmax(-1).numpy() * len(got)
    counts = np.bincount(got, minlength=VOCAB)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    statistic = ((observed - wanted) ** 2 / wanted)[wanted >= 1].sum()
    freedom = max((wanted >= 1).sum() - 1, 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.1 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.lists(
        st.fixed_dictionaries(
            {
                "top_k": st.sampled_from([0, 1, 2, 10, VOCAB, 10 * VOCAB]),
                "top_p": st.sampled_from([1.0, 0.99, 0.5, 0.1, 1e-6, 0.0]),
                "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
                "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            }
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_tokens_stay_in_the_support_whatever_the_mixture(seed: int, wishes: list[dict[str, Any]]) -> None:
    logits = torch.randn(len(wishes), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    got = sample(logits, [params(seed=seed + i, **w) for i, w in enumerate(wishes)]).tokens
    for row, token, wish in zip(logits, got.tolist(), wishes, strict=True):
        temperature = wish.pop("temperature")
        if temperature == 0:
            assert token == int(row.argmax())
        else:
            wish["top_k"] = min(wish["top_k"], VOCAB)
            slack = {**wish, "top_p": min(1.0, wish["top_p"] + 1e-5), "min_p": max(0.0, wish["min_p"] - 1e-5)}
            assert token in allowed_by(row / temperature, **slack)


def test_a_large_vocabulary_is_partitioned_alike() -> None:
    logits = torch.randn(2, 5000)
    for k in (3, 1249, 1250, 4999):
        got = {int(t) for i in range(20) for t in sample(logits, [params(top_k=k, seed=i), params(seed=i)]).tokens[:1]}
        assert got <= set(logits[0].topk(k).indices.tolist())


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    torch.manual_seed(2)
    logits = torch.randn(40, VOCAB)
    wishes = [params(seed=s) for s in range(40)]
    positions = list(range(100, 140))
    together = sample(logits, wishes, positions).tokens.tolist()
    alone = [sample(logits[i : i + 1], [wishes[i]], [positions[i]]).tokens.item() for i in range(40)]
    assert together == alone
    mixed = [params(temperature=0.0) if i % 3 == 0 else w for i, w in enumerate(wishes)]
    assert [t for i, t in enumerate(sample(logits, mixed, positions).tokens.tolist()) if i % 3] == [
        t for i, t in enumerate(together) if i % 3
    ]
    assert sample(logits, wishes, [p + 1 for p in positions]).tokens.tolist() != together
    assert sample(logits, [params(seed=s + 1) for s in range(40)], positions).tokens.tolist() != together


def test_a_draw_does_not_depend_on_how_the_others_are_restricted() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, VOCAB)
    kinds = [params(), params(top_p=0.9), params(top_k=3), params(min_p=0.2), params(top_p=0.5, min_p=0.1), params()]
    wishes = [msgspec.structs.replace(kind, seed=seed) for seed, kind in enumerate(kinds)]
    for position in range(20):
        together = sample(logits, wishes, [position] * 6).tokens.tolist()
        assert together == [sample(logits[i : i + 1], [wishes[i]], [position]).tokens.item() for i in range(6)]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**80 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    logits = torch.zeros(1, VOCAB)
    assert sample(logits, [params(seed=seed)]).tokens.tolist() == sample(logits, [params(seed=seed)]).tokens.tolist()


def test_noise_is_gumbel_and_uncorrelated() -> None:
    like = torch.empty(64, 4096)
    noise = gumbel_noise(np.arange(64), np.arange(64) % 5, like).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
    uniform = torch.exp(-torch.exp(-noise)).flatten().sort().values
    steps = torch.arange(1, len(uniform) + 1, dtype=torch.float64) / len(uniform)
    assert (uniform - steps).abs().max() < 0.005, "Kolmogorov-Smirnov"
    correlation = torch.corrcoef(noise) - torch.eye(64)
    assert correlation.abs().max() < 0.1
    shifted = (noise[:, 1:] - noise.mean()) * (noise[:, :-1] - noise.mean())
    assert shifted.mean().abs() < 0.02, "neighbouring tokens"


def naive_penalties(
    logits: list[float], history: list[int], num_prompt: int, repetition: float, presence: float, frequency: float
) -> list[float]:
    """OpenAI's and vLLM's formulas, one token at a time."""
    result = list(logits)
    for token in range(len(logits)):
        if token in history:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        count = history[num_prompt:].count(token)
        result[token] -= frequency * count + (presence if count else 0.0)
    return result


def test_penalties_equal_a_naive_reference() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, VOCAB) * 2
    histories = [torch.randint(0, VOCAB, (n,)).tolist() for n in (0, 3, 10, 30, 31, 60)]
    prompts = [0, 3, 4, 0, 31, 50]
    settings_ = [(1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.4), (0.5, 1.0, 1.0), (2.0, -1.0, 0.3)]
    wishes = [
        params(temperature=0.0, repetition_penalty=r, presence_penalty=p, frequency_penalty=f) for r, p, f in settings_
    ]
    rows = SamplingRows(6)
    table = torch.full((6, 61), 10**6, dtype=torch.int32)
    for i, wish in enumerate(wishes):
        rows.set(i, wish, prompts[i])
        table[i, : len(histories[i])] = torch.tensor(histories[i], dtype=torch.int32)
    adjusted = rows._adjust(logits, np.arange(6), np.array([len(h) for h in histories]), table)
    for i, (r, p, f) in enumerate(settings_):
        expected = naive_penalties(logits[i].tolist(), histories[i], prompts[i], r, p, f)
        torch.testing.assert_close(adjusted[i], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_bias_and_min_tokens() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 9] = 5.0
    wishes = [
        params(temperature=0.0, logit_bias=((3, 6.0), (9, -1.0))),
        params(temperature=0.0, logit_bias=((9, -100.0), (12, 1.0), (VOCAB + 5, 100.0))),
        params(temperature=0.0, stop_token_ids=(9, 0), min_tokens=3),
        params(temperature=0.0, stop_token_ids=(9, 0), min_tokens=3),
    ]
    histories = [[1] * 10, [1] * 10, [1] * 10, [1] * 10]
    assert sample(logits, wishes, histories=histories, prompt_tokens=[8, 8, 8, 7]).tokens.tolist() == [3, 12, 1, 9]


def test_a_row_taken_again_forgets_its_last_sequence() -> None:
    rows = SamplingRows(1)
    demanding = params(
        temperature=0.0, logit_bias=((3, 99.0),), logprobs=4, min_tokens=9, stop_token_ids=(5,), presence_penalty=1.0
    )
    rows.set(0, demanding, 0)
    rows.set(0, params(temperature=0.0), 0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.0
    got = rows.sample(logits, np.array([0]), np.array([0]), torch.zeros(1, 1, dtype=torch.int32))
    assert got.tokens.tolist() == [5] and got.logprobs is None


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(4)
    logits = torch.randn(4, VOCAB)
    wishes = [
        params(temperature=0.0, logprobs=0),
        params(temperature=1.9, top_k=3, logprobs=5, seed=3, logit_bias=((int(logits[1].argmin()), 100.0),)),
        params(temperature=1.0),
        params(temperature=0.0, logprobs=VOCAB + 10),
    ]
    got = sample(logits, wishes)
    assert got.logprobs is not None
    messages = got.logprobs.to_messages(4)
    assert messages[2] is None
    expected = logits.double().log_softmax(-1)
    for i, k in ((0, 0), (1, 5), (3, VOCAB)):
        message, token = messages[i], int(got.tokens[i])
        assert message is not None
        assert message.logprob == pytest.approx(expected[i, token].item(), abs=1e-5)
        assert message.rank == int((expected[i] > expected[i, token]).sum()) + 1
        top = expected[i].topk(k)
        assert list(message.top_ids) == top.indices.tolist()
        assert list(message.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-5)
    assert messages[1] is not None and messages[1].rank == VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [64, 77])
def test_masks_leave_what_they_allow(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(4, vocab).to(dtype)
    allowed = np.random.default_rng(0).random((2, vocab)) < 0.2
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -vocab % 32))), axis=1, bitorder="little")
    masks = Masks(np.array([0, 2]), bits.view(np.int32))
    rows = SamplingRows(4)
    for row in range(4):
        rows.set(row, params(temperature=row % 2, logprobs=0, grammar="" if row % 2 else "{}"), 0)
    table = torch.zeros(4, 1, dtype=torch.int32)
    before = logits.clone()
    got = rows.sample(logits, np.arange(4), np.zeros(4, np.int64), table, masks)
    for index, row in ((0, 0), (1, 2)):
        best = before[row].float().masked_fill(~torch.from_numpy(allowed[index]), float("-inf"))
        assert got.tokens[row] == best.argmax()
    assert torch.equal(logits, before) and got.logprobs is not None
    free = rows.sample(logits[[1, 3]], np.array([1, 3]), np.zeros(2, np.int64), table)
    assert got.tokens[[1, 3]].tolist() == free.tokens.tolist()
