"""Traces of real services as tables of requests, or of rates.

CSV files are known by their columns: Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT,
lengths as Sarathi-Serve and Vidur publish them (num_prefill_tokens, num_decode_tokens, perhaps arrived_at), and rates per
model as derived from ServeGen (model, window_start_s, rate_rps). JSON lines are Mooncake's (timestamp in milliseconds,
input_length, output_length, hash_ids).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

ARRIVAL_COLUMNS = ("timestamp", "arrived_at", "arrival_s", "arrival_time")
PROMPT_COLUMNS = ("contexttokens", "num_prefill_tokens", "input_length", "request tokens", "prompt_tokens")
OUTPUT_COLUMNS = ("generatedtokens", "num_decode_tokens", "output_length", "response tokens", "output_tokens")
MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """The file is none of the known formats; the message says what was met and where."""


class TraceSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace, the part of it that is used, and how it is scaled to the machine."""

    path: str
    start_s: float = 0.0
    """Start of the part that is used, since the trace's start and in its time."""
    length_s: float | None = None
    """Length of that part; None: to the end."""
    time_scale: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds of the run for one second of the trace: 0.5 plays it twice as fast, bursts too. Rates stay what they are."""
    keep: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the requests that are kept, drawn by the seed: thins the load and leaves its shape in time."""
    rate_scale: Annotated[float, Meta(gt=0)] = 1.0
    """Factor on the rates of a trace of rates."""
    prompt_scale: Annotated[float, Meta(gt=0)] = 1.0
    output_scale: Annotated[float, Meta(gt=0)] = 1.0
    series: str = ""
    """Which model's rates, in a trace of several."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel arrays over requests, in the order of the file sorted by time; or rates."""

    at_s: np.ndarray | None = None
    """Seconds since the first; None where the file has lengths only."""
    prompt_tokens: np.ndarray = np.zeros(0, np.int64)
    output_tokens: np.ndarray = np.zeros(0, np.int64)
    blocks: list[list[int]] = []
    """Per request the identities of its prompt's blocks (equal where prompts begin alike), or no entries at all."""
    block_tokens: int = 0
    grid_s: float = 0.0
    """Above 0: times are rounded down to this grid, and requests within a cell are to be spread."""
    rates: dict[str, list[tuple[float, float]]] = {}
    """Per model (duration in seconds, requests per second), windows without traffic left out."""


def read_trace(path: Path) -> Trace:
    """Raises `TraceError` for what is no known format, `OSError` for what cannot be read."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            if path.suffix == ".jsonl":
                return _requests(path, (msgspec.json.decode(line) for line in file if line.strip()), is_jsonl=True)
            reader = csv.DictReader(file)
            columns = {name.strip().lower() for name in reader.fieldnames or ()}
            rows = ({key.strip().lower(): value for key, value in row.items() if key} for row in reader)
            if {"window_start_s", "rate_rps"} <= columns:
                return _rates(rows)
            return _requests(path, rows, is_jsonl=False)
        except (msgspec.DecodeError, UnicodeDecodeError, csv.Error) as error:
            raise TraceError(f"{path}: {error}") from None


def _requests(path: Path, rows: Iterable[Mapping[str, Any]], *, is_jsonl: bool) -> Trace:
    times: list[float] = []
    lengths: list[tuple[int, int]] = []
    blocks: list[list[int]] = []
    has_times, names = False, ["", "", ""]
    for number, row in enumerate(rows, start=1 if is_jsonl else 2):
        if not any(names):
            names = [
                next((name for name in known if name in row), "")
                for known in (ARRIVAL_COLUMNS, PROMPT_COLUMNS, OUTPUT_COLUMNS)
            ]
            if not (names[1] and names[2]):
                raise TraceError(f"{path}: no columns of prompt and output lengths among {', '.join(row)}")
            has_times = bool(names[0])
        try:
            prompt, output = int(float(row[names[1]])), int(float(row[names[2]]))
            if prompt < 1 or output < 1:
                continue  # Some traces keep requests that failed.
            if has_times:
                times.append(_seconds(row[names[0]]) / (1000 if is_jsonl else 1))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        lengths.append((prompt, output))
        if "hash_ids" in row:
            blocks.append(row["hash_ids"])
    if not lengths:
        raise TraceError(f"{path} holds no requests")
    tokens = np.array(lengths, np.int64)
    if not has_times:
        return Trace(prompt_tokens=tokens[:, 0], output_tokens=tokens[:, 1])
    at_s = np.array(times)
    order = np.argsort(at_s, kind="stable")
    at_s = at_s[order] - at_s[order[0]]
    distinct = np.unique(at_s)
    return Trace(
        at_s=at_s,
        prompt_tokens=tokens[order, 0],
        output_tokens=tokens[order, 1],
        blocks=[blocks[index] for index in order] if len(blocks) == len(lengths) else [],
        block_tokens=MOONCAKE_BLOCK_TOKENS if blocks else 0,
        grid_s=float(np.diff(distinct).min()) if is_jsonl and 1 < distinct.size < at_s.size else 0.0,
    )


def _seconds(value: Any) -> float:
    """A number, or a point in time with any number of digits after the second."""
    try:
        return float(value)
    except ValueError:
        found = re.fullmatch(r"(.{19})(\.\d+)?(.*)", value.strip())
        if found is None:
            raise
        whole, fraction, zone = found.groups()
        return datetime.fromisoformat(whole + (zone or "+00:00")).timestamp() + float(fraction or 0)


def _rates(rows: Iterable[Mapping[str, str]]) -> Trace:
    windows: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(rows, start=2):
        try:
            windows.setdefault(row.get("model", ""), []).append((float(row["window_start_s"]), float(row["rate_rps"])))
        except (TypeError, ValueError) as error:
            raise TraceError(f"line {number}: {error}") from None
    rates = {}
    for model, steps in windows.items():
        starts = sorted(start for start, _ in steps)
        width_s = float(np.diff(starts).min()) if len(starts) > 1 else 1.0
        rates[model] = [(width_s, rate) for _, rate in sorted(steps) if rate > 0]
    return Trace(rates=rates)


def spread(at_s: np.ndarray, grid_s: float, rng: np.random.Generator) -> np.ndarray:
    """Spreads the requests of each cell of the grid evenly over it, at a drawn offset. Stays sorted."""
    _, starts, counts = np.unique(at_s, return_index=True, return_counts=True)
    rank = np.arange(at_s.size) - np.repeat(starts, counts)
    offset = np.repeat(rng.random(starts.size), counts)
    return at_s + grid_s * (rank + offset) / np.repeat(counts, counts)
