"""What a release is made of: images by digest, packages by hash, a list of parts, and a script that forgets nothing."""

from __future__ import annotations

import os
import re
import shutil
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


def test_the_chart_s_version_is_one_for_helm_and_its_tag_the_release_s() -> None:
    chart = "name: a\nversion: 0.1.0\n# The tag.\nappVersion: 0.1.0\n"
    assert release.chart_version(chart, "0.2.0") == chart.replace("0.1.0", "0.2.0")
    candidate = yaml.safe_load(release.chart_version(chart, "1.0.0rc1"))
    assert (candidate["version"], candidate["appVersion"]) == ("1.0.0-rc.1", "1.0.0rc1")
    with pytest.raises(release.ReleaseError, match="0 lines of 'appVersion'"):
        release.chart_version("version: 0.1.0\n", "0.2.0")


def test_no_file_that_is_released_has_a_version_that_stays_behind(tmp_path: Path) -> None:
    """Versions of plugins and locks are others'; the changelog's are history, and tests ask the files."""
    now, repository = PROJECT["version"], copy_of_repository(tmp_path)
    done = run_release(repository, "9.9.9", "--dry-run")
    assert done.returncode == 0, done.stderr
    (names,) = re.findall(r"version 9\.9\.9 in (.*):", done.stdout)
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    others = re.compile(r"(tests|examples|locks|bench|models)/|requirements\.lock|constraints\.txt|CHANGELOG\.md")
    behind = [
        name
        for name in listed.splitlines()
        if not others.match(name)
        and Path(name).suffix in ("", ".toml", ".yaml", ".yml", ".json", ".md", ".py", ".tpl", ".txt", ".env")
        and re.search(rf"(?<![\d.]){re.escape(now)}(?![\d.]*\d)", (REPOSITORY / name).read_text(errors="replace"))
    ]
    assert set(behind) <= set(names.split(", ")), behind
    assert {"pyproject.toml", "deploy/helm/tideway/Chart.yaml"} <= set(behind)


def copy_of_repository(folder: Path) -> Path:
    """What a release changes and reads, in a repository of its own, with digests and something unreleased."""
    repository = folder / "repository"
    for name in ("pyproject.toml", "deploy/release.py", "deploy/pin_images.py", "deploy/images.env"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, repository / name)
    shutil.copytree(DEPLOY / "helm/tideway", repository / "deploy/helm/tideway")
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A.\n")
    images = repository / "deploy/images.env"
    images.write_text(pin_images.pinned(images.read_text(), dict.fromkeys(IMAGES, DIGEST)))
    (repository / ".gitignore").write_text("dist\n.ci\n.tideway\n__pycache__\n")
    git(repository, "init", "--quiet", "--initial-branch", "main")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "All")
    return repository


def run_release(repository: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "deploy/release.py"), *arguments]
    who = {
        f"GIT_{kind}_{what}": "someone@example.org" for kind in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **who, "PATH": path or os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=Someone", "-c", "user.email=someone@example.org", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_release_forgets_nothing_and_a_dry_run_does_nothing(tmp_path: Path) -> None:
    repository, tools = copy_of_repository(tmp_path), tmp_path / "bin"
    tools.mkdir()
    log = tmp_path / "calls"
    for file in (tools / "make", tools / "docker", tools / "helm", repository / ".ci/run",
                 repository / ".tideway/tools/bin/cyclonedx-py"):  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        # The list of parts says what it was told on its standard input; Docker tells the packages of an image.
        file.write_text(
            "#!/bin/sh\necho $(basename $0) $* >> " + str(log) + "\n"
            "case $0 in */cyclonedx-py) sed 's/^/of the image: /' >> " + str(log) + ';; */docker) echo "a==$1";; esac\n'
        )
        file.chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    before = git(repository, "rev-parse", "HEAD")
    arguments = ["9.9.9", "--registry", "example.org/me/"]
    planned = run_release(repository, *arguments, "--dry-run", path=path)
    assert planned.returncode == 0 and "would stop" not in planned.stdout, planned.stderr
    assert not log.exists() and not git(repository, "status", "--porcelain") + git(repository, "tag")
    assert git(repository, "rev-parse", "HEAD") == before

    done = run_release(repository, *arguments, path=path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\+ (.*)", done.stdout, re.M) == re.findall(r"^\+ (.*)", planned.stdout, re.M)
    calls = log.read_text().splitlines()
    assert calls[:4] == [
        "run",
        "make --no-print-directory chart",
        "make --no-print-directory wheel sbom",
        "helm package deploy/helm/tideway --destination dist",
    ]
    images = [f"example.org/me/{name}:9.9.9" for name in release.BUILDS]
    assert len(calls) == 4 + 4 * len(images)
    for image, (build, asked, listing, told) in zip(images, zip(*[iter(calls[4:])] * 4, strict=True), strict=True):
        assert build.startswith("docker build ") and f"--tag {image} ." in build and f"@{DIGEST}" in build
        assert asked.startswith("docker run ") and f"{image} -m pip list" in asked
        assert told == "of the image: a==run"
        assert f"--output-file dist/{image.rpartition('/')[2].replace(':', '-')}.cdx.json" in listing
    assert git(repository, "log", "-1", "--format=%s") == "Release 9.9.9\n"
    assert git(repository, "tag", "--list", "--format=%(contents)") == "### Added\n\n- A.\n\n"
    changed = git(repository, "diff", "--name-only", before.strip(), "HEAD").split()
    assert changed == ["CHANGELOG.md", "deploy/helm/tideway/Chart.yaml", "pyproject.toml"]
    assert not git(repository, "status", "--porcelain")

    left = done.stdout.partition("What is left")[2]
    order = ["git push origin main v9.9.9"]
    for image in images:
        order += [f"docker push {image}", "cosign sign --yes", "cosign attest --yes --type cyclonedx --predicate dist/"]
    order += ["helm push dist/tideway-9.9.9.tgz oci://example.org/me/charts", "cosign sign-blob", "twine upload"]
    place = 0
    for step in order:
        place = left.find(step, place)
        assert place >= 0, step

    # Now nothing is unreleased, and what is wrong is said, all of it.
    again = run_release(repository, "9.9.9", path=path)
    assert (again.returncode, "has a section of 9.9.9 already" in again.stderr) == (1, True)
    (repository / "CHANGELOG.md").write_text("## [Unreleased]\n\n### Added\n\n- B.\n")
    pinned = repository / "deploy/images.env"
    pinned.write_text(pinned.read_text().replace(f"@{DIGEST}", ""))
    for extra in ([], ["--dry-run"]):
        refused = run_release(repository, "9.9.9", *extra, path=path)
        said = refused.stderr + refused.stdout
        assert refused.returncode == int(not extra)
        assert "not committed" in said and "is a tag v9.9.9 already" in said
        assert "Images without a digest: python:" in said and "nats:" in said and "Run deploy/pin_images.py" in said
    refused = run_release(repository, "0.0.1", "--dry-run")
    assert (refused.returncode, "comes before" in refused.stderr) == (1, True)


def test_images_are_built_by_digest_where_there_is_one() -> None:
    for digest, expected in (("", "a:1"), (DIGEST, f"a:1@{DIGEST}")):
        commands = release.image_commands("1.0.0", "", {"PYTHON_IMAGE": ("a:1", digest)})
        assert [command[command.index("--tag") + 1] for command in commands] == [
            f"{name}:1.0.0" for name in release.BUILDS
        ]
        assert all(f"PYTHON_IMAGE={expected}" in command for command in commands)


def test_every_image_that_chart_and_compose_take_is_built() -> None:
    templates = "".join(file.read_text() for file in (DEPLOY / "helm/tideway/templates").iterdir() if file.is_file())
    compose = "".join((REPOSITORY / name).read_text() for name in ("docker-compose.yml", "docker-compose.gpu.yml"))
    taken = set(re.findall(r'"(tideway-(?:worker|gateway|scheduler|placement)[a-z-]*)"', templates))
    taken |= set(re.findall(r"image: (tideway-[a-z-]+)", compose))
    assert "tideway-worker-cuda" in taken and taken == release.BUILDS.keys()
    (cuda,) = [
        command for command in release.image_commands("1.0.0", "", IMAGES) if "tideway-worker-cuda:1.0.0" in command
    ]
    on_gpu = yaml.safe_load((REPOSITORY / "docker-compose.gpu.yml").read_text())["services"]["worker"]["build"]["args"]
    assert on_gpu["EXTRA"] == "cuda" and "EXTRA=cuda" in cuda and "TORCH_INDEX_URL=" in cuda


# ---------------------------------------------------------------------------------------------------------- CI


def test_the_public_workflow_runs_what_a_change_must_pass() -> None:
    text = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step["run"] for step in workflow["jobs"]["check"]["steps"]]
    weekly = workflow["jobs"]["digests"]
    assert "schedule" in weekly["if"] and weekly["steps"][-1]["run"] == "python3 deploy/pin_images.py --check"
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
