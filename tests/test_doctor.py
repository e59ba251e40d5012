"""The doctor sees what is wrong, and says how to mend it."""

import os
import socket
from importlib.metadata import version
from pathlib import Path

import pytest

from eaglenest import doctor
from eaglenest.doctor import Check, examine
from eaglenest.settings import Settings


def named(settings: Settings, name: str) -> Check:
    return next(check for check in examine(settings) if check.name == name)


def test_looks_at_everything_it_promises(settings: Settings) -> None:
    names = {check.name for check in examine(settings)}

    assert {"Python", "cores", "memory", "GPU", "versions", "torch companions", "CPU instructions"} <= names
    assert {"disk: cache_dir", "disk: runs_dir", f"port {settings.serve_port}"} <= names


def test_whatever_is_not_well_comes_with_a_fix(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_tcmalloc", lambda: None)
    monkeypatch.setattr(doctor, "find_iomp", lambda: None)
    monkeypatch.setattr(doctor, "DISK_WANTED", 1 << 62)

    checks = examine(settings)

    assert {c.name for c in checks if c.status != "ok"} >= {"tcmalloc", "Intel OpenMP", "disk: runs_dir"}
    assert all(check.fix for check in checks if check.status != "ok")
    assert all(check.fix is None for check in checks if check.status == "ok")


def test_a_taken_port_fails_and_names_who_holds_it(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind((settings.host, settings.mlflow_port))
        taken.listen()
        check = named(settings, f"port {settings.mlflow_port}")

    assert check.status == "fail"
    assert f"pid {os.getpid()}" in check.found
    assert "EAGLENEST_MLFLOW_PORT" in (check.fix or "")


def test_versions_other_than_pinned_are_named(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cpu.txt", "gpu.txt"):
        (tmp_path / name).write_text(f"rich=={version('rich')}\nhttpx==0.0.1\nno-such-package==1.0\n")
    monkeypatch.setattr(doctor, "REQUIREMENTS", tmp_path)

    check = named(settings, "versions")

    assert check.status == "warn"
    assert f"httpx {version('httpx')} (pinned 0.0.1)" in check.found
    assert "no-such-package missing" in check.found
    assert "rich" not in check.found


def test_a_torch_companion_that_cannot_be_imported_fails(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchvision is when pip chose the build for another torch: there, and not importable."""
    monkeypatch.setattr(doctor, "COMPANIONS", ("no_such_module",))
    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")

    check = named(settings, "torch companions")

    assert check.status == "fail"
    assert "no_such_module" in check.found
    assert "uninstall" in (check.fix or "")


def test_an_mlflow_that_does_not_answer_fails_and_its_password_is_not_shown(settings: Settings) -> None:
    settings = Settings(
        **settings.model_dump(exclude={"mlflow_tracking_uri"}),
        MLFLOW_TRACKING_URI=f"http://me:secret@127.0.0.1:{settings.mlflow_port}",
    )

    check = named(settings, "MLflow")

    assert check.status == "fail"
    assert "does not answer" in check.found
    assert "secret" not in check.found


@pytest.mark.parametrize(("have", "status"), [(12, "ok"), (7, "warn"), (2, "fail")])
def test_memory_is_judged_by_what_is_free(have: int, status: str) -> None:
    check = doctor._amount("memory", have * doctor.GIB, doctor.MEMORY_WANTED, doctor.MEMORY_NEEDED, "free", "fix")

    assert check.status == status
