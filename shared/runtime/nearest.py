"""What a message says of a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: the known name that it is likely to mean, else all of them."""
    known = list(known)
    begin_so = [one for one in known if name and one.lower().startswith(name.lower())]
    near = begin_so or difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
