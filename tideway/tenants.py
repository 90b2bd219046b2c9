"""`tideway tenants`: weights and service of tenants, and use of their keys' limits."""

from __future__ import annotations

import re

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.messages.admin import TenantState
from tideway.console import LOOK, show_listing
from tideway.operations import AdminClient


def show_tenants(client: AdminClient, console: Console, *, as_json: bool) -> None:
    """Raises `OperatorError`."""
    states = client.tenants()
    empty = "There is no API key, and nobody asks for anything."
    show_listing(console, states, _table(states.tenants), as_json=as_json, empty=empty)
    if not as_json and any(re.fullmatch("key-[0-9a-f]{8}", one.tenant) for one in states.tenants):
        console.print("key-...: a key without a tenant's name, by the beginning of its SHA-256.")


def _table(tenants: list[TenantState]) -> Table:
    table = Table(title="Tenants, by service in the last minute", **LOOK)
    table.add_column("tenant", overflow="fold")
    for name in ("weight", "service", "share", "running", "waiting", "in flight", "tokens/min"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in tenants:
        in_flight = [(key.num_online, key.max_in_flight) for key in one.keys]
        tokens = [(key.num_tokens, key.tokens_per_minute) for key in one.keys]
        table.add_row(
            escape(one.tenant or "none"),
            f"{one.weight:g}",
            "?" if one.service_s is None else f"{one.service_s:.1f} s",
            "?" if one.share is None else f"{one.share:.0%}",
            "?" if one.num_running is None else str(one.num_running),
            "?" if one.num_waiting is None else str(one.num_waiting),
            _used(in_flight),
            _used(tokens),
        )
    return table


def _used(uses: list[tuple[int, int | None]]) -> str:
    """Use of each key's limit, one key per line."""
    return "\n".join(f"{used:,}/{limit:,}" for used, limit in uses if limit is not None) or "-"
