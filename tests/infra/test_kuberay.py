"""The KubeRay manifests: their schema, Ray's own check of what is embedded in them, and that nothing drifted."""

from __future__ import annotations

import copy
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import ServeDeploySchema

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "infra/kuberay"
SCHEMA = yaml.safe_load((Path(__file__).parent / "schemas/kuberay.yaml").read_text())
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(KUBERAY.glob("*.yaml"))}
SERVICE, JOB = MANIFESTS["rayservice"]["spec"], MANIFESTS["rayjob"]["spec"]
CLUSTERS = {"rayservice": SERVICE["rayClusterConfig"], "rayjob": JOB["rayClusterSpec"]}

CHECKED_LATER: dict[str, type[BaseModel]] = {
    "autoscaling_config": AutoscalingConfig,
    "request_router_config": RequestRouterConfig,
}
"""Parts of a Serve config that Ray leaves as plain dicts until it deploys."""


def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


def pod_specs(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    return [group["template"]["spec"] for group in groups]


def unknown_keys(given: Any, parsed: Any, where: str = "") -> list[str]:
    """Keys of `given` that Ray's `parsed` form of it has no field for: Ray reads those and ignores them, silently."""
    if isinstance(given, list) and isinstance(parsed, list):
        pairs = zip(given, parsed, strict=True)
        return [key for i, (item, part) in enumerate(pairs) for key in unknown_keys(item, part, f"{where}[{i}]")]
    if not isinstance(given, dict) or not isinstance(parsed, BaseModel):
        return []  # a value, or a dict that is the application's own
    unknown: list[str] = []
    for key, value in given.items():
        if key not in type(parsed).model_fields:
            unknown.append(f"{where}.{key}")
            continue
        part = getattr(parsed, key)
        if key in CHECKED_LATER and isinstance(part, dict):
            part = CHECKED_LATER[key].model_validate(part)
        unknown += unknown_keys(value, part, f"{where}.{key}")
    return unknown


# --- the manifests


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_fits_the_schema(name: str) -> None:
    validator().validate(MANIFESTS[name])


@pytest.mark.parametrize(
    ("name", "path", "key", "value"),
    [
        ("rayservice", ("spec",), "serveConfig", "applications: []"),
        ("rayservice", ("spec", "rayClusterConfig"), "rayVersions", "2.60.0"),
        ("rayservice", ("spec", "rayClusterConfig", "workerGroupSpecs", 0), "maxReplica", 2),
        ("rayservice", ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec"), "hostNetwerk", True),
        ("rayjob", ("spec",), "backOffLimit", 1),
        ("rayjob", ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0), "envs", []),
        ("rayjob", ("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams"), "num-cpus", 0),
        ("rayjob", ("spec",), "activeDeadlineSeconds", "1h"),
    ],
)
def test_a_misspelt_key_or_a_wrong_type_is_refused(name: str, path: tuple[Any, ...], key: str, value: Any) -> None:
    manifest = copy.deepcopy(MANIFESTS[name])
    level = manifest
    for step in path:
        level = level[step]
    level[key] = value
    assert not validator().is_valid(manifest)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_cluster_runs_the_pinned_ray_in_our_image(name: str) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray_version,) = (d.partition("==")[2] for d in dependencies if d.startswith("ray["))
    assert CLUSTERS[name]["rayVersion"] == ray_version
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for pod in pod_specs(CLUSTERS[name]):
        assert {container["image"] for container in pod["containers"]} == {f"eaglenest:{version}-cpu"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_nothing_runs_as_root_or_unbounded(name: str) -> None:
    pods = pod_specs(CLUSTERS[name])
    if name == "rayjob":
        pods.append(JOB["submitterPodTemplate"]["spec"])
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert {"cpu", "memory"} <= set(container["resources"]["limits"])


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_dashboard_asks_for_a_token_and_stays_inside_the_cluster(name: str) -> None:
    assert CLUSTERS[name]["authOptions"] == {"mode": "token"}
    assert CLUSTERS[name]["headGroupSpec"]["serviceType"] == "ClusterIP"


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_secret_is_written_into_a_manifest(name: str) -> None:
    for pod in pod_specs(CLUSTERS[name]):
        for container in pod["containers"]:
            for variable in container.get("env", []):
                if re.search(r"(?i)password|token|secret|key$", variable["name"]):
                    assert "value" not in variable


# --- the Serve config


def test_ray_accepts_the_serve_config_and_knows_every_key() -> None:
    given = yaml.safe_load(SERVICE["serveConfigV2"])
    parsed = ServeDeploySchema.model_validate(given)
    assert parsed.applications
    assert unknown_keys(given, parsed) == []


@pytest.mark.parametrize("where", ["", "http_options", "application", "deployment", "ray_actor_options", "autoscaling"])
def test_a_key_unknown_to_ray_is_noticed_at_every_level(where: str) -> None:
    given: dict[str, Any] = {
        "http_options": {"port": 8000},
        "applications": [
            {
                "name": "a",
                "import_path": "a:b",
                "args": {"anything": {"goes": "here"}},
                "deployments": [
                    {"name": "D", "autoscaling_config": {"min_replicas": 1}, "ray_actor_options": {"num_cpus": 0}}
                ],
            }
        ],
    }
    deployment = given["applications"][0]["deployments"][0]
    level = {
        "": given,
        "http_options": given["http_options"],
        "application": given["applications"][0],
        "deployment": deployment,
        "ray_actor_options": deployment["ray_actor_options"],
        "autoscaling": deployment["autoscaling_config"],
    }[where]
    assert unknown_keys(given, ServeDeploySchema.model_validate(given)) == []
    level["misspelt"] = 1
    (found,) = unknown_keys(given, ServeDeploySchema.model_validate(given))
    assert found.endswith("misspelt")


def test_there_is_room_for_every_replica_the_serve_config_may_ask_for() -> None:
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(SERVICE["serveConfigV2"])).applications
    (group,) = SERVICE["rayClusterConfig"]["workerGroupSpecs"]
    for deployment in application.deployments:
        assert isinstance(deployment.autoscaling_config, dict)
        assert deployment.max_replicas_per_node == 1
        assert 1 + group["minReplicas"] >= deployment.autoscaling_config["min_replicas"], "the head and the workers"
        assert 1 + group["maxReplicas"] >= deployment.autoscaling_config["max_replicas"]


def test_kubernetes_can_reach_the_serve_port() -> None:
    options = ServeDeploySchema.model_validate(yaml.safe_load(SERVICE["serveConfigV2"])).http_options
    assert options.host == "0.0.0.0"
    for pod in pod_specs(SERVICE["rayClusterConfig"]):
        assert {"name": "serve", "containerPort": options.port} in pod["containers"][0]["ports"]


# --- the job


def test_the_job_runs_the_distillation_script_as_ray_job_submit_would() -> None:
    program, script, *_ = shlex.split(JOB["entrypoint"])
    assert program == "python"
    assert script == "jobs/distill.py"
    assert (ROOT / script).is_file()
    assert yaml.safe_load(JOB["runtimeEnvYAML"])["py_modules"] == ["platform/eaglenest"]


def test_the_jobs_cluster_goes_when_it_ends_and_tries_are_counted() -> None:
    assert JOB["shutdownAfterJobFinishes"] is True
    assert JOB["backoffLimit"] <= 2
    assert JOB["activeDeadlineSeconds"] > 0


# --- no drift


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", KUBERAY / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_embedded_is_what_the_files_say(render: ModuleType) -> None:
    for name, (key, source) in render.EMBEDDED.items():
        embedded, expected = yaml.safe_load(MANIFESTS[Path(name).stem]["spec"][key]), yaml.safe_load(source.read_text())
        if key == "serveConfigV2":
            assert expected["http_options"].pop("host") == "127.0.0.1"
            assert embedded["http_options"].pop("host") == "0.0.0.0"
        assert embedded == expected, "run: python infra/kuberay/render.py"


def test_the_check_passes_now_and_fails_after_a_change(tmp_path: Path) -> None:
    for folder in ("infra/kuberay", "serve_configs", "jobs"):
        for path in (ROOT / folder).glob("*.*"):
            copied = tmp_path / folder / path.name
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(path.read_bytes())
    command = [sys.executable, str(tmp_path / "infra/kuberay/render.py")]

    def status(*arguments: str) -> int:
        return subprocess.run([*command, *arguments], capture_output=True, timeout=60).returncode

    assert status("--check") == 0
    config = tmp_path / "serve_configs/2-autoscaled.yaml"
    config.write_text(config.read_text() + "\ntarget_capacity: 50\n")
    assert status("--check") == 1
    assert status() == 0
    assert status("--check") == 0
    rendered = yaml.safe_load((tmp_path / "infra/kuberay/rayservice.yaml").read_text())
    assert yaml.safe_load(rendered["spec"]["serveConfigV2"])["target_capacity"] == 50


@pytest.mark.parametrize("config", ["http_options: {}", "host: 0.0.0.0", "host: 127.0.0.1\nhost: 127.0.0.1"])
def test_a_serve_config_whose_address_is_unclear_is_refused(render: ModuleType, config: str) -> None:
    with pytest.raises(ValueError, match=r"expected one `host: 127\.0\.0\.1`"):
        render.for_a_pod(config)


def test_a_manifest_without_the_key_is_refused(render: ModuleType) -> None:
    with pytest.raises(ValueError, match="found 0"):
        render.embed("spec: {}\n", "serveConfigV2", "applications: []")
