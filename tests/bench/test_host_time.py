"""bench.gpu.host_time launches real decodes, of which the graphs alone do nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.gpu.host_time import HEAD_DIM, PARTS, Decodes, Recorded, main, measure, page


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_checkpoint(tmp_path_factory.mktemp("model"), SHAPES["tiny"] | {"head_dim": HEAD_DIM})
    torch.set_num_threads(num_threads)


def test_graphs_are_told_of_each_step_and_replayed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[Recorded] = []
    monkeypatch.setattr(Recorded, "replay", lambda self: replays.append(self))
    decodes = Decodes(checkpoint, 3, 256, 140)
    try:
        graph = decodes.graphs._graphs[8]
        starts = [255, 213, 170]
        for step in range(1, 131):
            decodes.step()
            if step % 10 == 0:
                positions = graph.inputs.tensors["positions"].tolist()
                assert positions == [*(start + step - 1 for start in starts), *[0] * 5]
                assert replays[-2:] == [graph.layers, graph.head] and len(replays) == 2 * step
                pages = graph.inputs.tensors["page_starts"].diff().tolist()
                assert pages == [*(-(-(position + 1) // 128) for position in positions[:3]), *[1] * 5]
        tables = decodes.executor._rows._tables
        blocks = [block for row, num_pages in enumerate((4, 3, 3)) for block in tables[row, :num_pages].tolist()]
        assert len(set(blocks)) == 10, "each block is of one row"
    finally:
        decodes.executor.close()


@pytest.mark.parametrize("option", ["--rows", "--context", "--steps"])
def test_counts_are_positive(option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["host_time", option, "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"argument {option}: 0 is less than 1" in capsys.readouterr().err


def test_the_parts_are_all_of_a_launch(checkpoint: Path) -> None:
    row = measure(checkpoint, 2, 128, 30)
    parts = row["parts_us"]
    assert set(parts) == set(PARTS) and all(parts.values())
    # each part is watched, which takes time too
    assert 0.5e3 * row["launch_ms"] < sum(parts.values()) < 10e3 * row["launch_ms"]
    lines = page([row])
    assert len(lines) == 3 and lines[2].split("|")[1].strip() == "2"
