"""The application on a real Ray with a real engine and a real registry: one replica for the whole module."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from eaglenest.engine.environment import on_cpu

if TYPE_CHECKING:
    from openai import OpenAI

    from eaglenest.registry import Registry

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
ADMITTED, WAITING = 12, 12  # Serve counts a request as waiting until it has chosen a replica for it


class Line:
    """A TCP line to a server that can be cut and mended."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._is_cut = False
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut = True
        for end in self._open:
            self._hang_up(end)
        self._open.clear()

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                client.close()
                continue
            server = socket.create_connection(self._to)
            self._open += [client, server]
            for a, b in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            # Closing alone says nothing to the other side while the other thread still reads from that socket.
            for end in (source, sink):
                Line._hang_up(end)
                end.close()

    @staticmethod
    def _hang_up(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@dataclass
class Service:
    """A running application and everything around it."""

    url: str
    ray_address: str
    registry: Registry
    line: Line
    drafters: Path
    target: Any
    run_id: str

    @property
    def openai(self) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def status(self) -> dict[str, Any]:
        (status,) = httpx.get(f"{self.url}/eaglenest/status", timeout=30).json()
        return dict(status)

    def register(self, name: str, seed: int, **drafter: Any) -> int:
        from sample_drafters import save_drafter

        folder = save_drafter(self.drafters / name, self.target, seed, **drafter)
        return int(self.registry.register(folder, run_id=self.run_id, figures={"accept_len": 1.0}).version)


@pytest.fixture(scope="module")
def service(ray_cluster: Any, mlflow_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from mlflow import MlflowClient
    from ray_head import free_port, shipped

    from eaglenest.registry import Registry
    from eaglenest.targets import resolve_target

    host, port = re.fullmatch(r"http://([\d.]+):(\d+)", mlflow_server.uri).groups()  # type: ignore[union-attr]
    line = Line(host, int(port))
    run = MlflowClient(mlflow_server.uri).create_run("0").info.run_id
    http = free_port()
    made = Service(
        url=f"http://127.0.0.1:{http}",
        ray_address=ray_cluster.address,
        registry=Registry(mlflow_server.uri, "service-drafter"),
        line=line,
        drafters=tmp_path_factory.mktemp("drafters"),
        target=resolve_target(),
        run_id=run,
    )
    made.registry.promote(made.register("first", 1))
    made.register("second", 2)
    config = shipped(
        "1-one-replica.yaml",
        http,
        target=str(made.target.path),
        registry_uri=f"http://127.0.0.1:{line.port}",
        model_name="service-drafter",
        max_model_len=1024,
        poll_interval_s=1.0,
    )
    config["applications"][0]["deployments"][0] |= {"max_ongoing_requests": ADMITTED, "max_queued_requests": WAITING}
    ray_cluster.deploy(config, seconds=240)
    try:
        yield made
    finally:
        import ray

        ray.shutdown()
        line.close()


def test_the_replica_starts_with_the_champion(service: Service) -> None:
    status = service.status()
    assert (status["actual_version"], status["desired_version"], status["k"]) == (1, 1, 3)
    assert status["last_error"] is None


def test_a_cpu_engine_is_one_process_whose_threads_have_a_core_each(service: Service) -> None:
    if not on_cpu():
        pytest.skip("a GPU engine computes on its GPU")
    engines = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith("VLLM::")]
    assert [" ".join(engine.info["cmdline"]).strip() for engine in engines] == ["VLLM::EngineCore"]
    bound = {frozenset(psutil.Process(thread.id).cpu_affinity()) for thread in engines[0].threads()}
    assert len({cpus for cpus in bound if len(cpus) == 1}) == int(engines[0].environ()["OMP_NUM_THREADS"])


def test_the_openai_client_finds_vllms_routes(service: Service) -> None:
    client = service.openai
    assert [m.id for m in client.models.list().data] == [MODEL]
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=12, temperature=0
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 12
    done = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=8, temperature=0)
    assert done.choices[0].text
    figures = (done.model_extra or {})["metrics"]["speculative_decoding"]
    assert len(figures["acceptance_histogram"]) == 4


def test_a_stream_ends_in_usage_and_is_the_answer_itself(service: Service) -> None:
    client = service.openai
    messages: Any = [{"role": "user", "content": "Count from one to ten."}]
    ask: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert len(chunks) > 12
    assert text == client.chat.completions.create(**ask).choices[0].message.content


def test_tokenize_health_and_vllms_errors(service: Service) -> None:
    tokens = httpx.post(f"{service.url}/tokenize", json={"model": MODEL, "prompt": "He went to"}).json()
    assert tokens["tokens"] == [3681, 3514, 288]
    assert httpx.get(f"{service.url}/health").status_code == 200
    wrong = httpx.post(f"{service.url}/v1/completions", json={"model": "other", "prompt": "x"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "NotFoundError")


def test_a_sampled_request_with_top_k_does_not_end_the_service(service: Service) -> None:
    ask = {"model": MODEL, "prompt": "A poem:", "max_tokens": 8, "temperature": 0.8, "top_k": 5}
    for _ in range(2):
        assert httpx.post(f"{service.url}/v1/completions", json=ask, timeout=60).status_code == 200


def test_figures_come_out_of_vllms_route_and_of_rays(service: Service) -> None:
    own = httpx.get(f"{service.url}/metrics").text
    for name in ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"):
        assert re.search(rf"^{name}{{.*}} \d", own, re.M), name
    import ray

    ray.init(service.ray_address, namespace="serve", log_to_driver=False, ignore_reinit_error=True)
    port = ray.nodes()[0]["MetricsExportPort"]
    wanted = (
        "ray_eaglenest_drafter_version",
        "ray_vllm_spec_decode_num_drafts_total",
        "ray_vllm_generation_tokens_total",
    )
    deadline = time.monotonic() + 30
    while missing := [n for n in wanted if n not in httpx.get(f"http://127.0.0.1:{port}/metrics").text]:
        assert time.monotonic() < deadline, f"not exported by Ray: {missing}"
        time.sleep(1)


def test_promotions_under_streams_take_effect_and_change_no_token(service: Service) -> None:
    """One by a nudge, one found by polling; the same prompts before, during and after."""
    from eaglenest.serving.control import ServeReplicas

    replicas = ServeReplicas(ray_address=service.ray_address)
    prompts = [f"Write a sentence about the number {i}:" for i in range(8)]

    def stream(prompt: str) -> str:
        made = service.openai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=56, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join(chunk.choices[0].text for chunk in made)

    with ThreadPoolExecutor(len(prompts)) as pool:
        before = list(pool.map(stream, prompts))
        during = [pool.submit(stream, prompt) for prompt in prompts]
        time.sleep(0.5)
        service.registry.promote(2)
        (nudged,) = replicas.nudge()
        assert (nudged.actual_version, nudged.last_error) == (2, None)
        assert nudged.pause_ms is not None
        service.registry.promote(1)
        _wait_for_version(service, 1)
        assert [answer.result() for answer in during] == before
    (status,) = replicas.status()
    assert status.model_dump() == service.status()


def test_a_version_of_another_architecture_is_refused_once_and_the_old_one_serves_on(service: Service) -> None:
    from sample_drafters import drafter_config

    number = service.register("other", 5, config=drafter_config(service.target, norm_output=False))
    service.registry.promote(number)
    deadline = time.monotonic() + 30
    while service.status()["desired_version"] != number or service.status()["last_error"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    status = service.status()
    assert status["actual_version"] == 1
    assert "refused" in status["last_error"]
    assert "architecture" in status["last_error"]
    service.registry.rollback()
    _wait_for_version(service, 1)
    assert service.status()["last_error"] is None


def test_without_the_registry_the_replica_serves_on_and_says_so(service: Service) -> None:
    service.line.cut()
    try:
        deadline = time.monotonic() + 30
        while "registry could not be asked" not in str(service.status()["last_error"]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        answer = service.openai.completions.create(model=MODEL, prompt="Still here?", max_tokens=4)
        assert answer.choices[0].text
        assert httpx.get(f"{service.url}/health").status_code == 200
    finally:
        service.line.mend()
    service.registry.promote(2)
    _wait_for_version(service, 2)
    assert service.status()["last_error"] is None


def test_overload_is_answered_with_429_and_when_to_come_again(service: Service) -> None:
    ask = {"model": MODEL, "prompt": "Go on and on:", "max_tokens": 32, "ignore_eos": True, "temperature": 0}

    with httpx.Client(timeout=120, limits=httpx.Limits(max_connections=48)) as client, ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(lambda _: client.post(f"{service.url}/v1/completions", json=ask), range(48)))
    codes = [a.status_code for a in answers]
    assert set(codes) == {200, 429}
    assert codes.count(200) >= ADMITTED
    assert all(a.headers["retry-after"] == "1" for a in answers if a.status_code == 429)


def _wait_for_version(service: Service, number: int, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while (status := service.status())["actual_version"] != number or status["desired_version"] != number:
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
