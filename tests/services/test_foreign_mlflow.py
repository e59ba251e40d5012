"""Whose MLflow server it is that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.conftest import own_settings, stand_in

from eaglenest.services import local
from eaglenest.settings import Settings


class Healthy(BaseHTTPRequestHandler):
    """Says what MLflow says on its page of health."""

    said = b"OK"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def naming(folder: Path, settings: Settings, uri: str) -> Settings:
    return own_settings(folder, mlflow_port=settings.mlflow_port, MLFLOW_TRACKING_URI=uri)


def test_our_own_address_in_the_environment_makes_the_server_no_others(tmp_path: Path, settings: Settings) -> None:
    """`eaglenest env` exports it; the next `up` in that shell must start our server all the same."""
    exported = naming(tmp_path, settings, settings.local_tracking_uri)
    assert exported.tracking_uri == settings.local_tracking_uri
    assert not local._foreign_mlflow(settings)
    assert not local._foreign_mlflow(exported)
    assert local.status(exported)["mlflow"]["state"] == "stopped"


def test_another_server_is_not_ours_on_our_port_either(tmp_path: Path, settings: Settings) -> None:
    with stand_in(Healthy, settings.mlflow_port):
        assert local._foreign_mlflow(naming(tmp_path, settings, settings.local_tracking_uri))
    assert local._foreign_mlflow(naming(tmp_path, settings, "http://registry.example:5000"))
