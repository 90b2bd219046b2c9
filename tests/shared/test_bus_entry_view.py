"""The view behind every watch, against a model: an entry is there exactly while its last word is younger than its time."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bus.entry_view import DEFAULT_GRACE_S, EntryView
from tests.virtual_time import run_virtual

TTL_S = 2.0

Step = tuple[str, str, float]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "remove", "pause", "resume"]), st.sampled_from("abc"), st.floats(0.0, 3.0, width=32)
        ),
        max_size=25,
    ),
    st.booleans(),
)
def test_view_equals_its_model(steps: list[Step], has_ttl: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        told: dict[str, int | None] = {}
        view: EntryView[int] = EntryView(TTL_S if has_ttl else None, loop.time, told.__setitem__)
        model: dict[str, tuple[int, float]] = {}
        is_paused = False
        for number, (step, key, wait_s) in enumerate(steps, 1):
            if step == "put" and not is_paused:
                view.put(key, number, number)
                model[key] = (number, loop.time() + TTL_S if has_ttl else float("inf"))
            elif step == "remove" and not is_paused:
                view.remove(key)
                model.pop(key, None)
            elif step == "pause":
                view.pause()
                is_paused = True
            elif step == "resume" and is_paused:
                view.resume()
                is_paused = False
                grace_s = TTL_S if has_ttl else DEFAULT_GRACE_S
                model = {known: (value, loop.time() + grace_s) for known, (value, _) in model.items()}
            await asyncio.sleep(wait_s + 1e-6)
            if not is_paused:
                model = {known: entry for known, entry in model.items() if entry[1] > loop.time()}
            assert view.entries == {known: value for known, (value, _) in model.items()}
            assert {known: value for known, value in told.items() if value is not None} == view.entries
            assert set(view.revisions) == set(view.entries)

    run_virtual(main())


def test_seeing_an_entry_again_is_no_change() -> None:
    async def main() -> None:
        changes: list[tuple[str, int | None]] = []
        view: EntryView[int] = EntryView(
            None, asyncio.get_running_loop().time, lambda key, value: changes.append((key, value))
        )
        view.put("a", 1, 7)
        view.pause()
        view.resume()
        view.put("a", 1, 7)
        await asyncio.sleep(2 * DEFAULT_GRACE_S)
        assert view.entries == {"a": 1}
        assert changes == [("a", 1)]
        # A server that lost its store counts from one again.
        view.put("a", 2, 7)
        assert changes == [("a", 1), ("a", 2)]

    run_virtual(main())
