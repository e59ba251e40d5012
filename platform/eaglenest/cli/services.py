"""doctor, up, down, status, env."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from eaglenest.cli.common import AsJson, load_settings, out, pairs, print_json, progress, say
from eaglenest.errors import ServiceError
from eaglenest.settings import Settings

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "running": "green", "stopped": "dim"}


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    for command in (doctor, up, down, status, env):
        app.command()(command)


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has and lacks, and how to mend it.

    Exit code 1 when something will not work; warnings alone are fine.

    Example: eaglenest doctor --json | jq '.[] | select(.status != "ok")'
    """
    settings = load_settings()
    from eaglenest.doctor import examine

    checks = examine(settings)
    if as_json:
        print_json([check.model_dump() for check in checks])
    else:
        table = Table("", "what", "found", "to mend it", box=None, padding=(0, 2, 0, 0))
        for check in checks:
            mark = Text(check.status, style=_COLOURS[check.status])
            table.add_row(mark, Text(check.name), Text(check.found), Text(check.fix or ""))
        out.print(table)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def up(
    config: Annotated[
        Path | None, typer.Option(help="a Serve config; default: serve_configs/1-one-replica.yaml")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve/--no-serve", help="deploy the Serve application too")] = True,
    as_json: AsJson = False,
) -> None:
    """Start Ray, MLflow and the served model on this machine; what runs already stays.

    The champion of the registry is served. Settings that you set (EAGLENEST_TARGET, EAGLENEST_DTYPE, ...) take the
    place of the config's. Everything listens on this machine's loopback address only.

    Examples:

        eaglenest up

        eaglenest up --config serve_configs/2-autoscaled.yaml

        EAGLENEST_SERVE_PORT=9000 eaglenest up
    """
    settings = load_settings()
    from eaglenest.services import local

    with progress("starting") as tell:
        running = local.up(settings, serve=serve, config=config, say=tell)
    if as_json:
        print_json(running.__dict__)
        return
    shown = {"MLflow": running.tracking_uri, "Ray": running.dashboard_url}
    if running.serve_url:
        shown = {"OpenAI API": f"{running.serve_url}/v1"} | shown
    pairs(shown)
    say('stop with `eaglenest down`; for `ray` and `serve` commands of your own: eval "$(eaglenest env)"')


def down(as_json: AsJson = False) -> None:
    """Stop everything that `up` or `demo` started, and nothing else.

    What was made stays: drafters and runs in runs_dir, converted targets in cache_dir.

    Example: eaglenest down
    """
    settings = load_settings()
    from eaglenest.services import local

    with progress("stopping") as tell:
        ended = local.down(settings, say=tell)
    if as_json:
        print_json(ended)
    else:
        out.print(
            ", ".join(f"{name}: {count} processes ended" for name, count in ended.items()) or "nothing was running"
        )


def status(as_json: AsJson = False) -> None:
    """Say what runs, where, and which drafter each replica serves.

    Example: eaglenest status --json | jq -r '.ray.state'
    """
    settings = load_settings()
    from eaglenest.services import local

    found = local.status(settings)
    replicas = _replicas(settings) if found["serve"]["state"] == "running" else []
    if as_json:
        print_json({**found, "replicas": replicas})
        return
    table = Table("service", "state", "where", "memory", box=None, padding=(0, 2, 0, 0))
    for name, service in found.items():
        memory = f"{service['memory_mib']} MiB" if service.get("memory_mib") else ""
        state = Text(service["state"], style=_COLOURS.get(service["state"], "yellow"))
        table.add_row(name, state, service["url"], memory)
    out.print(table)
    for replica in replicas:
        serves = f"version {replica['actual_version']}" if replica["actual_version"] else "no drafter: plain decoding"
        out.print(
            Text(f"replica {replica['replica_id']}: {serves}, K={replica['k']}, {replica['dtype']}"), soft_wrap=True
        )
        if replica["last_error"]:
            out.print(Text(f"  {replica['last_error']}", style="yellow"), soft_wrap=True)


def env() -> None:
    """Print what lets `ray`, `serve` and MLflow's commands find our services.

    Example: eval "$(eaglenest env)" && serve status
    """
    settings = load_settings()
    from eaglenest.services.access import client_env

    for name, value in client_env(settings).items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _replicas(settings: Settings) -> list[dict[str, Any]]:
    from eaglenest.serving.control import ServeReplicas

    try:
        return [replica.model_dump() for replica in ServeReplicas().status()]
    except ServiceError as error:
        say(str(error))
        return []
