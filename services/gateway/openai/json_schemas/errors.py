"""What is said of schemas that cannot be followed."""

from __future__ import annotations


class SchemaError(ValueError):
    """What a schema asks for cannot be had; the message names the keyword."""
