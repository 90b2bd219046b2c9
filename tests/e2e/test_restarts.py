"""Each service dies, or is told to stop, and comes back in the middle of every kind of work at once: streams, a batch, an
upload, a model that is added, and a drain with its moves. Nothing is lost, and no answer is wrong."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from bench.cluster_faults.load import Batch, Resuming, expected_texts
from bench.mishaps import Load
from tests.e2e.stack import Stack
from tests.stalls import whatever_the_machine_does

NUM_STREAMS, NUM_TOKENS, NUM_LINES = 8, 150, 40
STEP_S = 0.012
FILE_BYTES = 4 << 20
FORM = {"content-type": "multipart/form-data; boundary=x"}
DRAINED = "worker-1-0"
RETRIED = (408, 502, 503, 504)
"""Statuses after which clients come again."""
INSIST_S = 60.0
GRACE = {"TIDEWAY_DRAIN_GRACE_S": "3", "TIDEWAY_STOP_GRACE_S": "1"}


@pytest.fixture(scope="module")
def system(checkpoints: dict[str, str]) -> Iterator[Stack]:
    with Stack(checkpoints, num_workers=2, num_instances=1, environment=GRACE, step_s=STEP_S) as system:
        system.wait_ready()
        yield system


@pytest.fixture(scope="module")
def texts(system: Stack) -> set[str]:
    """Texts of the streams when nothing happens."""
    return asyncio.run(expected_texts(system.url, list(system.models), NUM_STREAMS, NUM_TOKENS))


def insist(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The answer of who asks again after a lost connection, and after a refusal for now."""
    deadline_s = time.monotonic() + INSIST_S
    while True:
        try:
            answer = ask()
            if answer.status_code == 200:
                return answer
            assert answer.status_code in RETRIED, f"{answer.request.method} {answer.request.url}: {answer.text}"
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline_s, "not answered"
        time.sleep(0.2)


class Upload:
    """A file whose second half is sent when it may be."""

    def __init__(self, url: str, name: str) -> None:
        self.content = random.Random(name).randbytes(FILE_BYTES // 2).hex().encode()
        self.is_half_way, self.may_go_on = threading.Event(), threading.Event()
        self._url, self._name = url, name

    def send(self) -> str:
        """Returns the file's id."""
        answer = insist(lambda: httpx.post(self._url, content=self._parts(), headers=FORM, timeout=60))
        return str(answer.json()["id"])

    def _parts(self) -> Iterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield f'--x\r\ncontent-disposition: form-data; name="file"; filename="{self._name}"\r\n\r\n'.encode()
        middle = len(self.content) // 2
        yield self.content[:middle]
        self.is_half_way.set()
        self.may_go_on.wait(INSIST_S)
        yield self.content[middle:]
        yield b"\r\n--x--\r\n"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, id="dies"), pytest.param(signal.SIGTERM, id="stops", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "service",
    # Schedulers and placement die one at a time in test_chaos.py too.
    ["gateway", *(pytest.param(name, marks=pytest.mark.long) for name in ("scheduler-0", "placement")), "worker-0"],
)
def test_a_restart_in_the_middle_of_everything_loses_nothing(
    system: Stack, checkpoints: dict[str, str], texts: set[str], service: str, how: signal.Signals
) -> None:
    models, name = list(system.models), f"{service}-{how.name}"
    upload = Upload(f"{system.url}/v1/files", name)
    batch = Batch(system.url, models, NUM_LINES)
    load = Load(system.url, models, NUM_STREAMS, NUM_TOKENS, Resuming([system.url]).read)
    with httpx.Client(base_url=system.url, timeout=30) as client:

        def add() -> httpx.Response:
            return insist(lambda: client.post("/admin/models", json={"name": name, "source": checkpoints["llama"]}))

        async def restart_under_work() -> str:
            """Returns the uploaded file's id."""
            await asyncio.to_thread(batch.begin)
            reading = asyncio.create_task(load.run())
            uploading = asyncio.create_task(asyncio.to_thread(upload.send))
            await asyncio.to_thread(upload.is_half_way.wait, 20)
            await asyncio.to_thread(insist, lambda: client.post(f"/admin/instances/{DRAINED}/drain"))
            adding = asyncio.create_task(asyncio.to_thread(add))
            await asyncio.to_thread(system.kill, service, how)
            system.start(service)
            load.end()
            upload.may_go_on.set()
            await asyncio.gather(reading, adding)
            return await uploading

        file_id = asyncio.run(asyncio.wait_for(restart_under_work(), 180))
        assert [s.error for s in load.streams if not s.ended_well or s.num_tokens != NUM_TOKENS] == []
        with whatever_the_machine_does():
            assert {stream.text for stream in load.streams} <= texts
        assert batch.end() == ("completed", NUM_LINES)
        assert insist(lambda: client.get(f"/v1/files/{file_id}/content")).content == upload.content
        listed = insist(lambda: client.get("/v1/files?purpose=batch")).json()["data"]
        assert [file["id"] for file in listed if file["filename"] == name] == [file_id], "it is there once"
        system.wait_until(lambda: system.instance(DRAINED) is None, "it is drained")
        insist(lambda: client.post(f"/admin/instances/{DRAINED}/undrain"))
        system.wait_until(lambda: is_everywhere(system, name), "the new model and all others are on all instances")
        greedy = {"prompt": "Hi", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        answers = [client.post("/v1/completions", json={**greedy, "model": model}).json() for model in (name, "llama")]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        insist(lambda: client.delete(f"/admin/models/{name}"))


def is_everywhere(system: Stack, model: str) -> bool:
    instances = system.instances()
    ready = [{m["name"] for m in each["models"] if m["state"] == "ready"} for each in instances]
    return len(ready) == system.num_expected_instances and all(names >= {*system.models, model} for names in ready)
