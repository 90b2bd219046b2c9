"""Parts of other packages: found by entry point and by import path, refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shared.models.families import FAMILIES, family_of
from shared.plugins import PluginError, Registry
from shared.policies.autoscaling import ScalingBounds
from shared.policies.catalogue import (
    DISPATCH_POLICIES,
    REBALANCE_POLICIES,
    SCALING_POLICIES,
    ordering_policy,
    token_budget_policy,
)
from shared.policies.token_budget import Limits
from shared.runtime.settings import SettingsError, check_part
from tests import outside


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is installed."""
    monkeypatch.syspath_prepend(str(outside.install(tmp_path)))
    for module in [name for name in sys.modules if name.startswith("tideway_example")]:
        monkeypatch.delitem(sys.modules, module)


def test_a_policy_is_found_by_the_name_of_its_entry_point() -> None:
    assert type(ordering_policy("shortest_prompt")).__module__ == "tideway_example.policies"
    assert token_budget_policy("half_step", 512).limits(None) == Limits(256)  # type: ignore[arg-type]
    assert "drain_only" in REBALANCE_POLICIES.names() and "one_by_one" in SCALING_POLICIES.names()
    assert REBALANCE_POLICIES.find("drain_only")(10.0, 60.0, 5.0) is not None
    assert SCALING_POLICIES.find("one_by_one")(ScalingBounds(10.0, 60.0, 10.0)) is not None


def test_a_policy_is_found_by_its_import_path() -> None:
    part = DISPATCH_POLICIES.find("tideway_example.policies:FullestThatFits")
    assert part is DISPATCH_POLICIES.find("fullest")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "fulest",
            "unknown dispatch policy 'fulest'; known: first_token, freeness, round_robin, fewest_requests, fullest",
        ),
        ("tideway_example.policies:Nothing", "dispatch policy 'tideway_example.policies:Nothing' cannot be imported: "),
        ("no_such_package:Policy", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("tideway_example.family:FAMILY", "which is no dispatch policy"),
        (":", "cannot be imported"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_part("TIDEWAY_DISPATCH_POLICY", name, DISPATCH_POLICIES)
    assert why in str(refused.value) and str(refused.value).startswith(f"TIDEWAY_DISPATCH_POLICY={name!r}: ")


def test_a_built_in_part_cannot_be_replaced_by_an_installed_one() -> None:
    registry = Registry("order policy", "tideway.order_policies", {"shortest_prompt": dict})
    assert registry.find("shortest_prompt") is dict


def test_a_family_of_another_package_is_known_and_those_built_in_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of("ExampleForCausalLM")
    assert family is not None and family.name == "example" and family.loader
    assert family_of("LlamaForCausalLM") is FAMILIES[0]
    (tmp_path / "tideway_example/family.py").write_text("raise OSError('broken')")
    monkeypatch.delitem(sys.modules, "tideway_example.family")
    assert family_of("LlamaForCausalLM") is FAMILIES[0], "what is built in needs no plug-in"
    with pytest.raises(PluginError, match="broken"):
        family_of("ExampleForCausalLM")
