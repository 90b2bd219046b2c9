"""What a schema asks for and no grammar can enforce: refused, or left out and named."""

from __future__ import annotations

from typing import Any

MAX_NAMED = 20
"""Most keywords that are named."""


class SchemaError(ValueError):
    """What a schema asks for cannot be had; the message names the keyword and where it is."""


class Shortfalls:
    """Those of one schema."""

    def __init__(self, root: dict[str, Any], left_out: list[str] | None) -> None:
        """`left_out`: takes the names of what is left out; None: nothing may be."""
        self._root = root
        self._left_out = left_out
        self._places: dict[int, tuple[int, str]] = {}
        self.within: list[dict[str, Any]] = []
        """The schema that is looked at, and before it those that it is in."""

    @property
    def may_be_left_out(self) -> bool:
        return self._left_out is not None

    def add(self, keyword: str, why: str = "it cannot be enforced") -> None:
        """The keyword of the schema that is looked at is to be left out. Raises `SchemaError` where nothing may be."""
        if self._left_out is None:
            raise SchemaError(f"'{self._path(keyword)}': {why}")
        if len(self._left_out) < MAX_NAMED and (path := self._path(keyword)) not in self._left_out:
            self._left_out.append(path)

    def _path(self, keyword: str) -> str:
        """The keyword's place in what the client wrote: what we put in other words is within something that has one."""
        if not self._places:
            self._places = _places_in(self._root)
        written = next((id(schema) for schema in reversed(self.within) if id(schema) in self._places), id(self._root))
        path = [keyword]
        while written != id(self._root):
            written, name = self._places[written]
            path.append(name)
        return ".".join(reversed(path))


def _places_in(root: dict[str, Any]) -> dict[int, tuple[int, str]]:
    """By the identities of objects and lists: that of what each is in, and its name there."""
    found = {id(root): (0, "")}
    left: list[Any] = [root]
    while left:
        one = left.pop()
        for name, value in one.items() if isinstance(one, dict) else enumerate(one):
            if isinstance(value, dict | list) and id(value) not in found:
                found[id(value)] = (id(one), str(name))
                left.append(value)
    return found
