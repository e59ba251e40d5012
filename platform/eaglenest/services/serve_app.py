"""The Serve application, deployed through Ray's REST API, as `serve deploy` does: no Ray driver in this process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from eaglenest.errors import BadInput, ServiceError
from eaglenest.services import access
from eaglenest.services.http import request
from eaglenest.services.processes import port_holder, port_is_free
from eaglenest.services.state import Say, silent
from eaglenest.settings import Settings, get_settings

if TYPE_CHECKING:
    import httpx

DEPLOY_SECONDS = 600.0
_FAILED = {"DEPLOY_FAILED", "UNHEALTHY"}
_POLL_S = 0.5
_NAMELESS = "the Serve config"
_BUILDER = "eaglenest.serving.app:build"
_OVERLAID = ("target", "model_name", "num_speculative_tokens", "dtype", "max_model_len")


def render(settings: Settings, config: Path | dict[str, Any], args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A Serve config with the settings' host and port in it.

    A file's arguments give way to the settings that were set on purpose (EAGLENEST_TARGET and the like), so that one
    setting moves the served target and the distilled one alike. A dictionary is somebody's exact wish and stays.

    Args:
        args: arguments that go before all others, in every application.

    Raises:
        BadInput: the file cannot be read, or is no Serve config.
    """
    source, expected = _NAMELESS, "a Serve config: a mapping with `applications`"
    if isinstance(config, Path):
        source = str(config)
        try:
            config = yaml.safe_load(config.read_bytes())
        except OSError as error:
            raise BadInput(f"{source} cannot be read: {error.strerror}", expected) from error
        except (yaml.YAMLError, UnicodeError, RecursionError) as error:
            raise BadInput(f"{source} is not YAML: {error}", expected) from error
    if not isinstance(config, dict) or not isinstance(config.get("applications"), list):
        raise BadInput(f"{source} has no list `applications`", expected, "start from a file of serve_configs/")
    _check_applications(source, config["applications"])
    if not isinstance(config.get("http_options") or {}, dict):
        raise BadInput(f"{source}: http_options is {config['http_options']!r}", "a mapping, or nothing")
    if source != _NAMELESS:
        config = {**config, "applications": [_overlaid(settings, app) for app in config["applications"]]}
    if args:
        changed = [{**app, "args": {**(app.get("args") or {}), **args}} for app in config["applications"]]
        config = {**config, "applications": changed}
    http = {**(config.get("http_options") or {}), "host": settings.host, "port": settings.serve_port}
    return {**config, "http_options": http}


def _check_applications(source: str, applications: list[Any]) -> None:
    """What we rely on ourselves; the rest is for Serve to judge."""
    for number, application in enumerate(applications, start=1):
        where = f"{source}: application {number}"
        if not isinstance(application, dict) or not isinstance(application.get("name"), str):
            raise BadInput(f"{where} has no name", "a mapping with name, import_path and args")
        if not isinstance(application.get("args") or {}, dict):
            raise BadInput(f"{where}: args is {application['args']!r}", "a mapping, or nothing")


def _overlaid(settings: Settings, application: dict[str, Any]) -> dict[str, Any]:
    if application.get("import_path") != _BUILDER:
        return application
    on_purpose = {name: getattr(settings, name) for name in _OVERLAID if name in settings.model_fields_set}
    return {**application, "args": {**(application.get("args") or {}), **on_purpose}}


def digest(rendered: dict[str, Any]) -> str:
    """Equal for equal configs."""
    return hashlib.sha256(json.dumps(rendered, sort_keys=True).encode()).hexdigest()


def deploy_serve(
    settings: Settings, config: Path | dict[str, Any], *, say: Say = silent, timeout_s: float = DEPLOY_SECONDS
) -> None:
    """Deploy a Serve config and wait until its applications run. Serve updates what differs.

    Raises:
        BadInput: no Serve config, or one that Serve refuses.
        ServiceError: Ray does not answer, the port is taken, or an application fails or takes too long.
    """
    rendered = render(settings, config)
    if _moved(settings):
        delete_serve(settings, say=say)
    if not applications(settings) and not port_is_free(settings.host, settings.serve_port):
        holder = port_holder(settings.serve_port)
        raise ServiceError(
            f"port {settings.serve_port} for Serve is taken by {holder}",
            None,
            "end that program, or choose another port with EAGLENEST_SERVE_PORT",
        )
    answer = _ask(settings, "PUT", 120, rendered)
    if answer is None:
        raise _no_ray(settings)
    if answer.status_code != 200:
        raise BadInput(f"Serve refuses the config (HTTP {answer.status_code}): {answer.text.strip()[:600]}")
    _wait_until_running(settings, [app["name"] for app in rendered["applications"]], say, timeout_s)


def delete_serve(settings: Settings | None = None, *, say: Say = silent, timeout_s: float = 60.0) -> None:
    """Stop Serve and all its applications, and wait until they are gone. Fine where none runs.

    Raises:
        ServiceError: Ray does not answer, or they are still there in the end.
    """
    settings = settings or get_settings()
    deadline = time.monotonic() + timeout_s
    say("stopping the Serve applications")
    if _ask(settings, "DELETE", timeout_s) is None:
        raise _no_ray(settings)
    while applications(settings) or not port_is_free(settings.host, settings.serve_port):
        if time.monotonic() > deadline:
            raise ServiceError(
                f"the Serve applications did not stop within {timeout_s:.0f} s", None, "`eaglenest down`"
            )
        time.sleep(_POLL_S)


@contextlib.contextmanager
def deployed(settings: Settings, config: Path, args: Mapping[str, Any], *, say: Say = silent) -> Iterator[str]:
    """A Serve config with other arguments, up for as long as the context: `{"drafter": "none", "dtype": "bfloat16"}`.

    Yields:
        The root URL of its endpoint.

    Raises:
        BadInput, ServiceError: as `deploy_serve`.
    """
    rendered = render(settings, config, args)
    try:
        deploy_serve(settings, rendered, say=say)
        yield settings.serve_url
    finally:
        delete_serve(settings, say=say)


def applications(settings: Settings) -> dict[str, dict[str, Any]]:
    """Serve's applications by name, as Ray tells of them; empty where Serve does not run.

    Raises:
        ServiceError: Ray does not answer.
    """
    found: dict[str, dict[str, Any]] = _details(settings).get("applications", {})
    return found


def running(settings: Settings) -> bool:
    """Whether there are applications and all of them run."""
    states = [application["status"] for application in applications(settings).values()]
    return bool(states) and set(states) == {"RUNNING"}


def _details(settings: Settings) -> dict[str, Any]:
    answer = _ask(settings, "GET", 30)
    if answer is None or answer.status_code != 200:
        raise _no_ray(settings)
    details: dict[str, Any] = answer.json()
    return details


def _moved(settings: Settings) -> bool:
    """Serve cannot change its address while it runs."""
    details = _details(settings)
    http = details.get("http_options") or {}
    return bool(details.get("applications")) and (http.get("host"), http.get("port")) != (
        settings.host,
        settings.serve_port,
    )


def _wait_until_running(settings: Settings, names: list[str], say: Say, timeout_s: float) -> None:
    started = time.monotonic()
    said = ""
    while True:
        found = applications(settings)
        states = {name: found[name]["status"] if name in found else "NOT_STARTED" for name in names}
        if set(states.values()) == {"RUNNING"} and _routed(settings, names):
            return
        detail = _messages(found, names)
        if failed := [name for name, state in states.items() if state in _FAILED]:
            raise ServiceError(
                f"Serve could not start {', '.join(failed)}:{_tail(detail)}",
                None,
                "mend what it names; the replica's log is in Ray's dashboard, " + settings.dashboard_url,
            )
        if time.monotonic() - started > timeout_s:
            raise ServiceError(
                f"Serve did not bring up {', '.join(names)} within {timeout_s:.0f} s ({states}):{_tail(detail)}",
                None,
                "`eaglenest doctor` checks memory and cores; Ray's dashboard shows what waits for them",
            )
        last = detail.strip().splitlines()[-1] if detail.strip() else ""
        if (news := last or ", ".join(sorted(set(states.values())))) != said:
            said = news
            say(f"Serve: {news}")
        time.sleep(_POLL_S)


def _routed(settings: Settings, names: list[str]) -> bool:
    """Whether Serve's proxy knows the way to them: it learns of it a moment after they run."""
    answer = request("GET", f"{settings.serve_url}/-/routes")
    return answer is not None and answer.status_code == 200 and set(names) <= set(answer.json().values())


def _messages(found: dict[str, dict[str, Any]], names: list[str]) -> str:
    """What Serve says of the applications and their deployments, each line once."""
    messages: dict[str, None] = {}
    for name in names:
        application = found.get(name, {})
        messages[application.get("message", "")] = None
        for deployment in application.get("deployments", {}).values():
            messages[deployment.get("message", "")] = None
    return "\n".join(message for message in messages if message)


def _tail(text: str, lines: int = 15) -> str:
    kept = [line for line in text.splitlines() if line.strip()][-lines:]
    return "".join(f"\n  {line[:300]}" for line in kept) or " it gives no reason"


def _ask(settings: Settings, method: str, timeout_s: float, body: Any = None) -> httpx.Response | None:
    url = f"{settings.dashboard_url}/api/serve/applications/"
    return request(method, url, json=body, timeout_s=timeout_s, headers=access.headers(settings))


def _no_ray(settings: Settings) -> ServiceError:
    return ServiceError(
        f"Ray does not answer at {settings.dashboard_url}", "a running Ray head", "start it with `eaglenest up`"
    )
