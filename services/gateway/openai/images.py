"""Images of a chat, taken out of its messages: bytes within what a message on the bus carries, or URLs for a server that
fetches them itself. Nothing is fetched here.

Pure. The native engine takes none: its messages are left as they are, for `conversations` to refuse.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.parsing import template_variables
from services.gateway.openai.schemas import IMAGE, ChatMessage, ChatRequest, ContentPart
from shared.messages.cluster import ModelSpec
from shared.messages.requests import MAX_IMAGES_BYTES, Image

MAX_IMAGES = 64
"""Most images of a request."""
_DATA_URL = re.compile(r"data:(image/[\w.+-]{1,64})(?:;[^;,]{0,64}){0,4};base64,", re.IGNORECASE)


def images_of(messages: Sequence[ChatMessage], spec: ModelSpec) -> tuple[list[ChatMessage], tuple[Image, ...]]:
    """The messages as the chat template is given them, and the images of the user's messages in their order. A server that
    renders chats itself has placeholders of its own; for other engines the image parts stay, without their URLs. Raises
    `ApiError` 400."""
    if spec.is_native or not any(_has_image(message) for message in messages):
        return list(messages), ()
    plain, images, num_left = [], list[Image](), MAX_IMAGES_BYTES
    for i, message in enumerate(messages):
        if not _has_image(message):
            plain.append(message)
            continue
        parts = []
        for j, part in enumerate(message.content or ()):
            assert isinstance(part, ContentPart)
            if part.type != IMAGE:
                parts.append(part)
                continue
            image = _image(part, f"messages[{i}].content[{j}].image_url", num_left, takes_urls=spec.is_endpoint)
            images.append(image)
            num_left -= len(image.data) + len(image.url)
            if not spec.is_endpoint:
                parts.append(ContentPart(IMAGE))
        plain.append(msgspec.structs.replace(message, content=parts))
    if len(images) > MAX_IMAGES:
        raise _too_large(f"'messages' has {len(images)} images; the limit is {MAX_IMAGES}.")
    return plain, tuple(images)


def _has_image(message: ChatMessage) -> bool:
    """What assistants and tools are said to have shown is no image to any engine."""
    return (
        message.role == "user"
        and isinstance(message.content, list)
        and any(part.type == IMAGE for part in message.content)
    )


def _image(part: ContentPart, param: str, max_bytes: int, *, takes_urls: bool) -> Image:
    url = part.url
    if url.startswith(("http://", "https://")):
        if not takes_urls:
            message = f"'{param}': this model takes images as data: URLs with base64; no URL is fetched for it."
            raise invalid(param, message, "unsupported_value")
        image = Image(url=url)
    elif (found := _DATA_URL.match(url)) is None:
        expected = "a data: URL with base64 (data:image/png;base64,...)" + (" or an http(s) URL" if takes_urls else "")
        raise invalid(param, f"Invalid value for '{param}': {expected} is expected.")
    elif len(url) - found.end() > 4 * max_bytes // 3 + 4:
        raise _no_room()
    else:
        try:
            image = Image(base64.b64decode(url[found.end() :], validate=True), found[1].lower())
        except binascii.Error:
            raise invalid(param, f"Invalid value for '{param}': its base64 cannot be decoded.") from None
        if not image.data:
            raise invalid(param, f"Invalid value for '{param}': the image is empty.")
    if len(image.data) + len(image.url) > max_bytes:
        raise _no_room()
    return image


def _no_room() -> ApiError:
    return _too_large(f"The images in 'messages' have more than {MAX_IMAGES_BYTES} bytes in all, which is the limit.")


def _too_large(message: str) -> ApiError:
    return invalid("messages", message, "images_too_large")


def chat_of(request: ChatRequest, tools: list[dict[str, Any]] | None, images: Sequence[Image]) -> bytes:
    """`GenerationRequest.chat`. Calls of `tools` are read here, so that the server parses none. Raises `ApiError` 400."""
    chat: dict[str, Any] = {"messages": [_as_sent(message) for message in request.messages]}
    if tools:
        chat |= {"tools": tools, "tool_choice": "none"}
    if variables := template_variables(request):
        chat["chat_template_kwargs"] = variables
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(request, name)) is not None:
            chat[name] = value
    encoded = msgspec.json.encode(chat)
    num_bytes = len(encoded) + sum(len(image.data) + len(image.url) for image in images)
    if num_bytes > MAX_IMAGES_BYTES:
        message = (
            f"'messages' with images has {num_bytes} bytes, images and texts together; the limit is {MAX_IMAGES_BYTES}."
        )
        raise _too_large(message)
    return encoded


def _as_sent(message: ChatMessage) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message.content, list):
        sent["content"] = [
            {"type": IMAGE, IMAGE: {"detail": part.detail or "auto"}}
            if part.type == IMAGE and message.role == "user"
            else {"type": "text", "text": part.shown}
            for part in message.content
        ]
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            sent[name] = value
    return sent
