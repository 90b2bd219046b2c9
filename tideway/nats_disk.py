"""Whether the NATS server that is started here can write to its disk; and starting it again once it can.

nats-server (2.15.1) stores nothing more in a stream whose file it once could not write to, not even when there is space
again, until it is started anew; its /healthz tells. What it acknowledged before is on the disk, and outlasts that.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx

from tideway.readiness import PROBE_TIMEOUT_S

CHECK_INTERVAL_S = 2.0
MIN_FREE_BYTES = 64 * 1024**2
"""With less the server would be full again in a moment."""


async def write_error(http: httpx.AsyncClient, monitor_port: int) -> str:
    """What the server says; empty where all is well or nothing is known."""
    try:
        answer = await http.get(f"http://127.0.0.1:{monitor_port}/healthz", timeout=PROBE_TIMEOUT_S)
        error = str(answer.json().get("error", ""))
    except (httpx.HTTPError, ValueError):
        return ""
    return error if "write error" in error else ""


async def restart_when_there_is_space(
    http: httpx.AsyncClient,
    monitor_port: int,
    store: Path,
    tell: Callable[[str], None],
    restart: Callable[[str], None],
    min_free_bytes: int = MIN_FREE_BYTES,
) -> None:
    """For ever. `tell` once each time the disk is full; `restart` with the reason when it is not any more."""
    is_told = False
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        error = await write_error(http, monitor_port)
        if not error:
            is_told = False
        elif shutil.disk_usage(store).free >= min_free_bytes:
            restart("it could not write, and its disk has space again")
        elif not is_told:
            is_told = True
            tell(
                f"NATS cannot write: batches, files and changes of models wait for space on the disk of {store} ({error})"
            )
