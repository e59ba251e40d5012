"""Are two sets of greedy outputs the same tokens, near-ties of the target apart?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpx

from eaglenest.bench.models import Difference, Equality, RequestRow
from eaglenest.errors import BenchError

NEAR_TIE = 1e-4
"""Logits closer than this are a tie: floating point in another batch shape may decide it either way."""

TopLogprobs = dict[int, float]
Probe = Callable[[Sequence[int]], Awaitable[TopLogprobs]]


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; a proper prefix differs at its end; none when equal."""
    for index, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return index
    return None if len(reference) == len(other) else min(len(reference), len(other))


def tie_gap(top: TopLogprobs, tokens: Iterable[int | None]) -> float | None:
    """How far the least likely of `tokens` lies below the most likely token; none when one is not in `top`.

    Differences of log probabilities are differences of logits.
    """
    values = [top.get(token) if token is not None else None for token in tokens]
    known = [value for value in values if value is not None]
    return max(top.values()) - min(known) if known and len(known) == len(values) else None


def endpoint_probe(client: httpx.AsyncClient, model: str) -> Probe:
    """The target's own top five log probabilities after a prefix of token ids, from a running endpoint.

    One token of a fresh prompt comes from the target's prefill: no drafter takes part in it.
    """

    async def probe(prefix: Sequence[int]) -> TopLogprobs:
        body = {
            "model": model,
            "prompt": list(prefix),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        response = await client.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise BenchError(
                f"the endpoint gave no log probabilities (HTTP {response.status_code}: {response.text[:200]})",
                "vLLM's /v1/completions with token ids and logprobs",
            )
        top = response.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(name.removeprefix("token_id:")): value for name, value in top.items()}

    return probe


async def compare_outputs(reference: Iterable[RequestRow], other: Iterable[RequestRow], probe: Probe) -> Equality:
    """Compare the rows that both runs completed, by (concurrency, place, prompt). Outputs must be greedy.

    Args:
        probe: gives the target's log probabilities at a difference (see `endpoint_probe`); called once for each.
    """
    known = {_key(row): row for row in reference if row.error is None}
    equal, differences = 0, []
    for row in other:
        before = known.get(_key(row)) if row.error is None else None
        if before is None:
            continue
        position = first_difference(before.token_ids, row.token_ids)
        if position is None:
            equal += 1
        else:
            differences.append(await _judge(before, row, position, probe))
    near_ties = sum(difference.near_tie for difference in differences)
    return Equality(
        compared=equal + len(differences),
        equal=equal,
        near_ties=near_ties,
        changed=len(differences) - near_ties,
        differences=differences,
    )


async def _judge(reference: RequestRow, other: RequestRow, position: int, probe: Probe) -> Difference:
    tokens = [
        row.token_ids[position] if position < len(row.token_ids) else None for row in (reference, other)
    ]  # none: this output ended there, which no tie explains
    gap = None
    if None not in tokens and reference.prompt_token_ids:
        gap = tie_gap(await probe([*reference.prompt_token_ids, *reference.token_ids[:position]]), tokens)
    return Difference(
        prompt_id=other.prompt_id,
        position=position,
        reference_token=tokens[0],
        other_token=tokens[1],
        gap=gap,
        near_tie=gap is not None and gap <= NEAR_TIE,
    )


def _key(row: RequestRow) -> tuple[int, int, str]:
    return row.concurrency, row.index, row.prompt_id
