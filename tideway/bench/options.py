"""Options that become a `Workload`: short specifications, or a file in TOML or JSON."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.messages.requests import RequestClass
from tideway.bench.arrivals import Arrivals, Closed, Constant, Gamma, Phase, Phases, Poisson, Replay
from tideway.bench.command import ARRIVALS, LENGTHS
from tideway.bench.lengths import Fixed, Lengths, LogNormal, Uniform, Zipf
from tideway.bench.traces import TraceSource
from tideway.bench.workload import StreamSpec, Workload
from tideway.data_folder import OperatorError

T = TypeVar("T")


def parse_arrivals(text: str, trace_options: dict[str, Any] | None = None) -> Arrivals:
    """`trace_options`: fields of `TraceSource` for trace:PATH. Raises `OperatorError`."""
    kind, _, rest = text.partition(":")
    if kind == "trace" and rest:
        return _checked(text, ARRIVALS, lambda: Replay(trace=_source(rest, trace_options)))
    makers: dict[str, Callable[..., Arrivals]] = {
        "poisson": lambda rate: Poisson(rate_rps=rate),
        "gamma": lambda rate, cv: Gamma(rate_rps=rate, cv=cv),
        "constant": lambda rate: Constant(rate_rps=rate),
        "closed": lambda concurrency: Closed(concurrency=int(concurrency)),
        "onoff": lambda on_s, on_rate, off_s, off_rate=0.0, cv=1.0: Phases(
            phases=[Phase(duration_s=on_s, rate_rps=on_rate), Phase(duration_s=off_s, rate_rps=off_rate)], cv=cv
        ),
    }
    return _checked(text, ARRIVALS, lambda: makers[kind](*(float(word) for word in rest.split(":"))))


def parse_lengths(text: str) -> Lengths:
    """Raises `OperatorError`."""
    kind, _, rest = text.partition(":")
    if text.isdecimal():
        return _checked(text, LENGTHS, lambda: Fixed(tokens=int(text)))
    makers: dict[str, Callable[..., Lengths]] = {
        "uniform": lambda low, high: Uniform(min_tokens=int(low), max_tokens=int(high)),
        "lognormal": lambda mean, cv, low=1.0, high=1 << 20: LogNormal(
            mean_tokens=mean, cv=cv, min_tokens=int(low), max_tokens=int(high)
        ),
        "zipf": lambda alpha, low, high: Zipf(alpha=alpha, min_tokens=int(low), max_tokens=int(high)),
    }
    return _checked(text, LENGTHS, lambda: makers[kind](*(float(word) for word in rest.split(":"))))


def _source(path: str, trace_options: dict[str, Any] | None) -> TraceSource:
    return TraceSource(path=path, **{name: value for name, value in (trace_options or {}).items() if value is not None})


def _checked(text: str, known: str, make: Callable[[], T]) -> T:
    """What `make` returns, its bounds checked: msgspec checks them only where it converts."""
    try:
        made = make()
        return msgspec.convert(msgspec.to_builtins(made), type(made))
    except (KeyError, TypeError, ValueError) as error:
        reason = f" ({error})" if isinstance(error, msgspec.ValidationError) else ""
        raise OperatorError(f"{text!r} is none of: {known}{reason}") from None


def parse_weights(words: Sequence[str]) -> dict[str, float]:
    """NAME or NAME=WEIGHT. Raises `OperatorError`."""
    weights = {}
    for word in words:
        name, _, weight = word.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise OperatorError(f"--model {word}: the weight must be a number") from None
    return weights


def read_workload(path: Path) -> Workload:
    """A `Workload` as TOML (or JSON, by the file's name). Raises `OperatorError`."""
    try:
        content = path.read_bytes()
        plain = msgspec.json.decode(content) if path.suffix == ".json" else tomllib.loads(content.decode())
        return msgspec.convert(plain, Workload)
    except (OSError, ValueError) as error:
        raise OperatorError(f"{path}: {error}") from None


def simple_workload(
    *,
    models: dict[str, float],
    arrivals: str,
    prompt_tokens: str,
    output_tokens: str,
    lengths_from: str,
    trace_options: dict[str, Any],
    offline_arrivals: str,
    offline_prompt_tokens: str,
    offline_output_tokens: str,
    offline_lengths_from: str,
    offline_requests: int | None,
    num_requests: int | None,
    duration_s: float | None,
    seed: int,
    **shared: Any,
) -> Workload:
    """One stream of people who wait and perhaps one of work that may; `shared`: more fields of the online stream.
    Raises `OperatorError`."""
    scales = {name: trace_options[name] for name in ("prompt_scale", "output_scale")}
    limits = {"max_total_tokens": shared.pop("max_total_tokens", None)}
    streams = []
    for request_class, how, prompt, output, source, num in (
        (RequestClass.ONLINE, arrivals, prompt_tokens, output_tokens, lengths_from, num_requests),
        (
            RequestClass.OFFLINE,
            offline_arrivals,
            offline_prompt_tokens,
            offline_output_tokens,
            offline_lengths_from,
            offline_requests,
        ),
    ):
        if not how:
            continue
        parsed = parse_arrivals(how, trace_options)
        if not isinstance(parsed, Replay) and not source:
            prompt, output = prompt or "256", output or "64"
        streams.append(
            StreamSpec(
                name=request_class.value,
                request_class=request_class,
                models=models,
                arrivals=parsed,
                num_requests=num,
                lengths_from=_source(source, scales) if source else None,
                prompt_tokens=parse_lengths(prompt) if prompt else None,
                output_tokens=parse_lengths(output) if output else None,
                **limits,
                **(shared if request_class is RequestClass.ONLINE else {}),
            )
        )
    if not streams:
        raise OperatorError("nothing to send: give --arrivals, --offline-arrivals or --workload")
    try:
        workload = Workload(streams=streams, duration_s=duration_s, seed=seed)
        return msgspec.convert(msgspec.to_builtins(workload), Workload)
    except msgspec.ValidationError as error:
        raise OperatorError(str(error)) from None
