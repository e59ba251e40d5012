"""The swap on a real engine: nothing dropped, nothing changed, every layer executed, every refusal harmless."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from sample_drafters import FIRST_DRAFT_ID, MUTE, drafter_config, random_weights, save_drafter, save_unchecked, zero
from scipy.stats import chi2
from transformers import AutoModelForCausalLM, AutoTokenizer

from eaglenest.engine.arguments import EngineSpec
from eaglenest.engine.launch import start_engine
from eaglenest.engine.swapper import SwapRolledBack
from eaglenest.errors import EngineError, SwapRefused

if TYPE_CHECKING:
    from conftest import Bench

pytestmark = pytest.mark.slow

LAYERS = {
    "",  # d2t
    "lm_head",
    "model.norm",
    "model.fc",
    *(f"model.fc_norm.{i}" for i in range(3)),
    *(f"model.layers.0.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"model.layers.0.{n}" for n in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")),
}


@pytest.fixture(scope="module")
def second(bench: Bench) -> Path:
    return save_drafter(bench.root / "second", bench.target, seed=2)


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> list[list[int]]:
    """What the engine answers when nobody swaps."""
    return [stream.tokens for stream in bench.run(bench.ask_all())]


def test_swaps_under_streaming_requests_drop_and_change_nothing(
    bench: Bench, second: Path, undisturbed: list[list[int]]
) -> None:
    async def under_load() -> tuple[list[list[int]], list[Any]]:
        job = asyncio.create_task(bench.ask_all())
        await asyncio.sleep(0.3)
        reports = []
        for folder, version in ((second, "2"), (bench.first, "1")):
            reports.append(await bench.swapper.swap(folder, version))
        assert not job.done(), "the answers ended before the swaps: make them longer"
        return [stream.tokens for stream in await job], reports

    answers, reports = bench.run(under_load())
    # the same batching throughout, so a near tie would flip in both: nothing may differ
    assert answers == undisturbed
    assert [r.version for r in reports] == ["2", "1"]
    assert all(set(r.proven) == LAYERS for r in reports)
    assert bench.run(bench.version()) == "1"


def test_staging_is_spread_over_engine_steps(bench: Bench, second: Path) -> None:
    async def under_load() -> int:
        job = asyncio.create_task(bench.ask_all(tokens=40))
        await asyncio.sleep(0.3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await bench.swapper.swap(second, "2")
        ended = loop.time()
        return sum(began < at < ended for at in (await job)[0].times)

    steps = bench.run(under_load())
    bench.run(bench.swapper.swap(bench.first, "1"))
    assert steps >= 5, f"{steps} engine steps during the swap: it held the engine"


@pytest.mark.parametrize("layers", MUTE)
def test_every_layer_that_is_exchanged_is_the_one_executed(bench: Bench, layers: str) -> None:
    """Held to the token that the mute drafter proposes, a request takes 4 tokens a step instead of one."""
    folder = bench.root / f"mute {layers}"
    save_drafter(folder, bench.target, seed=3, change=zero(*MUTE[layers]))
    held = {"allowed_token_ids": [FIRST_DRAFT_ID], "tokens": 33}
    before = bench.run(bench.ask(f"Before {layers}:", **held)).steps
    bench.run(bench.swapper.swap(folder, layers))
    muted = bench.run(bench.ask(f"After {layers}:", **held)).steps
    bench.run(bench.swapper.swap(bench.first, "1"))
    after = bench.run(bench.ask(f"Again without {layers}:", **held)).steps
    assert (before, muted, after) == (33, 9, 33)


def _renamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.gate.weight"] = tensors.pop("midlayer.mlp.gate_proj.weight")


def _incomplete(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["fc_norm.1.weight"]


def _incomplete_fused(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["midlayer.self_attn.k_proj.weight"]


def _misshapen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def _oversized(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.self_attn.q_proj.weight"] = tensors["midlayer.self_attn.q_proj.weight"].repeat(2, 1)


def _not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.down_proj.weight"][3, 5] = float("nan")


def _with_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(49152, 576)


def _other_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_renamed, "midlayer.mlp.gate.weight"),
        (_incomplete, "lacks fc_norm.1.weight"),
        (_incomplete_fused, "lacks midlayer.self_attn.k_proj.weight"),
        (_misshapen, r"fc.weight of \(576, 1727\)"),
        (_oversized, r"q_proj.weight of \(1152, 1152\)"),
        (_not_finite, "down_proj.weight has values that are not finite"),
        (_with_embedding, "embed_tokens.weight, which is not the drafter's"),
        (_other_vocabulary, "draft vocabulary"),
    ],
)
def test_an_unfit_checkpoint_is_refused_and_the_old_one_serves_on(
    bench: Bench, undisturbed: list[list[int]], change: Callable[[dict[str, torch.Tensor]], None], says: str
) -> None:
    config = drafter_config(bench.target)
    tensors = random_weights(config, seed=4)
    change(tensors)
    folder = save_unchecked(bench.root / change.__name__, config, tensors)
    before = bench.run(bench.version())
    with pytest.raises(SwapRefused, match=says):
        bench.run(bench.swapper.swap(folder, "4"))
    assert bench.run(bench.version()) == before
    assert [s.tokens for s in bench.run(bench.ask_all(tokens=8))] == [tokens[:8] for tokens in undisturbed]


def test_a_truncated_file_is_refused(bench: Bench, second: Path) -> None:
    folder = save_unchecked(bench.root / "cut", (c := drafter_config(bench.target)), random_weights(c, 5))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SwapRefused, match=r"SafetensorError|incomplete"):
        bench.run(bench.swapper.swap(folder, "5"))


def test_an_exchange_that_fails_midway_is_undone(bench: Bench, second: Path, undisturbed: list[list[int]]) -> None:
    """Half the layers are exchanged when it fails; afterwards the mute drafter is whole again."""
    mute = bench.root / "mute whole"
    save_drafter(mute, bench.target, seed=6, change=zero("lm_head.weight", "norm.weight"))
    held = {"allowed_token_ids": [FIRST_DRAFT_ID], "tokens": 33}
    bench.run(bench.swapper.swap(mute, "mute"))
    bench.run(bench.engine.collective_rpc("drafter_fail_before", args=("model.layers.0.mlp.gate_up_proj",)))
    try:
        with pytest.raises(SwapRolledBack, match="out of memory"):
            bench.run(bench.swapper.swap(second, "2"))
    finally:
        bench.run(bench.engine.collective_rpc("drafter_fail_before", args=(None,)))
    assert bench.run(bench.version()) == "mute"
    assert bench.run(bench.ask("After the fault:", **held)).steps == 9
    bench.run(bench.swapper.swap(bench.first, "1"))
    assert [s.tokens for s in bench.run(bench.ask_all())] == undisturbed


@pytest.mark.parametrize("layer", ["lm_head", "model.layers.0.self_attn.qkv_proj"])
def test_a_layer_that_keeps_executing_its_old_weights_is_found_out(bench: Bench, second: Path, layer: str) -> None:
    """lm_head's plain weight is exchanged here, so that a hash of it would pass: its packed copy is not."""
    bench.run(bench.engine.collective_rpc("drafter_skip", args=(layer,)))
    try:
        with pytest.raises(SwapRolledBack, match=f"{layer} does not execute the new weights"):
            bench.run(bench.swapper.swap(second, "2"))
    finally:
        bench.run(bench.engine.collective_rpc("drafter_skip", args=(None,)))


def test_swaps_leave_no_memory_behind(bench: Bench, second: Path) -> None:
    import psutil

    def resident() -> int:
        return sum(p.memory_info().rss for p in psutil.Process().children(recursive=True))

    async def swaps(count: int) -> None:
        for i in range(count):
            await bench.swapper.swap((second, bench.first)[i % 2], str(2 - i % 2))

    bench.run(swaps(4))
    before = resident()
    bench.run(swaps(12))
    assert (grown := resident() - before) < 60 << 20, f"{grown >> 20} MiB more after 12 swaps of a 40 MiB drafter"


def test_a_cancelled_swap_leaves_nothing_behind(bench: Bench, second: Path) -> None:
    async def cancel() -> None:
        job = asyncio.create_task(bench.swapper.swap(second, "2"))
        await asyncio.sleep(0.02)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    before = bench.run(bench.version())
    bench.run(cancel())
    assert bench.run(bench.version()) == before


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 2}, {"temperature": 1.3, "top_p": 0.7}], ids=str
)
def test_sampled_output_has_the_targets_distribution(bench: Bench, sampling: dict[str, Any]) -> None:
    """Chi-square over all outcomes of three sampled tokens against exact probabilities, at alpha = 0.001.

    The drafter proposes " the" always, and the target is held to four tokens of which " the" is one, so drafts are
    both accepted and rejected often.
    """
    mute = bench.root / "mute whole"
    if not mute.exists():
        save_drafter(mute, bench.target, seed=6, change=zero("lm_head.weight", "norm.weight"))
    bench.run(bench.swapper.swap(mute, "mute"))
    allowed, prompt, asked, length = [FIRST_DRAFT_ID, 253, 281, 284], "He went to", 400, 3

    async def samples() -> list[tuple[int, ...]]:
        held = sampling | {"allowed_token_ids": allowed}
        streams = await asyncio.gather(*(bench.ask(prompt, length, seed=i, **held) for i in range(asked)))
        assert any(s.steps < length for s in streams), "no draft was accepted: the test would show nothing"
        return [tuple(s.tokens) for s in streams]

    drawn = bench.run(samples())
    outcomes = list(product(allowed, repeat=length))
    expected = _exact(bench.target.path, prompt, outcomes, allowed, **sampling) * asked
    counts = np.array([drawn.count(outcome) for outcome in outcomes], float)
    assert not counts[expected == 0].any(), "a token outside the top k was sampled"
    statistic, freedom = _pooled_chi_square(counts, expected)
    assert freedom >= 3
    assert statistic < chi2.isf(0.001, freedom), f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


def _exact(
    path: Path,
    prompt: str,
    outcomes: list[tuple[int, ...]],
    allowed: list[int],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Any:
    """Probability of each outcome under the target held to `allowed`, by transformers: [len(outcomes)]."""
    ids = AutoTokenizer.from_pretrained(path).encode(prompt)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids + list(o[:-1]) for o in outcomes])).logits[:, len(ids) - 1 :, allowed]
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], float("-inf"))
    steps = (logits.double() / temperature).softmax(-1)
    ranked, places = steps.sort(-1)
    tail = (ranked.cumsum(-1) <= 1 - top_p).scatter(-1, places, ranked.cumsum(-1) <= 1 - top_p)
    steps = steps.masked_fill(tail, 0)
    steps = steps / steps.sum(-1, keepdim=True)
    place = torch.tensor([[allowed.index(t) for t in o] for o in outcomes])
    return steps.gather(-1, place[..., None]).squeeze(-1).prod(-1).numpy()


def _pooled_chi_square(counts: Any, expected: Any) -> tuple[float, int]:
    """Outcomes expected fewer than five times are pooled into one."""
    rare = expected < 5
    c, e = counts[~rare], expected[~rare]
    if expected[rare].sum() >= 1:
        c, e = np.append(c, counts[rare].sum()), np.append(e, expected[rare].sum())
    return float(((c - e) ** 2 / e).sum()), len(c) - 1


def test_a_target_without_eagle3_support_is_named_before_the_engine_starts(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "gemma3"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bench.target.path / name, folder)
    config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 576}
    config |= {"num_hidden_layers": 4, "vocab_size": 49152, "num_attention_heads": 4, "num_key_value_heads": 1}
    config |= {"head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="SupportsEagle3"):
        start_engine(EngineSpec(target=folder, drafter=bench.first, max_model_len=512))
