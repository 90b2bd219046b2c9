"""`tideway route`: public names for one or several models."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from shared.messages.admin import RouteState
from tideway.console import LOOK, TableConsole, show_listing
from tideway.data_folder import DataFolder, OperatorError
from tideway.operations import AdminClient
from tideway.options import DEFAULT_DATA_DIR, AdminKey, AsJson, DataDir, GatewayUrl

app = typer.Typer(no_args_is_help=True, help="Set, delete and list routes: public names for one or several models.")


@app.command("list")
def list_routes(
    as_json: AsJson = False,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show all routes, their models, and which of these are down."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        states = client.routes()
    empty = "There are no routes. To set one: tideway route set NAME MODEL=WEIGHT ..."
    show_listing(TableConsole(), states, _table(states.routes), as_json=as_json, empty=empty, wrapped=LISTS)


LISTS = ("models", "mirrors", "fallbacks")
"""Columns with lists of models."""


def _table(routes: list[RouteState]) -> Table:
    table = Table("route", "models", "sticky", "mirrors", "fallbacks", "down", **LOOK)
    for route in routes:
        total = sum(route.arms.values())
        cells = (
            route.name,
            ", ".join(f"{model} {weight / total:.3g}" for model, weight in route.arms.items()),
            route.sticky,
            ", ".join(f"{model} {share:g}" for model, share in route.mirrors.items()),
            ", ".join(route.fallbacks),
            ", ".join(route.down),
        )
        table.add_row(*map(escape, cells))
    return table


@app.command("set")
def set_route(
    name: Annotated[
        str, typer.Argument(help="Name that clients use; may be the name of a model, which the route then takes over.")
    ],
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL[=WEIGHT]...", help="MODEL or MODEL=WEIGHT; the default weight is 1.")
    ],
    sticky: Annotated[
        str,
        typer.Option(help="Keep requests at one model: none, key (per API key) or user (per `user` of the request)."),
    ] = "none",
    mirror: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=SHARE",
            help="Also send this share of the requests to a model, and discard its answers; repeatable.",
        ),
    ] = None,
    fallback: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Model that answers while none of the others is up; repeatable, in order."),
    ] = None,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set a route: `set chat llama=9 new-llama=1` splits requests for chat; `set other-name llama` renames a model."""
    body = {
        "name": name,
        "arms": dict(_pair(text, 1.0) for text in models),
        "sticky": sticky,
        "mirrors": dict(_pair(text, None) for text in mirror or ()),
        "fallbacks": fallback or [],
    }
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        print(client.place)
        TableConsole().print(_table([client.set_route(body)]))


def _pair(text: str, default: float | None) -> tuple[str, float]:
    model, equals, number = text.rpartition("=")
    if not equals and default is not None:
        return text, default
    if not model or not re.fullmatch(r"\d+(\.\d*)?|\.\d+", number):
        raise OperatorError(f"{text!r}: expected a model, = and a number.")
    return model, float(number)


@app.command("delete")
def delete_route(
    name: Annotated[str, typer.Argument(help="Route to delete.")],
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete a route. If a model has the same name, it gets the requests again."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        print(client.place)
        client.delete_route(name)
        print(f"Route {name} is deleted.")
