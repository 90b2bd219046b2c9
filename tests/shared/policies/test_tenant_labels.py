"""Labels of tenants: bounded, and each tenant keeps its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.policies.tenant_labels import NOBODY, OTHER, TenantLabels


@given(tenants=st.lists(st.sampled_from([f"t{number}" for number in range(20)]), max_size=60))
def test_there_are_no_more_labels_than_were_allowed_and_the_named_have_theirs(tenants: list[str]) -> None:
    labels = TenantLabels(["named"], 5)
    given_to = [(tenant, labels.of(tenant)) for tenant in tenants]
    assert len({label for _, label in given_to} | {labels.of("named")} - {OTHER}) <= 6
    assert all(label in (tenant, OTHER) for tenant, label in given_to)
    assert [labels.of(tenant) for tenant, label in given_to if label != OTHER] == [
        label for _, label in given_to if label != OTHER
    ]
    assert labels.of("named") == "named" and labels.of("") == NOBODY
