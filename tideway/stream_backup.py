"""`tideway backup-streams` and `tideway restore-streams`: what JetStream keeps on disk, from a NATS that runs.

JetStream's own snapshots are taken (`$JS.API.STREAM.SNAPSHOT` and `.RESTORE`,
https://docs.nats.io/reference/reference-protocols/nats_api_reference). A backup is a folder named after its time, with the
configuration (`NAME.json`) and a compressed snapshot (`NAME.snapshot`) of each stream. Each stream is as of one moment; two
streams are not of the same one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import nats
import nats.errors
import typer
from nats.aio.client import Client
from nats.js.errors import APIError

from shared.bus.nats_streams import is_temporary
from shared.bus.permissions import inbox_prefix
from shared.runtime.settings import BusSettings, load
from shared.runtime.tls import client_tls
from tideway.data_folder import OperatorError

USER = "backup"
API = "$JS.API.STREAM"
CALL_TIMEOUT_S = 30.0
PATIENCE_S, RESTORE_TIMEOUT_S, RETRY_S = 60.0, 5.0, 0.5
"""How long a restore waits for servers that are away, for one answer, and between two refusals."""
CONNECT_ATTEMPTS = 3
"""Attempts to reach each server."""
CHUNK_BYTES = 128 << 10
TIME_FORMAT = "%Y-%m-%dT%H-%M-%SZ"
PARTIAL = ".part"

_NAME_IN_USE = 10130
"""JetStream's error code where a stream that is to be restored is there, or is being restored."""

PERMISSIONS: dict[str, Any] = {
    "publish": {
        "allow": [
            f"{API}.LIST",
            f"{API}.RESTORE.*",
            f"{API}.SNAPSHOT.*",
            "$JS.SNAPSHOT.ACK.>",
            "$JS.SNAPSHOT.RESTORE.>",
        ]
    },
    "subscribe": {"allow": [inbox_prefix(USER) + ".>"]},
}
"""Permissions of a user for backups in NATS' configuration. It sees all that is stored, and can make no stream but by a
restore."""

Backups = Annotated[Path, typer.Argument(help="Folder for backups; each gets a folder named after its time.")]


def backup_streams(
    folder: Backups,
    keep: Annotated[int, typer.Option(min=1, help="Number of newest backups to keep.")] = 7,
) -> None:
    """Back up JetStream's streams on disk from a running NATS.

    TIDEWAY_NATS_URL says where it is; TIDEWAY_NATS_USER and TIDEWAY_NATS_PASSWORD are those of a user with the rights of
    `backup`, if NATS has users. The NATS of `tideway up` has no such user: stop it, and use `tideway backup`.
    """
    made = make_backup(load(BusSettings), folder)
    for old in sorted(_backups(folder))[:-keep]:
        shutil.rmtree(old)
    num_bytes = sum(file.stat().st_size for file in made.iterdir())
    print(f"{made} has {len([*made.glob('*.json')])} streams ({num_bytes / 2**20:.1f} MiB).")


def restore_streams(
    backup: Annotated[Path, typer.Argument(help="Backup to restore: a folder named after its time.")],
) -> None:
    """Restore JetStream's streams from a backup, with TIDEWAY_NATS_REPLICAS copies, into a NATS that has none of them.

    TIDEWAY_NATS_URL says where it is; TIDEWAY_NATS_USER and TIDEWAY_NATS_PASSWORD are as for `tideway backup-streams`.
    """
    names = restore_backup(load(BusSettings), backup)
    print(f"{len(names)} streams are as in {backup}.")


def _backups(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and path.suffix != PARTIAL and [*path.glob("*.json")]]


def make_backup(settings: BusSettings, folder: Path) -> Path:
    """Into a new folder below `folder`, which is returned. `OperatorError` if NATS does not give all of it."""
    made = folder / time.strftime(TIME_FORMAT, time.gmtime())
    # Under another name until it is whole.
    partial = made.with_name(made.name + PARTIAL)
    for left_over in folder.glob("*" + PARTIAL):
        shutil.rmtree(left_over)
    partial.mkdir(mode=0o700, parents=True)
    asyncio.run(_backup(settings, partial))
    return partial.rename(made)


def restore_backup(settings: BusSettings, backup: Path) -> list[str]:
    """The names of the streams, which were made. `OperatorError` if one is there already, or `backup` is none."""
    names = sorted(file.stem for file in backup.glob("*.json"))
    if not names:
        raise OperatorError(f"{backup} is no backup: it has no stream.")
    asyncio.run(_restore(settings, backup, names))
    return names


async def _backup(settings: BusSettings, partial: Path) -> None:
    async with _connected(settings) as client:
        for name in await _streams_on_disk(client):
            with (partial / f"{name}.snapshot").open("wb") as file:
                described = await _snapshot(client, name, file)
            (partial / f"{name}.json").write_text(json.dumps(described))


async def _restore(settings: BusSettings, backup: Path, names: list[str]) -> None:
    async with _connected(settings) as client:
        for name in names:
            described = json.loads((backup / f"{name}.json").read_text())
            # One server refuses several copies, and a cluster whose streams have one is worse than one server.
            described["config"]["num_replicas"] = settings.nats_replicas
            deliver_subject = await _begin_restore(client, name, described)
            with (backup / f"{name}.snapshot").open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    await client.request(deliver_subject, chunk, timeout=CALL_TIMEOUT_S)
            # An empty chunk is the last; its answer comes when the stream is there.
            await _call(client, deliver_subject, b"")


@asynccontextmanager
async def _connected(settings: BusSettings) -> AsyncIterator[Client]:
    """`OperatorError` for what keeps it from connecting, and for calls that NATS does not answer or permit."""
    refusals: list[str] = []
    caller = asyncio.current_task()
    assert caller is not None

    async def on_error(error: Exception) -> None:
        # Whoever is not permitted to call gets no answer, and need not wait for one.
        if "permissions violation" in str(error).lower():
            refusals.append(str(error))
            caller.cancel()

    try:
        client = await nats.connect(
            settings.nats_url.split(","),
            user=settings.nats_user or None,
            password=settings.nats_password or None,
            tls=client_tls(settings),
            inbox_prefix=inbox_prefix(settings.nats_user).encode(),
            error_cb=on_error,
            max_reconnect_attempts=CONNECT_ATTEMPTS,
            reconnect_time_wait=1,
        )
    except (OSError, nats.errors.Error) as error:
        raise OperatorError(f"NATS at {settings.nats_url} cannot be reached (TIDEWAY_NATS_URL): {error}.") from None
    try:
        yield client
    except asyncio.CancelledError:
        if not refusals:
            raise
        raise OperatorError(f"NATS at {settings.nats_url}: {'; '.join(refusals)}.") from None
    except (TimeoutError, nats.errors.Error) as error:
        raise OperatorError(f"NATS at {settings.nats_url}: {error or 'it does not answer'}.") from None
    finally:
        await client.close()


async def _call(client: Client, subject: str, body: bytes) -> dict[str, Any]:
    """JetStream's reply; `OperatorError` where that is a refusal."""
    reply: dict[str, Any] = json.loads((await client.request(subject, body, timeout=CALL_TIMEOUT_S)).data)
    if "error" in reply:
        raise OperatorError(f"NATS refuses {subject}: {reply['error'].get('description')}.")
    return reply


async def _begin_restore(client: Client, name: str, described: dict[str, Any]) -> str:
    """Begins to restore a stream; returns the subject for its snapshot.

    A cluster that misses a server refuses, or does not answer: it is asked again. It may have taken what it does not answer
    yet, and then finds the name taken by that: the late answer counts.
    """
    deadline = time.monotonic() + PATIENCE_S
    subject, body = f"{API}.RESTORE.{name}", json.dumps(described).encode()
    told, is_answer_due, inbox = "it does not answer", False, client.new_inbox()
    answers = await client.subscribe(inbox)
    while time.monotonic() < deadline:
        await client.publish(subject, body, reply=inbox)
        try:
            answer = await answers.next_msg(timeout=RESTORE_TIMEOUT_S)
        except nats.errors.TimeoutError:
            is_answer_due = True
            continue
        if not answer.data:
            raise nats.errors.NoRespondersError
        reply = json.loads(answer.data)
        if "error" not in reply:
            await answers.unsubscribe()
            return str(reply["deliver_subject"])
        error = APIError(**reply["error"])
        is_own = is_answer_due and error.err_code == _NAME_IN_USE
        if not is_own and not is_temporary(error):
            raise OperatorError(f"NATS refuses {subject}: {error.description}.")
        told = str(error.description)
        await asyncio.sleep(RETRY_S)
    wanted = f"{described['config']['num_replicas']} servers with room for it"
    raise OperatorError(f"NATS does not begin {subject} within {PATIENCE_S:g} s: {told}. It needs {wanted}.")


async def _streams_on_disk(client: Client) -> list[str]:
    """Those of Tideway. What is in memory says who lives, and is told anew."""
    names: list[str] = []
    offset = 0
    while True:
        page = await _call(client, f"{API}.LIST", json.dumps({"offset": offset}).encode())
        streams = page["streams"] or []
        names += [s["config"]["name"] for s in streams if s["config"]["storage"] == "file"]
        offset += len(streams)
        if not streams or offset >= page["total"]:
            return sorted(name for name in names if name.startswith(("KV_tideway_", "OBJ_tideway_")))


async def _snapshot(client: Client, name: str, file: BinaryIO) -> dict[str, Any]:
    """Writes the stream's snapshot; returns its configuration and state, which a restore needs."""
    inbox = client.new_inbox()
    chunks = await client.subscribe(inbox)
    request = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES}
    reply = await _call(client, f"{API}.SNAPSHOT.{name}", json.dumps(request).encode())
    while True:
        chunk = await chunks.next_msg(timeout=CALL_TIMEOUT_S)
        if not chunk.data:
            break
        file.write(chunk.data)
        if chunk.reply:
            # The server sends no more than a window of chunks that nobody has acknowledged.
            await client.publish(chunk.reply, b"")
    await chunks.unsubscribe()
    status = (chunk.headers or {}).get("Status", "204")
    if status != "204":
        raise OperatorError(f"the snapshot of {name} broke off: {(chunk.headers or {}).get('Description', status)}.")
    return {"config": reply["config"], "state": reply["state"]}
