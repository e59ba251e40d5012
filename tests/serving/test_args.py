"""Arguments of the application, and the application built from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from eaglenest.engine import environment
from eaglenest.serving import app
from eaglenest.serving.args import AppArgs
from eaglenest.targets import Target

TARGET = Target("tiny", Path("/targets/tiny"), "f" * 64, 16, 4, 64, (1, 2, 3))


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_model_length"):
        AppArgs.model_validate({"max_model_length": 512})
    with pytest.raises(ValidationError, match="num_replicas"):
        app.build({"num_replicas": 2})


def test_arguments_of_the_command_line_are_text() -> None:
    args = AppArgs.model_validate({"num_speculative_tokens": "5", "poll_interval_s": "2.5", "enforce_eager": "true"})
    assert (args.num_speculative_tokens, args.poll_interval_s, args.enforce_eager) == (5, 2.5, True)


def test_the_engine_gets_what_was_asked_for() -> None:
    args = AppArgs(target="tiny", num_speculative_tokens=4, max_model_len=256, max_num_seqs=8, dtype="bfloat16")
    spec = args.engine_spec(TARGET, Path("/drafters/1"))
    assert (spec.target, spec.drafter, spec.num_speculative_tokens) == (TARGET.path, Path("/drafters/1"), 4)
    assert (spec.max_model_len, spec.max_num_seqs, spec.dtype, spec.served_model_name) == (256, 8, "bfloat16", "tiny")
    assert args.engine_spec(TARGET, None).drafter is None


def test_the_deployment_admits_what_an_engine_batches_and_answers_429_beyond() -> None:
    deployment = app.build({"max_num_seqs": 8})._bound_deployment
    config = deployment._deployment_config
    assert (config.max_ongoing_requests, config.max_queued_requests) == (16, 32)
    assert (config.backpressure_config.status_code, config.backpressure_config.retry_after_s) == (429, 1)
    assert config.graceful_shutdown_timeout_s >= 600
    assert deployment.ray_actor_options["num_cpus"] == 0


def test_the_replica_finds_its_environment_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLENEST_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    monkeypatch.setattr(environment, "on_cpu", lambda: True)
    env = app.build({})._bound_deployment.ray_actor_options["runtime_env"]["env_vars"]
    assert env["EAGLENEST_CACHE_DIR"] == "/somewhere"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" in env
    assert "secret" not in str(env), "secrets stay in the cluster's own environment"
    hub = app.build({"target": "org/model"})._bound_deployment.ray_actor_options["runtime_env"]["env_vars"]
    assert "HF_HUB_OFFLINE" not in hub


def test_a_drafter_given_as_a_relative_path_is_found_from_the_replica() -> None:
    (args,) = app.build({"drafter": "runs/drafter"})._bound_deployment.init_args
    assert args["drafter"] == str(Path("runs/drafter").resolve())
