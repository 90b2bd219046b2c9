"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DATA_DIR = Path(".tideway")
SERVER_KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable of the API key of a server that is measured."""
DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir", envvar="TIDEWAY_DATA_DIR", help="Data folder with credentials, logs and JetStream's files."
    ),
]
GatewayUrl = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="TIDEWAY_URL",
        help="URL of a gateway. Default: the one that runs on the data folder, with its key.",
    ),
]
AdminKey = Annotated[
    str, typer.Option("--api-key", envvar="TIDEWAY_ADMIN_API_KEY", help="Key for /admin. Default: the data folder's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def is_default(context: typer.Context, option: str) -> bool:
    """Whether nobody gave this option, by the command line or the environment."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "DEFAULT"
