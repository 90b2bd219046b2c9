"""One running system for all tests that leave it as they found it; chaos tests start their own, and run first: the one of
all others would idle beside theirs, which takes a tenth of a core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checkpoints import make_llama, make_opt
from tests.e2e.otlp_collector import OtlpCollector
from tests.e2e.stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [i for i, item in enumerate(items) if item.path.is_relative_to(Path(__file__).parent)]
    for i, item in zip(places, sorted((items[i] for i in places), key=_needs_stack), strict=True):
        items[i] = item


def _needs_stack(item: pytest.Item) -> bool:
    """Whether it uses this folder's `stack`, and not one of its module's own."""
    assert isinstance(item, pytest.Function)
    definitions = item._fixtureinfo.name2fixturedefs.get("stack", ())
    return bool(definitions) and definitions[-1].func.__module__ == __name__


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return {"llama": str(make_llama(folder / "llama")), "opt": str(make_opt(folder / "opt"))}


@pytest.fixture(scope="session")
def collector() -> Iterator[OtlpCollector]:
    collector = OtlpCollector()
    yield collector
    collector.close()


@pytest.fixture(scope="package")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the stack's scheduler and instances write their recordings."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="package")
def stack(checkpoints: dict[str, str], collector: OtlpCollector, recordings: Path) -> Iterator[Stack]:
    environment = {
        "TIDEWAY_OTLP_ENDPOINT": collector.endpoint,
        "TIDEWAY_RECORD_FILE": str(recordings / "of"),
        # A search, which only its test asks for, looks at the last minutes, and wants each model on an instance of its own.
        "TIDEWAY_MAX_MODELS_PER_GROUP": "1",
        "TIDEWAY_REPLACEMENT_INTERVAL_S": "120",
        "TIDEWAY_REPLACEMENT_LEAST_S": "120",
    }
    with Stack(checkpoints, environment=environment) as stack:
        stack.wait_ready()
        yield stack
