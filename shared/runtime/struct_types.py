"""Struct types made ready for decoding in threads.

msgspec works out what a struct type consists of when the type is decoded first. A second thread that decodes it before that
is done ends the process (signal 11): it finds the type with fields of which nothing is known yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import msgspec


def prepare_struct_types() -> None:
    """Has msgspec work out all struct types that are imported by now (0.1 ms each). Called before threads decode any."""
    for kind in set(_below(msgspec.Struct)):
        # It has a field that cannot be decoded, or one of a type that is known to type checkers alone: it never is decoded.
        with suppress(TypeError, NameError):
            msgspec.msgpack.Decoder(kind)


def _below(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)
