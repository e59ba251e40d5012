"""vLLM's own OpenAI application over a running engine: all its routes, none of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from eaglenest.engine.arguments import EngineSpec, engine_arguments

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.v1.engine.async_llm import AsyncLLM


async def openai_app(engine: AsyncLLM, spec: EngineSpec) -> FastAPI:
    """The application that `vllm serve` would serve for this engine."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in engine_arguments(spec).items():
        setattr(args, name, value)
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    app.state.server = SimpleNamespace()  # vLLM's error handler reads it; its own launcher would set it
    return app
