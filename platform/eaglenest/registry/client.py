"""The way to MLflow: one client per call, a quick answer when the server is down, and errors a reader can use.

MLflow's own client retries a dead server for four minutes. So every operation first asks the server one question, with
three seconds' patience and no retry, but for a kept connection that the server has closed meanwhile; what fails
later, half way, is retried briefly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from eaglenest.errors import RegistryError
from eaglenest.settings import shown

PROBE_SECONDS = 3
# What a kept connection says when the server, or a proxy before it, has closed it for idleness: no sign of ill health.
_HUNG_UP = ("Connection aborted", "Connection reset")
# MLflow reads these from the environment only. What the user has set stays.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def connect(tracking_uri: str) -> Any:
    """An `MlflowClient` for that server. It does not touch the network yet.

    Raises:
        RegistryError: the URI is not that of an MLflow server.
    """
    if not _fits(tracking_uri):
        raise RegistryError(
            f"{shown(tracking_uri)} is no MLflow server",
            "http://host:port or https://host",
            "start one with `eaglenest up`, or set MLFLOW_TRACKING_URI",
        )
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri, registry_uri=tracking_uri)


@contextmanager
def talking_to(tracking_uri: str, doing: str, *, missing: RegistryError | None = None) -> Iterator[Any]:
    """An `MlflowClient` for one operation, once the server has shown that it answers.

    Args:
        doing: the operation, for the message: "resolve champion".
        missing: raised when the server says that what was asked for does not exist.

    Raises:
        RegistryError: the server is unreachable or refused the operation. MLflow's own traceback is left out.
    """
    client = connect(tracking_uri)
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    _probe(tracking_uri)
    try:
        yield client
    except MlflowException as error:
        if missing is not None and error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise missing from None
        raise RegistryError(f"{shown(tracking_uri)} could not {doing}: {_brief(error)}") from None
    except RequestException as error:
        raise RegistryError(f"{shown(tracking_uri)} stopped answering, asked to {doing}: {_brief(error)}") from None


def _fits(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        return parts.scheme in {"http", "https"} and bool(parts.hostname)
    except ValueError:  # half an IPv6 address
        return False


def _probe(tracking_uri: str) -> None:
    """Ask for one experiment: that takes the server, its database and our credentials."""
    from mlflow.exceptions import MlflowException

    uri = shown(tracking_uri)
    mend = "start it with `eaglenest up`, or correct MLFLOW_TRACKING_URI"
    try:
        answer = _first_experiment(tracking_uri)
    except MlflowException as error:
        raise RegistryError(f"no MLflow server answers at {uri} ({_cause(error)})", "a running server", mend) from None
    if answer.status_code in {401, 403}:
        raise RegistryError(
            f"{uri} refuses us with HTTP {answer.status_code}: {answer.text[:120]}",
            "credentials it knows, and a host name it allows",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or start it with --allowed-hosts",
        )
    if answer.status_code != 200:
        raise RegistryError(f"{uri} answers HTTP {answer.status_code}, which no sound MLflow server does", None, mend)
    try:
        answer.json()
    except ValueError:
        raise RegistryError(f"what answers at {uri} is no MLflow server", "JSON from its REST API", mend) from None


def _first_experiment(tracking_uri: str) -> Any:
    """The server's answer; asked for twice where a kept connection turns out to be closed."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    ask = partial(
        http_request,
        get_default_host_creds(tracking_uri),
        "/api/2.0/mlflow/experiments/search",
        "GET",
        max_retries=0,
        timeout=PROBE_SECONDS,
        raise_on_status=False,
        params={"max_results": 1},
    )
    try:
        return ask()
    except MlflowException as error:
        if not any(sign in str(error) for sign in _HUNG_UP):
            raise
    return ask()


def _cause(error: Exception) -> str:
    text = str(error)
    if "timed out" in text:
        return f"silent for {PROBE_SECONDS} s"
    return "connection refused" if "refused" in text else _brief(error)


def _brief(error: Exception) -> str:
    text = " ".join(shown(str(error)).split())  # MLflow's messages hold the whole URI
    return text if len(text) <= 300 else f"{text[:300]}..."
