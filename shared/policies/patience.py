"""How long offline work of models without online requests waits for a time without online work.

A step of its own beside online work makes users slower by its whole length; a step that joins an online step of its model
costs little. While times without online work come, offline work finishes as much in them, so it leaves users alone.
Without such times it would get nothing. A leaky sum of the time with online work decides:

    pressed = min(PATIENCE_S, pressed + seconds with online work - LEAK * seconds without), at least 0

It is full after PATIENCE_S of online work, or if online work takes more than LEAK / (1 + LEAK) of the time for long.
"""

from __future__ import annotations

PATIENCE_S = 2.0
LEAK = 4.0


class Patience:
    """The sum for one instance. Call `observe` whenever a step is planned."""

    def __init__(self) -> None:
        self._pressed_s = 0.0
        self._last_s: float | None = None
        self._had_online = False

    def observe(self, now: float, has_online: bool) -> None:
        """`now`: seconds; an earlier time than the last counts as the last. `has_online` holds until the next call."""
        passed_s = 0.0 if self._last_s is None else max(0.0, now - self._last_s)
        pressed_s = self._pressed_s + (passed_s if self._had_online else -LEAK * passed_s)
        self._pressed_s = min(PATIENCE_S, max(0.0, pressed_s))
        self._last_s = now if self._last_s is None else max(now, self._last_s)
        self._had_online = has_online

    @property
    def is_spent(self) -> bool:
        return self._pressed_s >= PATIENCE_S
