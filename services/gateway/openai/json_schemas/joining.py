"""Schemas that join a reference with something else, where what that refers to holds itself: llguidance joins schemas where
it meets them, and would never end."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.openai.json_schemas.keywords import ASSERTIONS, OF_DOCUMENTS
from services.gateway.openai.json_schemas.references import MAX_REFERENCES, References
from services.gateway.openai.json_schemas.unions import Unions

MAX_JOINED = 2**18
"""Most characters of definitions that join what schemas refer to with what stands beside."""


class Joining:
    def __init__(self, references: References, unions: Unions) -> None:
        self._references = references
        self._unions = unions
        self._num_joined = 0

    def joined(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """The schema as a definition in which nothing that it joins is a reference; None: it may stay, or that would not
        end."""
        if not self._is_mixed(schema) or (whole := self._without_references(schema, ())) is None:
            return None
        text = json.dumps(whole, sort_keys=True)
        self._num_joined += len(text)
        kept = {name: schema[name] for name in OF_DOCUMENTS if name in schema}
        return {**kept, **self._references.definition("joined", text, lambda: whole)}

    def spread(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """The schema as an `anyOf` of its branches, each with what it says besides, where a branch refers to what holds
        itself; None: it is something else."""
        name = "anyOf" if "anyOf" in schema else "oneOf"
        if name not in schema:
            return None
        beside = {key: value for key, value in schema.items() if key in ASSERTIONS and key != name}
        branches = schema.get(name)
        if not beside or not isinstance(branches, list) or beside.keys() & {"oneOf", "nullable"}:
            return None
        inner = [one for one in branches if isinstance(one, dict) and isinstance(one.get("$ref"), str)]
        if not any(self._references.holds_itself(one) for one in inner):
            return None
        done = dict(schema)
        if name == "oneOf":
            self._unions.choose(done)
        kept = {key: schema[key] for key in OF_DOCUMENTS if key in schema}
        return {**kept, "anyOf": [{"allOf": [beside, branch]} for branch in done["anyOf"]]}

    def _is_mixed(self, schema: dict[str, Any]) -> bool:
        """Whether it joins a reference with something else, and what that refers to holds itself."""
        if self._num_joined > MAX_JOINED:
            return False
        parts = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        inner = [part for part in parts if isinstance(part, dict) and isinstance(part.get("$ref"), str)]
        if isinstance(schema.get("$ref"), str) and schema.keys() & ASSERTIONS - {"$ref"}:
            inner.append(schema)
        elif len(schema.keys() & ASSERTIONS) == 1 and len(parts) == 1:
            return False
        return any(self._references.holds_itself(part) for part in inner) or any(
            isinstance(part, dict) and self._is_mixed(part) for part in parts
        )

    def _without_references(self, schema: dict[str, Any], followed: tuple[str, ...]) -> dict[str, Any] | None:
        """The schema without references among what it joins: with what they refer to. None: that would not end."""
        parts: list[Any] = []
        rest = {name: value for name, value in schema.items() if name in ASSERTIONS}
        if isinstance(reference := rest.pop("$ref", None), str):
            if (
                reference in followed
                or len(followed) > MAX_REFERENCES
                or not (found := self._references.resolved(schema))
            ):
                return None
            parts.append(self._without_references(found, (*followed, reference)))
        if isinstance(rest.get("allOf"), list):
            parts += [
                self._without_references(part, followed) if isinstance(part, dict) else part
                for part in rest.pop("allOf")
            ]
        if any(part is None for part in parts):
            return None
        return rest if not parts else {"allOf": [*parts, rest] if rest else parts}
