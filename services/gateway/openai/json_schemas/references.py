"""References within a schema, and the definitions that its result has besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from services.gateway.openai.json_schemas.keywords import ASSERTIONS

MAX_REFERENCES = 32
"""Most references of a schema that are followed for one question."""
MAX_WALKED = 50_000
"""Most objects and lists of a schema that are walked for references."""
_VALUES = ("const", "enum", "default", "examples")


class References:
    """What the references of one schema stand for: parts of the schema as it came, and definitions of our own."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._made: dict[tuple[str, str], str] = {}
        """Names of our own definitions, by kind and what they are of."""
        self._sources: dict[str, Callable[[], Any]] = {}
        """Makes of each of them what is put for llguidance."""
        self._origins: dict[str, str] = {}
        """By references to our own definitions: the ones that they are made of."""
        self._reached: dict[str, set[str]] = {}
        """By reference: the references within what it refers to."""
        self._holding: dict[str, bool] = {}
        """By reference: whether what it refers to holds itself."""
        self._num_walked = 0

    def definition(self, kind: str, of: str, source: Callable[[], Any], origin: str | None = None) -> dict[str, Any]:
        """A reference to a definition of our own. `source` gives it as a schema that is still to be put for llguidance,
        once all else is looked at: schemas may hold themselves. `origin`: the reference that it is made of."""
        key = (kind, of)
        if key not in self._made:
            self._made[key] = f"{kind}-{len(self._made)}"
            self._sources[self._made[key]] = source
        reference = f"#/$defs/{self._made[key]}"
        if origin is not None:
            self._origins[reference] = origin
        return {"$ref": reference}

    def definitions(self, put: Callable[[Any], Any]) -> dict[str, Any]:
        """Our own definitions, put for llguidance by `put`, which may ask for more of them."""
        done: dict[str, Any] = {}
        while len(done) < len(self._sources):
            for name, source in [*self._sources.items()][len(done) :]:
                done[name] = put(source())
        return done

    def referred(self, schema: Mapping[str, Any]) -> Any:
        """What a reference names: in the schema as it came, or one of our own definitions."""
        name = schema["$ref"].removeprefix("#/$defs/") if isinstance(schema["$ref"], str) else ""
        return self._sources[name]() if name in self._sources else referred(schema, self.root)

    def resolved(self, schema: Any) -> dict[str, Any]:
        """The schema, or what its references lead to; empty: that is not known."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self.referred(schema)
        return schema if isinstance(schema, dict) and "$ref" not in schema else {}

    def holds_itself(self, schema: Mapping[str, Any]) -> bool:
        """Whether what a reference names holds itself."""
        reference = self._origins.get(schema["$ref"], schema["$ref"])
        if reference not in self._holding:
            seen, left = set[str](), {reference}
            while left and reference not in seen:
                one = left.pop()
                if one not in self._reached:
                    self._reached[one] = self._references_in(self.referred({"$ref": one}))
                left |= self._reached[one] - seen
                seen |= self._reached[one]
            self._holding[reference] = reference in seen
        return self._holding[reference]

    def _references_in(self, schema: Any) -> set[str]:
        found: set[str] = set()
        left = [schema]
        while left and self._num_walked < MAX_WALKED:
            self._num_walked += 1
            one = left.pop()
            if isinstance(one, dict):
                if isinstance(reference := one.get("$ref"), str):
                    found.add(reference)
                left += [value for name, value in one.items() if name not in ("$defs", "definitions")]
            elif isinstance(one, list):
                left += one
        return found


def referred(schema: Mapping[str, Any], root: Any) -> Any:
    """What `$ref` names within the schema `root`; None: nothing there."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for name in _path(reference)[1:]:
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def stays(reference: str) -> bool:
    """Whether the result has in the same place what a reference within a schema names, put for llguidance."""
    parts = iter(reference.split("/")[1:])
    for part in parts:
        if part in ("$defs", "definitions", "properties"):
            next(parts, None)
        elif part not in ("items", "additionalProperties"):
            return False
    return True


def without_unused(root: dict[str, Any]) -> dict[str, Any]:
    """The schema without definitions that nothing refers to, where all references are paths."""
    used: dict[str, set[str]] = {name: set() for name in ("$defs", "definitions") if isinstance(root.get(name), dict)}
    left: list[Any] = [{name: value for name, value in root.items() if name not in used}]
    while left and used:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if not isinstance(one, dict):
            continue
        left += one.values()
        for reference in (one.get(keyword) for keyword in ("$ref", "$dynamicRef", "$recursiveRef")):
            match _path(reference) if isinstance(reference, str) else ["#"]:
                case ["#"]:
                    pass
                case ["#", name, key, *_] if name in used:
                    if key not in used[name]:
                        used[name].add(key)
                        left.append(root[name].get(key))
                case ["#", name, *_] if name not in used:
                    pass
                case _:
                    return root
    return {**root, **{name: {key: value for key, value in root[name].items() if key in used[name]} for name in used}}


def _path(reference: str) -> list[str]:
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference.split("/")]


def without_neighbours(schema: Any) -> Any:
    """The schema without keywords beside references, which drafts until 7 ignore."""
    if isinstance(schema, list):
        return [without_neighbours(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = schema
    if isinstance(schema.get("$ref"), str):
        kept = {name: value for name, value in schema.items() if name == "$ref" or name not in ASSERTIONS}
    return {name: value if name in _VALUES else without_neighbours(value) for name, value in kept.items()}
