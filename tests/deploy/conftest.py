"""Each cluster of the chart's examples in turn."""

from __future__ import annotations

import pytest

from tests.deploy.cluster import CLUSTERS, Cluster, cluster


@pytest.fixture(params=CLUSTERS)
def here(request: pytest.FixtureRequest) -> Cluster:
    return cluster(request.param)
