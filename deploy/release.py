#!/usr/bin/env python3
"""Makes a release: version, section of the changelog, wheel, images, chart, lists of parts, tag.

    python3 deploy/release.py 0.2.0 --dry-run     says what would be done, and does nothing
    python3 deploy/release.py 0.2.0               does it, on a clean checkout of main, and pushes nothing
    python3 deploy/release.py 0.2.0 --registry ghcr.io/me    names the images so

In order: what must hold; .ci/run; the version in all files that have it, and the section of CHANGELOG.md; tests/deploy with
that version; wheel and chart in dist/; the images, from the digests of deploy/images.env and from the locks, and the list of
the parts of each; commit and tag. What it cannot take back, pushing and signing, it prints at the end. If a step fails,
`git checkout .` is as before.

An image without a digest in deploy/images.env stops it: run deploy/pin_images.py before, where the registries are reached.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from pin_images import IMAGES, PinError
from pin_images import read as read_images

REPOSITORY = Path(__file__).resolve().parents[1]
TOOLS = REPOSITORY / ".tideway/tools/bin"
CHART = "deploy/helm/tideway"
BUILDS = {
    "tideway-gateway": ("gateway",),
    "tideway-scheduler": ("scheduler",),
    "tideway-placement": ("placement",),
    "tideway-worker": ("worker",),
    # For pools of GPUs; torch is that of the package index, which has CUDA.
    "tideway-worker-cuda": ("worker", "EXTRA=cuda", "TORCH_INDEX_URL="),
}
"""Images by name: whose Dockerfile, and build arguments. The chart and docker-compose take these."""
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


def chart_version(chart: str, version: str) -> str:
    """Chart.yaml with the version, and with the tag of the images. Raises `ReleaseError`."""
    semantic = re.sub(r"(?<=\d)(a|b|rc)(\d+)$", r"-\1.\2", version)  # what Helm takes for a version
    for field, value in (("version", semantic), ("appVersion", version)):
        chart, count = re.subn(rf"^{field}: .*$", f"{field}: {value}", chart, flags=re.MULTILINE)
        if count != 1:
            raise ReleaseError(f"{CHART}/Chart.yaml has {count} lines of {field!r}.")
    return chart


def new_texts(version: str, today: str) -> dict[Path, str]:
    """The files that have the version, as the release has them. Raises `ReleaseError`."""
    project, chart, changelog = (
        REPOSITORY / name for name in ("pyproject.toml", f"{CHART}/Chart.yaml", "CHANGELOG.md")
    )
    return {
        project: next_version(project.read_text(), version),
        chart: chart_version(chart.read_text(), version),
        changelog: released(changelog.read_text(), version, today),
    }


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
    """`docker build` of each image, from the base image by its digest."""
    tagged, digest = images["PYTHON_IMAGE"]
    base = f"PYTHON_IMAGE={tagged}@{digest}" if digest else f"PYTHON_IMAGE={tagged}"
    prefix = f"{registry.rstrip('/')}/" if registry else ""
    return [
        [
            "docker", "build", "--file", f"services/{service}/Dockerfile",
            *(word for argument in (base, *arguments) for word in ("--build-arg", argument)),
            "--label", f"org.opencontainers.image.version={version}",
            "--tag", f"{prefix}{name}:{version}", ".",
        ]
        for name, (service, *arguments) in BUILDS.items()
    ]  # fmt: skip


def parts_file(image: str) -> str:
    """Path of the list of an image's parts: dist/NAME-VERSION.cdx.json."""
    return f"dist/{image.rpartition('/')[2].replace(':', '-')}.cdx.json"


def list_parts(image: str, is_dry: bool) -> None:
    """Writes what Python packages the image has, in CycloneDX's format. Asked of the image: the checkout has others."""
    packages = ["docker", "run", "--rm", "--entrypoint", "python", image, "-m", "pip", "list", "--format=freeze"]
    listing = [str(TOOLS / "cyclonedx-py"), "requirements", "--pyproject", "pyproject.toml", "--output-reproducible",
               "--output-file", parts_file(image), "-"]  # fmt: skip
    print("+", *packages, "|", *listing, flush=True)
    if not is_dry:
        installed = subprocess.run(packages, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(listing, cwd=REPOSITORY, check=True, input=installed)


def left_to_do(version: str, registry: str, images: list[str]) -> list[str]:
    """What publishes and signs the release: commands in the order in which they are run."""
    commands = [f"git push origin main v{version}"]
    for image in images:
        # Signed is what a registry has, which has a digest only once it is there.
        digest = f"\"$(docker inspect --format '{{{{index .RepoDigests 0}}}}' {image})\""
        commands += [
            f"docker push {image}",
            f"cosign sign --yes {digest}",
            f"cosign attest --yes --type cyclonedx --predicate {parts_file(image)} {digest}",
        ]
    if registry:
        package = re.search(r"^version: (.*)$", chart_version("version: x\nappVersion: x\n", version), re.MULTILINE)
        assert package is not None
        commands.append(f"helm push dist/tideway-{package[1]}.tgz oci://{registry.rstrip('/')}/charts")
    wheel = f"dist/tideway-{version}-py3-none-any.whl"
    return [
        *commands,
        f"cosign sign-blob --yes --bundle {wheel}.sigstore.json {wheel}",
        f"python -m twine upload {wheel}",
    ]


def faults(version: str) -> list[str]:
    """What is in the way of a release, each in a sentence."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    found = []
    if git("status", "--porcelain"):
        found.append("The checkout has changes that are not committed.")
    if (branch := git("branch", "--show-current").strip()) != "main":
        found.append(f"Releases are made of main, not of {branch!r}.")
    if git("tag", "--list", f"v{version}"):
        found.append(f"There is a tag v{version} already.")
    without = [tagged for tagged, digest in read_images(IMAGES.read_text()).values() if not digest]
    if without:
        found.append(f"Images without a digest: {', '.join(without)}. Run deploy/pin_images.py, and commit.")
    return found


def run(command: Sequence[str], is_dry: bool) -> None:
    print("+", *command, flush=True)
    if not is_dry:
        subprocess.run(command, cwd=REPOSITORY, check=True)


def release(version: str, registry: str, is_dry: bool) -> None:
    """Raises `ReleaseError`, `PinError` or `CalledProcessError`."""
    texts = new_texts(version, date.today().isoformat())
    new_section = section(texts[REPOSITORY / "CHANGELOG.md"], version)
    if (found := faults(version)) and not is_dry:
        raise ReleaseError(" ".join(found))
    for fault in found:
        print(f"would stop here: {fault}")
    run([".ci/run"], is_dry)
    names = ", ".join(str(file.relative_to(REPOSITORY)) for file in texts)
    print(f"+ version {version} in {names}:\n\n{new_section}\n")
    if not is_dry:
        for file, text in texts.items():
            file.write_text(text)
    run(["make", "--no-print-directory", "chart"], is_dry)
    run(["make", "--no-print-directory", "wheel", "sbom"], is_dry)
    if is_dry or shutil.which("helm"):
        run(["helm", "package", CHART, "--destination", "dist"], is_dry)
    else:
        print("There is no helm here: package the chart where there is, of the tag.")
    builds = image_commands(version, registry, read_images(IMAGES.read_text()))
    images = [command[command.index("--tag") + 1] for command in builds]
    for command, image in zip(builds, images, strict=True):
        run(command, is_dry)
        list_parts(image, is_dry)
    run(["git", "commit", "--all", "--message", f"Release {version}"], is_dry)
    run(["git", "tag", "--annotate", f"v{version}", "--cleanup=whitespace", "--message", new_section], is_dry)
    print("\nWhat is left, for it cannot be taken back:")
    for line in left_to_do(version, registry, images):
        print(f"  {line}")


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
