"""What a Serve config becomes before it is deployed, and what our services' processes are told."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from eaglenest.errors import BadInput, ServiceError
from eaglenest.services import access, kinds, serve_app
from eaglenest.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def config_file(tmp_path: Path, **args: Any) -> Path:
    path = tmp_path / "serve.yaml"
    application = {"name": "a", "import_path": "eaglenest.serving.app:build", "args": args}
    path.write_text(yaml.safe_dump({"http_options": {"port": 1, "root_path": "/x"}, "applications": [application]}))
    return path


def test_the_settings_address_replaces_the_configs(settings: Settings, tmp_path: Path) -> None:
    http = serve_app.render(settings, config_file(tmp_path))["http_options"]

    assert http == {"host": "127.0.0.1", "port": settings.serve_port, "root_path": "/x"}


def test_a_setting_that_was_set_moves_what_is_served(settings: Settings, tmp_path: Path) -> None:
    config = config_file(tmp_path, target="of the config", dtype="float16", drafter="none")
    chosen = settings.model_copy(update={"target": "mine"})  # model_copy marks it as set
    assert "target" in chosen.model_fields_set

    args = serve_app.render(chosen, config)["applications"][0]["args"]

    assert args == {"target": "mine", "dtype": "float16", "drafter": "none"}


def test_a_dictionary_is_deployed_as_it_is(settings: Settings, tmp_path: Path) -> None:
    wish = yaml.safe_load(config_file(tmp_path, target="exactly this").read_text())
    chosen = settings.model_copy(update={"target": "mine"})

    assert serve_app.render(chosen, wish)["applications"][0]["args"] == {"target": "exactly this"}


def test_applications_of_others_keep_their_arguments(settings: Settings) -> None:
    application = {"name": "a", "import_path": "other:app", "args": {"target": "theirs"}}
    chosen = settings.model_copy(update={"target": "mine"})

    assert serve_app._overlaid(chosen, application) == application


@pytest.mark.parametrize("path", sorted((ROOT / "serve_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_our_own_configs_can_be_rendered(path: Path, settings: Settings) -> None:
    assert serve_app.render(settings, path)["applications"]


@pytest.mark.parametrize(
    "content",
    [
        b"applications: 3",
        b"- a",
        b"a: [",
        b"",
        b"\xff\xfe",
        b"applications: [3]",
        b"applications: [{import_path: eaglenest.serving.app:build}]",
        b"applications: [{name: a, import_path: eaglenest.serving.app:build, args: 3}]",
        b"applications: [{name: a}]\nhttp_options: 3",
    ],
)
def test_what_is_no_config_is_refused(content: bytes, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)

    with pytest.raises(BadInput, match=r"bad\.yaml"):
        serve_app.render(settings, path)


@pytest.mark.parametrize("kind", ["args", "http_options"])
def test_a_key_left_empty_is_a_key_left_out(kind: str, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    application = "{name: a, import_path: eaglenest.serving.app:build" + (", args:" if kind == "args" else "") + "}"
    path.write_text(f"applications: [{application}]\n" + ("http_options:\n" if kind == "http_options" else ""))

    rendered = serve_app.render(settings.model_copy(update={"target": "mine"}), path, {"dtype": "float32"})

    assert rendered["applications"][0]["args"] == {"target": "mine", "dtype": "float32"}
    assert rendered["http_options"]["port"] == settings.serve_port


def test_without_ray_every_serve_call_says_so(settings: Settings) -> None:
    for call in (serve_app.applications, serve_app.delete_serve):
        with pytest.raises(ServiceError, match="Ray does not answer"):
            call(settings)


def test_processes_are_told_the_settings_with_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    settings = Settings(runs_dir=Path("runs"), cache_dir=Path("cache"), target="model", serve_port=1234)

    for name, value in kinds.settings_env(settings).items():
        monkeypatch.setenv(name, value)
    told = Settings()

    assert told.runs_dir == tmp_path / "runs"
    assert told.cache_dir == tmp_path / "cache"
    assert told.target == str(tmp_path / "model")
    assert told.serve_port == 1234
    assert told.tracking_uri == settings.tracking_uri


def test_ray_gets_a_folder_short_enough_for_its_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    settings = Settings(runs_dir=deep)

    assert len(str(kinds.ray_folder(settings))) < 40
    assert kinds.ray_folder(settings) != kinds.ray_folder(Settings(runs_dir=tmp_path))


def test_a_token_is_made_once_and_is_for_its_owner_only(settings: Settings) -> None:
    access.make_token(settings)
    path = access.token_path(settings)
    token = path.read_text()
    access.make_token(settings)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) == 64
    assert path.read_text() == token
    assert access.headers(settings) == {"Authorization": f"Bearer {token}"}


def test_what_the_user_decided_about_rays_token_comes_first(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "theirs")
    access.make_token(settings)
    assert access.headers(settings) == {"Authorization": "Bearer theirs"}
    assert "RAY_AUTH_TOKEN_PATH" not in access.auth_env(settings)

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert access.headers(settings) == {}
    assert access.auth_env(settings)["RAY_AUTH_MODE"] == "disabled"
    assert not access.token_path(settings).exists()


def test_a_process_adopts_our_ray_only_while_it_runs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    access.adopt(settings)

    assert "RAY_AUTH_MODE" not in os.environ
