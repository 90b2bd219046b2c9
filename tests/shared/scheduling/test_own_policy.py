"""The policy that docs/design/policies.md shows how to add, from its words."""

from __future__ import annotations

import copy

import pytest

from shared.policies import catalogue, dispatch
from tests.shared.scheduling.driver import Driver
from tests.shared.scheduling.samples import make_request
from tests.tideway.readme import REPOSITORY


def test_the_policy_of_the_recipe_takes_the_fullest_that_has_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPOSITORY / "docs" / "design" / "policies.md").read_text().split("**A dispatch policy of your own**")[1]
    recipe = text.split("```python")[1].split("```")[0]
    monkeypatch.setattr(catalogue, "DISPATCH_POLICIES", copy.copy(catalogue.DISPATCH_POLICIES))
    exec(recipe, {**vars(dispatch), "DISPATCH_POLICIES": catalogue.DISPATCH_POLICIES})
    driver = Driver(dispatch_policy="best_fit", max_waiting_per_model=100, lost_after_s=60.0)
    for name, freeness in (("a", 3.0), ("b", 1.5), ("c", 0.05)):
        driver.up(name)
        driver.report(name, freeness=freeness, num_running=4)
    driver.submit(make_request("small", num_prompt=16))
    driver.submit(make_request("large", num_prompt=64 * 5, max_tokens=1))
    assert driver.submit(make_request("huge", num_prompt=64 * 15, max_tokens=1)) is None
    assert driver.dispatches() == {"small": "b", "large": "a"}, "c has no memory for any, and nobody for the huge one"
    driver.pass_time(5.1)
    driver.report("a", freeness=3.0, num_running=4)
    assert driver.dispatches() == {"huge": "a"}, "waits no longer"
