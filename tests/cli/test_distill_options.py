"""What the options of `jobs/distill.py` and its config file make of a job."""

import json
from pathlib import Path

import pytest

from eaglenest.cli.distill_job import job_of
from eaglenest.cli.submit import checked
from eaglenest.errors import BadInput
from eaglenest.settings import Settings


def test_options_go_before_the_file_and_what_is_not_given_leaves_it(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(
        json.dumps({"answers": {"max_tokens": 99, "temperature": 0.5}, "recipe": {"passes": 3}, "name": "f"})
    )

    recipe = {"passes": None, "max_seconds": 9}
    job = job_of({"name": "o", "answers": {"max_tokens": 24}, "recipe": recipe}, file, Settings())

    assert (job.name, job.answers.max_tokens, job.answers.temperature) == ("o", 24, 0.5)
    assert (job.recipe.passes, job.recipe.max_seconds) == (3, 9)
    assert job_of({"name": "o", "answers": {"max_tokens": None}}, None, Settings()).answers.max_tokens == 128


def test_prompts_of_ones_own_are_judged_by_a_part_of_them_unless_others_are_named() -> None:
    def heldout(**given: str) -> str | None:
        return job_of({"name": "o", **given}, None, Settings()).heldout

    assert heldout() == "builtin:heldout"
    assert heldout(prompts="mine.jsonl") is None
    assert heldout(prompts="mine.jsonl", heldout="other.jsonl") == "other.jsonl"


@pytest.mark.parametrize(("name", "value"), [("recipe", 3), ("answers", None), ("recipe", ["passes"])])
def test_a_section_that_is_no_object_is_named(name: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({name: value}))
    with pytest.raises(BadInput, match=rf"job\.json: {name} is "):
        job_of({"name": "o", "recipe": {"passes": 2}, "answers": {"max_tokens": None}}, file, Settings())


def test_a_config_nested_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text("[" * 200_000)
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        job_of({"name": "o"}, file, Settings())


def test_a_folder_to_start_from_is_found_from_the_jobs_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert checked(["--name", "o", "--parent", "runs/first"])[-1] == str(tmp_path / "runs" / "first")
    assert checked(["--name", "o", "--parent", "champion"])[-1] == "champion"


def test_a_wrong_field_is_named(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"recipe": {"pases": 3}}))
    with pytest.raises(BadInput, match=r"recipe\.pases"):
        job_of({"name": "o"}, file, Settings())
