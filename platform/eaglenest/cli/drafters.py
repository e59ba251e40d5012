"""distill, promote, rollback, versions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from eaglenest.cli.common import AsJson, load_settings, out, print_json, progress, say
from eaglenest.settings import Settings

if TYPE_CHECKING:
    from eaglenest.registry import Registry
    from eaglenest.rollout.promote import RolloutResult
    from eaglenest.serving.control import ServeReplicas

Timeout = Annotated[float, typer.Option(help="seconds to wait for the replicas")]


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    # --help and unknown options are the job's
    passing = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(context_settings=passing)(distill)
    for command in (promote, rollback, versions):
        app.command()(command)


def distill(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Distill a drafter as a Ray job, follow its log, and register it as the challenger."""
    # shown is what the job itself says; the job's page has every line
    from eaglenest.cli.submit import checked
    from eaglenest.jobs_client import run_distill_job, telling

    arguments = checked(ctx.args)
    settings = load_settings()
    from eaglenest.services import local

    with progress("starting services") as tell:
        local.up(settings, serve=False, say=tell)
    say(f"the job's page, with the whole log: {settings.dashboard_url}/#/jobs")

    def show(line: str) -> None:
        told = telling(line)
        if told is not None and not told.startswith("error: "):  # an error is this command's last word
            print(told, file=sys.stderr if as_json else sys.stdout, flush=True)

    job_id = run_distill_job(settings, arguments, show)
    if as_json:
        newest = _registry(settings).resolve("challenger")
        print_json({"job_id": job_id, "version": newest.version, "figures": newest.figures})
    else:
        say(f"next: `eaglenest versions`, then {_way_into_service(_registry(settings))}")


def _way_into_service(registry: Registry) -> str:
    """The commands that put the challenger into service: a swap, unless an engine must start anew for it."""
    champion = registry.aliases().get("champion")
    fixed = ("target_fingerprint", "architecture", "d2t_sha256")
    if champion is not None:
        now, then = registry.resolve(champion).tags, registry.resolve("challenger").tags
        if any(now.get(name) != then.get(name) for name in fixed):
            return (
                "`eaglenest down`, `eaglenest promote challenger`, `eaglenest up`: it begins a new line "
                f"(another vocabulary or shape than version {champion}), so it cannot be swapped in"
            )
    return "`eaglenest promote challenger`"


def promote(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="number or alias, such as 3 or challenger")],
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Make a version the champion: every replica swaps to it while requests stream.

    The version is checked first (files, target, architecture). If a replica refuses it, the old champion is restored.
    Where no service runs, only the alias moves, and the next `up` serves it.

    Examples:

        eaglenest promote 3

        eaglenest promote challenger
    """
    settings = load_settings()
    from eaglenest.rollout.promote import promote as move

    with progress(f"promoting {version}") as tell:
        result = move(_registry(settings), version, _service(settings, tell), timeout_s=timeout)
    _print_rollout(result, as_json)


def rollback(timeout: Timeout = 120.0, as_json: AsJson = False) -> None:
    """Return to the previous champion. A second rollback undoes the first.

    Example: eaglenest rollback
    """
    settings = load_settings()
    from eaglenest.rollout.promote import rollback as move

    with progress("rolling back") as tell:
        result = move(_registry(settings), _service(settings, tell), timeout_s=timeout)
    _print_rollout(result, as_json)


def versions(as_json: AsJson = False) -> None:
    """List the drafter versions of the registered model, newest first.

    Example: eaglenest versions --json | jq '.[0].figures.accept_len'
    """
    settings = load_settings()
    found = sorted(_registry(settings).versions(), key=lambda version: version.version, reverse=True)
    if as_json:
        print_json([version.model_dump() | {"figures": version.figures} for version in found])
        return
    if not found:
        out.print(f"{settings.model_name} has no versions yet; raise one with `eaglenest distill`")
        return
    table = Table("version", "aliases", "acceptance length", "parent", "created", box=None, padding=(0, 2, 0, 0))
    for version in found:
        tags = version.tags
        simulated = tags.get("simulated_accept_len")
        length = tags.get("accept_len") or (f"{simulated} simulated" if simulated else "")
        created = version.created_at[:16].replace("T", " ")
        cells = ("\n".join(version.aliases), length, tags.get("parent_version", ""), created)
        table.add_row(str(version.version), *(Text(cell) for cell in cells))
    out.print(table)


def _registry(settings: Settings) -> Registry:
    from eaglenest.registry import Registry

    return Registry(settings.tracking_uri, settings.model_name)


def _service(settings: Settings, tell: Any) -> ServeReplicas | None:
    """The replicas to nudge, ours or those of a `serve run` on the same port; None where nothing is served."""
    from eaglenest.services import local
    from eaglenest.services.http import answers

    ours = local.status(settings)["serve"]["state"] != "stopped"
    if not ours and not answers(f"{settings.serve_url}/eaglenest/status"):
        tell("no service runs here: only the alias moves")
        return None
    import os

    from eaglenest.serving.control import ServeReplicas

    return ServeReplicas(ray_address=None if ours else os.environ.get("RAY_ADDRESS", "auto"))


def _print_rollout(result: RolloutResult, as_json: bool) -> None:
    if as_json:
        print_json(result.model_dump())
        return
    was = f"was {result.old}" if result.old is not None else "there was none"
    if result.old == result.new:
        was = "it was already"
    out.print(f"champion is version {result.new} ({was}); {len(result.replicas)} replicas serve it", end=" ")
    out.print(f"after {result.seconds:.1f} s")
    for replica in result.replicas:
        if replica.pause_ms is not None:
            out.print(Text(f"replica {replica.replica_id}: {replica.pause_ms:.1f} ms between two engine steps"))
