#!/usr/bin/env python3
"""Puts the digests of deploy/images.env behind its tags, as the registries have them now.

    python3 deploy/pin_images.py            asks each registry, through `docker buildx`, and writes the file
    python3 deploy/pin_images.py --check    asks nobody; exits with 1 where an image has no digest

Needs Docker with buildx, and nothing of Tideway's. A digest is of the manifest list, so that it holds for every processor.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images.env"
_LINE = re.compile(
    r"^(?P<variable>[A-Z0-9_]+_IMAGE)=(?P<tagged>[^@\s]+:[^@\s:/]+)(?:@(?P<digest>sha256:[0-9a-f]{64}))?$"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class PinError(Exception):
    """The file is not as described, or a registry gave no digest."""


def read(text: str) -> dict[str, tuple[str, str]]:
    """NAME:TAG and digest (empty: none) by variable. Raises `PinError`."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        if (matched := _LINE.match(line)) is None:
            raise PinError(f"line {number}: expected VARIABLE_IMAGE=NAME:TAG[@sha256:...], got {line!r}.")
        found[matched["variable"]] = matched["tagged"], matched["digest"] or ""
    return found


def digest_of(tagged: str) -> str:
    """The digest that the registry has for the tag now. Raises `PinError`."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", tagged]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PinError(f"{tagged}: {error}") from None
    digest = done.stdout.strip()
    if done.returncode or not _DIGEST.fullmatch(digest):
        raise PinError(f"{tagged}: {done.stderr.strip() or f'no digest, but {digest!r}'}")
    return digest


def pinned(text: str, digests: dict[str, str]) -> str:
    """The file with these digests, by variable; comments and order stay."""
    images = read(text)
    lines = []
    for line in text.splitlines():
        variable = line.partition("=")[0]
        lines.append(f"{variable}={images[variable][0]}@{digests[variable]}" if variable in digests else line)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether each image has a digest")
    parser.add_argument("--file", type=Path, default=IMAGES)
    options = parser.parse_args()
    try:
        text = options.file.read_text()
        images = read(text)
        if options.check:
            without = [tagged for tagged, digest in images.values() if not digest]
            if without:
                raise PinError(f"no digest: {', '.join(without)}. Run deploy/pin_images.py.")
            return 0
        digests = {variable: digest_of(tagged) for variable, (tagged, _) in images.items()}
    except PinError as error:
        print(f"pin_images: {error}", file=sys.stderr)
        return 1
    options.file.write_text(pinned(text, digests))
    for variable, (tagged, before) in images.items():
        print(f"{tagged}: {digests[variable]}{'' if before in ('', digests[variable]) else f' (was {before})'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
