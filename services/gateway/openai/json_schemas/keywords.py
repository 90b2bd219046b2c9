"""Keywords of JSON Schema, by what they hold and what they say."""

from __future__ import annotations

ASSERTIONS = frozenset(
    (
        *("$ref", "$dynamicRef", "$recursiveRef", "type", "enum", "const", "nullable"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("properties", "patternProperties", "additionalProperties", "required", "propertyNames"),
        *("minProperties", "maxProperties", "dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedProperties", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("minContains", "maxContains", "minItems", "maxItems", "uniqueItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
"""Keywords that say which values are valid. All others are remarks."""
SCHEMAS = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
)
"""Keywords that may hold a schema."""
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
"""Keywords that may hold a list of schemas."""
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold schemas by name."""
OF_DOCUMENTS = ("$schema", "$id", "id", "$defs", "definitions")
"""Keywords that stay where a schema is put in other words, since others refer to them or they say how it is read."""
TYPES = ("null", "boolean", "object", "array", "number", "string")
KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that llguidance enforces; others are remarks."""
