"""Synthetic prompts: words drawn by the seed, as many as give about the wanted number of tokens; or token ids, exactly.
Pure. Requests with equal prefix blocks begin with equal text."""

from __future__ import annotations

import msgspec
import numpy as np

from tideway.bench.workload import PlannedRequest, generator

FIRST_TOKEN_ID = 3
"""Most vocabularies begin with tokens that mean padding, beginning and end."""
CALIBRATION_WORDS = (32, 160)
"""Lengths of the two prompts whose counted tokens give a model's rate of tokens per word."""

TEXT = """
about above across action after again agree air allow almost alone along already also always among animal answer
appear area arrive ask back bank base bear beautiful because become bed before begin behind believe below best
better between big bird black blue board boat body book both box bread break bridge bright bring brother brown build
burn business busy buy call captain car care carry case catch cause centre certain chair chance change child choose
circle city class clean clear climb close cloud coast cold colour come common compare complete contain control cook
cool corner cost count country course cover cross cry cut dance dark day deep develop did differ direct distant
divide doctor dog door double down draw dream dress drink drive dry during each early earth east easy eat edge eight
electric end energy engine enough enter even evening ever every example eye face fact fall family far farm fast
father feel few field fight figure fill final find fine finger fire first fish five floor flow flower fly follow
food foot force forest form forward four free fresh friend from front fruit full game garden gather general gentle
girl give glass gold good govern grand grass great green ground group grow half hand happen happy hard have hear
heart heat heavy help here high hill history hold home hope horse hot hour house hundred hunt ice idea inch include
industry iron island just keep kind king know lake land language large
"""
WORDS = tuple(TEXT.split())


class TokensPerWord(msgspec.Struct, frozen=True):
    """Tokens of a prompt of w words = `base_tokens` (template, beginning of the text) + `tokens_per_word` * w."""

    base_tokens: float = 0.0
    tokens_per_word: float = 1.3
    """The default is what common tokenizers make of English."""

    @staticmethod
    def through(points: list[tuple[int, int]]) -> TokensPerWord:
        """Through (words, tokens) of one or two prompts."""
        if len(points) == 1 or points[0][0] == points[1][0]:
            (words, tokens), *_ = points
            return TokensPerWord(0.0, max(tokens, 1) / words)
        (words, tokens), (more_words, more_tokens) = points
        slope = max((more_tokens - tokens) / (more_words - words), 0.01)
        return TokensPerWord(max(0.0, tokens - slope * words), slope)

    def words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.base_tokens) / self.tokens_per_word))


def calibration_text(num_words: int, seed: int) -> str:
    return _text(generator(seed, "calibration", num_words).integers(0, len(WORDS), num_words))


def prompt_text(request: PlannedRequest, rate: TokensPerWord, seed: int) -> str:
    block_words = (
        max(1, round(request.prefix_block_tokens / rate.tokens_per_word)) if request.prefix_block_tokens else 0
    )
    return _text(_draw(request, rate.words(request.prompt_tokens), block_words, seed, 0, len(WORDS)))


def prompt_token_ids(request: PlannedRequest, vocabulary: int, seed: int) -> list[int]:
    """`request.prompt_tokens` ids below `vocabulary`."""
    drawn = _draw(
        request,
        request.prompt_tokens,
        request.prefix_block_tokens,
        seed,
        min(FIRST_TOKEN_ID, vocabulary - 1),
        vocabulary,
    )
    return [int(token) for token in drawn]


def _draw(request: PlannedRequest, num: int, block: int, seed: int, low: int, high: int) -> np.ndarray:
    """`num` numbers from `low` to below `high`: those of the prefix blocks of `block` numbers each, then its own."""
    pieces: list[np.ndarray] = []
    left = num
    for identity in request.prefix if block else ():
        pieces.append(generator(seed, "prefix", identity).integers(low, high, block)[:left])
        left -= pieces[-1].size
        if not left:
            break
    pieces.append(generator(seed, "prompt", request.request_id).integers(low, high, left))
    return np.concatenate(pieces)


def _text(indices: np.ndarray) -> str:
    return " ".join([WORDS[index] for index in indices.tolist()])
