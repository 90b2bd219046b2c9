"""Faults: what each does to a system that serves, and what was wrong in the answers to its own requests."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import httpx

from tests.conftest import NatsServer
from tests.e2e.stack import Stack
from tests.nats_cluster import NatsCluster

SETTLE_S = 5.0
AWAY_S = 15.0
"""How long a node that was killed is away."""
REQUEST_TIMEOUT_S = 90.0
RETRY_S = 0.5
SECOND_GATEWAY = "gateway-1"
NUM_LONG_PROMPTS, LONG_PROMPT_TOKENS = 12, 400
FILE_BYTES = 24 << 20

Fault = Callable[[Stack], Sequence[str]]
"""Returns what was wrong, in words; most faults leave it to the clients beside them to find that."""


def kill_each(stack: Stack) -> Sequence[str]:
    """kill -9 of one node after the other, each away for 15 s."""
    for node in _cluster(stack).nodes:
        with killed(node):
            pass
        time.sleep(SETTLE_S)
    return ()


def pause_each(stack: Stack) -> Sequence[str]:
    """One node after the other hangs for 20 s."""
    for node in _cluster(stack).nodes:
        _pause(stack, node, 20.0)
        time.sleep(SETTLE_S)
    return ()


def rolling(stack: Stack) -> Sequence[str]:
    """Each node is told to stop and started again."""
    for node in _cluster(stack).nodes:
        node.terminate()
        node.start()
        time.sleep(SETTLE_S)
    return ()


def two_of_three(stack: Stack) -> Sequence[str]:
    """kill -9 of two nodes, away for 30 s: what is left has no quorum."""
    first, second, _ = _cluster(stack).nodes
    with killed(first, 30.0), killed(second, 0.0):
        time.sleep(30.0)
    return ()


def single_pause(stack: Stack) -> Sequence[str]:
    """The only server hangs for 14 s."""
    assert isinstance(stack.nats, NatsServer)
    os.kill(stack.nats.pid, signal.SIGSTOP)
    time.sleep(14.0)
    os.kill(stack.nats.pid, signal.SIGCONT)
    return ()


def single_kill(stack: Stack) -> Sequence[str]:
    """kill -9 of the only server, back after 10 s."""
    assert isinstance(stack.nats, NatsServer)
    with killed(stack.nats, 10.0):
        pass
    return ()


# ---------------------------------------------------------------------------------------------------- other moments


def during_prefills(stack: Stack) -> Sequence[str]:
    """kill -9 of the instances' node while long prompts are computed."""
    with ThreadPoolExecutor(NUM_LONG_PROMPTS) as pool, killed(_leader(stack, "KV_tideway_instances")):
        answers = pool.map(partial(_long_prompt, stack), range(NUM_LONG_PROMPTS))
        return [each for each in answers if each]


def during_an_upload(stack: Stack) -> Sequence[str]:
    """kill -9 of the files' node while a file is sent; it must be there whole, or have been refused for now."""
    content = random.Random(1).randbytes(FILE_BYTES // 2).hex().encode()
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=stack.url, timeout=REQUEST_TIMEOUT_S) as client:
        node = _leader(stack, "OBJ_tideway_file_contents")
        sent = pool.submit(
            _retried, lambda: client.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
        )
        time.sleep(0.1)
        with killed(node):
            file, found = sent.result()
            if found:
                return [found]
            kept, found = _retried(lambda: client.get(f"/v1/files/{file['id']}/content"), is_json=False)
        _, also_found = _retried(lambda: client.delete(f"/v1/files/{file['id']}"))
    return [*filter(None, (found, also_found)), *(["the file differs"] if not found and kept != content else [])]


def during_moves(stack: Stack) -> Sequence[str]:
    """kill -9 of the leases' node while an instance is drained and its streams move."""
    name = str(stack.instances()[0]["instance_id"])
    with httpx.Client(base_url=stack.url, timeout=REQUEST_TIMEOUT_S) as client:
        _, drained = _retried(lambda: client.post(f"/admin/instances/{name}/drain"))
        with killed(_leader(stack, "KV_tideway_leases")):
            pass
        _, undrained = _retried(lambda: client.post(f"/admin/instances/{name}/undrain"))
    stack.wait_ready()
    return list(filter(None, (drained, undrained)))


def during_a_change_of_placement(stack: Stack) -> Sequence[str]:
    """kill -9 of the plans' node when a model was told to leave an instance, and again when it comes back."""
    model, found = list(stack.models)[-1], []
    with httpx.Client(base_url=stack.url, timeout=REQUEST_TIMEOUT_S) as client:
        for replicas in (1, None):
            node = _leader(stack, "KV_tideway_plans")
            _, wrong = _retried(lambda: client.post(f"/admin/models/{model}/scale", json={"replicas": replicas}))  # noqa: B023
            found.append(wrong)
            with killed(node):
                pass
            time.sleep(SETTLE_S)
    stack.wait_ready()
    return list(filter(None, found))


def with_the_scheduler(stack: Stack) -> Sequence[str]:
    """kill -9 at once of the leases' node and of the scheduler that leads."""
    with killed(_leader(stack, "KV_tideway_leases")):
        _restart(stack, "scheduler-0", "scheduler-1")
    return ()


def pause_the_leader(seconds: float, stack: Stack) -> Sequence[str]:
    """The leases' node hangs."""
    _pause(stack, _leader(stack, "KV_tideway_leases"), seconds)
    return ()


def with_a_gateway(stack: Stack) -> Sequence[str]:
    """kill -9 of the instances' node, and a second later of a gateway, whose clients resume at the other one."""
    with killed(_leader(stack, "KV_tideway_instances")):
        time.sleep(1.0)
        _restart(stack, SECOND_GATEWAY)
    return ()


def partitions_in_turn(stack: Stack) -> Sequence[str]:
    """One node after the other hears nobody for 8 s, the next as soon as the last is back."""
    for node in 2 * _cluster(stack).nodes:
        _pause(stack, node, 8.0)
        # Two of three are to be whole: the one that is back has to follow the others first.
        time.sleep(2.0)
    return ()


def with_all_control(stack: Stack) -> Sequence[str]:
    """kill -9 of the leases' node, and of all schedulers and placement in the middle of the election."""
    with killed(_leader(stack, "KV_tideway_leases")):
        time.sleep(1.0)
        _restart(stack, "scheduler-0", "scheduler-1", "placement")
    return ()


def with_an_instance(stack: Stack) -> Sequence[str]:
    """kill -9 at once of the instances' node and of an instance."""
    node = _leader(stack, "KV_tideway_instances")
    pid = int(stack.instances()[0]["pid"])
    with killed(node):
        os.kill(pid, signal.SIGKILL)
    stack.wait_ready()
    return ()


class Row(NamedTuple):
    fault: Fault
    is_cluster: bool = True
    is_resumed: bool = False
    """Streams are read with a key and resumed at another gateway where theirs ends."""


ROWS = {
    "kill": Row(kill_each),
    "pause": Row(pause_each),
    "rolling": Row(rolling),
    "two-of-three": Row(two_of_three),
    "prefill": Row(during_prefills),
    "upload": Row(during_an_upload),
    "moves": Row(during_moves),
    "placement": Row(during_a_change_of_placement),
    "scheduler": Row(with_the_scheduler),
    "pause-5": Row(partial(pause_the_leader, 5.0)),
    "pause-20": Row(partial(pause_the_leader, 20.0)),
    "pause-40": Row(partial(pause_the_leader, 40.0)),
    "gateway": Row(with_a_gateway, is_resumed=True),
    "partitions": Row(partitions_in_turn),
    "control": Row(with_all_control),
    "instance": Row(with_an_instance),
    "single-pause": Row(single_pause, is_cluster=False),
    "single-kill": Row(single_kill, is_cluster=False),
}


# --------------------------------------------------------------------------------------------------------- means


@contextmanager
def killed(node: NatsServer, away_s: float = AWAY_S) -> Iterator[None]:
    """kill -9 of the node; it is back after `away_s` or when the block ends, whichever is later."""
    back_s = time.monotonic() + away_s
    node.kill()
    try:
        yield
        time.sleep(max(0.0, back_s - time.monotonic()))
    finally:
        node.start()


def _cluster(stack: Stack) -> NatsCluster:
    assert isinstance(stack.nats, NatsCluster)
    return stack.nats


def _leader(stack: Stack, stream: str) -> NatsServer:
    return _cluster(stack).leader_of(stream) or _cluster(stack).nodes[0]


def _pause(stack: Stack, node: NatsServer, seconds: float) -> None:
    _cluster(stack).pause(node)
    time.sleep(seconds)
    _cluster(stack).resume(node)


def _restart(stack: Stack, *names: str) -> None:
    """kill -9 of all of them, then a new process each."""
    for name in names:
        stack.kill(name)
    time.sleep(1.0)
    for name in names:
        stack.start(name)


def _retried(ask: Callable[[], httpx.Response], *, is_json: bool = True) -> tuple[object, str]:
    """The answer to a request that is made again while it is refused for now, and what was wrong with it ("": nothing)."""
    deadline_s = time.monotonic() + REQUEST_TIMEOUT_S
    while True:
        try:
            answer = ask()
        except httpx.HTTPError as error:
            return None, repr(error)
        if answer.status_code == 200:
            return answer.json() if is_json else answer.content, ""
        if answer.status_code != 503 or "retry-after" not in answer.headers or time.monotonic() > deadline_s:
            return None, f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text[:200]}"
        time.sleep(RETRY_S)


def _long_prompt(stack: Stack, number: int) -> str:
    model = list(stack.models)[number % len(stack.models)]
    prompt = [3 + (number * 31 + position * 7) % 200 for position in range(LONG_PROMPT_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    with httpx.Client(timeout=REQUEST_TIMEOUT_S) as client:
        return _retried(lambda: client.post(f"{stack.url}/v1/completions", json=body))[1]
