"""Tideway's requests as vLLM's, and what vLLM's engine made as Tideway's messages. Runs in vLLM's environment."""

from __future__ import annotations

import json
import time
from array import array
from hashlib import blake2b
from struct import Struct
from typing import Any

import msgspec

from services.worker.engines.vllm.images import Pictured
from shared.engines.messages import Generate, Progress
from shared.messages.requests import (
    UNKNOWN_LOGPROB,
    Adapter,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    Pooled,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)
from shared.models.pooling import Pooling

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
PREEMPTED = 3
"""`EngineCoreEventType.PREEMPTED`."""


def core_request(
    message: Generate,
    max_model_len: int,
    number: int = 0,
    pooling: Pooling | None = None,
    pictured: Pictured | None = None,
) -> Any:
    """A vLLM `EngineCoreRequest`. `number`: of an online request, greater than those before. `pooling`: of the model.
    `pictured`: its prompt with its images. Raises `ValueError` for what vLLM does not take."""
    from vllm.v1.engine import EngineCoreRequest

    tokens = unpack_tokens(message.prompt) if pictured is None else pictured.tokens
    return EngineCoreRequest(
        request_id=message.key,
        prompt_token_ids=tokens,
        mm_features=None if pictured is None else pictured.features,
        sampling_params=None if pooling is not None else _sampling(message, max_model_len - len(tokens), number),
        pooling_params=_pooling(message, number, pooling) if pooling is not None else None,
        arrival_time=time.time() - message.waited_s,
        lora_request=None if message.adapter is None else lora_request(message.adapter),
        cache_salt=message.salt or None,
        data_parallel_rank=None,
        priority=message.priority,
    )


def lora_request(adapter: Adapter) -> Any:
    """vLLM's `LoRARequest`. Its name has the version, by which vLLM keeps cached prefixes apart."""
    from vllm.lora.request import LoRARequest

    name = f"{adapter.name} {adapter.version}"
    number = int.from_bytes(blake2b(name.encode(), digest_size=4).digest()) // 2 + 1
    return LoRARequest(name, number, adapter.source)


def _told(message: Generate, number: int) -> dict[str, Any] | None:
    """What Tideway's scheduler in vLLM reads of a request."""
    told = {
        "number": number,
        "ttft_s": message.ttft_s,
        "tpot_s": message.tpot_s,
        "num_fed": message.num_fed if message.sampling.grammar else 0,
        "slots": list(message.slots),
        "num_computed": message.num_computed,
    }
    return {"tideway": told} if any(told.values()) else None


def _pooling(message: Generate, number: int, pooling: Pooling) -> Any:
    from vllm import PoolingParams

    pooled = message.sampling.pooled or Pooled()
    more = _told(message, number) or {}
    if pooled.num_first:
        more["compressed_token_type_ids"] = pooled.num_first
    return PoolingParams(
        task="embed" if pooling.task == "embed" else "classify",
        dimensions=pooled.num_dimensions or None,
        use_activation=pooling.is_normalized,
        skip_reading_prefix_cache=pooling.is_whole,
        extra_kwargs=more or None,
    )


def _sampling(message: Generate, room: int, number: int) -> Any:
    import vllm

    sampling = message.sampling
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
        prompt_logprobs=sampling.prompt_logprobs if sampling.prompt_logprobs >= 0 else None,
        logit_bias=dict(sampling.logit_bias) or None,
        detokenize=False,
        structured_outputs=_grammar(sampling.grammar) if sampling.grammar else None,
        extra_args=_told(message, number),
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


def progress_of(output: Any, num_top: int, pooling: Pooling | None = None) -> Progress:
    """Progress of a request, from an `EngineCoreOutput`. `num_top`: alternatives that were asked for; below 0: no
    log-probabilities. What was pooled comes beside a token that means nothing. `pooling`: of the model, whose activation
    vLLM would choose otherwise."""
    reason, error = None, None
    if output.finish_reason is not None:
        reason = REASONS.get(str(output.finish_reason))
        if reason is None:
            reason = FinishReason.ERROR
            error = ErrorInfo(ErrorCode.GONE, f"vLLM ended the request: {output.finish_reason}")
    stats = output.prefill_stats
    tokens = list(output.new_token_ids)
    logprobs = _logprobs(output.new_logprobs, num_top) if num_top >= 0 and output.new_logprobs is not None else ()
    if output.new_prompt_logprobs_tensors is not None and logprobs:
        prompt = _packed_prompt(output.new_prompt_logprobs_tensors)
        logprobs = (msgspec.structs.replace(logprobs[0], prompt=prompt), *logprobs[1:])
    if output.pooling_output is not None:
        pooled = output.pooling_output.float()
        if pooling is not None and pooling.activation != "identity":
            pooled = getattr(pooled, pooling.activation)()
        vector = array("f", pooled.tolist()).tobytes()
        tokens, logprobs = [0], (msgspec.structs.replace(UNKNOWN_LOGPROB, prompt=vector),)
        reason = reason and FinishReason.LENGTH
    return Progress(
        key=output.request_id,
        tokens=pack_tokens(tokens),
        logprobs=logprobs,
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


def _packed_prompt(tensors: Any) -> bytes:
    """What `unpack_logprobs` reads, of a prompt's tokens from the second on: of each vLLM has the token itself first, then
    the most likely ones."""
    rows = zip(
        tensors.logprob_token_ids.tolist(),
        tensors.logprobs.tolist(),
        tensors.selected_token_ranks.tolist(),
        strict=True,
    )
    num_top = tensors.logprobs.shape[1] - 1
    row = Struct(f"=fi{num_top}i{num_top}f")
    return b"".join(row.pack(values[0], rank, *ids[1:], *values[1:]) for ids, values, rank in rows)
