"""How well the traffic to come is known from what was: the error of several forecasts of a model's rate, on the rates of
production models over two weeks (ServeGen's table). No step and no request: it says which traffic replacement should judge a
change by.

A forecast for the next time is the rate that one of these says, each made of nothing but the past:

    last window     the last 10 minutes go on
    last hour       its mean goes on
    horizons        the mean of the last 1, 2, 4, 8 and 16 windows, as trials weigh the past (shared/placement/stretches.py)
    trend           a straight line through the last hour, half of whose slope goes on
    yesterday       the same time of yesterday
    scaled          the same, times the last hour over that hour of yesterday
    daily change    the last 20 minutes, and half of what came to them yesterday
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.placement.day import DAY_S, TRACES, WINDOW_S, read_rates
from bench.placement.experiments import Table
from bench.reporting import Target
from shared.placement.stretches import NUM_HORIZONS

DAY = int(DAY_S / WINDOW_S)
HOUR = int(3600.0 / WINDOW_S)
AHEAD_MIN = (10, 30, 60, 180)
HORIZONS = "horizons"

Forecast = Callable[[np.ndarray, int], float]
"""Mean rate of so many windows from now on, given the rates until now."""


def _trend(past: np.ndarray, num: int) -> float:
    slope = float(np.polyfit(np.arange(HOUR), past[-HOUR:], 1)[0])
    return max(0.0, float(past[-2:].mean()) + 0.5 * slope * num / 2)


def _yesterday(past: np.ndarray, num: int) -> float:
    return float(past[-DAY:][:num].mean())


def _scaled(past: np.ndarray, num: int) -> float:
    return _yesterday(past, num) * float(past[-HOUR:].mean()) / float(past[-DAY - HOUR : -DAY].mean())


def _daily_change(past: np.ndarray, num: int) -> float:
    change = _yesterday(past, num) - float(past[-DAY - 2 : -DAY].mean())
    return max(0.0, float(past[-2:].mean()) + 0.5 * change)


FORECASTS: dict[str, Forecast] = {
    "last window": lambda past, num: float(past[-1]),
    "last hour": lambda past, num: float(past[-HOUR:].mean()),
    HORIZONS: lambda past, num: float(np.mean([past[-(1 << power) :].mean() for power in range(NUM_HORIZONS)])),
    "trend": _trend,
    "yesterday": _yesterday,
    "scaled": _scaled,
    "daily change": _daily_change,
}


def errors(rates: np.ndarray, forecast: Forecast, num: int) -> np.ndarray:
    """Absolute errors of forecasts of the mean of `num` windows, at each window after the first day and an hour, over the
    mean of all rates."""
    begins = range(DAY + HOUR, len(rates) - num + 1)
    return np.array([abs(forecast(rates[:at], num) - rates[at : at + num].mean()) for at in begins]) / rates.mean()


def _error(known: Sequence[np.ndarray], forecast: Forecast, minutes: int) -> float:
    num = minutes * 60 // int(WINDOW_S)
    return float(np.mean(np.concatenate([errors(rates, forecast, num) for rates in known])))


def compare(folder: Path = TRACES) -> Table:
    known = {name: rates for name, rates in read_rates(folder).items() if len(rates) > 2 * DAY}
    found = {
        name: [_error([*known.values()], forecast, minutes) for minutes in AHEAD_MIN]
        for name, forecast in FORECASTS.items()
    }
    rows: list[dict[str, object]] = [
        {"forecast": name} | {f"next {minutes} min": f"{error:.3f}" for minutes, error in zip(AHEAD_MIN, own, strict=True)}
        for name, own in found.items()
    ]  # fmt: skip
    targets = [
        Target(name=f"error for the next {minutes} min, horizons over the best forecast",
               value=found[HORIZONS][index] / min(own[index] for own in found.values()), limit=1.05)
        for index, minutes in enumerate(AHEAD_MIN)
        if minutes >= 60
    ]  # fmt: skip
    num_days = min(map(len, known.values())) // DAY
    notes = f"mean absolute error over the mean rate, of {', '.join(sorted(known))} over {num_days} days"
    return Table(name="forecast", rows=rows, targets=targets, notes=notes)
