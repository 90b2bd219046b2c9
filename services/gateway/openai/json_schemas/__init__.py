"""Rewrites clients' JSON schemas into ones that llguidance enforces, in which nothing is valid that was not before. Pure.

Called by `openai.structured`, which makes grammars of the result (`preparing.prepared`), and by `tools`, which closes the
schemas of functions (`closing.closed`) and asks for types of arguments (`values.types_of`). Knows no request, no error of
HTTP and no grammar: whether llguidance follows a result is found out elsewhere.
"""
