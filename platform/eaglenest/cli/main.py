"""The `eaglenest` command: a thin shell over the modules that do the work."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from eaglenest import __version__
from eaglenest.cli import drafters, measuring, services
from eaglenest.cli.common import err
from eaglenest.errors import EagleNestError, of_system
from eaglenest.services.processes import sigterm_as_interrupt

INTERRUPTED = 130


class Commands(TyperGroup):
    """The command group; an error of ours becomes one message and its exit code, unless --debug asks for all of it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with sigterm_as_interrupt():
                return super().invoke(ctx)
        except EagleNestError as error:
            if ctx.params.get("debug"):
                raise
            raise _told(error) from None
        except BrokenPipeError:  # whoever read us has had enough: typer ends quietly
            raise
        except OSError as error:
            if ctx.params.get("debug"):
                raise
            raise _told(of_system(error)) from None
        except KeyboardInterrupt:
            if ctx.params.get("debug"):
                raise
            err.print("interrupted")
            raise typer.Exit(INTERRUPTED) from None


def _told(error: EagleNestError) -> typer.Exit:
    err.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    return typer.Exit(error.exit_code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Settings come from EAGLENEST_* in the environment. First steps: eaglenest doctor, then eaglenest demo.",
)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"eaglenest {__version__}\n")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = (
        False
    ),
) -> None:
    """Raise EAGLE 3.1 drafters for a target model, keep them as versions, and swap them into the running service."""


for group in (services, drafters, measuring):
    group.register(app)


if __name__ == "__main__":
    app()
