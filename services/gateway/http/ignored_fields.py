"""Request fields that nobody knows, keywords of schemas that no grammar enforces, and tools that are left out: they change
nothing; the client learns of them from a header of the answer, the operator from one line in the log."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from typing import get_type_hints

import msgspec
from starlette.requests import Request

from services.gateway.http.errors import BYTE_ORDER_MARK, forms_of
from services.gateway.metrics import GatewayMetrics
from shared.runtime.nearest import near

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-tideway-ignored-fields"
MAX_NAMED = 20
"""In one header."""
MAX_NAME_CHARACTERS = 200
MAX_LOGGED = 1000
"""Pairs of a field and a key; after so many nothing more is logged."""

UNENFORCED = "the keyword '%s' cannot be enforced and has no effect"
WITHOUT_EFFECT = "the field '%s' has no effect with this model"
LEFT_OUT = "'%s' is left out: the model is not told of it"

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNSAFE = re.compile(r"[^A-Za-z0-9_.$-]")


class IgnoredFields:
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[bytes, str]] = set()

    def note_unknown(self, request: Request, kind: type[msgspec.Struct], body: bytes | bytearray) -> None:
        """`kind`: what `body` was decoded to."""
        names = list(_unknown(kind, body.removeprefix(BYTE_ORDER_MARK), ""))
        self.note(request, names, "the field '%s' is not known and has no effect", _known(kind))

    def note(self, request: Request, names: Sequence[str], words: str, known: Collection[str] = ()) -> None:
        """The header is set where the answer begins. `words`: for the log; `%s` is a name. `known`: names that may be
        meant."""
        if not names:
            return
        self._metrics.ignored_fields.inc(len(names))
        before: list[str] = getattr(request.state, "ignored_fields", [])
        shown = [_UNSAFE.sub("?", name[:MAX_NAME_CHARACTERS]) for name in names[: MAX_NAMED - len(before)]]
        request.state.ignored_fields = before + shown
        # Whose key it is is not logged, and not kept in words.
        key = hashlib.sha256(repr((request.headers.get("authorization"), request.headers.get("x-api-key"))).encode())
        for name in shown:
            pair = (key.digest()[:8], name)
            if pair not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(pair)
                meant = near(name, known)
                logger.info(f"%s: {words}%s", request.url.path, name, f"; is '{meant}' meant?" if meant else "")


def _unknown(kind: type[msgspec.Struct], body: bytes | bytearray | msgspec.Raw, path: str) -> Iterator[str]:
    """Unknown fields of an object, and of the objects that are its fields."""
    known = _known(kind)
    for name, raw in _OBJECT.decode(body).items():
        if name not in known and bytes(raw) != b"null":  # which asks for nothing
            yield path + name
        elif name not in known:
            continue
        elif (inner := known[name]) is not None and bytes(raw).lstrip().startswith(b"{"):
            yield from _unknown(inner, raw, f"{path}{name}.")


@functools.cache
def _known(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Its fields by name, with the struct that a field is, where it can be one only."""
    hints = get_type_hints(kind)
    known: dict[str, type[msgspec.Struct] | None] = {}
    for field in msgspec.structs.fields(kind):
        forms = forms_of(hints[field.name])
        structs = [form for form in forms if isinstance(form, type) and issubclass(form, msgspec.Struct)]
        known[field.encode_name] = structs[0] if len(structs) == 1 else None
    if kind.__struct_config__.tag_field is not None:
        known[kind.__struct_config__.tag_field] = None
    return known
