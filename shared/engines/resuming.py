"""How a request that has output already goes on in an engine that knows nothing of it.

Where what comes next is a function of the tokens alone, prompt and output are given as one prompt. Where the engine
keeps more than tokens (the state of a random generator, counts of output tokens for penalties, a grammar's position)
and cannot be given that, the output is made again from the prompt, compared with what the client has, and passed on
from its end: right, but as slow as the output is long. If it comes out otherwise (a step of other rows may round
otherwise in half precision), the tokens are given as prompt after all, which the caller counts; output that must
follow a grammar, or whose prompt has images that the engine takes in chats alone, ends with an error.
"""

from __future__ import annotations

from collections.abc import Set

import msgspec

from shared.engines.capabilities import Capability
from shared.messages.requests import ErrorCode, ErrorInfo, GenerationRequest, SamplingParams, TokenLogprob


def repeats_for(request: GenerationRequest, lacks: Set[str]) -> frozenset[Capability]:
    """What an engine with these lacks would have to have to go on from the tokens; empty: it can."""
    sampling = request.sampling
    if not request.prior:
        return frozenset()
    found = []
    if sampling.temperature > 0 and not sampling.is_seed_drawn:
        found.append(Capability.SEED_RESUME)
    if sampling.presence_penalty or sampling.frequency_penalty:
        found.append(Capability.PENALTY_RESUME)
    if sampling.grammar:
        found.append(Capability.GRAMMAR_RESUME)
    if request.images:
        found.append(Capability.IMAGE_RESUME)
    return frozenset(found) & lacks


_NEVER_FED = {
    Capability.GRAMMAR_RESUME: "Its structured output",
    Capability.IMAGE_RESUME: "Its output to images",
}
"""Output that cannot be continued from its tokens, even where it came out otherwise."""


class Diverged(Exception):
    """Output that is made again is not what it was."""


class Resumption:
    """One request's way through an engine. `lacks`: of the engine."""

    def __init__(self, request: GenerationRequest, lacks: Set[str]) -> None:
        self._request = request
        self._reasons = repeats_for(request, lacks)
        self._expected = request.prior if self._reasons else b""
        """Packed tokens that are to come again."""

    @property
    def is_repeating(self) -> bool:
        return bool(self._expected)

    @property
    def prompt(self) -> bytes:
        """Packed, as the engine is given it."""
        return self._request.prompt + (b"" if self._reasons else self._request.prior)

    @property
    def num_fed(self) -> int:
        return 0 if self._reasons else len(self._request.prior) // 4

    @property
    def sampling(self) -> SamplingParams:
        sampling, num_fed = self._request.sampling, self.num_fed
        if self._request.prior and sampling.prompt_logprobs >= 0:
            # They went out with the first token.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        if not num_fed:
            return sampling
        return msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - num_fed, min_tokens=max(0, sampling.min_tokens - num_fed)
        )

    def take(self, tokens: bytes, logprobs: tuple[TokenLogprob, ...]) -> tuple[bytes, tuple[TokenLogprob, ...]]:
        """What of a step's output is new. Raises `Diverged`."""
        if not self._expected:
            return tokens, logprobs
        again, self._expected = self._expected[: len(tokens)], self._expected[len(tokens) :]
        if again != tokens[: len(again)]:
            raise Diverged
        return tokens[len(again) :], logprobs[len(again) // 4 :]

    def give_in(self) -> ErrorInfo | None:
        """After `Diverged`: the next try goes on from the tokens. Why that would be wrong; None: it is begun."""
        for capability, what in _NEVER_FED.items():
            if capability in self._reasons:
                message = f"{what} was interrupted and did not come out alike again: it cannot be continued."
                return ErrorInfo(ErrorCode.INTERNAL, message)
        self._reasons, self._expected = frozenset(), b""
        return None
