"""vLLM accepts, step by step, exactly what our module predicts.

Drafters learn the answers of tiny targets by heart, so that there is acceptance to compare; vLLM serves them, and our
own module replays the very token ids that came back. One case is stock `vllm serve`, without any code of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.conftest import free_port
from tests.tiny import START, VOCAB, tiny_drafter, tiny_target, tiny_tokenizer
from torch import Tensor

from eaglenest.distill.features import Document, Features, collate
from eaglenest.distill.initialise import drafter_config, from_target
from eaglenest.distill.learner import Learner
from eaglenest.distill.recipe import Recipe
from eaglenest.drafters.checkpoint import load_checkpoint, save_checkpoint
from eaglenest.drafters.module import Eagle3Drafter
from eaglenest.drafters.vocabulary import choose_draft_vocabulary
from eaglenest.engine.environment import engine_env, on_cpu
from eaglenest.targets import Target, resolve_target
from eaglenest.targets.head import TargetHead, load_embedding

pytestmark = pytest.mark.slow

K, TOKENS = 3, 64
NEAR_TIE = 1e-3
"""Two draft logits this close may fall either way in another implementation's float32; they spread over several."""


@dataclass(frozen=True)
class Case:
    """A drafter to serve."""

    kind: str
    eagle: str
    aux_layer_ids: tuple[int, ...]
    hidden_size: int = 64  # the target's is 64


STOCK = Case("llama", "3.1", (1, 2, 3))
CASES = [
    Case("qwen3", "3.1", (0, 1, 2, 3, 4)),
    Case("llama", "3", (1, 2, 3)),
    Case("qwen3", "3", (2, 3), hidden_size=96),  # with an embedding of its own
]


@dataclass
class Made:
    """A target, and a drafter checkpoint that knows its answers to the prompts."""

    model: Any
    target: Target
    folder: Path
    prompts: list[list[int]]


def make(folder: Path, case: Case) -> Made:
    model = tiny_target(folder / "target", case.kind, tie_word_embeddings=False)
    target = resolve_target(str(folder / "target"))
    random = torch.Generator().manual_seed(1)
    prompts = [[START, *torch.randint(0, 256, (5 + 7 * i,), generator=random).tolist()] for i in range(5)]
    prompts.append(render("What is 7 times 8?"))
    documents = []
    for number, prompt in enumerate(prompts):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, use_cache=True
        )
        documents.append(Document(str(number), "x", tuple(ids[0].tolist()), len(prompt)))
    items = [(d, features(model, d.ids, case.aux_layer_ids)) for d in documents]
    vocabulary = choose_draft_vocabulary((d.answer for d in documents), 200, VOCAB)
    drafter = new_drafter(target, case, vocabulary)
    recipe = Recipe(ttt_steps=K, prompt_weight=0.0, precision="float32")
    learner = Learner(drafter, TargetHead.load(target.path, vocabulary), recipe)
    for update in range(60):
        learner.step(learner.batch(items), update / 60)
    save_checkpoint(
        folder / "drafter",
        config=drafter.config,
        state=drafter.state_dict(),
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        prompts_digest="0" * 64,
        dtype="float32",
    )
    return Made(model, target, folder / "drafter", prompts)


def render(question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    return list(tiny_tokenizer().apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def new_drafter(target: Target, case: Case, vocabulary: list[int]) -> Eagle3Drafter:
    config = drafter_config(target, draft_vocab_size=200, eagle=case.eagle, aux_layer_ids=case.aux_layer_ids)
    if case.hidden_size == target.hidden_size:
        return from_target(target, config, vocabulary, seed=0)
    fields = config.model_dump(exclude={"hidden_size", "draft_vocab_size"})
    drafter = tiny_drafter(vocabulary=vocabulary, dtype=torch.float32, hidden_size=case.hidden_size, **fields)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(0.2) if parameter.ndim == 2 else parameter.fill_(1.0)
    return drafter


def features(model: Any, ids: tuple[int, ...], aux_layer_ids: tuple[int, ...]) -> Features:
    """States in float32, straight from the model: a teacher's have been through bfloat16."""
    before_norm: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.no_grad():
        streams = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    streams = (*streams[:-1], before_norm[0])
    return Features(torch.cat([streams[k][0] for k in aux_layer_ids], dim=-1), streams[-1][0])


def assert_same_steps(made: Made, served: list[tuple[list[int], list[int], list[int]]]) -> None:
    """Walk along each answer by vLLM's steps, and compare each with what our module drafts there.

    served: prompt ids, answer ids, drafts accepted in each step.
    """
    config, state, _ = load_checkpoint(made.folder)
    drafter = Eagle3Drafter(config, state.get("embed_tokens.weight", load_embedding(made.target.path)))
    drafter.load_state_dict(state)
    compared = ties = 0
    for prompt, answer, accepted in served:
        document = Document("x", "x", (*prompt, *answer), len(prompt))
        batch = collate([(document, features(made.model, document.ids, config.aux_layer_ids))], K, torch.float32)
        with torch.no_grad():
            logits = torch.stack([drafter.lm_head(n) for n in drafter.ttt_steps(batch.pack, K)])
        best = logits.argmax(-1)
        drafts, top = best + drafter.d2t[best], logits.topk(2).values
        row = 0
        for step, theirs in enumerate(accepted):
            reach = int(batch.pack.reach[row])
            at = int(batch.pack.rows[row])
            right = [int(drafts[k, row]) == int(batch.nexts[at + k]) for k in range(reach)]
            ours = right.index(False) if False in right else reach
            last = row + theirs + 1 >= len(batch.pack.rows)
            assert last is (step == len(accepted) - 1)
            if ours != theirs and not (last and ours == reach < theirs):  # the token limit cut the last step's answer
                k = min(ours, theirs)
                assert float(top[k, row, 0] - top[k, row, 1]) < NEAR_TIE, (step, ours, theirs, accepted)
                ties += 1
            compared, row = compared + 1, row + theirs + 1
    all_accepted = [n for _, _, accepted in served for n in accepted]
    assert compared == len(all_accepted) >= 15 * len(served)
    assert ties <= 0.01 * compared
    # the comparison means something: drafts fail and succeed at every position
    assert {0, 1, 2, 3} == set(all_accepted)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.kind}-{c.eagle}-{len(c.aux_layer_ids)}-{c.hidden_size}")
def test_an_engine_accepts_step_by_step_what_our_module_predicts(case: Case, tmp_path: Path) -> None:
    made = make(tmp_path, case)
    engine = {"target": str(made.target.path), "drafter": str(made.folder), "dtype": "float32", "max_model_len": 256}
    engine |= {"num_speculative_tokens": K, "max_num_seqs": 4, "enforce_eager": True, "spec_metrics": "detailed"}
    (tmp_path / "case.json").write_text(json.dumps({"engine": engine, "prompts": made.prompts, "tokens": TOKENS}))
    command = [sys.executable, str(Path(__file__).with_name("serve_case.py")), "case.json", "result.json"]
    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **engine_env()}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert_same_steps(made, [(p, r["ids"], r["accepted"]) for p, r in zip(made.prompts, result, strict=True)])


@contextmanager
def stock_server(made: Made, folder: Path) -> Iterator[str]:
    """Plain `vllm serve`: nothing of ours on its command line or in its path.

    The command of vLLM's CPU build ends at once, because it looks for a package named `vllm`; there the same server is
    started by its module.
    """
    port = free_port()
    speculative = {"method": "eagle3", "model": str(made.folder), "num_speculative_tokens": K}
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command = module if on_cpu() else [str(Path(sys.executable).with_name("vllm")), "serve"]
    command += [
        str(made.target.path),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
    ]
    command += ["--served-model-name", "stock", "--enforce-eager", "--speculative-config", json.dumps(speculative)]
    command += ["--per-request-spec-decode-metrics", "detailed"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "EAGLENEST"))}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=env | engine_env(), stdout=log, stderr=log)
    try:
        for _ in range(180):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(1)
        else:
            pytest.fail((folder / "log").read_text()[-3000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def test_stock_vllm_serve_loads_a_checkpoint_and_accepts_what_our_module_predicts(tmp_path: Path) -> None:
    made = make(tmp_path, STOCK)
    common: dict[str, Any] = {"model": "stock", "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    common |= {"ignore_eos": True}
    with stock_server(made, tmp_path) as url:

        def ask(route: str, **body: Any) -> tuple[dict[str, Any], list[int]]:
            reply = httpx.post(f"{url}/v1/{route}", json=common | body, timeout=120).raise_for_status().json()
            return reply, reply["metrics"]["speculative_decoding"]["per_step_accepted"]

        served = []
        for prompt in made.prompts[:-1]:
            reply, accepted = ask("completions", prompt=prompt)
            served.append((prompt, reply["choices"][0]["token_ids"], accepted))
        question = [{"role": "user", "content": "What is 7 times 8?"}]
        reply, accepted = ask("chat/completions", messages=question)
        assert reply["prompt_token_ids"] == made.prompts[-1] == render("What is 7 times 8?")
        served.append((reply["prompt_token_ids"], reply["choices"][0]["token_ids"], accepted))
    assert_same_steps(made, served)
