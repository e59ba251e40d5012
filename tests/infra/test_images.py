"""The Dockerfiles and the build context: pinned bases, sources that exist and reach the build, no root, no secrets."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "infra/images").glob("Dockerfile.*"))
KNOWN = {"ARG", "CMD", "COPY", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR"}

pytestmark = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) in order, comments dropped and continued lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (word.upper(), rest) for word, _, rest in (line.strip().partition(" ") for line in joined.splitlines() if line)
    ]


def arguments(dockerfile: Path, instruction: str) -> list[str]:
    return [rest for word, rest in instructions(dockerfile) if word == instruction]


def sent_to_build(path: Path) -> bool:
    """Whether .dockerignore lets `path` into the build context: the last rule that matches decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().split("\n"):
        if rule and not rule.startswith("#"):
            pattern = rule.removeprefix("!").rstrip("/")
            if fnmatch(path.as_posix(), pattern) or fnmatch(path.parts[0], pattern):
                sent = rule.startswith("!")
    return sent


def test_only_known_instructions_are_used(dockerfile: Path) -> None:
    assert {word for word, _ in instructions(dockerfile)} <= KNOWN
    assert instructions(dockerfile)[0][0] == "FROM"


def test_every_base_image_is_pinned(dockerfile: Path) -> None:
    for base in arguments(dockerfile, "FROM"):
        name, _, tag = base.partition(":")
        assert name, base
        assert re.match(r"\d+\.\d+", tag), f"{base}: pin a version"


def test_copied_files_exist_and_reach_the_build(dockerfile: Path) -> None:
    sources = [
        Path(source)
        for copy in arguments(dockerfile, "COPY")
        for source in [word for word in copy.split() if not word.startswith("--")][:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), f"{dockerfile.name} copies {source}, which does not exist"
        assert sent_to_build(source), f".dockerignore keeps {source} out of the build"


def test_the_image_does_not_run_as_root(dockerfile: Path) -> None:
    users = arguments(dockerfile, "USER")
    assert users, "no USER at all: the base image's, which may be root"
    assert users[-1] not in {"root", "0"}


def test_nothing_is_installed_without_a_pin(dockerfile: Path) -> None:
    for run in arguments(dockerfile, "RUN"):
        for command in re.findall(r"pip install ([^&|;]*)", run):
            packages = [
                word
                for word in re.sub(r"--(requirement|constraint|extra-index-url) \S+", "", command).split()
                if not word.startswith("-")
            ]
            assert all(word == "." or "==" in word for word in packages), command
            assert packages or "--requirement" in command, command


def test_no_secret_and_no_address_of_a_registry_is_written_into_the_image(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert not re.search(r"https?://", text)
    for word, rest in instructions(dockerfile):
        if word in {"ARG", "ENV"}:
            assert not re.search(r"(?i)password|secret|token|api_?key", rest), f"{word} {rest}"


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", ".env", "runs/demo/report.json", "infra/mlflow/.env"]
)
def test_the_build_context_leaves_out(dockerfile: Path, path: str) -> None:
    assert not sent_to_build(Path(path))
