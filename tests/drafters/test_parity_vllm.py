"""A checkpoint in stock vLLM, without any code of ours: it loads, and drafts token for token as our module does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from tests.conftest import free_port

from eaglenest.distill.features import Document, Features, collate
from eaglenest.distill.initialise import drafter_config, from_target
from eaglenest.distill.learner import Learner
from eaglenest.distill.recipe import Recipe
from eaglenest.distill.teachers import TransformersTeacher
from eaglenest.drafters.checkpoint import save_checkpoint
from eaglenest.drafters.vocabulary import choose_draft_vocabulary
from eaglenest.engine.environment import engine_env
from eaglenest.targets import Target, resolve_target
from eaglenest.targets.head import TargetHead

pytestmark = pytest.mark.slow

QUESTIONS = ["Name three uses of copper.", "Write a line about rain.", "What is 7 times 8?", "Why do cats purr?"]
K, LENGTH = 3, 48


@dataclass
class Stock:
    """A stock vLLM server with our drafter, and the learner that made it."""

    url: str
    target: Target
    learner: Learner
    teacher: TransformersTeacher

    def ask(self, question: str) -> tuple[list[int], list[int], list[int]]:
        """Prompt ids, answer ids, and how many drafts each step accepted."""
        body = {
            "model": "stock",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": LENGTH,
            "temperature": 0,
            "return_token_ids": True,
        }
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
        spec = reply["metrics"]["speculative_decoding"]
        return reply["prompt_token_ids"], reply["choices"][0]["token_ids"], spec["per_step_accepted"]


@pytest.fixture(scope="module", params=["3.1", "3"])
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("stock")
    target = resolve_target()
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    documents = []
    for number, question in enumerate(QUESTIONS):
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        said = model.generate(asked, max_new_tokens=LENGTH, do_sample=False)[0]
        documents.append(Document(str(number), "x", tuple(said.tolist()), asked.shape[1]))
    del model
    teacher = TransformersTeacher(target.path, target.aux_layer_ids)
    items = list(zip(documents, teacher.features(documents), strict=True))
    recipe = Recipe(ttt_steps=K, draft_vocab_size=1024, prompt_weight=0.0)
    config = drafter_config(target, draft_vocab_size=1024, eagle=request.param)
    vocabulary = choose_draft_vocabulary((d.answer for d in documents), 1024, target.vocab_size)
    learner = Learner(from_target(target, config, vocabulary, 0), TargetHead.load(target.path, vocabulary), recipe)
    # learns these answers by heart, so that there is acceptance to compare
    for update in range(40):
        learner.step(learner.batch(items), update / 40)
    save_checkpoint(
        folder / "drafter",
        config=config,
        state=learner.drafter.state_dict(),
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        prompts_digest="0" * 64,
        dtype="float32",
    )
    port = free_port()
    speculative = {"method": "eagle3", "model": str(folder / "drafter"), "num_speculative_tokens": K}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.path)]
    command += ["--served-model-name", "stock", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]
    command += ["--speculative-config", json.dumps(speculative), "--per-request-spec-decode-metrics", "detailed"]
    with (folder / "log").open("wb") as log:
        env = {**os.environ, **engine_env()}
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        _wait(f"http://127.0.0.1:{port}/health", server, folder / "log")
        yield Stock(f"http://127.0.0.1:{port}", target, learner, teacher)
    finally:
        server.terminate()
        server.wait(60)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(180):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def ours(learner: Learner, document: Document, features: Features) -> list[int]:
    """How many drafts each serving step would accept, by our own module."""
    batch = collate([(document, features)], K, torch.float32)
    with torch.no_grad():
        drafts = [learner.drafter.lm_head(n).argmax(-1) for n in learner.drafter.ttt_steps(batch.pack, K)]
    taken, row, start = [], 0, int(batch.pack.rows[0])
    while row < len(batch.pack.rows):
        reach = int(batch.pack.reach[row])
        hits = [
            int(drafts[k][row] + learner.drafter.d2t[drafts[k][row]]) == int(batch.nexts[start + row + k])
            for k in range(reach)
        ]
        accepted = next((k for k, hit in enumerate(hits) if not hit), reach)
        taken.append(accepted)
        row += accepted + 1
    return taken


def test_stock_vllm_accepts_step_by_step_what_our_module_predicts(stock: Stock) -> None:
    predicted, served = [], []
    for question in QUESTIONS:
        asked, said, steps = stock.ask(question)
        document = Document("q", "x", (*asked, *said), len(asked))
        mine = ours(stock.learner, document, stock.teacher.features([document])[0])
        count = min(len(mine), len(steps)) - 1  # the last step is cut by the token limit
        predicted += mine[:count]
        served += steps[:count]
    assert len(served) >= 20
    assert sum(served) / len(served) > 0.8, "a drafter that knows the answers by heart is accepted"
    differing = sum(a != b for a, b in zip(predicted, served, strict=True))
    # states reach our module as bfloat16: a draft between two near-equal logits may differ
    assert differing <= 0.05 * len(served), list(zip(predicted, served, strict=True))
    assert sum(predicted) + len(predicted) == pytest.approx(sum(served) + len(served), rel=0.03)
