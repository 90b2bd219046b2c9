"""`tideway drain` and `tideway scale`, and the client of the gateway's admin API that they and `tideway top` share.

All goes over HTTP, so that an operator needs the gateway's address and the admin key, and no way to NATS.
"""

from __future__ import annotations

import os.path
import re
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import httpx
import msgspec

from shared.messages.admin import (
    InstanceState,
    InstanceStates,
    ModelState,
    ModelStates,
    ReplacementState,
    RouteState,
    RouteStates,
    ShownPlan,
    TenantStates,
)
from shared.messages.cluster import InstancePlan, PlacementPlan
from shared.messages.timeline import RequestTimelines, SloExplanation
from shared.models.spec import is_name
from tideway.data_folder import DataFolder, OperatorError
from tideway.plan_file import GroupSpec

DEFAULT_URL = "http://127.0.0.1:8000"
REQUEST_TIMEOUT_S = 15.0
"""Longer than the gateway gives placement."""
POLL_INTERVAL_S = 0.5
GONE, READY = "gone", "ready"
INSTANCE_ID = r"[A-Za-z0-9_-]+"

T = TypeVar("T")
OnInstance = TypeVar("OnInstance", InstanceState, InstancePlan)


class UnavailableError(OperatorError):
    """It may pass: nobody answers at the moment, or the services are not all there."""


class Gateway(NamedTuple):
    """Gateway that a command turns to."""

    url: str
    """Without /v1."""
    data: DataFolder | None = None
    """The folder that it runs on, if it was found by that."""
    is_guessed: bool = False

    def __str__(self) -> str:
        if self.is_guessed:
            return f"{self.url}, since nothing runs on the data folder."
        return self.url + (f", data folder {self.data.path}." if self.data is not None else ".")


def base_url(url: str) -> str:
    """URL of a server, of what users give as its address."""
    return url.rstrip("/").removesuffix("/v1")


def find_gateway(data: DataFolder, url: str, *, may_guess: bool) -> Gateway:
    """The gateway at `url`; where that is empty, the one that runs on the data folder; where none does, the one at
    `DEFAULT_URL` if `may_guess`, else `OperatorError`."""
    if url:
        return Gateway(base_url(url))
    if (state := data.running_state()) is not None:
        return Gateway(base_url(state.address), data)
    if not may_guess:
        raise OperatorError(f"Nothing runs on {data.path}; give --url (TIDEWAY_URL) or another --data-dir.")
    return Gateway(DEFAULT_URL, is_guessed=True)


class RefusedError(OperatorError):
    """The gateway answered 4xx."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        """Code of the API's error; empty: it has none."""


class AdminClient:
    """Every failure is an `OperatorError` that says what to do."""

    def __init__(
        self,
        url: str,
        api_key: str = "",
        *,
        doubt: str = "",
        data: DataFolder | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """`doubt`: what to say first if nothing answers there. `data`: the folder that the gateway runs on, if it was found
        by that."""
        self._doubt = doubt
        self._data = data
        self.url = base_url(url)
        if not (api_key.isascii() and api_key.isprintable()):
            raise OperatorError(
                "The admin key (--api-key, TIDEWAY_ADMIN_API_KEY) has other characters than printable ASCII."
            )
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s)
        except httpx.InvalidURL as error:
            raise OperatorError(f"{url} is no address of a gateway: {error}.") from None

    @classmethod
    def of(
        cls,
        data: DataFolder,
        url: str,
        api_key: str,
        *,
        may_guess: bool = False,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> AdminClient:
        """Client for the gateway at `url`; where that is empty, for the one that runs on the data folder, with its key;
        where none does, for the one at `DEFAULT_URL` if `may_guess`."""
        gateway = find_gateway(data, url, may_guess=may_guess)
        if gateway.data is not None:
            api_key = api_key or gateway.data.credentials().admin_api_key
        doubt = f"Nothing runs on {data.path}. " if gateway.is_guessed else ""
        return cls(gateway.url, api_key, doubt=doubt, data=gateway.data, timeout_s=timeout_s)

    @property
    def place(self) -> str:
        """On what it acts, in a line."""
        return f"On {Gateway(self.url, self._data)}"

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def instances(self) -> InstanceStates:
        return self._call("GET", "/admin/instances", InstanceStates)

    def models(self, interval_s: int = 60) -> ModelStates:
        """`interval_s`: that their traffic is told of."""
        return self._call("GET", f"/admin/models?interval_s={interval_s}", ModelStates)

    def plan(self) -> PlacementPlan:
        return self._call("GET", "/admin/plan", PlacementPlan)

    def shown_plan(self) -> ShownPlan:
        return self._call("GET", "/admin/plan", ShownPlan)

    def request_timelines(self, request_id: str) -> RequestTimelines:
        """Timelines of one request, by any of its ids."""
        if "/" in request_id or not request_id.strip("."):  # in a path, these are other places
            raise OperatorError(f"Nothing is known of the request {request_id!r}.")
        return self._call("GET", f"/admin/requests/{quote(request_id, safe='')}", RequestTimelines)

    def latest_requests(
        self, limit: int, *, model: str = "", missed: bool = False, running: bool = False
    ) -> RequestTimelines:
        query = urlencode(
            {"limit": limit, "model": model, "missed": f"{missed}".lower(), "running": f"{running}".lower()}
        )
        return self._call("GET", f"/admin/requests?{query}", RequestTimelines)

    def explain_slo(self, interval_s: int) -> SloExplanation:
        return self._call("GET", f"/admin/slo?interval_s={interval_s}", SloExplanation)

    def change_plan(self, action: str) -> ReplacementState:
        return self._call("POST", "/admin/plan", ReplacementState, {"action": action})

    def set_plan(self, groups: Iterable[GroupSpec]) -> ReplacementState:
        told = [{"node_id": one.node, "devices": one.devices, "models": one.models} for one in groups]
        return self._call("POST", "/admin/plan", ReplacementState, {"action": "set", "groups": told})

    def drain(self, instance_id: str, *, is_undone: bool, is_forced: bool = False) -> PlacementPlan:
        action = "undrain" if is_undone else "drain?force=true" if is_forced else "drain"
        return self._call("POST", f"{_instance_path(instance_id)}/{action}", PlacementPlan)

    def set_role(self, instance_id: str, role: str) -> None:
        self._call("POST", f"{_instance_path(instance_id)}/role", dict, {"role": role})

    def add_model(self, body: dict[str, Any]) -> PlacementPlan:
        """`body`: as of POST /admin/models."""
        return self._call("POST", "/admin/models", PlacementPlan, body)

    def remove_model(self, name: str) -> PlacementPlan:
        return self._call("DELETE", _path_of("model", name), PlacementPlan)

    def load_adapter(self, name: str, source: str, base: str, ttft_ms: float, tpot_ms: float) -> PlacementPlan:
        body: dict[str, Any] = {"name": name, "source": source, "base": base}
        body |= {key: ms for key, ms in (("ttft_ms", ttft_ms), ("tpot_ms", tpot_ms)) if ms}
        return self._call("POST", "/admin/models", PlacementPlan, body)

    def unload_adapter(self, name: str) -> PlacementPlan:
        if all(adapter.name != name for adapter in self.models().adapters):
            raise OperatorError(f"There is no adapter {name!r}.")
        return self.remove_model(name)

    def scale_model(self, name: str, replicas: int | None) -> PlacementPlan:
        return self._call("POST", f"{_path_of('model', name)}/scale", PlacementPlan, {"replicas": replicas})

    def scale_instances(self, num_instances: int) -> PlacementPlan:
        return self._call("POST", "/admin/scale", PlacementPlan, {"instances": num_instances})

    def tenants(self) -> TenantStates:
        return self._call("GET", "/admin/tenants", TenantStates)

    def routes(self) -> RouteStates:
        return self._call("GET", "/admin/routes", RouteStates)

    def set_route(self, body: dict[str, Any]) -> RouteState:
        return self._call("POST", "/admin/routes", RouteState, body)

    def delete_route(self, name: str) -> None:
        self._call("DELETE", _path_of("route", name), dict)

    def _call(self, method: str, path: str, kind: type[T], body: dict[str, Any] | None = None) -> T:
        try:
            answer = self._http.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last: of host names
            reason = str(error) or type(error).__name__
            raise UnavailableError(
                f"{self._doubt}The gateway at {self.url} does not answer ({reason}). Another one: --url or TIDEWAY_URL."
            ) from None
        except ValueError:
            raise OperatorError("A number of this command is infinite or too large: expected a finite one.") from None
        if answer.status_code in (401, 403):
            raise OperatorError(f"{_message(answer)} Give the admin key in --api-key or TIDEWAY_ADMIN_API_KEY.")
        if not answer.is_success:
            if answer.is_server_error:
                raise UnavailableError(_message(answer))
            raise RefusedError(_message(answer), _error(answer).get("code") or "")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise OperatorError(
                f"{self.url}{path} does not answer as a Tideway of this version does: {error}"
            ) from None


def _find(instances: Iterable[OnInstance], instance_id: str) -> OnInstance | None:
    return next((one for one in instances if one.instance_id == instance_id), None)


def _places(plan: PlacementPlan, model: str) -> list[InstancePlan]:
    return [place for place in plan.instances if any(spec.name == model for spec in place.models)]


def _instance_path(instance_id: str) -> str:
    """Raises `OperatorError` for what is the id of no instance."""
    if not re.fullmatch(INSTANCE_ID, instance_id):
        raise OperatorError(f"There is no instance {instance_id!r}.")
    return f"/admin/instances/{quote(instance_id, safe='')}"


def _path_of(kind: str, name: str) -> str:
    """Path of a model or route. Raises `OperatorError` for what is the name of none: in a path, `a/../b` would be b."""
    if not is_name(name):
        raise OperatorError(f"There is no {kind} {name!r}.")
    return f"/admin/{kind}s/{quote(name)}"


def _error(answer: httpx.Response) -> dict[str, Any]:
    """The API's error; empty where it is none of this API."""
    try:
        return dict(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return {}


def _message(answer: httpx.Response) -> str:
    said = _error(answer).get("message")
    return f"{said}".rstrip(".") + "." if said else f"{answer.url} answered {answer.status_code}."


def drain(
    client: AdminClient,
    instance_id: str,
    *,
    is_undone: bool,
    is_forced: bool = False,
    wait_s: float | None,
    say: Callable[[str], None],
) -> None:
    """`is_forced`: the last instance too. `wait_s`: until it can be drained, and until the instance is gone (undone: serves
    all that is planned for it), for so long each; None: do not wait."""
    # Where no gateway answers, this fails at once: `_ask` would wait for one.
    was_drained = instance_id in client.plan().draining
    try:
        plan = _ask(lambda: client.drain(instance_id, is_undone=is_undone, is_forced=is_forced), wait_s, say)
    except RefusedError as error:
        if error.code != "conflict":
            raise
        raise OperatorError(f"{error} --force drains it all the same.") from None
    if not is_undone:
        say(f"{instance_id} is left out of the plan and drains.")
    else:
        say(f"{instance_id} is to come back." if was_drained else f"{instance_id} was not drained; nothing changed.")
    _say_unplaced(plan, say)
    if is_undone and wait_s is not None and not client.models().models:
        say("  There is no model: an instance starts when one is added (tideway model add).")
        return
    if is_undone and not was_drained and _find(plan.instances, instance_id) is None:
        if wait_s is not None:
            say("  Nothing is planned for it, so there is nothing to wait for.")
        return

    def status() -> str:
        if not is_undone:
            return _left(_find(client.instances().instances, instance_id))
        place = _find(client.plan().instances, instance_id)
        return _back(instance_id, place, _find(client.instances().instances, instance_id))

    _wait(status, wait_s, say, f"{instance_id}: ")


def _ask(ask: Callable[[], T], wait_s: float | None, say: Callable[[str], None]) -> T:
    """What it answers. Where that cannot be had yet, as a replacement is under way, it is asked again for `wait_s`."""
    deadline_s = time.monotonic() + (wait_s or 0.0)
    said = ""
    while True:
        try:
            return ask()
        except UnavailableError as error:
            if time.monotonic() >= deadline_s:
                raise
            if str(error) != said:
                said = str(error)
                say(f"  {said}")
        time.sleep(POLL_INTERVAL_S)


def _wait(status: Callable[[], str], wait_s: float | None, say: Callable[[str], None], subject: str = "") -> None:
    """Until it is `GONE` or `READY`, whoever is away for a while; None: not at all."""
    if wait_s is None:
        return
    deadline_s = time.monotonic() + wait_s
    said = ""
    while True:
        try:
            reached = status()
        except UnavailableError as error:
            reached = str(error).rstrip(".")
        if reached != said:
            say(f"  {reached}")
            said = reached
        if reached in (GONE, READY):
            return
        if time.monotonic() >= deadline_s:
            raise OperatorError(f"{subject}{reached} after {wait_s:g} s. It goes on by itself.")
        time.sleep(POLL_INTERVAL_S)


def _left(instance: InstanceState | None, name: str = "") -> str:
    """`name`: of the only model that is to go."""
    models = [model for model in instance.models if name in ("", model.name)] if instance else []
    if instance is None or (name and not models):
        return GONE
    if num_held := sum(model.num_running + model.num_waiting for model in models):
        return f"{num_held} request{'s' * (num_held != 1)} left"
    return "nothing left, not gone yet"


def _back(instance_id: str, place: InstancePlan | None, instance: InstanceState | None, name: str = "") -> str:
    """`name`: of the only model that matters. Raises `OperatorError` where a model cannot be loaded there."""
    if instance is None:
        return (
            "not there yet"
            if place
            else "not there, and nothing is planned for it yet; does its worker run, does the plan have it (tideway plan)?"
        )
    planned = [model.name for model in place.models if name in ("", model.name)] if place else []
    if not planned:
        return "there, and no model is planned for it"
    models = {model.name: model for model in instance.models if model.name in planned}
    failed = [f"{one}: {model.error or 'no reason given'}" for one, model in models.items() if model.state == "failed"]
    if failed:
        raise OperatorError(f"{instance_id} is there, but could not load {'; '.join(failed).rstrip('.')}.")
    loading = [one for one in planned if one not in models or models[one].state != "ready"]
    if instance.state == READY and loading:
        return f"loading {', '.join(loading)}"
    return instance.state


def source_told(source: str) -> str:
    """What the gateway is told of a source of weights: the absolute path of a folder here, else what was said."""
    folder = Path(os.path.expanduser(source))  # which leaves an unknown user's `~` as it is, where pathlib raises
    return str(folder.resolve()) if source and folder.is_dir() else source


def drained_and_gone(draining: Iterable[str], there: Collection[str]) -> str:
    """A line for the operator; empty if all of those that are left out of the plan are still there."""
    gone = sorted(set(draining).difference(there))
    back = "tideway drain INSTANCE --undo brings one back; tideway scale --instances N those that scaling removed"
    return f"Drained and gone: {', '.join(gone)} ({back})" if gone else ""


ANOTHER_PLACEMENT = "tideway plan --set FILE for another; tideway plan --rollback undoes the last change"
CHOSEN = (
    "this placement was chosen by a search or an operator, and keeps its instances whatever numbers are asked for"
    f" ({ANOTHER_PLACEMENT})"
)
"""Said to an operator where `PlacementPlan.is_chosen`."""


def scale_model(
    client: AdminClient, name: str, replicas: int | None, *, wait_s: float | None, say: Callable[[str], None]
) -> None:
    """`replicas` None: on all instances where it fits. `wait_s`: until the model serves where it is planned and nowhere
    else, for so long; None: do not wait."""
    plan = client.scale_model(name, replicas)
    places = [planned.instance_id for planned in _places(plan, name)]
    wanted = "all instances where it fits" if replicas is None else f"{replicas} instance{'s' * (replicas != 1)}"
    say(f"{name} is to be on {wanted}; planned: {', '.join(places) or 'none'}.")
    if name in plan.asleep:
        say("  It is put away, and loaded there when a request for it comes.")
    elif replicas is not None and len(places) < replicas:
        say(f"  {len(places)} of {replicas} can be had now: {_why_fewer(plan, places)}.")
        if not plan.is_chosen:
            say("  Placement adds the others as soon as it can.")
    _say_unplaced(plan, say)

    def status() -> str:
        places = _places(client.plan(), name)
        return _served(places, client.instances(), name) if places else f"{name} is planned nowhere"

    _wait(status, wait_s, say)


def _why_fewer(plan: PlacementPlan, places: Collection[str]) -> str:
    """Why a model is planned for no more instances than `places`."""
    by_hand = [one for one in plan.draining if one not in plan.released]
    drained = f", and {', '.join(by_hand)} {'is' if len(by_hand) == 1 else 'are'} drained" if by_hand else ""
    others = [one.instance_id for one in plan.instances if one.instance_id not in places]
    if others:
        reason = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not planned to have it{drained}"
    else:
        are = "is 1 instance" if len(places) == 1 else f"are {len(places)} instances"
        reason = f"there {are}{drained}" + ("" if plan.is_chosen else " (tideway scale --instances N for more)")
    return f"{reason}; {CHOSEN}" if plan.is_chosen else reason


def scale_instances(
    client: AdminClient, num_instances: int, *, wait_s: float | None, say: Callable[[str], None]
) -> None:
    """`wait_s`: until so many serve all that is planned for them, and the others are gone, for so long; None: do not
    wait."""
    plan = client.scale_instances(num_instances)
    wanted = "is to be 1 instance" if num_instances == 1 else f"are to be {num_instances} instances"
    say(f"There {wanted}; planned now: {len(plan.instances)}.")
    _say_unplaced(plan, say)
    if plan.is_chosen and len(plan.instances) < num_instances:
        reason = f"{num_instances - len(plan.instances)} more wait: {CHOSEN}."
        if wait_s is not None:
            raise OperatorError(reason)
        say(f"  {reason}")
        return

    def status() -> str:
        plan = client.plan()
        num_planned = len(plan.instances)
        if num_planned < num_instances and any(_wants_more(model, plan) for model in client.models().models):
            return f"{num_planned} of {num_instances} instances planned"
        return _served(plan.instances, client.instances())

    _wait(status, wait_s, say)


def _wants_more(model: ModelState, plan: PlacementPlan) -> bool:
    """Whether a model wants more instances. Where none does, the other instances stay away: an instance without a model is
    not started."""
    if model.name in plan.unplaced:
        return False
    return model.replicas is None or len(_places(plan, model.name)) < model.replicas


def _served(places: list[InstancePlan], instances: InstanceStates, name: str = "") -> str:
    """What is still to happen where something is planned, and on the other instances; `name`: as of `_back`."""
    there = {instance.instance_id: instance for instance in instances.instances}
    ahead = {p.instance_id: _back(p.instance_id, p, there.get(p.instance_id), name) for p in places}
    ahead |= {i: _left(instance, name) for i, instance in there.items() if i not in ahead}
    return "; ".join(f"{i}: {status}" for i, status in ahead.items() if status not in (GONE, READY)) or READY


def _say_unplaced(plan: PlacementPlan, say: Callable[[str], None]) -> None:
    for name, reason in plan.unplaced.items():
        say(f"  {name} is on no instance: {reason}")
