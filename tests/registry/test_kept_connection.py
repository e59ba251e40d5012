"""Servers and proxies close connections that were idle. That is no sign of a registry that is down."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from tests.conftest import stand_in

from eaglenest.errors import RegistryError
from eaglenest.registry.client import talking_to


class Forgetful(BaseHTTPRequestHandler):
    """Answers so many requests of each connection, and hangs up on the next one unanswered."""

    protocol_version = "HTTP/1.1"
    answers = 1

    def setup(self) -> None:
        super().setup()
        self.left = self.answers

    def do_GET(self) -> None:
        if self.left == 0:
            self.close_connection = True
            return
        self.left -= 1
        said = b'{"experiments": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (Forgetful,), {"answers": request.param})
    with stand_in(handler) as uri:
        yield uri


@pytest.mark.parametrize("address", [1], indirect=True)
def test_a_connection_closed_while_idle_is_opened_anew(address: str) -> None:
    for _ in range(4):
        with talking_to(address, "ask"):
            pass


@pytest.mark.parametrize("address", [0], indirect=True)
def test_a_server_that_always_hangs_up_is_told_as_down(address: str) -> None:
    with pytest.raises(RegistryError, match="no MLflow server answers"), talking_to(address, "ask"):
        pass
