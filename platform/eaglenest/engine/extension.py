"""What EagleNest adds to a vLLM worker: the drafter's swap, reached by `AsyncLLM.collective_rpc`.

Each call runs in the worker between two engine steps. It answers with a plain dictionary and never raises, so that
every rank of a tensor-parallel engine answers in the same way: `{"ok": True, ...}` or `{"ok": False, "what": ...}`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eaglenest.errors import EagleNestError, SwapRefused

Answer = dict[str, Any]

Shapes = dict[str, tuple[int, ...]]

WEIGHTS = "model.safetensors"


class DrafterExtension:
    """Mixed into vLLM's worker class. Every public name starts with `drafter_`."""

    def drafter_begin(self, folder: str, version: str) -> Answer:
        """Start staging the checkpoint in `folder`; answers with the plan: for each slice its bytes."""
        return self._drafter_answer(lambda state: state.begin(self, Path(folder), version))

    def drafter_stage(self, first: int, last: int) -> Answer:
        """Do the slices `first` to `last`, exclusive."""
        return self._drafter_answer(lambda state: state.stage(first, last))

    def drafter_commit(self, version: str) -> Answer:
        """Exchange the staged weights with the live ones."""
        return self._drafter_answer(lambda state: state.commit(version, self._drafter_before_part))

    def drafter_proof(self) -> Answer:
        """Compare what is executed now with what was staged, layer by layer."""
        return self._drafter_answer(lambda state: state.proof())

    def drafter_restore(self) -> Answer:
        """Put the previous weights back, if the staged ones are in service."""
        return self._drafter_answer(lambda state: state.restore())

    def drafter_finish(self) -> Answer:
        """Forget whatever is not in service: staged weights, or the previous ones."""
        return self._drafter_answer(lambda state: state.finish())

    def drafter_state(self) -> Answer:
        """The version in service (None: the one the engine was started with) and the one being staged."""
        return self._drafter_answer(lambda state: {"version": state.version, "staging": state.staging})

    def _drafter_before_part(self, path: str) -> None:
        """A place for tests to make an exchange fail midway."""

    def _drafter_answer(self, work: Callable[[_State], Answer | None]) -> Answer:
        state = self.__dict__.setdefault("_eaglenest_drafter", _State())
        began = time.perf_counter()
        answer: Answer = {"ok": True, "rank": getattr(self, "rank", 0)}
        try:
            answer |= work(state) or {}
        except EagleNestError as error:
            answer |= {"ok": False, "what": error.what, "expected": error.expected, "fix": error.fix}
        except Exception as error:  # nothing may escape into the engine's loop: it is not the swap's to break
            answer |= {"ok": False, "what": f"{type(error).__name__}: {error}"}
        answer["seconds"] = time.perf_counter() - began
        return answer


class _State:
    """The swap in progress on one worker."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.staging: str | None = None
        self._previous: str | None = None
        self._shadow: Any = None
        self._file: Any = None
        self._launched: Shapes | None = None

    def begin(self, worker: Any, folder: Path, version: str) -> Answer:
        from safetensors import safe_open

        from eaglenest.engine.shadow import Shadow

        self.finish()
        live = worker.get_draft_model()
        if live is None:
            raise SwapRefused("the engine decodes without a drafter", "an engine started with one")
        self._require_launch_shapes(worker, folder / WEIGHTS)
        self._file = safe_open(folder / WEIGHTS, framework="pt", device="cpu").__enter__()
        names = list(self._file.keys())
        empty = {name: self._file.get_tensor(name).to("meta") for name in names}  # mapped, not read
        self._shadow = Shadow(live, worker.get_model(), empty, self._file.get_tensor, worker.vllm_config, worker.device)
        self.staging = version
        return {"slices": [piece.nbytes for piece in self._shadow.slices], "parts": sorted(self._shadow.parts)}

    def stage(self, first: int, last: int) -> None:
        for index in range(first, last):
            self._staged_shadow().run(index)

    def commit(self, version: str, before: Callable[[str], None]) -> None:
        shadow = self._staged_shadow()
        if version != self.staging or not shadow.staged or shadow.exchanged:
            raise SwapRefused(f"version {version} is not ready for service", "a version staged to its end")
        self._require_same_vocabulary()
        shadow.exchange(before)
        self._previous, self.version = self.version, version

    def proof(self) -> Answer:
        return {"parts": self._staged_shadow().prove()}

    def restore(self) -> None:
        if self._shadow is not None and self._shadow.exchanged:
            self._shadow.exchange()
            self.version = self._previous

    def finish(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        if self._shadow is not None:
            self._shadow.close()
        self._shadow = self._file = self.staging = self._previous = None

    def _require_launch_shapes(self, worker: Any, file: Path) -> None:
        """vLLM's loaders cut a weight that is too large down to size, without a word: compare with the first one's."""
        if self._launched is None:
            launched = Path(worker.vllm_config.speculative_config.draft_model_config.model) / WEIGHTS
            self._launched = _shapes(launched) if launched.exists() else {}
        wanted, found = self._launched, _shapes(file)
        if not wanted:  # not a folder on this machine: vLLM's loaders are the judge
            return
        wrong = [f"lacks {name}" for name in wanted.keys() - found.keys()]
        wrong += [f"has {name}, which is not the drafter's" for name in found.keys() - wanted.keys()]
        both = wanted.keys() & found.keys()
        wrong += [f"has {n} of {found[n]} instead of {wanted[n]}" for n in both if wanted[n] != found[n]]
        if wrong:
            raise SwapRefused(
                f"the checkpoint {'; '.join(sorted(wrong))}",
                "the names and shapes of the checkpoint the engine was started with, and nothing of the target's",
                "distill the drafter with the same architecture and draft vocabulary, or restart the replica",
            )

    def _staged_shadow(self) -> Any:
        if self._shadow is None:
            raise SwapRefused("no version is being staged", "drafter_begin before anything else")
        return self._shadow

    def _require_same_vocabulary(self) -> None:
        import torch

        for path, part in self._shadow.parts.items():
            for name, tensor in part.live.named_parameters(recurse=False):
                if tensor.dtype == torch.int64 and not torch.equal(tensor, getattr(part.shadow, name)):
                    raise SwapRefused(
                        f"{path + '.' if path else ''}{name} differs: the draft vocabulary is another one",
                        "the same d2t in every version that is swapped in place",
                        "distill from the running version, which keeps its vocabulary, or replace the replica",
                    )


def _shapes(file: Path) -> Shapes:
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="cpu") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
