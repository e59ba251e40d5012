"""infra/mlflow/compose.yaml: its schema, its references, and that nothing secret or open to the network is in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "infra/mlflow/compose.yaml"
SCHEMA = yaml.safe_load((Path(__file__).parent / "schemas/compose.yaml").read_text())


@pytest.fixture
def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


def test_it_fits_the_schema(compose: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(compose, SCHEMA)


@pytest.mark.parametrize(("service", "key"), [("mlflow", "helthcheck"), ("database", "user_name")])
def test_an_unknown_key_is_refused(compose: dict[str, Any], service: str, key: str) -> None:
    compose["services"][service][key] = {}
    with pytest.raises(jsonschema.ValidationError, match=key):
        jsonschema.validate(compose, SCHEMA)


def test_every_name_it_refers_to_is_declared(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert set(service.get("networks", [])) - {"default"} <= set(compose["networks"])
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        assert set(service.get("depends_on", {})) <= set(compose["services"])
        assert {mount.partition(":")[0] for mount in service.get("volumes", [])} <= set(compose["volumes"])
        if "build" in service:
            context = (COMPOSE.parent / service["build"]["context"]).resolve()
            assert context == ROOT
            assert (context / service["build"]["dockerfile"]).is_file()


def test_every_service_reports_its_health_and_keeps_its_data(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert "healthcheck" in service, name
        assert service["volumes"], name


def test_only_this_machine_can_reach_it(compose: dict[str, Any]) -> None:
    assert "ports" not in compose["services"]["database"]
    assert compose["networks"]["database"]["internal"] is True
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["mlflow"]["ports"])
    assert "--allowed-hosts" in compose["services"]["mlflow"]["command"][-1]


def test_the_password_comes_from_outside_and_is_in_no_argument(compose: dict[str, Any]) -> None:
    assert compose["secrets"] == {"database_password": {"environment": "MLFLOW_DATABASE_PASSWORD"}}
    for service in compose["services"].values():
        assert not [name for name in service.get("environment", {}) if re.search(r"PASSWORD$|TOKEN$|SECRET$", name)]
    command = compose["services"]["mlflow"]["command"][-1]
    assert not re.search(r"://[^@/\s]*:[^@/\s]*@", command), "the database URI carries a password"


def test_the_server_is_the_version_the_clients_are_pinned_to(compose: dict[str, Any]) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (pinned,) = (d.partition("==")[2] for d in dependencies if d.startswith("mlflow=="))
    assert compose["services"]["mlflow"]["image"].endswith(f":{pinned}")
    assert f"mlflow=={pinned}" in (ROOT / "infra/images/Dockerfile.mlflow").read_text()
