"""What an engine may lack, and what a request asks of one.

The scheduler passes over instances that lack what a request asks; where all that serve its model lack it, the request is
refused by name. What can be had in another way is no lack of a request: output is continued by repeating it (`resuming.py`).
"""

from __future__ import annotations

from collections.abc import Set
from enum import StrEnum

from shared.messages.requests import ErrorCode, ErrorInfo, GenerationRequest

NATIVE = "native"
VLLM = "vllm"
ENDPOINT = "endpoint"
"""A server that runs already, behind its HTTP API."""
ENGINES = (NATIVE, VLLM, ENDPOINT)


class Capability(StrEnum):
    ADAPTERS = "adapters"
    PROMPT_LOGPROBS = "prompt_logprobs"
    GRAMMARS = "grammars"
    POOLING = "pooling"
    """Embeddings and scores of prompts."""
    IMAGES = "images"
    """Images in prompts."""
    PREFIX_SALTS = "prefix_salts"
    """Tenants' prefixes are kept apart in the cache, for certain."""
    KV_MOVES = "kv_moves"
    PREEMPTS = "preempts"
    """Online requests take rows and memory of offline ones at the next step."""
    INTERRUPTS = "interrupts"
    """An online request that arrives ends a running step of offline work."""
    BUDGETS = "budgets"
    """Offline tokens of a step are bounded by what the objectives of online requests leave."""
    SEVERAL_MODELS = "several_models"
    GRAMMAR_RESUME = "grammar_resume"
    """Capability: output is continued from its tokens alone. Without it, it is made again and compared."""
    SEED_RESUME = "seed_resume"
    PENALTY_RESUME = "penalty_resume"
    IMAGE_RESUME = "image_resume"
    """The same of a prompt with images."""


NAMES = {
    Capability.ADAPTERS: ("LoRA adapters", "model"),
    Capability.PROMPT_LOGPROBS: ("log-probabilities of the prompt", "prompt_logprobs"),
    Capability.POOLING: ("vectors and scores", "model"),
    Capability.GRAMMARS: ("structured output", "response_format"),
    Capability.IMAGES: ("images", "messages"),
}
"""Capabilities that a request may ask for: what each is, and the field at fault."""


def asked(request: GenerationRequest) -> frozenset[Capability]:
    """Capabilities without which an instance cannot run the request."""
    found = []
    if request.adapter is not None:
        found.append(Capability.ADAPTERS)
    if request.sampling.prompt_logprobs >= 0:
        found.append(Capability.PROMPT_LOGPROBS)
    if request.sampling.pooled is not None:
        found.append(Capability.POOLING)
    if request.sampling.grammar:
        found.append(Capability.GRAMMARS)
    if request.images:
        found.append(Capability.IMAGES)
    return frozenset(found)


def refusal(request: GenerationRequest, lacks: Set[str]) -> ErrorInfo | None:
    """Why an engine with these lacks cannot run the request; None: it can."""
    missing = sorted(asked(request) & lacks)
    if not missing:
        return None
    what, param = NAMES[Capability(missing[0])]
    message = f"{what} cannot be had: the engine that serves {request.public_model!r} lacks {', '.join(missing)}."
    return ErrorInfo(ErrorCode.BAD_REQUEST, message[0].upper() + message[1:], param)
