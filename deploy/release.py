#!/usr/bin/env python3
"""Makes a release: version, section of the changelog, wheel, images, list of parts, tag.

    python3 deploy/release.py 0.2.0 --dry-run     says what would be done, and does nothing
    python3 deploy/release.py 0.2.0               does it, on a clean checkout of main, and pushes nothing
    python3 deploy/release.py 0.2.0 --registry ghcr.io/me    names the images so

In order: what must hold; .ci/run; pyproject.toml and CHANGELOG.md; wheel and list of parts in dist/; the images, from the
digests of deploy/images.env; commit and tag. What it cannot take back, pushing, it prints at the end. If a step fails,
`git checkout .` is as before.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from pin_images import IMAGES, PinError
from pin_images import read as read_images

REPOSITORY = Path(__file__).resolve().parents[1]
SERVICES = ("gateway", "scheduler", "placement", "worker")
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(?:a|b|rc)\d+)?")
_UNRELEASED = "## [Unreleased]\n"


class ReleaseError(Exception):
    """What must hold before a release does not."""


def next_version(project: str, version: str) -> str:
    """pyproject.toml with the version, which must be a later one unless nothing was released under it. Raises
    `ReleaseError`."""
    found = re.search(r'^version = "([^"]+)"$', project, re.MULTILINE)
    if found is None:
        raise ReleaseError("pyproject.toml has no version.")
    now, then = (_VERSION.fullmatch(text) for text in (found[1], version))
    if then is None:
        raise ReleaseError(f"{version!r} is no version, such as 0.2.0 or 1.0.0rc1.")
    if now is not None and tuple(map(int, then.groups())) < tuple(map(int, now.groups())):
        raise ReleaseError(f"{version} comes before {found[1]}, which pyproject.toml has.")
    return project[: found.start(1)] + version + project[found.end(1) :]


def released(changelog: str, version: str, today: str) -> str:
    """CHANGELOG.md with what is unreleased under the version. Raises `ReleaseError`."""
    if f"## [{version}]" in changelog:
        raise ReleaseError(f"CHANGELOG.md has a section of {version} already.")
    before, found, after = changelog.partition(_UNRELEASED)
    if not found or not re.match(r"\s*### ", after):
        raise ReleaseError("CHANGELOG.md has nothing under [Unreleased].")
    return f"{before}{_UNRELEASED}\n## [{version}] - {today}\n{after}"


def section(changelog: str, version: str) -> str:
    """What the changelog says of the version."""
    _, _, after = changelog.partition(f"## [{version}]")
    return re.split(r"^## ", after.partition("\n")[2], maxsplit=1, flags=re.MULTILINE)[0].strip()


def image_commands(version: str, registry: str, images: dict[str, tuple[str, str]]) -> list[list[str]]:
    """`docker build` of each service, from the base image by its digest."""
    tagged, digest = images["PYTHON_IMAGE"]
    prefix = f"{registry.rstrip('/')}/" if registry else ""
    return [
        [
            "docker", "build", "--file", f"services/{service}/Dockerfile",
            "--build-arg", f"PYTHON_IMAGE={tagged}@{digest}" if digest else f"PYTHON_IMAGE={tagged}",
            "--label", f"org.opencontainers.image.version={version}",
            "--tag", f"{prefix}tideway-{service}:{version}", ".",
        ]
        for service in SERVICES
    ]  # fmt: skip


def check(version: str) -> None:
    """Raises `ReleaseError`."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    if git("status", "--porcelain"):
        raise ReleaseError("The checkout has changes that are not committed.")
    if (branch := git("branch", "--show-current").strip()) != "main":
        raise ReleaseError(f"Releases are made of main, not of {branch!r}.")
    if git("tag", "--list", f"v{version}"):
        raise ReleaseError(f"There is a tag v{version} already.")
    without = [tagged for tagged, digest in read_images(IMAGES.read_text()).values() if not digest]
    if without:
        raise ReleaseError(f"Images without a digest: {', '.join(without)}. Run deploy/pin_images.py, and commit.")


def run(command: Sequence[str], is_dry: bool) -> None:
    print("+", *command, flush=True)
    if not is_dry:
        subprocess.run(command, cwd=REPOSITORY, check=True)


def release(version: str, registry: str, is_dry: bool) -> None:
    """Raises `ReleaseError`, `PinError` or `CalledProcessError`."""
    project, changelog = REPOSITORY / "pyproject.toml", REPOSITORY / "CHANGELOG.md"
    new_project = next_version(project.read_text(), version)
    new_changelog = released(changelog.read_text(), version, date.today().isoformat())
    if is_dry:
        try:
            check(version)
        except ReleaseError as error:
            print(f"would stop here: {error}")
    else:
        check(version)
    run([".ci/run"], is_dry)
    print(f"+ version {version} in pyproject.toml; in CHANGELOG.md:\n\n{section(new_changelog, version)}\n")
    if not is_dry:
        project.write_text(new_project)
        changelog.write_text(new_changelog)
    run(["make", "--no-print-directory", "lock", "wheel", "sbom"], is_dry)
    images = image_commands(version, registry, read_images(IMAGES.read_text()))
    for command in images:
        run(command, is_dry)
    run(["git", "commit", "--all", "--message", f"Release {version}"], is_dry)
    run(["git", "tag", "--annotate", f"v{version}", "--message", section(new_changelog, version)], is_dry)
    print("\nWhat is left, for it cannot be taken back:")
    print(f"  git push origin main v{version}")
    for command in images:
        print(f"  docker push {command[command.index('--tag') + 1]}")
    print(f"  python -m twine upload dist/tideway-{version}-*.whl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--registry", default="", help="of the images, such as ghcr.io/me; none: local names")
    options = parser.parse_args()
    try:
        release(options.version, options.registry, options.dry_run)
    except (ReleaseError, PinError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"release: {' '.join(map(str, error.cmd))} failed ({error.returncode})", file=sys.stderr)
        return error.returncode or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
