"""The distillation job through Ray's Jobs API, on a Ray that was started outside of our environment."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import Cluster

from eaglenest.drafters.checkpoint import load_checkpoint
from eaglenest.registry import Registry

pytestmark = pytest.mark.slow


def test_the_cluster_itself_lacks_our_package(cluster: Cluster) -> None:
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(cluster.settings.dashboard_url)
    job = client.submit_job(entrypoint="python -c 'import eaglenest'")
    assert cluster.wait(client, job, 60) == "FAILED"
    assert "No module named 'eaglenest'" in client.get_job_logs(job)


def test_a_job_brings_our_package_and_registers_a_challenger(cluster: Cluster, small_job: Path) -> None:
    client, job = cluster.submit(
        ["--name", "first", "--from-nothing", "--max-seconds", "8", "--config", str(small_job)]
    )
    status = cluster.wait(client, job, 300)
    logs = client.get_job_logs(job)
    assert status == "SUCCEEDED", logs[-4000:]
    registry = Registry(cluster.settings.tracking_uri, cluster.settings.model_name)
    version = registry.resolve("challenger")
    figures = version.figures
    assert figures["train_prompts"] == 6
    assert 0 < figures["train_answer_tokens"] <= 6 * 24
    assert figures["simulated_accept_len"] >= 1.0
    config, tensors, manifest = load_checkpoint(registry.download(version, cluster.settings.cache_dir / "check"))
    assert manifest is not None
    assert (config.fc_norm, config.norm_output, config.draft_vocab_size) == (True, True, 1024)
    assert tensors["lm_head.weight"].shape == (1024, 576)


def test_a_teacher_on_vllm_answers_and_hands_over_the_states_in_one_pass(cluster: Cluster, small_job: Path) -> None:
    # answers of another length are not in the store yet
    arguments = ["--name", "captured", "--parent", "challenger", "--teacher", "vllm", "--answer-length", "20"]
    client, job = cluster.submit([*arguments, "--max-seconds", "8", "--config", str(small_job)])
    status = cluster.wait(client, job, 300)
    logs = client.get_job_logs(job)
    assert status == "SUCCEEDED", logs[-4000:]
    registry = Registry(cluster.settings.tracking_uri, cluster.settings.model_name)
    figures = registry.resolve("challenger").figures
    captured = int(re.search(r"(\d+) answers came with their states", logs)[1])  # type: ignore[index]
    assert captured >= figures["train_prompts"] >= 1
    assert figures["simulated_accept_len"] >= 1.0


def test_a_killed_trainer_goes_on_from_its_checkpoint(cluster: Cluster, small_job: Path) -> None:
    arguments = ["--name", "killed", "--parent", "challenger", "--max-seconds", "45", "--config", str(small_job)]
    client, job = cluster.submit(arguments)
    saved = cluster.settings.runs_dir / "training" / "killed"
    deadline = time.monotonic() + 150
    # the second one on disk tells that Ray Train knows of the first
    while len(list(saved.glob("checkpoint_*/progress.json"))) < 2:
        assert time.monotonic() < deadline, client.get_job_logs(job)[-4000:]
        assert not client.get_job_status(job).is_terminal(), client.get_job_logs(job)[-4000:]
        time.sleep(0.5)
    workers = [
        p
        for p in psutil.Process(cluster.pid).children(recursive=True)
        if any("RayTrainWorker" in part for part in p.cmdline())
    ]
    assert workers, "no training worker to kill"
    os.kill(workers[0].pid, signal.SIGKILL)
    assert cluster.wait(client, job, 240) == "SUCCEEDED", client.get_job_logs(job)[-4000:]
    logs = client.get_job_logs(job)
    assert "goes on at pass" in logs, logs[-4000:]
    registry = Registry(cluster.settings.tracking_uri, cluster.settings.model_name)
    challenger = registry.resolve("challenger")
    assert challenger.tags["job"] == "killed"


def test_a_bad_prompt_file_ends_the_job_with_file_and_line(cluster: Cluster, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "fine"}]}\n{"messages": [{"role": "wizard"}]}\n')
    client, job = cluster.submit(["--name", "bad", "--from-nothing", "--prompts", str(bad)])
    assert cluster.wait(client, job, 120) == "FAILED"
    logs = client.get_job_logs(job)
    assert "bad.jsonl" in logs
    assert "line 2" in logs
    assert "Traceback" not in logs
