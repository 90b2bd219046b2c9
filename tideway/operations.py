"""`tideway drain` and `tideway scale`, and the client of the gateway's admin API that they and `tideway top` share.

All goes over HTTP, so that an operator needs the gateway's address and the admin key, and no way to NATS.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from tideway.data_folder import DataFolder, OperatorError

DEFAULT_URL = "http://127.0.0.1:8000"
REQUEST_TIMEOUT_S = 15.0
"""Longer than the gateway gives placement."""
POLL_INTERVAL_S = 0.5
GONE, READY = "gone", "ready"
INSTANCE_ID = r"[A-Za-z0-9_-]+"

T = TypeVar("T")


class ModelOnInstance(msgspec.Struct, frozen=True):
    name: str
    state: str
    num_running: int
    num_waiting: int
    error: str = ""


class Load(msgspec.Struct, frozen=True):
    """As `GET /admin/instances` says; freeness None: unbounded."""

    pool_use: float | None
    num_running: int
    num_waiting: int
    num_offline: int
    num_high: int
    migration_freeness: float | None
    num_moving_out: int
    num_moving_in: int
    num_moved_out: int
    num_moved_in: int


class Instance(msgspec.Struct, frozen=True):
    instance_id: str
    incarnation: str
    node_id: str
    state: str
    device: str
    models: list[ModelOnInstance]
    num_merged: int
    merged_bytes: int
    migration: bool
    load: Load | None

    @property
    def num_held(self) -> int:
        """Requests that run or wait there."""
        return sum(model.num_running + model.num_waiting for model in self.models)


class Instances(msgspec.Struct, frozen=True):
    instances: list[Instance]
    draining: list[str] | None

    def find(self, instance_id: str) -> Instance | None:
        return next((instance for instance in self.instances if instance.instance_id == instance_id), None)


class Model(msgspec.Struct, frozen=True):
    name: str
    replicas: int | None
    instances: dict[str, str]
    """Instance id to the model's state there."""
    unplaced: str | None
    num_running: int
    num_waiting: int
    num_queued: int | None


class Models(msgspec.Struct, frozen=True):
    models: list[Model]


class PlannedModel(msgspec.Struct, frozen=True):
    name: str


class PlannedInstance(msgspec.Struct, frozen=True):
    instance_id: str
    models: list[PlannedModel]


class Plan(msgspec.Struct, frozen=True):
    instances: list[PlannedInstance]
    unplaced: dict[str, str]
    draining: list[str] = []

    def models_on(self, instance_id: str) -> list[str]:
        return [model.name for i in self.instances if i.instance_id == instance_id for model in i.models]


class AdminClient:
    """Every failure is an `OperatorError` that says what to do."""

    def __init__(self, url: str, api_key: str = "", *, doubt: str = "") -> None:
        """`doubt`: what to say first if nothing answers there."""
        self._doubt = doubt
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=REQUEST_TIMEOUT_S)
        except httpx.InvalidURL as error:
            raise OperatorError(f"{url} is no address of a gateway: {error}.") from None

    @classmethod
    def of(cls, data: DataFolder, url: str, api_key: str, *, may_guess: bool = False) -> AdminClient:
        """For the gateway at `url`; where that is empty, for the one that runs on the data folder, with its key; where none
        does, for the one at `DEFAULT_URL` if `may_guess`."""
        if url:
            return cls(url, api_key)
        state = data.read_state() if data.holder_pid() else None
        if state is not None:
            return cls(state.address, api_key or data.credentials().admin_api_key)
        if not may_guess:
            raise OperatorError(f"Nothing runs on {data.path}; give --url (TIDEWAY_URL) or another --data-dir.")
        return cls(DEFAULT_URL, api_key, doubt=f"Nothing runs on {data.path}. ")

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def instances(self) -> Instances:
        return self._call("GET", "/admin/instances", Instances)

    def models(self) -> Models:
        return self._call("GET", "/admin/models", Models)

    def plan(self) -> Plan:
        return self._call("GET", "/admin/plan", Plan)

    def drain(self, instance_id: str, *, is_undone: bool) -> Plan:
        if not re.fullmatch(INSTANCE_ID, instance_id):
            raise OperatorError(f"There is no instance {instance_id!r}.")  # and no path for it
        action = "undrain" if is_undone else "drain"
        return self._call("POST", f"/admin/instances/{quote(instance_id, safe='')}/{action}", Plan)

    def scale_model(self, name: str, replicas: int | None) -> Plan:
        return self._call("POST", f"/admin/models/{quote(name)}/scale", Plan, {"replicas": replicas})

    def scale_instances(self, num_instances: int) -> Plan:
        return self._call("POST", "/admin/scale", Plan, {"instances": num_instances})

    def _call(self, method: str, path: str, kind: type[T], body: dict[str, Any] | None = None) -> T:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise OperatorError(
                f"{self._doubt}The gateway at {self.url} does not answer ({reason}). Another one: --url or TIDEWAY_URL."
            ) from None
        if answer.status_code in (401, 403):
            raise OperatorError(f"{_message(answer)} Give the admin key in --api-key or TIDEWAY_ADMIN_API_KEY.")
        if not answer.is_success:
            raise OperatorError(_message(answer))
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise OperatorError(
                f"{self.url}{path} does not answer as a Tideway of this version does: {error}"
            ) from None


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"]).rstrip(".") + "."
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answered {answer.status_code}."


def drain(
    client: AdminClient,
    instance_id: str,
    *,
    is_undone: bool,
    wait_s: float | None,
    say: Callable[[str], None],
) -> None:
    """`wait_s`: until the instance is gone (undone: serves all that is planned for it), for so long; None: do not wait."""
    plan = client.drain(instance_id, is_undone=is_undone)
    say(f"{instance_id} is to come back." if is_undone else f"{instance_id} is left out of the plan and drains.")
    _say_unplaced(plan, say)
    if wait_s is None:
        return
    deadline_s = time.monotonic() + wait_s
    said = ""
    while True:
        status = _back(client, instance_id) if is_undone else _left(client, instance_id)
        if status != said:
            say(f"  {status}")
            said = status
        if status in (GONE, READY):
            return
        if time.monotonic() >= deadline_s:
            raise OperatorError(f"{instance_id}: {status} after {wait_s:g} s. It goes on by itself.")
        time.sleep(POLL_INTERVAL_S)


def _left(client: AdminClient, instance_id: str) -> str:
    instance = client.instances().find(instance_id)
    if instance is None:
        return GONE
    if instance.num_held:
        return f"{instance.num_held} request{'s' * (instance.num_held != 1)} left"
    return "nothing left, not gone yet"


def _back(client: AdminClient, instance_id: str) -> str:
    """Raises `OperatorError` where a model cannot be loaded there."""
    planned = client.plan().models_on(instance_id)
    instance = client.instances().find(instance_id)
    if instance is None:
        return "not there yet"
    if not planned:
        return "there, and no model is planned for it"
    models = {model.name: model for model in instance.models if model.name in planned}
    failed = [
        f"{name}: {model.error or 'no reason given'}" for name, model in models.items() if model.state == "failed"
    ]
    if failed:
        raise OperatorError(f"{instance_id} is back, but could not load {'; '.join(failed).rstrip('.')}.")
    loading = [name for name in planned if name not in models or models[name].state != "ready"]
    if instance.state == READY and loading:
        return f"loading {', '.join(loading)}"
    return instance.state


def drained_and_gone(draining: Iterable[str], there: Collection[str]) -> str:
    """A line for the operator; empty if all of those that are left out of the plan are still there."""
    gone = sorted(set(draining).difference(there))
    return f"Drained and gone: {', '.join(gone)} (tideway drain INSTANCE --undo brings one back)" if gone else ""


def scale_model(client: AdminClient, name: str, replicas: int | None, say: Callable[[str], None]) -> None:
    """`replicas` None: on all instances where it fits."""
    plan = client.scale_model(name, replicas)
    places = [planned.instance_id for planned in plan.instances if any(model.name == name for model in planned.models)]
    wanted = "all instances where it fits" if replicas is None else f"{replicas} instance{'s' * (replicas != 1)}"
    say(f"{name} is to be on {wanted}; planned: {', '.join(places) or 'none'}.")
    if replicas is not None and len(places) < replicas:
        say(f"  No more than {len(places)} can hold it now.")
    _say_unplaced(plan, say)


def scale_instances(client: AdminClient, num_instances: int, say: Callable[[str], None]) -> None:
    plan = client.scale_instances(num_instances)
    wanted = "is to be 1 instance" if num_instances == 1 else f"are to be {num_instances} instances"
    say(f"There {wanted}; planned now: {len(plan.instances)}.")
    _say_unplaced(plan, say)


def _say_unplaced(plan: Plan, say: Callable[[str], None]) -> None:
    for name, reason in plan.unplaced.items():
        say(f"  {name} is on no instance: {reason}")
