"""`tideway up`: starts NATS and the services, reports progress, keeps them running, and stops them in order.

Raises `OperatorError` or `SettingsError` where the operator must change something; whatever was started is stopped by then.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from shared.bus.interface import BusError
from shared.engines.capabilities import NATIVE
from shared.messages.cluster import ModelSpec, PlacementPlan
from shared.runtime.service import OPERATOR_ERROR_EXIT_CODE
from shared.runtime.settings import (
    BusSettings,
    GatewaySettings,
    InstanceSettings,
    PlacementSettings,
    SchedulerSettings,
    WorkerSettings,
    load,
)
from shared.runtime.tls import is_loopback, own_server_tls
from tideway import preflight, tree
from tideway.cluster import ClusterView
from tideway.console import Reporter
from tideway.data_folder import DataFolder, OperatorError, ProcessState, State
from tideway.first_request import first_request
from tideway.liveness import probe_for_ever, restart_when_there_is_space
from tideway.operations import ANOTHER_PLACEMENT
from tideway.readiness import ModelChecks, Step, answers, nats_greets, responds
from tideway.supervisor import Backoff, Child, Crash, Supervisor, log_failure

CHANGE_TIMEOUT_S = 120.0
"""Time limit of a change of the models: a checkpoint is read first."""
POLL_INTERVAL_S = 0.1
NATS_TIMEOUT_S = 15.0
MAX_CRASHES_AT_START = 3
TAIL_LINES = 15
_OPTIONS = ("quantization", "tool_format", "draft")
"""Fields of a model that a later start may change."""


class Up:
    """One run of the command. The last three arguments are for tests."""

    def __init__(
        self,
        options: tree.UpOptions,
        reporter: Reporter,
        *,
        make_services: tree.MakeServices = tree.services,
        free_memory_bytes: Callable[[], int | None] = preflight.free_memory_bytes,
        backoff: Backoff | None = None,
    ) -> None:
        self._gateway = load(GatewaySettings)
        self._options = options = replace(options, has_tls=bool(self._gateway.tls_cert))
        self._reporter = reporter
        self._make_services = make_services
        self._free_memory_bytes = free_memory_bytes
        self._data = DataFolder(options.data_dir)
        self._supervisor = Supervisor(self._data.logs, self, backoff)
        self._services: list[tree.Service] = []
        self._nats_url = options.nats_url
        self._nats_monitor_port = 0
        self._phase = "starting"
        self._started_unix_s = time.time()
        self._deadline_s = math.inf
        self._crashed_at_start: Crash | None = None
        self._stop = asyncio.Event()
        # Settings that cannot be used are better said before anything starts.
        for kind in (SchedulerSettings, PlacementSettings, WorkerSettings, InstanceSettings):
            load(kind)
        self._has_api_keys = bool(self._gateway.api_keys or self._gateway.api_keys_file)

    async def run(self) -> None:
        """Returns when a signal (or `request_stop`) ended it and everything is stopped."""
        self._data.prepare()
        self._data.acquire()
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.request_stop)
        try:
            await self._run()
        finally:
            try:
                await self._stop_all()
            finally:
                for number in numbers:
                    loop.remove_signal_handler(number)
                self._data.release()

    def request_stop(self) -> None:
        """The second time: at once."""
        if self._stop.is_set():
            self._supervisor.kill()
        self._stop.set()

    async def _run(self) -> None:
        options = self._options
        for number in range(options.num_gateways):
            preflight.check_port(options.host, options.port + number)
        preflight.check_memory(self._free_memory_bytes())
        self._reporter.say(f"Starting Tideway; logs are in {self._data.logs}")
        starting = asyncio.create_task(self._bring_up(), name="bring up")
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        starting.result()
        self._phase = "ready"
        self._write_state()
        async with httpx.AsyncClient(trust_env=False) as http:
            keeping = self._probes(http)
            if "nats" in self._supervisor.children:
                keeping.append(self._keep_nats_writing(http))
            probes = [asyncio.create_task(probe, name="probe") for probe in keeping]
            for probe in probes:
                probe.add_done_callback(log_failure)
            await stopping
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _stop_all(self) -> None:
        self._phase = "stopping"
        if not self._supervisor.children:
            return
        if self._stop.is_set():
            self._reporter.say("Stopping (once more to stop at once)")
        self._write_state()
        killed = await self._supervisor.stop()
        for name in killed:
            self._reporter.warn(f"{name} did not stop in time and was killed")
        if self._stop.is_set():
            self._reporter.say("Stopped")

    # ------------------------------------------------------------------------------------------------- bringing up

    async def _bring_up(self) -> None:
        self._deadline_s = time.monotonic() + self._options.timeout_s
        with self._reporter:
            bus, passwords = await self._start_nats()
            # A server that may not fit is tried first; on our own the buckets that a view needs are made by placement.
            view = (
                None
                if passwords
                else await ClusterView.connect(load(BusSettings, {**os.environ, **bus}), NATS_TIMEOUT_S)
            )
            try:
                common = {**bus, **self._admin_key()}
                self._services = self._make_services(self._options, common, passwords)
                for service in self._services:
                    await self._supervisor.start(service.spec)
                self._write_state()
                async with httpx.AsyncClient(trust_env=False, verify=own_server_tls(self._gateway)) as http:
                    await self._wait_for(self._process_steps(http))
                    if view is None:
                        view = await ClusterView.connect(load(BusSettings, {**os.environ, **bus}), NATS_TIMEOUT_S)
                    await self._replace_changed_models(http, await view.configured())
                    models = ModelChecks(view)
                    names = [spec.name for spec in self._options.models]
                    await self._wait_for([Step(f"model {name}", models.settled(name), "worker") for name in names])
                    self._report_failed_models(models)
                    served = [name for name in names if name not in models.failed and name not in models.drained]
                    # Where all is drained it must come up nevertheless: how else could that be undone?
                    path = "/ready" if served else "/health"
                    urls = self._options.addresses.items()
                    await self._wait_for(
                        [Step("API", answers(http, f"{url}{path}", f"on {url}"), name) for name, url in urls]
                    )
                self._report_earlier_models(await view.configured())
                plan = await view.plan()
                self._report_drained(plan)
                self._report_chosen(plan)
            finally:
                if view is not None:
                    await view.close()
        await asyncio.to_thread(self._say_ready, served)  # it looks into checkpoints

    async def _start_nats(self) -> tuple[dict[str, str], dict[str, str]]:
        """The bus's settings as environment (with our own server: the operator's), and the passwords of our own server."""
        options, credentials = self._options, self._data.credentials()
        if options.nats_url:
            gateway = self._gateway
            return tree.bus_environment(options.nats_url, gateway.nats_user, gateway.nats_password), {}
        if options.nats_port:
            preflight.check_port("127.0.0.1", options.nats_port, "--nats-port")
        free, self._nats_monitor_port = preflight.free_ports(2)
        port = options.nats_port or free
        config = tree.nats_config(self._data, credentials, port, self._nats_monitor_port)
        self._data.write_private(self._data.nats_config, config)
        await self._supervisor.start(tree.nats_spec(preflight.nats_server_binary(), self._data))
        self._nats_url = f"nats://127.0.0.1:{port}"
        await self._wait_for([Step("NATS", nats_greets(port), "nats")], NATS_TIMEOUT_S)
        return tree.operator_environment(self._nats_url, credentials), credentials.nats_passwords

    def _admin_key(self) -> dict[str, str]:
        """Key for /admin. Where API keys are configured, /admin wants one of its own and is closed without it."""
        if not self._has_api_keys or self._gateway.admin_api_key:
            return {}
        self._reporter.done("key for /admin", f"in {self._data.path / 'credentials.json'}")
        return {"TIDEWAY_ADMIN_API_KEY": self._data.credentials().admin_api_key}

    def _process_steps(self, http: httpx.AsyncClient) -> list[Step]:
        host = preflight.local_host(self._gateway.metrics_host)
        processes = [(service.spec.name, service.metrics_port) for service in self._services]
        return [Step(name, answers(http, f"http://{host}:{port}/health"), name) for name, port in processes]

    async def _wait_for(self, steps: list[Step], timeout_s: float = math.inf) -> None:
        deadline_s = min(self._deadline_s, time.monotonic() + timeout_s)
        pending = list(steps)
        while pending:
            if self._crashed_at_start is not None:
                raise self._start_failure(self._crashed_at_start)
            for step in list(pending):
                try:
                    detail = await step.check()
                except BusError:
                    continue  # the bus is away for a moment, or still starting
                if detail is not None:
                    pending.remove(step)
                    if detail or step.label == step.process:
                        self._reporter.done(step.label, detail)
            if pending and time.monotonic() >= deadline_s:
                raise self._timeout(pending)
            if pending:
                self._reporter.waiting(", ".join(step.label for step in pending))
                await asyncio.sleep(POLL_INTERVAL_S)

    def _tail(self, name: str) -> str:
        child = self._supervisor.children.get(name)
        return "".join(f"\n  | {line}" for line in (child.log_tail(TAIL_LINES) if child else []))

    def _start_failure(self, crash: Crash) -> OperatorError:
        child = self._supervisor.children[crash.name]
        tail = child.log_tail(TAIL_LINES)
        if crash.exit_code == OPERATOR_ERROR_EXIT_CODE and tail and tail[-1].startswith("tideway: "):
            return OperatorError(f"{crash.name}: {tail[-1].removeprefix('tideway: ')}")
        hint = ""
        if crash.name == "nats":
            hint = f" If its store is damaged, move {self._data.jetstream} away and start again."
        return OperatorError(
            f"{crash.name} does not start ({crash.reason}).{hint} Its log, {child.log_path}, ends:{self._tail(crash.name)}"
        )

    def _timeout(self, pending: list[Step]) -> OperatorError:
        what = ", ".join(step.label for step in pending)
        return OperatorError(
            f"Not ready in time: {what}. The log of {pending[0].process} ends:{self._tail(pending[0].process)}"
        )

    def _report_failed_models(self, models: ModelChecks) -> None:
        for name, model in models.failed.items():
            self._reporter.failed(f"model {name}", model.reason)
        for name, model in models.drained.items():
            self._reporter.warn(f"model {name} is on no instance: {model.reason}")
        if len(models.failed) == len(self._options.models):
            raise OperatorError("No model can be served; the reasons stand above.")

    def _report_drained(self, plan: PlacementPlan | None) -> None:
        """What an operator drained stays so over restarts; what scaling took out comes back by itself."""
        if plan is not None and (by_hand := [i for i in plan.draining if i not in plan.released]):
            self._reporter.warn(
                f"drained earlier, and left out: {', '.join(by_hand)} (tideway drain INSTANCE --undo brings one back)"
            )

    def _report_chosen(self, plan: PlacementPlan | None) -> None:
        """Its groups go before those that nodes make of themselves."""
        if plan is not None and plan.is_chosen:
            self._reporter.warn(
                "the placement was chosen earlier by a search or an operator, and stays, whatever --instances and "
                f"--tensor-parallel say ({ANOTHER_PLACEMENT})"
            )

    def _report_earlier_models(self, configured: dict[str, ModelSpec]) -> None:
        """What was added at run time, or asked for at an earlier start."""
        for name in configured.keys() - {spec.name for spec in self._options.models}:
            self._reporter.done(
                f"model {name}", f"is kept from an earlier start (DELETE /admin/models/{name} drops it)"
            )

    async def _replace_changed_models(self, http: httpx.AsyncClient, configured: dict[str, ModelSpec]) -> None:
        """Models of earlier starts whose names are asked for now with other checkpoints or engines, or on demand. Raises
        `OperatorError` where a new one is refused; the earlier one is put back then."""
        for spec in self._options.models:
            earlier = configured.get(spec.name)
            if earlier is None or (wanted := _wanted(earlier, spec)) == earlier:
                continue
            is_dropped = False
            try:
                await self._change_models(http, "DELETE", f"/{spec.name}")
                is_dropped = True
                await self._change_models(http, "POST", "", wanted)
            except OperatorError as error:
                if is_dropped:
                    await self._change_models(http, "POST", "", earlier)
                raise OperatorError(f"model {spec.name}: {error} It stays what it was, {_told(earlier)}.") from None
            self._reporter.done(f"model {spec.name}", f"is {_told(wanted)} now, and was {_told(earlier)}")

    async def _change_models(
        self, http: httpx.AsyncClient, method: str, path: str, spec: ModelSpec | None = None
    ) -> None:
        key = self._gateway.admin_api_key or self._data.credentials().admin_api_key
        # The API has the spec's own names, and takes what is absent for the default.
        body = None
        if spec is not None:
            default = msgspec.to_builtins(ModelSpec("", ""))
            body = {name: value for name, value in msgspec.to_builtins(spec).items() if value != default[name]}
        headers = {"authorization": f"Bearer {key}"} if self._has_api_keys else {}
        until_s = time.monotonic() + CHANGE_TIMEOUT_S
        while True:
            try:
                answer = await http.request(
                    method,
                    f"{self._options.address}/admin/models{path}",
                    json=body,
                    headers=headers,
                    timeout=CHANGE_TIMEOUT_S,
                )
            except httpx.HTTPError as error:
                raise OperatorError(f"The models cannot be changed: {error!r}.") from None
            if answer.status_code != 503 or time.monotonic() > until_s:
                break
            await asyncio.sleep(POLL_INTERVAL_S)  # placement runs, and may not lead yet
        if answer.status_code != 200:
            raise OperatorError(answer.json()["error"]["message"])

    def _say_ready(self, models: list[str]) -> None:
        options, say = self._options, self._reporter.say
        if not self._has_api_keys and not is_loopback(options.host):
            self._reporter.warn(
                f"anyone who reaches this machine on port {options.port} may use it: no API keys (TIDEWAY_API_KEYS) are set"
            )
        say(f"Ready in {self._reporter.elapsed_s:.0f} s on {', '.join(options.addresses.values())}")
        if not models:
            return
        path, body = first_request([spec for spec in options.models if spec.name in models])
        streamed = "-N " if "stream" in body else ""
        key = " \\\n    -H 'Authorization: Bearer YOUR_KEY'" if self._has_api_keys else ""
        say(f"\n  curl {streamed}{options.address}{path} -H 'Content-Type: application/json'{key} \\")
        say(f"    -d '{msgspec.json.encode(body).decode()}'\n")

    # -------------------------------------------------------------------------------------------------- keeping up

    def _probes(self, http: httpx.AsyncClient) -> list[Coroutine[Any, Any, None]]:
        timeout_s = self._gateway.watchdog_s
        if not timeout_s:
            return []
        host = preflight.local_host(self._gateway.metrics_host)
        checks = {
            service.spec.name: responds(http, f"http://{host}:{service.metrics_port}/live")
            for service in self._services
        }
        children = self._supervisor.children
        if "nats" in children:
            checks["nats"] = nats_greets(urlsplit(self._nats_url).port or 0)
        return [probe_for_ever(children[name], check, timeout_s) for name, check in checks.items()]

    async def _keep_nats_writing(self, http: httpx.AsyncClient) -> None:
        nats = self._supervisor.children["nats"]
        await restart_when_there_is_space(
            http,
            self._nats_monitor_port,
            self._data.jetstream,
            self._reporter.warn,
            lambda reason: nats.give_up(reason, signal.SIGTERM),
        )

    def on_crash(self, crash: Crash) -> None:
        if self._phase == "starting":
            if crash.exit_code == OPERATOR_ERROR_EXIT_CODE or crash.num_crashes >= MAX_CRASHES_AT_START:
                self._crashed_at_start = self._crashed_at_start or crash
        else:
            log = self._supervisor.children[crash.name].log_path
            self._reporter.warn(
                f"{crash.name} ended ({crash.reason}); it is started again in {crash.restart_in_s:.1f} s. Its log: {log}"
            )
        self._write_state()

    def on_restart(self, child: Child) -> None:
        if self._phase == "ready":
            self._reporter.done(f"{child.spec.name} was started again", f"process {child.pid}")
        self._write_state()

    def _write_state(self) -> None:
        ports = {service.spec.name: service.metrics_port for service in self._services}
        processes = [
            ProcessState(name=name, pid=child.pid, num_starts=child.num_starts, metrics_port=ports.get(name, 0))
            for name, child in self._supervisor.children.items()
        ]
        state = State(
            pid=os.getpid(),
            phase=self._phase,
            address=self._options.address,
            nats_url=self._nats_url,
            started_unix_s=self._started_unix_s,
            processes=processes,
        )
        try:
            self._data.write_state(state)
        except OSError as error:
            # A full disk must not keep processes from being restarted.
            self._reporter.warn(f"what `tideway status` shows is out of date: {error}")


def _wanted(earlier: ModelSpec, asked: ModelSpec) -> ModelSpec:
    """What a model of an earlier start is to be now. With the same checkpoint and engine, what is not said stays what it
    was."""
    if earlier.source != asked.source or (asked.engine and _engine(earlier) != _engine(asked)):
        return asked
    said = {name: value for name in _OPTIONS if (value := getattr(asked, name))}
    if asked.on_demand:
        said |= {"on_demand": True, "idle_s": asked.idle_s}
    return msgspec.structs.replace(earlier, **said)


def _engine(spec: ModelSpec) -> tuple[str, str, str]:
    return spec.engine or NATIVE, spec.engine_args, spec.engine_url


def _told(spec: ModelSpec) -> str:
    engine = "" if spec.is_native else f" on the engine {spec.engine}"
    options = "".join(f", {name.replace('_', ' ')} {value}" for name in _OPTIONS if (value := getattr(spec, name)))
    return f"{spec.source}{options}{engine}" + (f", on demand and idle for {spec.idle_s:g} s" if spec.on_demand else "")
