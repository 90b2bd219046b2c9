"""What the turns say: each server's figures, their ratios to the best peer's, the table and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from bench.reporting import Target, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFILL = "prefill"
"""What names of cases begin with that are about prompts: their rate is that of the first token."""
LEAST_THROUGHPUT_RATIO = 1.2
"""Least share of the best peer's rate."""
MOST_LATENCY_RATIO = 1.0
"""Largest multiple of the same peer's P99."""


class Case(msgspec.Struct, frozen=True):
    """Random prompts, greedy, of which `concurrency` are answered at once; all answers have `output_tokens`."""

    name: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    num_prompts: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one turn."""

    server: str
    case: str
    round: int
    duration_s: float
    output_tokens_per_s: float
    mean_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    p99_tpot_ms: float
    p50_itl_ms: float
    """Median of the gaps between chunks of a stream; TPOT is a stream's mean, which does not see that it stands still."""
    p99_itl_ms: float
    max_itl_ms: float
    others_cores: float
    """What processes outside of this bench took meanwhile."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A server in a case, over all turns. Latencies in milliseconds: means of the turns' figures."""

    server: str
    case: str
    output_tokens_per_s: float
    mean_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    p99_tpot_ms: float
    p50_itl_ms: float
    p99_itl_ms: float
    max_itl_ms: float

    @property
    def rate(self) -> float:
        """Output tokens per second, or first tokens."""
        return 1e3 / self.mean_ttft_ms if self.case.startswith(PREFILL) else self.output_tokens_per_s


def turns(servers: Sequence[str]) -> list[str]:
    """The order of a round, A B B A or A B C C B A, so that a steady drift of the machine's speed cancels."""
    return [*servers, *reversed(servers)]


def rows(measured: Sequence[Measured]) -> list[Row]:
    """By case and server, in the order in which they came first."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for each in measured:
        found.setdefault((each.case, each.server), []).append(each)
    cases = list(dict.fromkeys(each.case for each in measured))
    made = [_row(turns) for turns in found.values()]
    return sorted(made, key=lambda row: cases.index(row.case))


def _row(turns: Sequence[Measured]) -> Row:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(turn, name) for turn in turns)

    return Row(
        server=turns[0].server,
        case=turns[0].case,
        # The same number of tokens in each turn: rates add up as times do.
        output_tokens_per_s=statistics.harmonic_mean([turn.output_tokens_per_s for turn in turns]),
        mean_ttft_ms=mean("mean_ttft_ms"),
        p99_ttft_ms=mean("p99_ttft_ms"),
        mean_tpot_ms=mean("mean_tpot_ms"),
        p99_tpot_ms=mean("p99_tpot_ms"),
        p50_itl_ms=mean("p50_itl_ms"),
        p99_itl_ms=mean("p99_itl_ms"),
        max_itl_ms=max(turn.max_itl_ms for turn in turns),
    )


def best_peer(rows: Sequence[Row], case: str, own: str) -> Row | None:
    """The one with the highest rate; None: there is no other server."""
    return max((row for row in rows if row.case == case and row.server != own), key=lambda row: row.rate, default=None)


def targets(rows: Sequence[Row], own: str) -> list[Target]:
    """What `own` is to reach beside the best peer of each case."""
    found = []
    for row in rows:
        peer = best_peer(rows, row.case, own)
        if row.server != own or peer is None:
            continue
        note = f"against {peer.server}"
        ratio = row.rate / peer.rate
        found.append(
            Target(
                name=f"{row.case}: tokens per second", value=ratio, limit=LEAST_THROUGHPUT_RATIO, is_least=True,
                note=note,
            )
        )  # fmt: skip
        for name, value, other in (
            ("P99 TTFT", row.p99_ttft_ms, peer.p99_ttft_ms),
            ("P99 TPOT", row.p99_tpot_ms, peer.p99_tpot_ms),
        ):
            if other > 0:  # one output token has no time per further one
                found.append(
                    Target(name=f"{row.case}: {name}", value=value / other, limit=MOST_LATENCY_RATIO, note=note)
                )
    return found


def page(rows: Sequence[Row], own: str) -> list[str]:
    """Lines of Markdown."""
    header = (
        "case", "server", "output tok/s", f"{own} / it", "mean TTFT ms", "P99", "mean TPOT ms", "P99", "P50 ITL ms",
        "P99", "longest",
    )  # fmt: skip
    lines = []
    for row in rows:
        mine = next((each for each in rows if each.case == row.case and each.server == own), None)
        ratio = "" if mine is None else f"{mine.rate / row.rate:.2f}"
        lines.append(
            (
                row.case, row.server, f"{row.output_tokens_per_s:.1f}", ratio, f"{row.mean_ttft_ms:.0f}",
                f"{row.p99_ttft_ms:.0f}", f"{row.mean_tpot_ms:.1f}", f"{row.p99_tpot_ms:.1f}",
                f"{row.p50_itl_ms:.1f}", f"{row.p99_itl_ms:.1f}", f"{row.max_itl_ms:.0f}",
            )
        )  # fmt: skip
    return table(header, lines)


def draw(rows: Sequence[Row], title: str) -> Figure:
    """Bars: a group a case, a colour a server. Raises `PlotsUnavailable`."""
    from tideway.bench.plots import new_figure

    figure, axes = new_figure(3, title)
    cases = list(dict.fromkeys(row.case for row in rows))
    servers = list(dict.fromkeys(row.server for row in rows))
    width = 0.8 / len(servers)
    for one, (label, name) in zip(
        axes,
        (("output tok/s", "output_tokens_per_s"), ("P99 TTFT, ms", "p99_ttft_ms"), ("mean TPOT, ms", "mean_tpot_ms")),
        strict=True,
    ):
        for number, server in enumerate(servers):
            of_server = {row.case: getattr(row, name) for row in rows if row.server == server}
            places = [index + number * width for index, case in enumerate(cases) if case in of_server]
            one.bar(places, [of_server[case] for case in cases if case in of_server], width, label=server)
        one.set_ylabel(label)
        one.set_yscale("log")
    axes[0].legend()
    axes[-1].set_xticks([index + 0.4 - width / 2 for index in range(len(cases))], cases)
    axes[-1].set_xlabel("")
    return figure
