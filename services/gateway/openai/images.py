"""Images of a chat, taken out of its messages: bytes within what a message on the bus carries, or URLs for a server that
fetches them itself. Nothing is fetched here.

Pure. The native engine takes none: the parts stay in its messages, for `conversations` to refuse.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.conversations import plain_messages
from services.gateway.openai.parsing import template_variables
from services.gateway.openai.schemas import IMAGE, ChatMessage, ChatRequest, ContentPart
from services.gateway.tools.formats import with_instructions
from shared.messages.cluster import ModelSpec
from shared.messages.requests import MAX_IMAGES_BYTES, Image

MAX_IMAGES = 64
"""Most images of a request."""
MAX_URL_CHARACTERS = 8192
MAX_SENT_BYTES = 16 * MAX_IMAGES_BYTES
"""Most bytes of images of a request's choices together: each travels with images of its own."""
_DATA_URL = re.compile(r"data:(image/[\w.+-]{1,64})(?:;[^;,]{0,64}){0,4};base64,", re.IGNORECASE)


def images_of(messages: Sequence[ChatMessage], spec: ModelSpec) -> tuple[list[ChatMessage], tuple[Image, ...]]:
    """The messages as the chat template is given them, and the images of the user's messages in their order. A server that
    renders chats itself has placeholders of its own; for other engines the image parts stay. No part keeps its URL. Raises
    `ApiError` 400."""
    plain, images, num_left = [], list[Image](), MAX_IMAGES_BYTES
    for i, message in enumerate(messages):
        if not isinstance(message.content, list):
            plain.append(message)
            continue
        parts = []
        for j, part in enumerate(message.content):
            if not spec.is_native and message.shows(part):
                image = _image(part, f"messages[{i}].content[{j}].image_url", num_left, takes_urls=spec.is_endpoint)
                images.append(image)
                num_left -= len(image.data) + len(image.url)
                if spec.is_endpoint:
                    continue
            parts.append(part if part.image_url is None else msgspec.structs.replace(part, image_url=None))
        plain.append(msgspec.structs.replace(message, content=parts))
    if len(images) > MAX_IMAGES:
        raise _too_large(f"'messages' has {len(images)} images; the limit is {MAX_IMAGES}.")
    return plain, tuple(images)


def check_choices(images: Sequence[Image], num_choices: int) -> None:
    """Raises `ApiError` 400 for more choices than may be sent with the images."""
    num_bytes = num_choices * sum(len(image.data) + len(image.url) for image in images)
    if num_bytes > MAX_SENT_BYTES:
        message = f"'n' times the bytes of the images in 'messages' is {num_bytes}; the limit is {MAX_SENT_BYTES}."
        raise invalid("n", message, "images_too_large")


def _image(part: ContentPart, param: str, max_bytes: int, *, takes_urls: bool) -> Image:
    url = part.url
    if url.startswith(("http://", "https://")):
        if not takes_urls:
            message = f"'{param}': this model takes images as data: URLs with base64; no URL is fetched for it."
            raise invalid(param, message, "unsupported_value")
        if not url.isascii() or len(url) > MAX_URL_CHARACTERS:
            expected = f"at most {MAX_URL_CHARACTERS} characters, all of them ASCII (others percent-encoded)"
            raise invalid(param, f"Invalid value for '{param}': a URL has {expected}.")
        image = Image(url=url)
    elif (found := _DATA_URL.match(url)) is None:
        expected = "a data: URL with base64 (data:image/png;base64,...)" + (" or an http(s) URL" if takes_urls else "")
        raise invalid(param, f"Invalid value for '{param}': {expected} is expected.")
    elif len(url) - found.end() > 4 * max_bytes // 3 + 4:
        raise _no_room()
    else:
        try:
            image = Image(base64.b64decode(url[found.end() :], validate=True), found[1].lower())
        except ValueError:
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


def chat_of(
    request: ChatRequest, tools: list[dict[str, Any]] | None, images: Sequence[Image], *, takes_tools: bool
) -> bytes:
    """`GenerationRequest.chat`. Calls of `tools` are read here, so that the server parses none. `takes_tools`: the model's
    chat template does; else instructions tell of them. Raises `ApiError` 400."""
    messages = plain_messages(request.messages, takes_images=True)
    if tools and not takes_tools:
        messages, tools = with_instructions(messages, tools), None
    shown = (part for message in request.messages for part in message.images)
    chat: dict[str, Any] = {"messages": [_as_sent(message, shown) for message in messages]}
    if tools:
        chat |= {"tools": tools, "tool_choice": "none"}
    if variables := template_variables(request):
        chat["chat_template_kwargs"] = variables
    for name in ("add_generation_prompt", "continue_final_message", "add_special_tokens"):
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


def _as_sent(message: dict[str, Any], shown: Iterator[ContentPart]) -> dict[str, Any]:
    """A message for a template, as the API has it. `shown`: the image parts from this message on."""
    sent = {name: value for name, value in message.items() if name != "thinking"}  # reasoning by a third name
    if isinstance(sent["content"], list):
        sent["content"] = [
            part if part["type"] == "text" else {"type": IMAGE, IMAGE: {"detail": next(shown).detail or "auto"}}
            for part in sent["content"]
        ]
    if "tool_calls" in sent:
        sent["tool_calls"] = [_as_text(call) for call in sent["tool_calls"]]
    return sent


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON text."""
    if not (function := call.get("function")):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
