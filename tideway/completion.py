"""Shell completion of arguments: instances, models and requests, from the gateway that the command would ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from tideway.data_folder import DataFolder, OperatorError
from tideway.operations import AdminClient
from tideway.options import DEFAULT_DATA_DIR

TIMEOUT_S = 1.0
NUM_REQUESTS = 50


def instances(ctx: typer.Context, incomplete: str) -> list[str]:
    def names(client: AdminClient) -> list[str]:
        states = client.instances()
        return [one.instance_id for one in states.instances] + (states.draining or [])

    return _matching(ctx, incomplete, names)


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    return _matching(ctx, incomplete, lambda client: [one.name for one in client.models().models])


def requests(ctx: typer.Context, incomplete: str) -> list[str]:
    return _matching(ctx, incomplete, lambda client: [one.id for one in client.latest_requests(NUM_REQUESTS).requests])


def _matching(ctx: typer.Context, incomplete: str, names: Callable[[AdminClient], list[str]]) -> list[str]:
    """Nothing where nobody answers: whoever completes a line wants no error."""
    options = ctx.params
    data = DataFolder(Path(options.get("data_dir") or DEFAULT_DATA_DIR))
    url, api_key = options.get("url") or "", options.get("api_key") or ""
    try:
        with AdminClient.of(data, url, api_key, timeout_s=TIMEOUT_S) as client:
            return [name for name in dict.fromkeys(names(client)) if name.startswith(incomplete)]
    except OperatorError:
        return []
