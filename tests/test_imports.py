"""Imports are light, and the source root stays out of the standard library's way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "ray", "vllm", "mlflow", "transformers"}

LIGHT = [
    "import eaglenest",
    "import eaglenest.doctor, eaglenest.services.local, eaglenest.services.memory",
    "import eaglenest.cli.main as m\ntry: m.app(['--help'])\nexcept SystemExit: pass",
    "import eaglenest.cli.main as m\ntry: m.app(['distill', '--help'])\nexcept SystemExit: pass",
    "import eaglenest.cli.main as m\ntry: m.app(['doctor', '--json'])\nexcept SystemExit: pass",
]


@pytest.mark.parametrize("code", LIGHT, ids=["package", "services", "help", "distill help", "doctor"])
def test_light_ways_in_load_nothing_heavy(code: str) -> None:
    report = f"\nimport sys, json\nsys.stderr.write('LOADED' + json.dumps(sorted(set(sys.modules) & {HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.rpartition("LOADED")[2]) == []


def test_source_root_is_no_package() -> None:
    """`platform/__init__.py` would shadow the standard library's platform module wherever the root is on the path."""
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = "import platform, eaglenest; print(platform.__file__); platform.machine()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / "platform")


def test_jobs_found_from_the_working_directory_leave_the_standard_library_alone() -> None:
    """A job runs with the project's root first on its path (ray #58772)."""
    code = "import sys; sys.path.insert(0, '.'); import platform; platform.machine(); print(platform.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "lib/python" in done.stdout
