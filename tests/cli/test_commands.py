"""The command's face: help that teaches, errors in one message with an exit code of their own, JSON for machines."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from eaglenest import errors
from eaglenest.cli import common, drafters
from eaglenest.cli.main import app
from eaglenest.registry import Registry, TrackedRun
from eaglenest.settings import Settings, get_settings

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
runner = CliRunner()


def call(*arguments: str, env: dict[str, str] | None = None) -> Any:
    """The command in this process; its stdout and stderr apart, unwrapped."""
    get_settings.cache_clear()
    return runner.invoke(app, list(arguments), env={"COLUMNS": "200", **(env or {})})


def env_of(settings: Settings) -> dict[str, str]:
    from eaglenest.services.kinds import settings_env

    env = settings_env(settings)
    if settings.mlflow_tracking_uri is None:
        del env["MLFLOW_TRACKING_URI"]
    return env


def test_what_the_system_refuses_is_one_message_that_names_the_file(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = env_of(settings) | {"EAGLENEST_RUNS_DIR": str(tmp_path / "file")}

    for command in ("status", "down", "up"):
        result = call(command, env=env)

        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {tmp_path / 'file'}")
        assert "EAGLENEST_RUNS_DIR" in result.stderr
        assert result.stderr.count("\n") == 1


def test_the_password_of_the_registry_is_never_printed(settings: Settings) -> None:
    env = env_of(settings) | {"MLFLOW_TRACKING_URI": "http://anna:secret@127.0.0.1:9"}

    for command in ("status", "up", "versions", "doctor"):
        result = call(command, env=env)

        assert "127.0.0.1:9" in result.output
        assert "secret" not in result.output


def test_every_promised_command_is_there() -> None:
    promised = {"doctor", "up", "down", "status", "distill", "promote", "rollback", "versions", "bench", "demo"}
    assert promised <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_explains_itself_and_shows_an_example(command: str) -> None:
    result = call(command, "--help")

    assert result.exit_code == 0
    assert "Example" in result.output
    assert "Usage" in result.output


def test_no_arguments_show_the_commands() -> None:
    result = call()

    assert all(command in result.output for command in COMMANDS)


def test_version() -> None:
    from eaglenest import __version__

    assert call("--version").stdout == f"eaglenest {__version__}\n"


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_an_error_is_one_message_on_stderr_and_its_exit_code(
    kind: type[errors.EagleNestError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise kind("[it] is wrong", "it right", "turn it")

    monkeypatch.setattr("eaglenest.cli.drafters.load_settings", fail)

    result = call("versions")

    assert result.exit_code == kind.exit_code
    assert result.stdout == ""
    assert result.stderr == "error: [it] is wrong. expected: it right. to mend it: turn it.\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise errors.TargetError("wrong")

    monkeypatch.setattr("eaglenest.cli.drafters.load_settings", fail)

    assert isinstance(call("--debug", "versions").exception, errors.TargetError)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("EAGLENEST_TARGETT", "x", "did you mean EAGLENEST_TARGET"),
        ("EAGLENEST_SERVE_PORT", "many", "EAGLENEST_SERVE_PORT='many'"),
        ("EAGLENEST_SERVE_PORT", "99999", "less than or equal to 65535"),
        ("EAGLENEST_DTYPE", "int8", "'float32', 'bfloat16' or 'float16'"),
        ("EAGLENEST_NUM_SPECULATIVE_TOKENS", "0", "greater than or equal to 1"),
        ("EAGLENEST_MODEL_NAME", "a/b", "EAGLENEST_MODEL_NAME='a/b'"),
    ],
)
@pytest.mark.parametrize("command", ["doctor", "versions"])
def test_a_bad_setting_is_one_readable_message(variable: str, value: str, says: str, command: str) -> None:
    result = call(command, env={variable: value})

    assert result.exit_code == errors.BadInput.exit_code
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert "pydantic" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--concurrency", "1,x"], "--concurrency 1,x"),
        (["bench", "--concurrency", "0"], "numbers from 1 up"),
        (["bench", "--prompts", "no-such.jsonl"], "no-such.jsonl"),
        (["up", "--config", "no-such.yaml"], "no-such.yaml"),
        (["bench", "--url", "http://[::1"], "--url http://[::1"),
        (["bench", "--url", "127.0.0.1:8000"], "such as http://127.0.0.1:8000"),
        (["bench", "--save", "/proc/no-such/bench.json"], "--save /proc/no-such/bench.json"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], says: str, settings: Settings, tmp_path: Path
) -> None:
    result = call(*arguments, env=env_of(settings))

    assert result.exit_code == errors.BadInput.exit_code
    assert says in result.stderr
    assert not (settings.runs_dir / "services.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["distill"], "--name"),
        (["distill", "--name", "x", "--no-such-option"], "--no-such-option"),
        (["distill", "--name", "x", "--workers", "two"], "--workers"),
        (["promote"], "VERSION"),
    ],
)
def test_a_mistaken_command_line_is_answered_before_anything_starts(
    arguments: list[str], says: str, settings: Settings
) -> None:
    result = call(*arguments, env=env_of(settings))

    assert result.exit_code == click.UsageError.exit_code
    assert says in result.stderr
    assert not (settings.runs_dir / "services.json").exists()


@pytest.mark.parametrize("content", ["applications: 3", "- a\n- b", "a: [", ""])
def test_a_file_that_is_no_serve_config_is_refused_by_name(content: str, settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(content)

    result = call("up", "--config", str(config), env=env_of(settings))

    assert result.exit_code == errors.BadInput.exit_code
    assert "mine.yaml" in result.stderr


def test_without_a_registry_every_command_that_wants_it_says_so(settings: Settings) -> None:
    for arguments in (["versions"], ["promote", "1"], ["rollback"]):
        result = call(*arguments, env=env_of(settings))
        assert result.exit_code == errors.RegistryError.exit_code
        assert "eaglenest up" in result.stderr


def test_status_and_down_are_fine_where_nothing_runs(settings: Settings) -> None:
    status = call("status", "--json", env=env_of(settings))
    down = call("down", "--json", env=env_of(settings))

    assert {name: found["state"] for name, found in json.loads(status.stdout).items() if name != "replicas"} == {
        "ray": "stopped",
        "mlflow": "stopped",
        "serve": "stopped",
    }
    assert json.loads(down.stdout) == {}


def test_doctor_speaks_json_and_fails_when_something_will_not_work(settings: Settings) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind((settings.host, settings.serve_port))
        taken.listen()
        result = call("doctor", "--json", env=env_of(settings))

    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert checks[f"port {settings.serve_port}"]["status"] == "fail"
    assert result.exit_code == 1


def test_env_is_for_a_shell(settings: Settings) -> None:
    result = call("env", env=env_of(settings))

    lines = dict(line.removeprefix("export ").split("=", 1) for line in result.stdout.splitlines())
    assert lines["RAY_API_SERVER_ADDRESS"] == settings.dashboard_url
    assert lines["MLFLOW_TRACKING_URI"] == settings.tracking_uri
    assert lines["RAY_AUTH_TOKEN_PATH"] == str(settings.runs_dir / "ray.token")


@pytest.mark.slow
def test_versions_and_promotions_of_a_real_registry(
    mlflow_server: Any, make_checkpoint: Any, settings: Settings
) -> None:
    """Without a service: the alias moves, nothing else does."""
    env = {
        **env_of(settings),
        "MLFLOW_TRACKING_URI": mlflow_server.uri,
        "EAGLENEST_MODEL_NAME": "cli-drafter",
    }
    assert "no versions yet" in call("versions", env=env).stdout
    registry = Registry(mlflow_server.uri, "cli-drafter")
    with TrackedRun(mlflow_server.uri, "cli", run_name="cli", params={}, tags={}) as run:
        for seed in (1, 2):
            figures = {"accept_len": 1.0 + seed / 2}
            registry.register(make_checkpoint(f"d{seed}", seed=seed), run_id=run.run_id, figures=figures)

    promoted = [json.loads(call("promote", ref, "--json", env=env).stdout) for ref in ("1", "challenger")]
    listed = json.loads(call("versions", "--json", env=env).stdout)
    back = json.loads(call("rollback", "--json", env=env).stdout)
    unknown = call("promote", "99", env=env)

    assert [(result["old"], result["new"]) for result in promoted] == [(None, 1), (1, 2)]
    assert [version["version"] for version in listed] == [2, 1]
    assert listed[0]["figures"]["accept_len"] == 2.0
    assert "champion" in listed[0]["aliases"]
    assert (back["old"], back["new"]) == (2, 1)
    assert unknown.exit_code == errors.RegistryError.exit_code
    assert "99" in unknown.stderr


def test_paths_of_a_job_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job runs in another folder than the one it was submitted from."""
    from eaglenest.cli.submit import checked

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("{}")
    (tmp_path / "champion").write_text("a file of the alias's name")

    arguments = checked(["--name", "x", "--prompts", "mine.jsonl", "--heldout=mine.jsonl", "--parent", "champion"])

    absolute = str(tmp_path / "mine.jsonl")
    assert arguments == ["--name", "x", "--prompts", absolute, f"--heldout={absolute}", "--parent", "champion"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_word_and_exit_code_130(number: int, tmp_path: Path) -> None:
    code = (
        "import time, sys\nimport eaglenest.cli.drafters as d\n"
        "def wait():\n    sys.stderr.write('here\\n'); sys.stderr.flush(); time.sleep(30)\n"
        "d.load_settings = wait\nimport eaglenest.cli.main as m\nm.app(['versions'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "here\n"
    time.sleep(0.1)
    os.kill(process.pid, number)

    assert process.wait(10) == 130
    assert process.stderr.read() == "interrupted\n"
    process.stderr.close()


def test_a_promotion_tells_of_each_replica_and_its_pause(capsys: pytest.CaptureFixture[str]) -> None:
    from eaglenest.rollout.promote import RolloutResult
    from eaglenest.serving.status import ReplicaStatus

    replica = ReplicaStatus(
        replica_id="r1",
        desired_version=2,
        actual_version=2,
        since="2026-01-01T00:00:00+00:00",
        stage_ms=40.0,
        pause_ms=3.25,
        dtype="float32",
        k=3,
    )
    result = RolloutResult(old=1, new=2, replicas=[replica], seconds=0.5)

    drafters._print_rollout(result, as_json=False)
    told = capsys.readouterr().out
    drafters._print_rollout(result, as_json=True)

    assert "champion is version 2 (was 1)" in told
    assert "replica r1: 3.2 ms" in told
    assert json.loads(capsys.readouterr().out)["replicas"][0]["pause_ms"] == 3.25


def test_progress_stays_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with common.progress("working") as tell:
        tell("half way")

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "half way\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("answers, training: 48 prompts, 2922 tokens, 0 s", "answers, training: 48 prompts, 2922 tokens, 0 s"),
        ("\x1b[36m(RayTrainWorker pid=7)\x1b[0m pass 3 | loss 2.1", "pass 3 | loss 2.1"),
        ("\x1b[36m(EngineAnswerer pid=7)\x1b[0m INFO 12-01 16:43:13 [vllm.py:1] Chunked prefill", None),
        ("2026-12-01 16:43:03,045\tINFO job_manager.py:581 -- Runtime env is setting up.", None),
        ("Loading safetensors checkpoint shards: 100%", None),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("", None),
    ],
)
def test_of_a_jobs_log_a_person_sees_what_the_job_says(line: str, shown: str | None) -> None:
    from eaglenest.jobs_client import telling

    assert telling(line) == shown


@pytest.mark.parametrize(("vocabulary", "new_line"), [("same", False), ("other", True)])
def test_after_a_job_the_way_into_service_is_told(
    monkeypatch: pytest.MonkeyPatch, vocabulary: str, new_line: bool
) -> None:
    def version(d2t: str) -> SimpleNamespace:
        return SimpleNamespace(tags={"target_fingerprint": "t", "architecture": "a", "d2t_sha256": d2t})

    known = {2: version("same"), "challenger": version(vocabulary)}
    registry: Any = SimpleNamespace(aliases=lambda: {"champion": 2}, resolve=known.__getitem__)
    told = drafters._way_into_service(registry)
    assert ("eaglenest down" in told) is new_line
    assert "eaglenest promote challenger" in told
