"""`oneOf` as `anyOf`: where at most one branch can hold, or where each is told to exclude the others."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from services.gateway.openai.json_schemas.exclusion import Exclusion, Schemas, key_of
from services.gateway.openai.json_schemas.keywords import ASSERTIONS
from services.gateway.openai.json_schemas.negation import Negation
from services.gateway.openai.json_schemas.references import MAX_REFERENCES, References
from services.gateway.openai.json_schemas.shortfalls import Shortfalls
from services.gateway.openai.json_schemas.values import are_disjoint, are_objects_apart, known_types_of, values_of

MAX_TAG_STEPS = 100_000
"""Most schemas that are looked at for values of tags."""
MAX_COMPARED = 100
"""Most branches of `oneOf` that are compared with each other, but for those that name their values."""
MAX_EXCLUDING = 24
"""Most branches of `oneOf` that are told to exclude each other."""


class Unions:
    def __init__(self, references: References, negation: Negation, shortfalls: Shortfalls) -> None:
        self._references = references
        self._negation = negation
        self._exclusion = Exclusion(references.resolved)
        self._shortfalls = shortfalls
        self._num_tag_steps = 0
        self._types: dict[str, set[str]] = {}
        """Types by reference."""

    def choose(self, schema: dict[str, Any]) -> None:
        """Makes `oneOf` an `anyOf`, each branch of which excludes the others as far as that can be told."""
        branches = schema["oneOf"]
        discriminator = schema.get("discriminator")
        named = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        types = [self._types_of(branch) for branch in branches]
        if are_objects_apart(types) and (tag := self._tag(branches, named)) is not None:
            branches = [self._with_tag(branch, tag) for branch in branches]
        else:
            beside = {name: value for name, value in schema.items() if name in ASSERTIONS and name != "oneOf"}
            excluding = self._excluding(branches, (beside,) if beside else ())
            if excluding is None:
                self._shortfalls.add(
                    "oneOf", "it cannot be shown that its schemas exclude each other; anyOf can be had"
                )
            branches = branches if excluding is None else excluding
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": branches}]
        else:
            schema["anyOf"] = branches
        del schema["oneOf"]

    def _types_of(self, schema: Any) -> set[str]:
        return known_types_of(schema, self._references.root, self._types)

    def _tag(self, branches: Sequence[Any], named: Any) -> str | None:
        """A property that has another value in each branch."""
        names = [named] if isinstance(named, str) else self._properties(branches[0]) if branches else []
        return next((name for name in names if self._is_tag(branches, name)), None)

    def _properties(self, branch: Any) -> list[str]:
        found = self._references.resolved(branch)
        for _ in range(MAX_REFERENCES):
            if not isinstance(inner := found.get("oneOf") or found.get("anyOf"), list) or not inner:
                break
            found = self._references.resolved(inner[0])
        return [one for one in found.get("properties", {}) if isinstance(one, str)]

    def _is_tag(self, branches: Sequence[Any], name: str) -> bool:
        values = []
        for branch in branches:
            values.append(self._tag_values(branch, name))
            if not values[-1]:
                return False
        return are_disjoint(values)

    def _tag_values(self, branch: Any, name: str, num_followed: int = 0) -> list[Any]:
        """Those that the property may have; empty: any, or it is not known."""
        self._num_tag_steps += 1
        if num_followed > MAX_REFERENCES or self._num_tag_steps > MAX_TAG_STEPS:
            return []
        found = self._references.resolved(branch)
        inner = found.get("oneOf") or found.get("anyOf")
        if isinstance(inner, list):
            of_each = [self._tag_values(one, name, num_followed + 1) for one in inner]
            return [value for values in of_each for value in values] if all(of_each) else []
        properties = found.get("properties")
        own = self._references.resolved(properties.get(name)) if isinstance(properties, dict) else {}
        return values_of(own) or []

    def _with_tag(self, branch: dict[str, Any], tag: str) -> dict[str, Any]:
        """The branch, which has to have the property."""
        reference = branch.get("$ref")
        if isinstance(reference, str):
            source = functools.partial(self._with_tag, self._references.resolved(branch), tag)
            made = self._references.definition("tagged", f"{reference} {tag}", source, origin=reference)
            return {**branch, **made}
        for name in ("oneOf", "anyOf"):
            if isinstance(branch.get(name), list):
                others = {key: value for key, value in branch.items() if key != name}
                return {**others, "anyOf": [self._with_tag(one, tag) for one in branch[name]]}
        kind = {} if self._types_of(branch) else {"type": "object"}
        return {**branch, **kind, "required": list(dict.fromkeys([*branch.get("required", []), tag]))}

    def _excluding(self, branches: Sequence[Any], beside: Schemas) -> list[Any] | None:
        """The branches, each of which is told not to hold where another may; None: that cannot be told. What keeps two
        apart is the opposite of the other one, or if that cannot be told, what the one alone may have: values are left
        out then, and none is added. `beside`: what holds of each value besides."""
        values = [values_of(self._references.resolved(branch)) for branch in branches]
        keys = [key_of(value) for each in values for value in each or ()]
        if None not in values and len(keys) == len(set(keys)):
            return [*branches]
        if len(branches) > MAX_COMPARED:
            return None
        whole = [(*beside, branch) for branch in branches]
        overlaps: list[list[int]] = [[] for _ in branches]
        for one, other in itertools.combinations(range(len(branches)), 2):
            if not self._exclusion.is_empty_between(whole[one], whole[other]):
                overlaps[one].append(other)
                overlaps[other].append(one)
        if len(branches) > MAX_EXCLUDING and any(overlaps):
            return None
        opposites = {place: self._negation.of(branches[place]) for place in sorted(set().union(*overlaps))}
        found = []
        for place, branch in enumerate(branches):
            conditions = []
            for other in overlaps[place]:
                if (condition := opposites[other]) is None:
                    between = self._exclusion.between(whole[place], whole[other])
                    if not between:
                        return None
                    condition = between[0] if len(between) == 1 else {"anyOf": between}
                if condition not in conditions:
                    conditions.append(condition)
            found.append({"allOf": [branch, *conditions]} if conditions else branch)
        return found
