"""Steps of vLLM's worker that end for an online request, and what its scheduler then takes back, on what is used of both."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.engines.vllm.interrupting import (
    INTERRUPTED,
    WATCH,
    ArrivalNumber,
    InterruptibleWorker,
    Rewinding,
    Watch,
    layers_of,
)

SIZE = 32


class Model(torch.nn.Module):
    """Four layers; `after`: called behind the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.others = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Linear(1, 1)])
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(4)])
        self.after: Any = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                self.after()
        return x


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> InterruptibleWorker:
    outputs = SimpleNamespace(ModelRunnerOutput=lambda **fields: SimpleNamespace(**fields))
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", outputs)
    made = InterruptibleWorker()
    model = Model()
    made.model_runner = SimpleNamespace(model=model, execute_model=lambda _step: model(torch.zeros(1)))
    return made


def test_a_step_ends_at_a_layers_start_when_a_later_request_has_arrived(worker: InterruptibleWorker) -> None:
    arrivals = ArrivalNumber.at(worker.tideway_watch())
    runner = worker.model_runner
    runner.model.after = lambda: arrivals.set(7)
    output = runner.execute_model(SimpleNamespace(**{WATCH: Watch(6, 0.0)}))
    assert getattr(output, INTERRUPTED) == 7 and output.req_ids == []
    # Neither one that was known before the step, nor one that may wait, nor any in a step that is not interruptible.
    for step in ({WATCH: Watch(7, 0.0)}, {WATCH: Watch(6, 60.0)}, {}):
        arrivals.set(0)
        runner.model.after = lambda: arrivals.set(7)
        assert isinstance(runner.execute_model(SimpleNamespace(**step)), torch.Tensor)
    assert getattr(runner.execute_model(SimpleNamespace(**{WATCH: Watch(6, 60.0)})), INTERRUPTED) == 7, (
        "before the first"
    )


def test_layers_are_the_longest_list_of_equal_modules() -> None:
    model = Model()
    assert layers_of(model) == list(model.layers)
    with pytest.raises(ValueError, match="no list of equal layers"):
        layers_of(torch.nn.Linear(1, 1))


class Manager:
    """vLLM's KV cache manager, as far as it is used."""

    def __init__(self, blocks: dict[str, list[int]], cached: dict[str, int]) -> None:
        self.blocks = blocks
        self.evicted: set[int] = set()
        self.coordinator = SimpleNamespace(single_type_managers=(SimpleNamespace(num_cached_block=cached),))

    def get_block_ids(self, key: str) -> tuple[list[int]]:
        return (self.blocks[key],)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


def sequence(num_tokens: int, num_computed: int, num_in_flight: int) -> SimpleNamespace:
    """A request of vLLM's as its `schedule` leaves it."""
    return SimpleNamespace(
        num_tokens=num_tokens,
        num_computed_tokens=num_computed,
        num_in_flight_tokens=num_in_flight,
        is_prefill_chunk=False,
    )


def test_what_a_lost_step_was_to_compute_is_not_there_for_anyone() -> None:
    requests = {
        "prompt": sequence(200, 140, 100),  # 40 tokens before: blocks 10 is whole, 11 is begun
        "sharing": sequence(150, 130, 34),  # was given 10, 11 and 12, which the step before it in the list was to fill
        "decode": sequence(65, 65, 1),  # the step would have begun its third block
    }
    manager = Manager(
        {"prompt": [10, 11, 12, 13, 14], "sharing": [10, 11, 12, 15, 16], "decode": [20, 21, 22], "gone": [30]},
        {"prompt": 4, "sharing": 4, "decode": 2},
    )
    requests["gone"] = sequence(10, 5, 5)
    scheduler = SimpleNamespace(requests=requests, block_size=SIZE, kv_cache_manager=manager)
    counts = {"prompt": 100, "sharing": 34, "decode": 1, "gone": 5}
    rewinding = Rewinding(scheduler)
    rewinding.note(counts)
    del requests["gone"], manager.blocks["gone"]  # cancelled while the step ran
    rewinding.rewind(counts)
    assert {key: one.num_computed_tokens for key, one in requests.items()} == {
        "prompt": 40,
        "sharing": 32,
        "decode": 64,
    }
    assert all(one.num_in_flight_tokens == 0 for one in requests.values())
    assert manager.evicted == {11, 12, 13, 14, 15, 16, 22, 30}
    assert manager.coordinator.single_type_managers[0].num_cached_block == {"prompt": 1, "sharing": 1, "decode": 2}
    assert {key: one.is_prefill_chunk for key, one in requests.items()} == {
        "prompt": True, "sharing": True, "decode": False,
    }  # fmt: skip
