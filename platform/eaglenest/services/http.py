"""HTTP to the local services: httpx without proxies from the environment, which loopback addresses never want."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


def request(
    method: str, url: str, *, timeout_s: float = 5.0, json: Any = None, headers: Mapping[str, str] | None = None
) -> httpx.Response | None:
    """One request; None where nothing answers in time."""
    import httpx

    try:
        with httpx.Client(trust_env=False, timeout=timeout_s) as client:
            return client.request(method, url, json=json, headers=headers)
    except httpx.TransportError:
        return None


def answers(url: str, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None) -> bool:
    """Whether a GET is answered with 200."""
    response = request("GET", url, timeout_s=timeout_s, headers=headers)
    return response is not None and response.status_code == 200
