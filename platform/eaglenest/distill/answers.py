"""The target answers the prompts: by an engine of our own, or through a service that already runs it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eaglenest.distill.features import Document
from eaglenest.distill.prompts import Prompt
from eaglenest.distill.self_prompts import Turn
from eaglenest.errors import BadInput, EngineError
from eaglenest.targets.resolve import Target

CHUNK = 48  # prompts asked at once: enough to fill a batch, few enough to lose when interrupted


class AnswerSettings(BaseModel):
    """How the target answers. Greedy by default: drafts are judged against greedy output first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int = Field(default=128, ge=4, description="tokens of one answer at most")
    temperature: float = Field(default=0.0, ge=0, le=2)
    seed: int = 0

    def digest(self) -> str:
        """Names the answers made with these settings."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Answer(BaseModel):
    """Token ids of a rendered prompt and of the target's answer to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    prompt_ids: tuple[int, ...] = Field(min_length=1)
    answer_ids: tuple[int, ...] = Field(min_length=1)

    def document(self, category: str, max_length: int) -> Document:
        """As a document of at most `max_length` tokens, cut at its end."""
        return Document(self.key, category, (self.prompt_ids + self.answer_ids)[:max_length], len(self.prompt_ids))


class Answerer(Protocol):
    """Anything through which the target answers."""

    def answer(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Answer]:
        """One answer each, in order."""
        ...


def prompt_key(prompt: Prompt) -> str:
    """Digest of what is asked, whatever the prompt is called."""
    turns = [dict(m) for m in prompt.messages]
    return hashlib.sha256(json.dumps(turns, sort_keys=True).encode()).hexdigest()[:24]


class AnswerStore:
    """Answers on disk, a JSON line each, so that no prompt is answered twice and an interrupted run goes on.

    Args:
        folder: where the files lie. target, settings: whose answers these are; each pair has a file.
    """

    def __init__(self, folder: Path, target: Target, settings: AnswerSettings) -> None:
        self.path = folder / f"{target.name}-{target.fingerprint[:12]}-{settings.digest()}.jsonl"
        self._known: dict[str, Answer] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    answer = Answer.model_validate_json(line)
                except ValidationError:
                    continue  # the last line of an interrupted write: it will be answered again
                self._known[answer.key] = answer

    def get(self, prompt: Prompt) -> Answer | None:
        """The stored answer, or None."""
        return self._known.get(prompt_key(prompt))

    def add(self, answers: Iterable[Answer]) -> None:
        """Keep answers, on disk before this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = list(answers)
        with self.path.open("a") as file:
            if file.tell() and not self.path.read_bytes().endswith(b"\n"):
                file.write("\n")
            file.writelines(a.model_dump_json() + "\n" for a in fresh)
            file.flush()
            os.fsync(file.fileno())
        self._known.update((a.key, a) for a in fresh)


class EngineAnswerer:
    """A vLLM engine of our own. Runs inside a process with `engine_env()`; see `distill.run`.

    Args:
        target: its folder. dtype, max_model_len: the engine's.
        capture: residual streams to keep, for a teacher (`teachers.EngineTeacher`). ranks: tensor-parallel size.
    """

    def __init__(
        self,
        target: Path,
        dtype: str = "auto",
        max_model_len: int = 2048,
        *,
        capture: Sequence[int] = (),
        ranks: int = 1,
    ) -> None:
        from eaglenest.engine.arguments import EngineSpec, engine_arguments
        from eaglenest.engine.environment import prepare_environment
        from eaglenest.engine.launch import threads_for

        spec = EngineSpec.model_validate(
            {
                "target": target,
                "dtype": dtype,
                "max_model_len": max_model_len,
                "max_num_seqs": CHUNK,
                "capture": capture,
                "tensor_parallel_size": ranks,
            }
        )
        prepare_environment()
        import vllm

        try:
            arguments = engine_arguments(spec)
            with threads_for(vllm.EngineArgs(**arguments).create_engine_config()):
                self._engine = vllm.LLM(**arguments, disable_log_stats=True)
        except Exception as error:
            raise EngineError(
                f"vLLM did not start ({type(error).__name__}: {str(error).strip() or 'no message'})",
                f"an engine for {target}",
                "read the job's log above; `eaglenest doctor` checks memory and libraries",
            ) from error
        self._room = max_model_len

    def answer(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Answer]:
        """Answer a batch of prompts.

        Raises:
            BadInput: a prompt leaves no room for an answer.
        """
        return self._answer(prompts, settings, [None] * len(prompts))

    def write(self, turn: Turn, seeds: Sequence[int]) -> list[str | None]:
        """A user's turn for each seed; see `self_prompts.Writer`."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=1.0, max_tokens=turn.max_tokens, stop_token_ids=[turn.end], seed=seed)
            for seed in seeds
        ]
        asked: list[Any] = [{"prompt_token_ids": list(turn.before)} for _ in seeds]
        outputs = self._engine.generate(asked, sampling, use_tqdm=False)
        return [o.outputs[0].text if o.outputs[0].finish_reason == "stop" else None for o in outputs]

    def _answer(
        self, prompts: Sequence[Prompt], settings: AnswerSettings, extras: Sequence[dict[str, Any] | None]
    ) -> list[Answer]:
        """extras: `SamplingParams.extra_args` of each request."""
        from vllm import SamplingParams

        tokenizer = self._engine.get_tokenizer()
        rendered = [render(tokenizer, prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, rendered, strict=True):
            if len(ids) + 4 > self._room:
                raise BadInput(
                    f"prompt {prompt.id} has {len(ids)} tokens",
                    f"at most {self._room - 4}, the engine's context less an answer",
                    "shorten it, or raise EAGLENEST_MAX_MODEL_LEN",
                )
        sampling = [
            SamplingParams(
                temperature=settings.temperature,
                max_tokens=min(settings.max_tokens, self._room - len(ids)),
                seed=settings.seed,
                extra_args=extra,
            )
            for ids, extra in zip(rendered, extras, strict=True)
        ]
        outputs = self._engine.generate([{"prompt_token_ids": ids} for ids in rendered], sampling, use_tqdm=False)
        return [
            Answer(key=prompt_key(p), prompt_ids=tuple(ids), answer_ids=tuple(o.outputs[0].token_ids))
            for p, ids, o in zip(prompts, rendered, outputs, strict=True)
        ]


class EndpointAnswerer:
    """The target behind a running OpenAI-compatible vLLM endpoint, ours or bare.

    Args:
        url: root of the endpoint, without `/v1`. model: the served name; None: the first one.
    """

    def __init__(self, url: str, model: str | None = None, concurrency: int = 16) -> None:
        self._url, self._model, self._concurrency = url.rstrip("/"), model, concurrency

    def answer(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Answer]:
        """Answer a batch of prompts.

        Raises:
            EngineError: the endpoint fails, or gives no token ids.
        """

        async def ask(client: Any, model: str, prompt: Prompt) -> Answer:
            reply = await client.chat.completions.create(
                model=model,
                messages=[dict(m) for m in prompt.messages],
                temperature=settings.temperature,
                max_tokens=settings.max_tokens,
                seed=settings.seed,
                extra_body={"return_token_ids": True},
            )
            return _from_reply(prompt, reply)

        return asyncio.run(self._each(ask, prompts))

    def write(self, turn: Turn, seeds: Sequence[int]) -> list[str | None]:
        """A user's turn for each seed; see `self_prompts.Writer`.

        Raises:
            EngineError: the endpoint fails.
        """

        async def ask(client: Any, model: str, seed: int) -> str | None:
            reply = await client.completions.create(
                model=model,
                prompt=list(turn.before),
                temperature=1.0,
                max_tokens=turn.max_tokens,
                seed=seed,
                extra_body={"stop_token_ids": [turn.end]},
            )
            return reply.choices[0].text if reply.choices[0].finish_reason == "stop" else None

        return asyncio.run(self._each(ask, seeds))

    async def _each(self, ask: Callable[[Any, str, Any], Awaitable[Any]], items: Sequence[Any]) -> list[Any]:
        """ask(client, model, item) of every item, so many at once."""
        import openai

        client = openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
        gate = asyncio.Semaphore(self._concurrency)
        async with client:
            try:
                model = self._model or (await client.models.list()).data[0].id

                async def one(item: Any) -> Any:
                    async with gate:
                        return await ask(client, model, item)

                return await asyncio.gather(*(one(item) for item in items))
            except openai.OpenAIError as error:
                raise EngineError(
                    f"{self._url} did not answer ({type(error).__name__}: {error})",
                    "a running vLLM endpoint of the target",
                    "`eaglenest status` shows ours; leave --answers-from out to start an engine for the job",
                ) from error


def _from_reply(prompt: Prompt, reply: Any) -> Answer:
    choice = reply.choices[0]
    asked, said = getattr(reply, "prompt_token_ids", None), getattr(choice, "token_ids", None)
    if not asked or not said:
        raise EngineError("the endpoint returns no token ids", "a vLLM server that honours `return_token_ids`")
    return Answer(key=prompt_key(prompt), prompt_ids=tuple(asked), answer_ids=tuple(said))


def render(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt through the target's chat template, ready for the answer.

    Raises:
        BadInput: the template refuses the messages (some take no system turn).
    """
    try:
        ids = tokenizer.apply_chat_template([dict(m) for m in prompt.messages], add_generation_prompt=True)
    except Exception as error:
        raise BadInput(
            f"the target's chat template refuses prompt {prompt.id} ({error})",
            "messages it can render",
            "drop the system turn, or the prompt",
        ) from error
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)


def answer_prompts(
    prompts: Sequence[Prompt],
    store: AnswerStore,
    settings: AnswerSettings,
    answerer: Answerer,
    *,
    budget: int | None = None,
    max_length: int,
    on_progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> list[Document]:
    """Answers to the first of `prompts`, from the store where it has them.

    Args:
        answerer: asked only for what is missing.
        budget: answer tokens in all; no prompt is asked beyond them. None: every prompt.
        max_length: of a document, in tokens.
        on_progress: told how many prompts are answered, and how many answer tokens there are.
    """
    documents: list[Document] = []
    tokens = begin = 0
    while begin < len(prompts) and (budget is None or tokens < budget):
        room = CHUNK if budget is None else max(1, (budget - tokens) // settings.max_tokens)
        chunk = prompts[begin : begin + min(CHUNK, room)]
        missing = [p for p in chunk if store.get(p) is None]
        if missing:
            store.add(answerer.answer(missing, settings))
        for prompt in chunk:
            answer = store.get(prompt)
            assert answer is not None
            if budget is not None and tokens + len(answer.answer_ids) > budget:
                return _with_drafts(documents)
            tokens += len(answer.answer_ids)
            documents.append(answer.document(prompt.category, max_length))
        begin += len(chunk)
        on_progress(len(documents), tokens)
    return _with_drafts(documents)


def _with_drafts(documents: list[Document]) -> list[Document]:
    """Those in which something can be proposed: at least two answer tokens are left of each."""
    return [d for d in documents if len(d.ids) > d.answer_start + 1]
