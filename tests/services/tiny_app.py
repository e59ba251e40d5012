"""Serve applications of a few lines, for the services' tests; Ray's workers find this module on their PYTHONPATH."""

from typing import Any

from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Echo:
    """Answers with what it was given."""

    def __init__(self, word: str) -> None:
        if word == "fail":
            raise ValueError("this one was told to fail")
        self._word = word

    async def __call__(self, request: Any) -> str:
        return self._word


def build(args: dict[str, str]) -> Any:
    return Echo.bind(args["word"])
