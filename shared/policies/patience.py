"""How long offline work of models without online requests waits for a moment at which nothing online is there.

A step of its own beside online work makes users slower by its whole length, where one that joins an online step of its model
costs little. While such moments come, offline work gets as much done in them, so it leaves users alone; where they do
not come, it would get nothing. What decides is a leaky sum of the time with online work,

    pressed = min(PATIENCE_S, pressed + seconds with online work - LEAK * seconds without), at least 0

which is full where online work has been there for PATIENCE_S, or for more than LEAK / (1 + LEAK) of the time for long.
"""

from __future__ import annotations

PATIENCE_S = 2.0
LEAK = 4.0


class Patience:
    """The sum for one instance. `observe` is called whenever a step is planned."""

    def __init__(self) -> None:
        self._pressed_s = 0.0
        self._last_s: float | None = None
        self._had_online = False

    def observe(self, now: float, has_online: bool) -> None:
        """`now`: seconds; earlier than the last is as the last. `has_online`: from now on, until the next call."""
        passed_s = 0.0 if self._last_s is None else max(0.0, now - self._last_s)
        pressed_s = self._pressed_s + (passed_s if self._had_online else -LEAK * passed_s)
        self._pressed_s = min(PATIENCE_S, max(0.0, pressed_s))
        self._last_s = now if self._last_s is None else max(now, self._last_s)
        self._had_online = has_online

    @property
    def is_spent(self) -> bool:
        return self._pressed_s >= PATIENCE_S
