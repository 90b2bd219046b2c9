"""Tideway's requests as vLLM's, and what vLLM's engine made as Tideway's messages. Runs in vLLM's environment."""

from __future__ import annotations

import json
import time
from typing import Any

from shared.engines.messages import Generate, Progress
from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    FinishReason,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
PREEMPTED = 3
"""`EngineCoreEventType.PREEMPTED`."""


def core_request(message: Generate, max_model_len: int, number: int = 0) -> Any:
    """A vLLM `EngineCoreRequest`. `number`: of an online request, greater than those before. Raises `ValueError` for what
    vLLM does not take."""
    from vllm.v1.engine import EngineCoreRequest

    tokens = unpack_tokens(message.prompt)
    return EngineCoreRequest(
        request_id=message.key,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=_sampling(message, max_model_len - len(tokens), number),
        pooling_params=None,
        arrival_time=time.time() - message.waited_s,
        lora_request=None,
        cache_salt=message.salt or None,
        data_parallel_rank=None,
        priority=message.priority,
    )


def _sampling(message: Generate, room: int, number: int) -> Any:
    import vllm

    sampling = message.sampling
    told = {
        "number": number,
        "ttft_s": message.ttft_s,
        "tpot_s": message.tpot_s,
        "num_fed": message.num_fed if sampling.grammar else 0,
        "slots": list(message.slots),
        "num_computed": message.num_computed,
    }
    return vllm.SamplingParams(
        max_tokens=min(sampling.max_tokens, room),
        min_tokens=min(sampling.min_tokens, room),
        temperature=sampling.temperature,
        top_k=sampling.top_k or -1,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed if sampling.temperature > 0 else None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # those that end it are among the stop tokens
        logprobs=sampling.logprobs if sampling.logprobs >= 0 else None,
        logit_bias=dict(sampling.logit_bias) or None,
        detokenize=False,
        structured_outputs=_grammar(sampling.grammar) if sampling.grammar else None,
        extra_args={"tideway": told} if any(told.values()) else None,
    )


def _grammar(text: str) -> Any:
    """The gateway writes one grammar of llguidance: a JSON schema, or Lark."""
    from vllm.sampling_params import StructuredOutputsParams

    grammars = json.loads(text)["grammars"]
    if len(grammars) != 1:
        raise ValueError("vLLM follows one grammar, and this output's has several parts")
    (one,) = grammars
    if "json_schema" in one:
        found = StructuredOutputsParams(json=one["json_schema"])
    elif "lark_grammar" in one:
        found = StructuredOutputsParams(grammar=one["lark_grammar"])
    else:
        raise ValueError(f"vLLM follows no grammar of {', '.join(one)}")
    found._backend = "guidance"
    return found


def progress_of(output: Any, num_top: int) -> Progress:
    """Progress of a request, from an `EngineCoreOutput`. `num_top`: alternatives that were asked for; below 0: no
    log-probabilities."""
    reason, error = None, None
    if output.finish_reason is not None:
        reason = REASONS.get(str(output.finish_reason))
        if reason is None:
            reason = FinishReason.ERROR
            error = ErrorInfo(ErrorCode.GONE, f"vLLM ended the request: {output.finish_reason}")
    stats = output.prefill_stats
    return Progress(
        key=output.request_id,
        tokens=pack_tokens(list(output.new_token_ids)),
        logprobs=_logprobs(output.new_logprobs, num_top) if num_top >= 0 and output.new_logprobs is not None else (),
        finish_reason=reason,
        error=error,
        num_cached=0 if stats is None else stats.num_cached_tokens,
        num_preemptions=sum(int(event.type) == PREEMPTED for event in output.events or ()),
    )


def _logprobs(lists: Any, num_top: int) -> tuple[TokenLogprob, ...]:
    """vLLM has the chosen token first, then the most likely ones."""
    rows = zip(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, strict=True)
    return tuple(
        TokenLogprob(
            float(values[0]),
            tuple(int(one) for one in ids[1 : num_top + 1]),
            tuple(float(one) for one in values[1 : num_top + 1]),
            int(rank),
        )
        for ids, values, rank in rows
    )
