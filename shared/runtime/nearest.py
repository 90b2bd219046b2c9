"""What a message says of a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(name: str, known: Iterable[str]) -> str | None:
    """The known name that it is likely to mean; None: there is none."""
    known = list(known)
    begin_so = [one for one in known if name and one.lower().startswith(name.lower())]
    found = begin_so or difflib.get_close_matches(name, known, 1, 0.5)
    return found[0] if found else None


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: the known name that it is likely to mean, else all of them."""
    known = list(known)
    meant = near(name, known)
    return f"; did you mean {meant!r}?" if meant is not None else f"; known: {', '.join(known)}"
