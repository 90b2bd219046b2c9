"""A chat's messages as templates take them: plain, and in other forms where a template refuses or drops some.

Pure. Clients send what OpenAI's API allows: instructions as `developer`, system messages anywhere, results of tools that the
request does not name again, calls that were cut off. Templates were written for one model's training data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.schemas import CUSTOM_ARGUMENT, IMAGE, UNSEEN, ChatMessage, is_nested_deep


class Part(Protocol):
    """A part of a message's content."""

    @property
    def type(self) -> str: ...


Message = dict[str, Any]
Content = str | list[dict[str, str]]
Form = Callable[[Sequence[Message]], list[Message]]

ONLY_ARGUMENT = "arguments"
"""What arguments of a call that are no object are called in the object that they become."""
_INSTRUCTING = ("system", "developer")
_RESULTS = ("tool", "function")
_THINKING = "thinking"
"""A part of an assistant's message that is its reasoning."""
_BETWEEN = "\n\n"
_IMAGE = {"type": "image"}
"""A template writes the model's placeholder for it."""


def plain_messages(messages: Sequence[ChatMessage], *, takes_images: bool = False) -> list[Message]:
    """Messages as templates expect them: text parts joined by a line break (as vLLM does), absent fields left out, reasoning
    under the names that templates read. `takes_images`: the user's may have images, beside which texts stay parts. Raises
    `ApiError` 400."""
    plain: list[Message] = []
    old_call_id = ""
    for i, message in enumerate(messages):
        content: Any = message.content
        thought = ""
        if message.role != "assistant" and (message.tool_calls or message.function_call):
            param = f"messages[{i}].{'tool_calls' if message.tool_calls else 'function_call'}"
            raise invalid(param, f"Invalid value for '{param}': only a message of the assistant has calls.")
        if takes_images and message.images:
            for j, part in enumerate(content):
                if part.type != IMAGE:
                    check_parts([part], f"messages[{i}].content", role="user", first=j)
            content = [_IMAGE if part.type == IMAGE else _text_part(part.shown) for part in content]
        elif isinstance(content, list):
            if message.role not in _RESULTS:
                check_parts(content, f"messages[{i}].content", role=message.role)
            thought = "\n".join(part.reasoning for part in content if part.type == _THINKING)
            content = "\n".join(part.shown for part in content if part.type != _THINKING)
        elif content is None:
            if message.role not in ("assistant", *_RESULTS):  # a tool may return nothing
                raise invalid(f"messages[{i}].content", f"Invalid value for 'messages[{i}].content': it is missing.")
            content = message.refusal or ""
        fields: Message = {"role": message.role, "content": content}
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                fields[name] = value
        if message.role == "assistant" and (reasoning := message.reasoning_content or message.reasoning or thought):
            fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if not (content and message.tool_calls):  # gpt-oss's template refuses both beside calls
                fields["thinking"] = reasoning
        if message.tool_calls:
            where = f"messages[{i}].tool_calls"
            fields["tool_calls"] = [_with_arguments(call, f"{where}[{j}]") for j, call in enumerate(message.tool_calls)]
        elif message.function_call:
            old_call_id = f"call{i:05}"  # nine characters: Mistral's templates refuse others
            call = {"id": old_call_id, "type": "function", "function": message.function_call}
            fields["tool_calls"] = [_with_arguments(call, f"messages[{i}]")]
        elif message.role == "function":
            fields["role"] = "tool"  # as templates know it
            if old_call_id:
                fields["tool_call_id"] = old_call_id
        plain.append(fields)
    return plain


def check_parts(parts: Sequence[Part], param: str, *, role: str = "", first: int = 0) -> None:
    """Raises `ApiError` 400 for a part that only results of tools, or only assistants, may have. `param`: what they are
    called in the request. `first`: the number of the first part."""
    for i, part in enumerate(parts, first):
        if part.type in UNSEEN or (part.type == _THINKING and role != "assistant"):
            raise not_served(f"{param}[{i}].type", part.type)


def not_served(param: str, part_type: str) -> ApiError:
    return invalid(param, f"Invalid value for '{param}': '{part_type[:100]}' is not supported by this server.")


def _with_arguments(call: dict[str, Any], param: str) -> dict[str, Any]:
    """A tool call whose arguments, JSON text in OpenAI's API, are the object that templates go through. `param`: what it is
    called in the request. Raises `ApiError` 400."""
    if call.get("type") == "custom":
        custom = call.get("custom")
        if not isinstance(custom, dict):
            raise invalid(f"{param}.custom", f"Invalid value for '{param}.custom': an object is expected.")
        arguments = {CUSTOM_ARGUMENT: custom.get("input", "")}
        return {
            "id": call.get("id"),
            "type": "function",
            "function": {"name": custom.get("name"), "arguments": arguments},
        }
    function = call.get("function", {})
    if not isinstance(function, dict):
        raise invalid(f"{param}.function", f"Invalid value for '{param}.function': an object is expected.")
    if not function:
        return call
    return {**call, "function": {**function, "arguments": arguments_object(function.get("arguments"))}}


def custom_input(arguments: str) -> str:
    """Input of a custom tool, from the arguments of the function that it is to the model."""
    value = arguments_object(arguments).get(CUSTOM_ARGUMENT)
    return value if isinstance(value, str) else arguments


def arguments_object(written: Any) -> dict[str, Any]:
    """The object that arguments of a call are, as a client or a model wrote them: JSON, JSON in a JSON string, or what was
    cut off. Nothing and null are no arguments; what is no object becomes the only field of one. Its texts are UTF-8."""
    value = written
    for _ in range(2):
        if not isinstance(value, str):
            break
        if not value.strip():
            return {}
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            break
    if value is None:
        return {}
    if is_nested_deep(value):
        value = written
    whole: dict[str, Any] = _in_utf8(value if isinstance(value, dict) else {ONLY_ARGUMENT: value})
    return whole


def in_utf8(text: str) -> str:
    """Without halves of characters, which escapes of JSON may have: neither a template's text nor an answer can."""
    return text.encode(errors="replace").decode()


def _in_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return in_utf8(value)
    if isinstance(value, list):
        return [_in_utf8(each) for each in value]
    return {in_utf8(name): _in_utf8(each) for name, each in value.items()} if isinstance(value, dict) else value


def forms(messages: Sequence[Message], *, knows_developer: bool) -> Iterator[list[Message]]:
    """The messages, and then other ways to say the same, the closest first: one that a template takes whole is among them
    for most templates. `knows_developer`: the template has the role, else it is system from the beginning."""
    roles = {message["role"] for message in messages}
    begun = list(messages) if knows_developer else _as_system(messages)
    of_roles: list[Form] = [list]
    if roles.intersection(_INSTRUCTING):
        of_roles += [_as_system, _later_as_user, _hoisted, _in_first_user]
    of_calls: list[Form] = [list]
    if roles.intersection(_RESULTS) or any("tool_calls" in message for message in messages):
        of_calls.append(calls_as_text)
    told: list[list[Message]] = []
    for without_calls in of_calls:
        for arranged in of_roles:
            form = arranged(without_calls(begun))
            if form not in told:
                told.append(form)
                yield form


def lost(messages: Sequence[Message], text: str) -> Message | None:
    """The first instruction or result of a tool that is not in the text that a template made of the messages; None: none
    is missing. A template may trim it, or write it as JSON."""
    for message in messages:
        if message["role"] in (*_INSTRUCTING, *_RESULTS) and (content := message["content"].strip()):
            spelled = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
            if not any(one in text for one in spelled):
                return message
    return None


def _as_system(messages: Sequence[Message]) -> list[Message]:
    return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]


def _later_as_user(messages: Sequence[Message]) -> list[Message]:
    """Instructions at the beginning are one system message, later ones are user messages, joined to those beside them."""
    arranged: list[Message] = []
    is_later = was_moved = False
    for message in _as_system(messages):
        is_instruction = message["role"] == "system"
        is_moved = is_instruction and is_later
        if is_moved:
            message = {**message, "role": "user"}
        if is_instruction or was_moved:
            _append(arranged, message)
        else:
            arranged.append(message)
        is_later, was_moved = is_later or not is_instruction, is_moved
    return arranged


def _append(messages: list[Message], message: Message) -> None:
    """Appends a message, as a part of the last one where that has the same role."""
    if messages and messages[-1]["role"] == message["role"]:
        messages[-1] = {**messages[-1], "content": joined(messages[-1]["content"], message["content"])}
    else:
        messages.append(message)


def joined(first: Content, second: Content) -> Content:
    """One content of two; parts, where one of them is a list of them."""
    if isinstance(first, str) and isinstance(second, str):
        return _BETWEEN.join(filter(None, (first, second)))
    return [*as_parts(first), *as_parts(second)]


def as_parts(content: Content) -> list[dict[str, str]]:
    """A message's content as parts, as templates of models that take images go through it."""
    return content if isinstance(content, list) else [_text_part(content)] if content else []


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _hoisted(messages: Sequence[Message]) -> list[Message]:
    """All instructions in one system message at the beginning."""
    instructions, others = _parted(messages)
    return [{"role": "system", "content": instructions}, *others]


def _in_first_user(messages: Sequence[Message]) -> list[Message]:
    """All instructions before the first user message's own text: for models that know no system message."""
    instructions, others = _parted(messages)
    for i, message in enumerate(others):
        if message["role"] == "user":
            told = {**message, "content": joined(instructions, message["content"])}
            return [*others[:i], told, *others[i + 1 :]]
    return [{"role": "user", "content": instructions}, *others]


def _parted(messages: Sequence[Message]) -> tuple[str, list[Message]]:
    texts = [each["content"] for each in messages if each["role"] in _INSTRUCTING]
    return _BETWEEN.join(filter(None, texts)), [each for each in messages if each["role"] not in _INSTRUCTING]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls of tools, and what they returned, in plain words: for a template that knows neither."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] in _RESULTS:
            _append_result(plain, message)
        elif "tool_calls" not in message:
            plain.append(message)
        else:
            calls = [call.get("function", call) for call in message["tool_calls"]]
            written = [{"name": call.get("name"), "arguments": call.get("arguments")} for call in calls]
            text = "\n".join(filter(None, (message["content"], json.dumps(written, ensure_ascii=False))))
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            plain.append({**kept, "content": text})
    return plain


def _append_result(messages: list[Message], message: Message) -> None:
    """Results of several calls are one message of the user, since many templates have roles alternate."""
    result = {"role": "user", "content": message["content"]}
    if messages and messages[-1].get("role") == "user":
        _append(messages, result)
    else:
        messages.append(result)
