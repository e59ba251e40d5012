"""Options of `jobs/distill.py`: what runs inside the cluster when a distillation job is submitted."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from eaglenest.errors import BadInput, EagleNestError, of_system

if TYPE_CHECKING:
    from eaglenest.distill.run import DistillJob
    from eaglenest.settings import Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def distill(
    name: Annotated[str, typer.Option(help="name of the run; the same name goes on where it stopped")],
    target: Annotated[str | None, typer.Option(help="embedded name, hub id or path; default: EAGLENEST_TARGET")] = None,
    parent: Annotated[str, typer.Option(help="version, alias or checkpoint folder to start from")] = "champion",
    from_nothing: Annotated[bool, typer.Option("--from-nothing", help="start from the target alone")] = False,
    prompts: Annotated[str, typer.Option(help="builtin:train, or a JSONL file")] = "builtin:train",
    self_prompts: Annotated[int | None, typer.Option(help="prompts that the target writes itself, beside them")] = None,
    heldout: Annotated[
        str | None, typer.Option(help="held-out prompts; default: ours, or a fifth of the topics of your own file")
    ] = None,
    answer_tokens: Annotated[int | None, typer.Option(help="answer tokens to train on at most")] = None,
    answer_length: Annotated[int | None, typer.Option(help="tokens of one answer at most; default: 128")] = None,
    answers_from: Annotated[str | None, typer.Option(help="URL of a running endpoint that shall answer")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="training time")] = None,
    passes: Annotated[int | None, typer.Option(help="passes over the answers at most")] = None,
    workers: Annotated[int, typer.Option(help="trainers")] = 1,
    teachers: Annotated[int, typer.Option(help="teachers")] = 1,
    teacher: Annotated[
        str | None, typer.Option(help="transformers, or vllm: writes the answers and keeps their states in one pass")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="trainers and teachers take a GPU each")] = False,
    threads: Annotated[
        int | None, typer.Option(help="threads of each trainer and teacher on a CPU; default: all cores")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON with any field of DistillJob (docs/distillation.md); options override it")
    ] = None,
) -> None:
    """Distill a drafter and register it as the challenger.

    Example: python jobs/distill.py --name first --from-nothing --answer-tokens 25000 --max-seconds 300
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for noisy in ("httpx", "httpx2", "mlflow", "ray.train"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from eaglenest.services.processes import sigterm_as_interrupt

    given: dict[str, Any] = {
        "name": name,
        "target": target,
        "prompts": prompts if prompts != "builtin:train" else None,
        "self_prompts": self_prompts,
        "heldout": heldout,
        "answer_tokens": answer_tokens,
        "answers": {"max_tokens": answer_length},
        "answers_from": answers_from,
        "workers": workers,
        "teachers": teachers,
        "teacher": teacher,
        "gpu": gpu,
        "threads": threads,
        "recipe": {"max_seconds": max_seconds, "passes": passes},
    }
    with sigterm_as_interrupt():
        try:
            _run(given, config, None if from_nothing else parent)
        except (EagleNestError, OSError) as error:
            told = of_system(error) if isinstance(error, OSError) else error
            print(f"error: {told}", file=sys.stderr)
            raise SystemExit(told.exit_code) from error


def _run(given: dict[str, Any], config: Path | None, parent: str | None) -> None:
    import ray

    from eaglenest.pipeline import raise_drafter
    from eaglenest.settings import get_settings

    settings = get_settings()
    job = job_of(given, config, settings)
    ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    version = raise_drafter(job, settings, parent=parent, say=lambda line: print(line, flush=True))
    print(f"registered {settings.model_name} version {version.version} as challenger", flush=True)


def job_of(given: dict[str, Any], config: Path | None, settings: Settings) -> DistillJob:
    """The job that the config file and the options describe; an option goes before the file, None is not given.

    Raises:
        BadInput: names the field.
    """
    from eaglenest.distill.run import DistillJob

    fields = _read(config)
    for name, value in given.items():
        if isinstance(value, dict):
            section = fields.get(name, {})
            if not isinstance(section, dict):
                raise BadInput(
                    f"{config}: {name} is {section!r}", "a JSON object", f"leave {name} out for its defaults"
                )
            fields[name] = {**section, **{k: v for k, v in value.items() if v is not None}}
        elif value is not None:
            fields[name] = value
    fields.setdefault("target", settings.target)
    if "heldout" not in fields and "prompts" in fields:
        fields["heldout"] = None
    fields.setdefault("num_speculative_tokens", settings.num_speculative_tokens)
    try:
        return DistillJob.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", "a field of DistillJob") from error


def _read(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        raw = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{config} cannot be read as JSON ({error})", "an object with fields of DistillJob") from error
    if not isinstance(raw, dict):
        raise BadInput(f"{config} holds {type(raw).__name__}", "a JSON object")
    return raw


def main() -> None:
    """Run the command."""
    app()
