"""`tideway backup` and `tideway restore`: the durable content of a data folder in one archive, while Tideway is stopped."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from typing import Annotated

import typer

from tideway.data_folder import DataFolder, OperatorError
from tideway.options import DEFAULT_DATA_DIR

KEPT = ("nats", "credentials.json", "models.json", "cost_models")
"""Models, plan, files, batches and their lines are in the first; logs are not kept."""

Archive = Annotated[
    Path, typer.Argument(help="Tar archive. It contains credentials, so only its owner may read it (mode 600).")
]
DataDir = Annotated[
    Path, typer.Option("--data-dir", envvar="TIDEWAY_DATA_DIR", help="Data folder of a stopped Tideway.")
]
NewDataDir = Annotated[
    Path, typer.Option("--data-dir", envvar="TIDEWAY_DATA_DIR", help="Folder to restore into; not a data folder yet.")
]


def backup(archive: Archive, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Back up models, plan, files, batches and credentials into one archive. Tideway must be stopped."""
    data = DataFolder(data_dir)
    if not (data.path / KEPT[0]).is_dir():
        raise OperatorError(f"{data.path} is not a data folder of Tideway; name one with --data-dir.")
    data.acquire(", and back it up then")
    # Under another name until it is whole.
    partial = archive.with_name(archive.name + ".part")
    try:
        partial.unlink(missing_ok=True)
        # A file or link of somebody else's, where others may write too, gets no credentials.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for name in KEPT:
                    if (data.path / name).exists():
                        tar.add(data.path / name, name)
            os.fsync(file.fileno())
        partial.replace(archive)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OperatorError(f"{archive} could not be written: {error}.") from None
    finally:
        data.release()
    print(f"{data.path} is backed up in {archive} ({archive.stat().st_size / 2**20:.1f} MiB).")


def restore(archive: Archive, data_dir: NewDataDir = DEFAULT_DATA_DIR) -> None:
    """Restore a backup into a new data folder."""
    data = DataFolder(data_dir)
    is_ours = False
    try:
        with tarfile.open(archive) as tar:
            if KEPT[0] not in tar.getnames():
                raise OperatorError(f"{archive} is not a backup of Tideway.")
            is_new = not data.path.exists()
            data.prepare()
            data.acquire(", or restore into another --data-dir")
            is_ours = is_new
            _unpack(tar, data.path)
    except (OSError, tarfile.TarError, OperatorError) as error:
        if is_ours:
            shutil.rmtree(data.path, ignore_errors=True)
        if isinstance(error, OperatorError):
            raise
        # What is no archive at all has a line for each method of compression.
        reason = "it is not a backup of Tideway, or not a whole one" if "\n" in str(error) else str(error)
        raise OperatorError(f"{archive} could not be restored into {data.path}: {reason}.") from None
    finally:
        data.release()
    print(f"{archive} is restored into {data.path}; start it with `tideway up --data-dir {data.path}`.")


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    """Raises `OperatorError` where the folder has something that was kept already, and what unpacking raises."""
    if there := [name for name in KEPT if (folder / name).exists()]:
        raise OperatorError(f"{folder} has {', '.join(there)} already; move it away, or choose another --data-dir.")
    beside = folder / "restoring"
    try:
        # Beside, so that a next try finds nothing of one that failed.
        shutil.rmtree(beside, ignore_errors=True)
        tar.extractall(beside, [m for m in tar if m.name.split("/")[0] in KEPT], filter="data")
        for name in reversed(KEPT):
            if (beside / name).exists():
                (beside / name).rename(folder / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
