"""The shipped Serve configs: valid to the last key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeDeploySchema

from eaglenest.serving.args import APP_NAME, DEPLOYMENT, AppArgs

CONFIGS = sorted((Path(__file__).parents[2] / "serve_configs").glob("*.yaml"))


def unknown_keys(value: Any, schema: type[BaseModel], where: str = "") -> list[str]:
    """Keys that Serve's schemas would ignore without a word."""
    found = []
    for key, inner in value.items():
        if key not in schema.model_fields:
            found.append(f"{where}{key}")
            continue
        hint = schema.model_fields[key].annotation
        models = [m for m in (hint, *get_args(hint)) if isinstance(m, type) and issubclass(m, BaseModel)]
        for model in models[:1]:
            for item in inner if isinstance(inner, list) else [inner]:
                found += unknown_keys(item, model, f"{where}{key}.")
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_is_valid_and_has_no_key_that_would_be_ignored(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    parsed = ServeDeploySchema.model_validate(config)
    assert unknown_keys(config, ServeDeploySchema) == []
    (application,) = parsed.applications
    assert (application.name, application.import_path) == (APP_NAME, "eaglenest.serving.app:build")
    AppArgs.model_validate(application.args)
    assert [d.name for d in application.deployments] == [DEPLOYMENT]
    assert parsed.http_options.host == "127.0.0.1"
    # the app's own runtime environment and num_cpus live there; a config's options would replace them whole
    assert "ray_actor_options" not in config["applications"][0]["deployments"][0]


def test_a_misspelt_key_is_found() -> None:
    config = yaml.safe_load(CONFIGS[0].read_text())
    config["applications"][0]["deployments"][0]["max_ongoing_request"] = 5
    ServeDeploySchema.model_validate(config)  # Serve says nothing
    assert unknown_keys(config, ServeDeploySchema) == ["applications.deployments.max_ongoing_request"]


def test_the_autoscaled_config_can_reach_its_target() -> None:
    path = next(p for p in CONFIGS if "autoscaled" in p.stem)
    deployment = yaml.safe_load(path.read_text())["applications"][0]["deployments"][0]
    scaling = AutoscalingConfig.model_validate(deployment["autoscaling_config"])
    parsed = DeploymentSchema.model_validate(deployment)
    assert set(deployment["autoscaling_config"]) <= set(AutoscalingConfig.model_fields)
    assert scaling.max_replicas > scaling.min_replicas
    # a replica that never holds more requests than the target would never ask for a second one
    assert parsed.max_ongoing_requests > scaling.target_ongoing_requests
    assert parsed.max_queued_requests > 0
