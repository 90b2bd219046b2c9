"""Errors in OpenAI's shape, with the field at fault and its limit.

The only place that knows how the bus's typed reasons (`ErrorCode`) map to HTTP statuses and OpenAI's codes.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from shared.messages.requests import ErrorCode, ErrorInfo
from shared.models.spec import NAME_PATTERN, NAME_RULE
from shared.runtime.nearest import nearest

MODEL_FAILED = "model_failed"
INSTANCES_CRASHED = "instances_crashed"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
HANDED_OVER = "handed_over"
CANCELLED = "cancelled"


class ApiError(Exception):
    """A request ends with this answer. `type`, `code` and `param` are OpenAI's fields of those names."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param or None
        self.code = code
        self.retry_after_s = retry_after_s
        self.more_headers: dict[str, str] = {}
        self.too_long: tuple[int, int] | None = None
        """Tokens of a prompt, and how many the model's context takes, where the first are more."""
        self.is_of_messages = False
        """It is told as Anthropic's API does."""

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if not self.is_of_messages:
            return msgspec.json.encode({"error": error})
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {**error, "type": kind}})

    def headers(self) -> dict[str, str]:
        headers = dict(self.more_headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 408 or self.code in (MODEL_FAILED, INSTANCES_CRASHED):
            # OpenAI's clients try these again by themselves: one that was late would run into its deadline once more.
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


_MEANINGS: dict[ErrorCode, tuple[int, str, str]] = {
    ErrorCode.BAD_REQUEST: (400, "invalid_request_error", "invalid_value"),
    ErrorCode.UNKNOWN_MODEL: (404, "invalid_request_error", "model_not_found"),
    ErrorCode.TOO_LONG: (400, "invalid_request_error", CONTEXT_LENGTH_EXCEEDED),
    ErrorCode.OVERLOADED: (429, "rate_limit_error", "overloaded"),
    ErrorCode.BUSY: (429, "rate_limit_error", "overloaded"),
    ErrorCode.DEADLINE: (408, "timeout_error", "deadline_exceeded"),
    ErrorCode.STORAGE_FULL: (507, "server_error", "storage_full"),
    ErrorCode.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    ErrorCode.CONFLICT: (409, "invalid_request_error", "conflict"),
    ErrorCode.NOT_PERMITTED: (500, "server_error", "internal_error"),
    ErrorCode.INTERNAL: (500, "server_error", "internal_error"),
    ErrorCode.NOT_FINITE: (500, "server_error", "logits_not_finite"),
    ErrorCode.CRASHED: (500, "server_error", INSTANCES_CRASHED),
    ErrorCode.GONE: (503, "service_unavailable", "unavailable"),
    ErrorCode.DRAINING: (503, "service_unavailable", "unavailable"),
    ErrorCode.NOT_LEADER: (503, "service_unavailable", "unavailable"),
    ErrorCode.MODEL_FAILED: (503, "service_unavailable", MODEL_FAILED),
    ErrorCode.LOADING: (503, "service_unavailable", "unavailable"),
    ErrorCode.UNAVAILABLE: (503, "service_unavailable", "unavailable"),
    ErrorCode.CANCELLED: (409, "invalid_request_error", CANCELLED),
    ErrorCode.HANDED_OVER: (503, "service_unavailable", HANDED_OVER),
}
"""A passed deadline is 408, not 504: the limit is the client's own (or the operator's), not a defect of a server."""

DEFAULT_RETRY_AFTER_S = 2.0


def of_info(info: ErrorInfo) -> ApiError:
    """The client's view of a typed refusal or failure from the bus."""
    status, kind, code = _MEANINGS[info.code]
    is_passing = status in (429, 503, 507) and code != MODEL_FAILED
    retry_after_s = (info.retry_after_s or DEFAULT_RETRY_AFTER_S) if is_passing else None
    return ApiError(status, info.message, type=kind, param=info.param, code=code, retry_after_s=retry_after_s)


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


T = TypeVar("T")

_MISSING = re.compile(r"missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
MAX_NAME_CHARACTERS = 100
"""Longest name of an unknown field in a message."""


def _choices(struct: type, path: str) -> str:
    """What a field of the struct, or of one within it (`messages[0].role`), that takes only certain values may be; empty for
    other fields."""
    parent, _, name = re.sub(r"\[[^]]*\]", "", path).rpartition(".")
    owners = _structs(struct, parent)
    forms = [form for owner in owners for form in forms_of(get_type_hints(owner).get(name))]
    tags = [owner.__struct_config__.tag for owner in owners if owner.__struct_config__.tag_field == name]
    values = [value for form in forms if get_origin(form) is Literal for value in get_args(form)]
    return ", ".join(map(repr, values + tags))


def _structs(struct: type, path: str) -> list[Any]:
    """The structs of which one is at that place of the struct (`messages[0]`); the struct itself where the path is empty."""
    forms: list[Any] = [struct]
    for name in filter(None, re.sub(r"\[[^]]*\]", "", path).split(".")):
        forms = [form for owner in forms for form in forms_of(get_type_hints(owner).get(name))]
        forms = [form for form in forms if isinstance(form, type) and issubclass(form, msgspec.Struct)]
    return forms


def forms_of(annotation: Any) -> list[Any]:
    """The types that a value, or an item of it, may have."""
    arguments = () if get_origin(annotation) is Literal else get_args(annotation)
    return [form for argument in arguments for form in forms_of(argument)] or [annotation]


_HALF = re.compile(
    rb"(?<!\\)(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?<!\\)(\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""Half of a character beyond 2^16, alone: what is left where a client cut a text between its halves."""
_STRICT_END = r"$(?!\\n)"
"""End of the patterns of names as msgspec quotes it; clients need not know that `$` alone lets a line feed follow."""
_RULES = {NAME_PATTERN: NAME_RULE, "high|normal": "'high', 'normal' or a whole number"}
"""Words for what a pattern asks, by a part of it."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Before the body in what some editors and shells write."""


def _with_integers(value: Any) -> Any:
    """JSON in which numbers such as 4096.0 are integers."""
    if isinstance(value, dict):
        return {key: _with_integers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _without_nulls(body: Any) -> Any:
    """A request without the fields that are null."""
    return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body


MAX_JSON_VALUES = 1_000_000
"""In one body: token ids of several prompts are its most. All of them are made on the event loop, which stands still."""
MAX_JSON_CONTAINERS = 65_536
"""Objects and lists of one body; each costs many times what a number does."""


def _check_size(body: bytes | bytearray) -> None:
    """Before anything is made of it. Raises `ApiError` 400."""
    for param, limit, marks in (("values", MAX_JSON_VALUES, b",[{"), ("objects and lists", MAX_JSON_CONTAINERS, b"[{")):
        if _num_marks(body, marks) <= limit:
            continue
        # What is between quotes are texts, whose commas and brackets cost nothing.
        outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
        if (count := _num_marks(outside, marks)) > limit:
            raise ApiError(400, f"The request body has {count} {param}; the limit is {limit}.", code="body_too_complex")


def _num_marks(body: bytes | bytearray, marks: bytes) -> int:
    return sum(body.count(mark) for mark in marks)


def decode(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """The typed request in `body`; what is wrong with it is a 400 that names the field."""
    body = body.removeprefix(BYTE_ORDER_MARK)
    _check_size(body)
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if ", got `" not in str(error):
                raise
            # Some clients have no integers, some write null for what is left out, and some numbers and flags as texts. They
            # are the exception, so only what failed is gone through.
            plain = _without_nulls(_with_integers(msgspec.json.decode(body)))
            return msgspec.convert(plain, decoder.type, strict=False)
    except msgspec.ValidationError as error:
        # "Expected `int` - at `$.field`" or "... - at `key` in `$.field`"; a struct's own check names its field first.
        sentence, *places = str(error).split(" - at ")
        param = "".join(place.rpartition("`$")[2].rstrip("`") for place in reversed(places)).removeprefix(".")
        if missing := _MISSING.search(sentence):
            param = f"{param}.{missing[1]}" if param else missing[1]
            raise invalid(param, f"Missing required parameter: '{param}'.") from None
        if unknown := _UNKNOWN.fullmatch(sentence):
            name, owners = unknown[1][:MAX_NAME_CHARACTERS], _structs(decoder.type, param)
            known = [field.encode_name for owner in owners for field in msgspec.structs.fields(owner)]
            param = f"{param}.{name}" if param else name
            raise invalid(param, f"Unknown parameter: '{param}'{nearest(name, known)}", "unknown_parameter") from None
        if sentence.startswith(("Invalid enum value", "Invalid value")) and (choices := _choices(decoder.type, param)):
            sentence = f"{sentence.rstrip('.')}; it is one of {choices}"
        for pattern, rule in _RULES.items():
            if pattern in sentence:
                sentence = f"expected {rule}"
        sentence = sentence.replace(_STRICT_END, "$")
        where = f"Invalid value for '{param}'" if param else "Invalid request body"
        raise invalid(param, f"{where}: {sentence}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        half = _HALF.search(body)
        reason = str(error) if half is None else f"{half[0].decode()} is half of a character"
        raise ApiError(400, f"Invalid JSON: {reason.rstrip('.')}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.", code="invalid_json") from None
