"""What the shell completes beside names of commands and options: instances, models and requests of the gateway that the
command would talk to."""

from __future__ import annotations

from pathlib import Path

import typer

from tideway.data_folder import DataFolder, OperatorError
from tideway.operations import AdminClient

TIMEOUT_S = 1.0
NUM_REQUESTS = 50


def instances(ctx: typer.Context, incomplete: str) -> list[str]:
    return _named(ctx, incomplete, "instances")


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    return _named(ctx, incomplete, "models")


def requests(ctx: typer.Context, incomplete: str) -> list[str]:
    return _named(ctx, incomplete, "requests")


def _named(ctx: typer.Context, incomplete: str, kind: str) -> list[str]:
    """Nothing where nobody answers: whoever completes a line wants no error."""
    options = ctx.params
    try:
        data = DataFolder(Path(options.get("data_dir") or ".tideway"))
        with AdminClient.of(
            data, options.get("url") or "", options.get("api_key") or "", timeout_s=TIMEOUT_S
        ) as client:
            match kind:
                case "instances":
                    states = client.instances()
                    names = [one.instance_id for one in states.instances] + (states.draining or [])
                case "models":
                    names = [one.name for one in client.models().models]
                case _:
                    shown = client.latest_requests(limit=NUM_REQUESTS, model="", missed=False, running=False)
                    names = [one.id for one in shown.requests]
    except OperatorError:
        return []
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
