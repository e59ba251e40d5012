"""The token of our Ray: who may run code on it. Made by us for one runs_dir, in a file that only its owner reads.

Ray asks every client for a token once it has one itself, and it is right to: whoever reaches its dashboard runs code as
its user. Ours never is the one in ~/.ray, which belongs to the user's other clusters. RAY_AUTH_MODE, RAY_AUTH_TOKEN and
RAY_AUTH_TOKEN_PATH, Ray's own settings, come first where the user has set them.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from eaglenest.errors import ServiceError
from eaglenest.services.state import RAY, load
from eaglenest.settings import Settings


def token_path(settings: Settings) -> Path:
    """Where our token lies while Ray runs."""
    return settings.runs_dir.resolve() / "ray.token"


def make_token(settings: Settings) -> None:
    """A new token, unless the user has chosen how Ray authenticates, or the file is there."""
    path = token_path(settings)
    if "RAY_AUTH_TOKEN_PATH" not in auth_env(settings) or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def remove_token(settings: Settings) -> None:
    token_path(settings).unlink(missing_ok=True)


def auth_env(settings: Settings) -> dict[str, str]:
    """What a process needs in its environment to be part of our Ray, besides what the user has set.

    Ray takes 127.0.0.1 for the machine's outer address, and listens on that, unless told that there is no cluster.
    """
    return {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **_token_env(settings)}


def _token_env(settings: Settings) -> dict[str, str]:
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    ours = str(token_path(settings))
    if mode != "token" or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH", ours) != ours:
        return {"RAY_AUTH_MODE": mode}
    return {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": ours}


def adopt(settings: Settings) -> None:
    """Let this process talk to the Ray that we started, if we did. To be called before Ray is imported."""
    if RAY in load(settings).services:
        os.environ.update(auth_env(settings))


def client_env(settings: Settings) -> dict[str, str]:
    """For a shell: with it `ray job submit`, `serve deploy` and MLflow's clients find our services by themselves."""
    return {
        **auth_env(settings),
        "RAY_API_SERVER_ADDRESS": settings.dashboard_url,
        "RAY_DASHBOARD_ADDRESS": settings.dashboard_url,
        "MLFLOW_TRACKING_URI": settings.tracking_uri,
    }


def headers(settings: Settings) -> dict[str, str]:
    """The HTTP headers that Ray's dashboard wants.

    Raises:
        ServiceError: the token cannot be read.
    """
    env = auth_env(settings)
    if env["RAY_AUTH_MODE"] != "token":
        return {}
    token = os.environ.get("RAY_AUTH_TOKEN")
    path = Path(env.get("RAY_AUTH_TOKEN_PATH") or os.environ.get("RAY_AUTH_TOKEN_PATH") or token_path(settings))
    try:
        return {"Authorization": f"Bearer {token or path.read_text().strip()}"}
    except FileNotFoundError:
        return {}  # Ray was not started by us, or not at all
    except OSError as error:
        raise ServiceError(f"Ray's token {path} cannot be read: {error.strerror}") from error
