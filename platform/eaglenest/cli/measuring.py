"""bench, demo."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from eaglenest.cli.common import AsJson, err, load_settings, out, print_json, progress, say
from eaglenest.errors import BadInput, ServiceError
from eaglenest.settings import Settings

if TYPE_CHECKING:
    from eaglenest.bench.models import BenchResult, Plan
    from eaglenest.distill.prompts import Prompt


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command()(bench)
    app.command()(demo)


def bench(
    url: Annotated[
        str | None, typer.Option(help="measure this running endpoint alone, instead of engines of our own")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="compiled engines too: ten minutes more on a CPU")] = False,
    concurrency: Annotated[str, typer.Option(help="requests in flight, one window each")] = "1,2,4,8",
    max_tokens: Annotated[int, typer.Option(min=2, help="answer tokens of each request")] = 64,
    requests: Annotated[int | None, typer.Option(min=1, help="requests of each window")] = None,
    prompts: Annotated[str, typer.Option(help="builtin:heldout, builtin:train, or a JSONL file")] = "builtin:heldout",
    save: Annotated[Path | None, typer.Option(help="write every figure and request to this JSON file")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare plain decoding with speculation: tokens per second, acceptance, latency.

    Engines are started one after the other with the registry's champion, so nothing else may be served meanwhile.

    Examples:

        eaglenest bench

        eaglenest bench --full --save bench.json

        eaglenest bench --url http://127.0.0.1:8000 --concurrency 1,4
    """
    levels = _levels(concurrency)
    if url is not None:
        url = _root_url(url)
    if save:
        _require_writable(save)
    settings = load_settings()
    from eaglenest.bench.models import Plan
    from eaglenest.distill.prompts import load_prompts
    from eaglenest.report import render_bench

    asked = load_prompts(prompts)
    plan = Plan(concurrencies=levels, max_tokens=max_tokens, requests_per_point=requests)
    result = _endpoint(url, asked, plan) if url else _configurations(settings, asked, plan, full)
    if save:
        save.write_text(result.model_dump_json(indent=2) + "\n")
    if as_json:
        print_json(result.without_rows().model_dump())
    else:
        out.print(render_bench(result))


def demo(as_json: AsJson = False) -> None:
    """The whole way on this machine: raise a drafter, serve it, measure it, improve it, swap it in under load.

    Takes half an hour on two cores the first time, and goes on where it was interrupted. It ends with a report in
    runs_dir/demo: report.html for people, report.json for machines.

    Example: eaglenest demo
    """
    settings = load_settings()
    from eaglenest.demo import run_demo
    from eaglenest.doctor import examine
    from eaglenest.report import render_terminal

    checks = examine(settings)
    for check in checks:
        if check.status != "ok":
            say(f"{check.status}: {check.name}: {check.found}" + (f"; {check.fix}" if check.fix else ""))
    if any(check.status == "fail" for check in checks):
        raise ServiceError("this machine cannot run the demo", "what `eaglenest doctor` lists", "mend it as it says")
    began = time.monotonic()

    def tell(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        style = "bold cyan" if line.startswith("==") else "dim"
        err.print(Text(f"{minutes:2d}:{seconds:02d}  {line}", style=style), soft_wrap=True)

    report = run_demo(settings, tell)
    if as_json:
        print_json(report.model_dump(mode="json"))
        return
    out.print(render_terminal(report))
    folder = (settings.runs_dir / "demo").resolve()
    out.print(f"The report: {folder / 'report.html'} (and report.json)", soft_wrap=True)
    for command in report.commands:
        out.print(Text.assemble((f"{command.command:<28}", "bold"), command.text), soft_wrap=True)


def _levels(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1:
        raise BadInput(f"--concurrency {text}", "numbers from 1 up with commas between, such as 1,2,4,8")
    return levels


def _root_url(url: str) -> str:
    """The root of an endpoint, without `/v1`."""
    from urllib.parse import urlsplit

    try:
        sound = urlsplit(url).scheme in {"http", "https"} and bool(urlsplit(url).hostname)
    except ValueError:  # half an IPv6 address
        sound = False
    if not sound:
        raise BadInput(f"--url {url}", "the root of an endpoint, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def _require_writable(path: Path) -> None:
    """Find out before minutes of measuring, not after them. An earlier file stays as it is until then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise BadInput(f"--save {path}: {error.strerror}", "a file that can be written") from error


def _endpoint(url: str, prompts: list[Prompt], plan: Plan) -> BenchResult:
    from eaglenest.bench.measure import measure
    from eaglenest.bench.models import BenchResult

    with progress("measuring") as tell:
        measured = measure(url, None, prompts, plan, on_progress=tell)
    speculates = measured.acceptance is not None
    return BenchResult(
        plain=[] if speculates else [measured],
        speculative=[measured] if speculates else [],
        speedup_c1=None,
        speedup_c1_vs_best_plain=None,
    )


def _configurations(settings: Settings, prompts: list[Prompt], plan: Plan, full: bool) -> BenchResult:
    from eaglenest.bench.run import default_configurations, run_bench
    from eaglenest.services import local, serve_app

    with progress("starting services") as tell:
        local.up(settings, serve=False, say=tell)
        if serve_app.applications(settings):
            raise ServiceError(
                "a Serve application is running, and would share the machine with what is measured",
                "a machine to itself",
                "`eaglenest down` first, or measure what runs: eaglenest bench --url " + settings.serve_url,
            )
        dtype = "float32" if settings.dtype == "auto" else settings.dtype
        result = run_bench(
            default_configurations(dtype=dtype, full=full),
            local.engines(settings, say=tell),
            prompts,
            plan,
            on_progress=tell,
        )
    say("Ray and MLflow stay up: `eaglenest down` stops them")
    return result
