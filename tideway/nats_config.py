"""`tideway nats-config`: the users of a NATS server, one per role, with permissions from the catalogue of subjects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from shared.bus.permissions import ROLES, TOKEN, permissions, role_of
from tideway import stream_backup
from tideway.data_folder import OperatorError


def nats_users(passwords: Mapping[str, str], nodes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The `users` of a server's `authorization`. `passwords`: by user. `nodes`: the node of a worker that is kept to its
    own, by user."""
    users = []
    for user, password in passwords.items():
        role = role_of(user)
        assert role is not None, user
        may = permissions(role, user, nodes.get(user, ""))
        publish: dict[str, Any] = {"allow": may.publish}
        if may.never_publish:
            publish["deny"] = may.never_publish
        rights = {"publish": publish, "subscribe": {"allow": may.subscribe}}
        users.append({"user": user, "password": password, "permissions": rights})
    return users


def users_file(node_ids: list[str]) -> str:
    """File for `include` in a server's configuration. Passwords are variables of the server's environment, with their
    values in double quotes: NATS_GATEWAY_PASSWORD for user `gateway`. With `node_ids` each node has a worker of its own,
    `worker-NODE` with NATS_WORKER_NODE_PASSWORD, and there is no common one. `OperatorError` if a node cannot be one, or
    two have the same variable."""
    for node_id in node_ids:
        if not TOKEN.fullmatch(node_id):
            raise OperatorError(f"--node {node_id!r}: a TIDEWAY_NODE_ID has A-Z, a-z, 0-9, _ and - only.")
    nodes = {f"worker-{node_id}": node_id for node_id in node_ids}
    names = [name for name in ROLES if name != "worker" or not nodes] + list(nodes)
    passwords: dict[str, str] = {}
    for name in names:
        variable = f"$NATS_{re.sub(r'[^A-Z0-9]', '_', name.upper())}_PASSWORD"
        if variable in passwords.values():
            raise OperatorError(f"--node: {variable[1:]} would be the password of {name} and of another worker.")
        passwords[name] = variable
    text = json.dumps({"users": nats_users(passwords, nodes)}, indent=2)
    # In quotes a variable would be its own name.
    text = re.sub(r'"(\$NATS_\w+)"', r"\1", text)
    return f"# Made by `tideway nats-config`.\nauthorization: {text}\n"


CHART_NODE = "NODE"
"""Stands for a worker's TIDEWAY_NODE_ID in `chart_permissions`; no subject has it otherwise."""


def chart_permissions() -> str:
    """JSON of what each role may do, a worker of the node `CHART_NODE`, and the user that makes backups, for the Helm chart,
    which knows the nodes only when it is rendered: `{user: permissions}`, each as in a server's configuration."""
    nodes = {f"worker-{CHART_NODE}": CHART_NODE}
    users = nats_users(dict.fromkeys([*ROLES, *nodes], ""), nodes)
    may = {user["user"]: user["permissions"] for user in users} | {stream_backup.USER: stream_backup.PERMISSIONS}
    return json.dumps(may, indent=1) + "\n"


def nats_config(
    node: Annotated[
        list[str] | None,
        typer.Option(
            help="TIDEWAY_NODE_ID of a worker; repeatable. Each worker gets a user that receives only its own messages."
        ),
    ] = None,
    chart: Annotated[
        bool,
        typer.Option(
            "--chart",
            help="Print the roles' permissions as the Helm chart reads them, instead of a server's configuration.",
        ),
    ] = False,
) -> None:
    """Print the users for a NATS server's configuration, one for each role."""
    if chart and node:
        raise OperatorError("--chart names no nodes: the chart fills them in.")
    print(chart_permissions() if chart else users_file(node or []), end="")
