"""What a release is made of: images by digest, packages by hash, a list of parts, and a script that forgets nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
sys.path.insert(0, str(DEPLOY))
import pin_images  # noqa: E402
import release  # noqa: E402

IMAGES = pin_images.read((DEPLOY / "images.env").read_text())
DIGEST = "sha256:" + "0123456789abcdef" * 4
LOCK = (REPOSITORY / "requirements.lock").read_text()


LOCKS = {"requirements": LOCK} | {file.stem: file.read_text() for file in sorted((REPOSITORY / "locks").glob("*.lock"))}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def locked(lock: str = LOCK) -> dict[str, str]:
    """Versions by name."""
    return dict(re.findall(r"^([a-z0-9._-]+)==([^\s;\\]+)", lock, re.MULTILINE))


def needed(*extras: str) -> set[str]:
    """Names of what the project needs with these extras, and with those that these name."""
    found = {requirement_name(one) for one in PROJECT["dependencies"]}
    for extra in extras:
        for one in PROJECT["optional-dependencies"][extra]:
            others = re.fullmatch(r"tideway\[(.*)\]", one)
            found |= needed(*others[1].split(",")) if others else {requirement_name(one)}
    return found


def requirement_name(requirement: str) -> str:
    return normal(re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_images_of_others_are_taken_from_the_file_of_digests(name: str) -> None:
    for service, described in yaml.safe_load((REPOSITORY / name).read_text())["services"].items():
        image = described.get("image", "")
        if not image or image.startswith("tideway-"):
            continue
        variable, default = re.fullmatch(r"\$\{([A-Z_]+):-(\S+)\}", image).groups()  # type: ignore[union-attr]
        assert IMAGES[variable][0] == default, f"{service}: deploy/images.env says {IMAGES[variable][0]}"


def test_images_are_built_from_the_file_of_digests() -> None:
    for file in sorted(REPOSITORY.glob("services/*/Dockerfile")):
        text = file.read_text()
        stages = set(re.findall(r"^FROM .* AS (\w+)$", text, re.MULTILINE))
        arguments = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", text, re.MULTILINE))
        for source in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
            assert source in stages or source.removeprefix("${").removesuffix("}") in arguments, f"{file}: {source}"
        assert set(arguments.values()) == {IMAGES["PYTHON_IMAGE"][0]}, file
    build = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["x-build"]
    assert build["args"]["PYTHON_IMAGE"] == f"${{PYTHON_IMAGE:-{IMAGES['PYTHON_IMAGE'][0]}}}"


def run_pinning(file: Path, docker: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEPLOY / "pin_images.py"), "--file", str(file), *arguments]
    return subprocess.run(command, env={"PATH": str(docker)}, capture_output=True, text=True, timeout=60)


def test_digests_are_put_behind_the_tags_and_kept_there(tmp_path: Path) -> None:
    file, docker = tmp_path / "images.env", tmp_path / "bin" / "docker"
    file.write_text((DEPLOY / "images.env").read_text())
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\n[ "$3" = inspect ] && echo {DIGEST}\n')
    docker.chmod(0o755)
    assert run_pinning(file, docker.parent, "--check").returncode == int(
        not all(digest for _, digest in IMAGES.values())
    )
    for _ in range(2):
        done = run_pinning(file, docker.parent)
        assert done.returncode == 0, done.stderr
        assert pin_images.read(file.read_text()) == {name: (tag, DIGEST) for name, (tag, _) in IMAGES.items()}
    assert file.read_text().startswith("# The images that others make")
    assert run_pinning(file, docker.parent, "--check").returncode == 0


def test_a_registry_that_gives_no_digest_changes_nothing(tmp_path: Path) -> None:
    file, docker = tmp_path / "images.env", tmp_path / "bin" / "docker"
    file.write_text("NATS_IMAGE=nats:2.12.8-alpine\n")
    docker.parent.mkdir()
    missing = run_pinning(file, docker.parent)
    assert missing.returncode == 1 and "docker" in missing.stderr
    docker.write_text("#!/bin/sh\necho unauthorized >&2\nexit 1\n")
    docker.chmod(0o755)
    refused = run_pinning(file, docker.parent)
    assert (refused.returncode, "nats:2.12.8-alpine: unauthorized" in refused.stderr) == (1, True)
    assert file.read_text() == "NATS_IMAGE=nats:2.12.8-alpine\n"
    with pytest.raises(pin_images.PinError, match="line 1"):
        pin_images.read("NATS_IMAGE=nats@sha256:abc\n")


# ----------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_locked_by_hash_and_from_nowhere_else(name: str) -> None:
    lock = LOCKS[name]
    entries = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]
    form = r"\S+==\S+[^\n]*\\(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+\n?"
    assert entries and all(re.fullmatch(form, re.sub(r"^#.*\n", "", entry, flags=re.MULTILINE)) for entry in entries)
    assert not re.search(r"https?://|file:|^-|/", re.sub(r"^#.*$", "", lock, flags=re.MULTILINE), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "extras"),
    [("base", ()), ("gateway", ("gateway",)), ("placement", ("placement",)), ("worker", ("worker",)),
     ("cuda12", ("cuda",)), ("cuda13", ("cuda",))],
)  # fmt: skip
def test_each_image_s_lock_has_what_it_needs_in_the_versions_of_the_tests(name: str, extras: tuple[str, ...]) -> None:
    versions, all_versions = locked(LOCKS[name]), locked()
    wanted = {package.replace("-cu12", "-cu13") if name == "cuda13" else package for package in needed(*extras)}
    assert wanted - versions.keys() == {"torch"} & wanted, "make lock"
    follow_cuda = re.compile(r"(cuda|nvidia)-|.*-cu\d+$")
    assert {package: version for package, version in versions.items() if all_versions.get(package, version) != version
            and not follow_cuda.match(package)} == {}  # fmt: skip
    other = {"12": "13", "13": "12"}[name[-2:]] if name.startswith("cuda") else "13"
    assert f"libucx-cu{other}" not in versions and f"ucxx-cu{other}" not in versions


def test_images_install_nothing_but_torch_without_a_hash() -> None:
    num_installs = 0
    for file in sorted(REPOSITORY.glob("services/*/Dockerfile")):
        text = re.sub(r"\\\n\s*", "", file.read_text())
        final = text.partition(" AS base\n")[2].partition("\nFROM ")[0] + text.rpartition("\nFROM ")[2]
        for command in re.findall(r"pip install ([^&\n]*)", final):
            num_installs += 1
            options = set(command.split())
            assert (
                options >= {"--no-deps", "--require-hashes"}
                or options >= {"--no-deps", "--no-build-isolation", "."}
                or (options >= {"constraints.txt", "locked.txt"} and command.split()[-1] == "torch")
            ), f"{file}: {command}"
    assert num_installs == 4 * 2 + 4


def test_the_lock_has_the_versions_that_the_tests_run_with() -> None:
    versions = locked()
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    not_locked = {"torch", "flash-attn-4", "flashinfer-python"}  # torch is of its own index, the others are of GPUs
    assert {name: versions.get(normal(name)) for name in pinned.keys() - not_locked} == {
        name: version for name, version in pinned.items() if name not in not_locked
    }
    missing = needed(*PROJECT["optional-dependencies"].keys() - {"cuda"}) - versions.keys()
    assert missing == {"torch"}, "make lock"


# ------------------------------------------------------------------------------------------------------ releases


def test_what_is_unreleased_becomes_the_version_s() -> None:
    changelog = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A.\n\n## [0.1.0] - 2026-01-01\n\n- B.\n"
    new = release.released(changelog, "0.2.0", "2026-11-27")
    assert new.index("[Unreleased]") < new.index("## [0.2.0] - 2026-11-27\n\n### Added") < new.index("[0.1.0]")
    assert release.section(new, "0.2.0") == "### Added\n\n- A."
    for text, version in ((new, "0.3.0"), (changelog, "0.1.0"), ("# Changelog\n", "0.2.0")):
        with pytest.raises(release.ReleaseError):
            release.released(text, version, "2026-11-27")


def test_versions_go_up() -> None:
    project = '[project]\nname = "a"\nversion = "0.1.0"\n'
    for version in ("0.1.0", "0.1.1", "0.10.0", "1.0.0rc1"):
        assert release.next_version(project, version) == project.replace("0.1.0", version)
    for version in ("0.0.9", "1.0", "v1.0.0", ""):
        with pytest.raises(release.ReleaseError):
            release.next_version(project, version)


def test_a_dry_run_says_all_and_does_nothing() -> None:
    def state() -> str:
        return (
            subprocess.run(
                ["git", "status", "--porcelain"], cwd=REPOSITORY, capture_output=True, text=True, check=True
            ).stdout
            + subprocess.run(["git", "tag"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        )

    before = state()
    command = [sys.executable, str(DEPLOY / "release.py"), "9.9.9", "--dry-run", "--registry", "example.org/me/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    order = [".ci/run", "version 9.9.9 in pyproject.toml", "make --no-print-directory lock wheel sbom"]
    order += [f"--tag example.org/me/tideway-{service}:9.9.9" for service in release.SERVICES]
    order += ["git commit", "git tag", "What is left", "git push origin main v9.9.9", "docker push"]
    places = [done.stdout.find(step) for step in order]
    assert -1 not in places and places == sorted(places), done.stdout
    assert state() == before
    refused = subprocess.run([*command[:2], "0.0.1", "--dry-run"], capture_output=True, text=True, timeout=60)
    assert (refused.returncode, "comes before" in refused.stderr) == (1, True)


def test_images_are_built_by_digest_where_there_is_one() -> None:
    for digest, expected in (("", "a:1"), (DIGEST, f"a:1@{DIGEST}")):
        commands = release.image_commands("1.0.0", "", {"PYTHON_IMAGE": ("a:1", digest)})
        assert [command[command.index("--tag") + 1] for command in commands] == [
            f"tideway-{service}:1.0.0" for service in release.SERVICES
        ]
        assert all(f"PYTHON_IMAGE={expected}" in command for command in commands)


# ---------------------------------------------------------------------------------------------------------- CI


def test_the_public_workflow_runs_what_a_change_must_pass() -> None:
    text = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step["run"] for step in workflow["jobs"]["check"]["steps"]]
    assert not [step["uses"] for step in steps if "uses" in step], "an action of others is pinned by commit"
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"make --no-print-directory (\S+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    hosts = {urlsplit(url).hostname for url in re.findall(r"https://\S+", text)}
    assert hosts == {"download.pytorch.org"}


def test_security_says_how_to_report_and_what_holds() -> None:
    text = (REPOSITORY / "SECURITY.md").read_text()
    assert {"## Reporting", "## What is protected, from whom", "## What is not protected"} <= set(text.splitlines())
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (REPOSITORY / link).exists(), link
