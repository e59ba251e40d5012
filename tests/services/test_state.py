"""The state file and its lock."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eaglenest.errors import ServiceError
from eaglenest.services import local, state
from eaglenest.services.processes import ProcessRecord
from eaglenest.settings import Settings


def test_nothing_started_is_an_empty_state(settings: Settings) -> None:
    assert state.load(settings) == state.State()


def test_what_is_saved_is_loaded(settings: Settings) -> None:
    record = ProcessRecord(mark="m", log=Path("/logs/ray.log"), pid=3, create_time=1.25)
    written = state.State(services={"ray": record}, serve_digest="d")

    state.save(settings, written)

    assert state.load(settings) == written
    assert [path.name for path in settings.runs_dir.iterdir()] == ["services.json"]


@pytest.mark.parametrize("content", ["", "{", '{"services": 3}', '{"unknown": 1}'])
def test_a_damaged_state_is_an_error_that_names_the_file(content: str, settings: Settings) -> None:
    state.save(settings, state.State())
    state.state_path(settings).write_text(content)

    with pytest.raises(ServiceError, match=r"services\.json"):
        local.down(settings)


def test_one_command_at_a_time_and_the_next_says_that_it_waits(settings: Settings) -> None:
    said: list[str] = []
    order: list[str] = []

    def second() -> None:
        with state.locked(settings, said.append):
            order.append("second")

    with state.locked(settings):
        thread = threading.Thread(target=second)
        thread.start()
        while not said:
            time.sleep(0.01)
        order.append("first")
    thread.join(10)

    assert order == ["first", "second"]
    assert "waiting" in said[0]


def test_a_command_that_was_killed_holds_no_lock(settings: Settings) -> None:
    code = (
        "import os, sys\nfrom eaglenest.services import state\nfrom eaglenest.settings import Settings\n"
        "with state.locked(Settings(runs_dir=sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(settings.runs_dir)], timeout=30)

    with state.locked(settings, lambda message: pytest.fail(message)):
        pass
