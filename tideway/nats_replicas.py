"""`tideway nats-replicas N`: moves the streams of Tideway on a NATS cluster to N copies each, up or down, while all runs.

A stream may be changed by the role that makes it, so where users are named after roles the command connects as each of them,
with the passwords of NATS_GATEWAY_PASSWORD and so on; else as the one user that TIDEWAY_NATS_USER names.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
import typer

from shared.bus.interface import BusError
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_streams import Streams
from shared.bus.permissions import ROLES, declared_streams, role_of
from shared.runtime.settings import BusSettings, load
from tideway.data_folder import OperatorError

CONNECT_TIMEOUT_S = 10.0
COPY_TIMEOUT_S = 120.0
"""Without another copy that is whole."""
POLL_S = 0.25


def nats_replicas(
    number: Annotated[
        int, typer.Argument(metavar="1|3|5", help="Number of copies of each stream, each on its own server.")
    ],
) -> None:
    """Set the number of copies of each stream on a NATS cluster (TIDEWAY_NATS_URL), while everything runs."""
    if number not in (1, 3, 5):
        raise OperatorError(f"{number} copies: expected 1, 3 or 5.")
    if not os.environ.get("TIDEWAY_NATS_URL"):
        raise OperatorError(
            "Set TIDEWAY_NATS_URL: the NATS that `tideway up` starts is a single server with one copy of each stream."
        )
    asyncio.run(move_all(load(BusSettings), number, os.environ))


def users_of(settings: BusSettings, environment: Mapping[str, str]) -> Iterator[BusSettings]:
    """The settings of each user whose streams are to be moved. `OperatorError` where a role's password is missing."""
    if not settings.nats_user or role_of(settings.nats_user) is None:
        yield settings
        return
    for name, role in ROLES.items():
        if declared_streams(role):
            variable = f"NATS_{name.upper()}_PASSWORD"
            password = environment.get(variable) or (settings.nats_password if name == settings.nats_user else "")
            if not password:
                raise OperatorError(f"Set {variable}: the streams of {name} are changed by that user alone.")
            yield msgspec.structs.replace(settings, nats_user=name, nats_password=password)


async def move_all(settings: BusSettings, num_replicas: int, environment: Mapping[str, str]) -> None:
    """Prints a line a stream. Raises `OperatorError` where one cannot be moved."""
    moved: set[str] = set()
    for user in users_of(settings, environment):
        user = msgspec.structs.replace(user, nats_wait_s=0.0)
        try:
            bus = await asyncio.wait_for(NatsBus.connect(user, "operator", "command"), CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise OperatorError(
                f"NATS at {user.nats_url} does not answer, or refuses {user.nats_user or 'us'}."
            ) from None
        try:
            for name in await bus.streams.own_names():
                if name not in moved:
                    moved.add(name)
                    await _move(bus.streams, name, num_replicas)
        except BusError as error:
            raise OperatorError(f"{error.info.message}.") from None
        finally:
            await bus.close()


async def _move(streams: Streams, name: str, num_replicas: int) -> None:
    """Returns when all copies are whole."""
    had = await streams.set_replicas(name, num_replicas)
    num_current, give_up = 0, time.monotonic() + COPY_TIMEOUT_S
    while True:
        health = await streams.health(name)
        if health.num_copies == num_replicas and health.num_current >= num_replicas:
            break
        if health.num_current > num_current:
            num_current, give_up = health.num_current, time.monotonic() + COPY_TIMEOUT_S
        if time.monotonic() > give_up:
            raise OperatorError(f"{name} has {health.num_current} of {num_replicas} copies after {COPY_TIMEOUT_S:g} s.")
        await asyncio.sleep(POLL_S)
    copies = f"{num_replicas} {'copy' if num_replicas == 1 else 'copies'}"
    print(f"{name}: {copies}" + (f", had {had}" if had != num_replicas else ""), flush=True)
