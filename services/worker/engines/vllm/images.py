"""Prompts with images as vLLM's engine takes them, made by vLLM's own input processor: each placeholder of the chat template
becomes as many as its image has tokens. Runs in vLLM's environment."""

from __future__ import annotations

from typing import Any, NamedTuple

from shared.engines.messages import Generate
from shared.messages.requests import unpack_tokens


def why_no_torchvision() -> str:
    """Why vLLM cannot import torchvision; empty: it can."""
    try:
        import torchvision  # noqa: F401
    except Exception as error:  # one that was built for another torch fails in ways of its own
        return str(error)
    return ""


class Pictured(NamedTuple):
    tokens: list[int]
    features: list[Any]
    """vLLM's `MultiModalFeatureSpec`s, by whose hashes it also keeps cached prefixes apart."""


class Pictures:
    def __init__(self, config: Any) -> None:
        """`config`: vLLM's. Blocking, seconds."""
        from vllm.multimodal.media.image import ImageMediaIO
        from vllm.v1.engine.input_processor import InputProcessor

        self._processor = InputProcessor(config)
        options = config.model_config.multimodal_config.media_io_kwargs or {}
        self._images = ImageMediaIO(**options.get("image", {}))

    def in_prompt(self, message: Generate) -> Pictured:
        """Blocking. Raises `ValueError` for images, or a prompt with these images, that the model does not take."""
        from vllm import SamplingParams

        tokens = unpack_tokens(message.prompt)
        num_prompt = len(tokens) - message.num_fed  # output has no placeholders, even where it looks so
        try:
            images = [self._images.load_bytes(image.data) for image in message.images]
            prompt = {"prompt_token_ids": tokens[:num_prompt], "multi_modal_data": {"image": images}}
            made = self._processor.process_inputs(message.key, prompt, SamplingParams(max_tokens=1), ("generate",))
        except Exception as error:  # whatever a model's processor makes of an image
            raise ValueError(str(error)) from error
        return Pictured([*made.prompt_token_ids, *tokens[num_prompt:]], made.mm_features)
