"""What a distillation needs before it may train."""

from collections.abc import Sequence
from typing import Any

import pytest

from eaglenest.distill.answers import Answer, AnswerSettings, prompt_key
from eaglenest.distill.prompts import Prompt, load_prompts
from eaglenest.distill.run import DistillJob, _answered
from eaglenest.errors import BadInput
from eaglenest.settings import Settings
from eaglenest.targets import Target


class Curt:
    """A target that ends its answers at once, but for those of some prompts."""

    def __init__(self, talks: Sequence[Prompt]) -> None:
        self.talks = {p.id for p in talks}

    def answer(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Answer]:
        said = {True: (5, 6, 7), False: (2,)}
        return [Answer(key=prompt_key(p), prompt_ids=(1,), answer_ids=said[p.id in self.talks]) for p in prompts]


@pytest.mark.parametrize("which", ["train", "held-out"])
def test_answers_that_leave_nothing_to_propose_are_told_before_training(which: str, settings: Settings) -> None:
    training, heldout = load_prompts("builtin:train")[:3], load_prompts("builtin:heldout")[:3]
    crew: Any = Curt(heldout if which == "train" else training)
    target = Target("tiny", settings.cache_dir, "f" * 64, 8, 4, 50, (1, 2))
    job = DistillJob(name="o", target="tiny")

    with pytest.raises(BadInput, match=f"no {which if which == 'held-out' else 'prompt'}.* got an answer"):
        _answered(job, target, settings, training, heldout, crew, lambda _: None)
