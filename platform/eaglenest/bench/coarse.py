"""Acceptance from the server's counters, where a response carries no figures of its own.

The counters are the whole server's: the figures hold only while nobody else uses it, and tell nothing by category.
"""

from __future__ import annotations

from collections import defaultdict

import httpx

from eaglenest.bench.models import Acceptance

PREFIX = "vllm:spec_decode_num_"
Counters = dict[str, float]


def parse_counters(text: str) -> Counters | None:
    """Sums over engines of vLLM's speculative counters, and of its running requests, from a `/metrics` page.

    Keys: `drafts`, `draft_tokens`, `accepted_tokens`, `pos:<k>` and `busy`. None when the page has no such counters.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: Counters = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
                sums["busy"] += sample.value
            elif name == f"{PREFIX}accepted_tokens_per_pos" and not sample.name.endswith("_created"):
                sums[f"pos:{int(sample.labels['position'])}"] += sample.value
            elif name in (f"{PREFIX}drafts", f"{PREFIX}draft_tokens", f"{PREFIX}accepted_tokens"):
                sums[name.removeprefix(PREFIX)] += sample.value
    return dict(sums) if "drafts" in sums else None


async def read_counters(client: httpx.AsyncClient) -> Counters | None:
    """The endpoint's counters now; none when it has no `/metrics`, or no speculative counters there."""
    try:
        response = await client.get("/metrics", follow_redirects=True)
        response.raise_for_status()
        return parse_counters(response.text)
    except (httpx.HTTPError, ValueError):
        return None


def coarse_acceptance(before: Counters | None, after: Counters | None) -> Acceptance | None:
    """Acceptance between two readings; none when the endpoint was busy at either, or no step lies between them."""
    if before is None or after is None or before.get("busy") or after.get("busy"):
        return None
    positions = sorted(int(key.removeprefix("pos:")) for key in after if key.startswith("pos:"))
    return acceptance_from_counts(
        steps=int(after["drafts"] - before["drafts"]),
        accepted=int(after["accepted_tokens"] - before["accepted_tokens"]),
        drafted=int(after["draft_tokens"] - before["draft_tokens"]),
        passed=[after[f"pos:{k}"] - before.get(f"pos:{k}", 0.0) for k in positions],
    )


def acceptance_from_counts(*, steps: int, accepted: int, drafted: int, passed: list[float]) -> Acceptance | None:
    """Acceptance from bare counts; `passed[k]`: steps that accepted draft position k. None without a step."""
    if steps <= 0:
        return None
    reached = [float(steps), *passed][: len(passed)]
    return Acceptance(
        accept_len=1 + accepted / steps,
        interval=None,
        steps=steps,
        accepted=accepted,
        drafted=drafted,
        unconditional=[p / steps for p in passed],
        conditional=[p / r if r else None for p, r in zip(passed, reached, strict=True)],
        coarse=True,
    )
