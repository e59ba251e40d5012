"""A Ray of our own for the modules here."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray_head import RayHead

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]  # for `ray_head` and `sample_drafters`


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayHead]:
    """One head node for a module, with a cache folder of its own."""
    from ray_head import RayHead

    home = Path(tempfile.mkdtemp(prefix="en-", dir="/tmp"))  # short: Ray puts unix sockets below it
    cache = home / "cache"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_", "EAGLENEST_"))}
    try:
        # no token: whether Ray wants one depends on a file in the home folder
        more = {"EAGLENEST_CACHE_DIR": str(cache), "RAY_AUTH_MODE": "disabled"}
        more["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "2"
        with RayHead(env | more, home).running() as cluster:
            yield cluster
    finally:
        shutil.rmtree(home, ignore_errors=True)
