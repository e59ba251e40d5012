"""From a name, hub id or path to a target on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglenest.errors import TargetError
from eaglenest.settings import Settings, get_settings
from eaglenest.targets.embedded import EMBEDDED, materialise
from eaglenest.targets.fingerprint import target_fingerprint

_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True)
class Target:
    """A causal LM on local disk.

    `aux_layer_ids` are residual streams after that many layers, ascending (vLLM's convention).
    """

    name: str
    path: Path
    fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]


def resolve_target(name_or_path: str | None = None, settings: Settings | None = None) -> Target:
    """Find the target, making or fetching it where needed.

    Args:
        name_or_path: an embedded name, a local folder, or a hub id; None: the settings' target.

    Raises:
        TargetError: no such target, or a folder that is not a causal LM in safetensors.
    """
    settings = settings or get_settings()
    name = name_or_path or settings.target
    path = materialise(name, settings.cache_dir) if name in EMBEDDED else _local(name) or _fetch(name)
    config = _read_config(path)
    _check_folder(path)
    layers = int(config["num_hidden_layers"])
    return Target(
        name=name if name in EMBEDDED else Path(name).name,
        path=path,
        fingerprint=target_fingerprint(path, settings.cache_dir / "fingerprints"),
        hidden_size=int(config["hidden_size"]),
        num_layers=layers,
        vocab_size=int(config["vocab_size"]),
        aux_layer_ids=default_aux_layer_ids(layers),
    )


def _local(name: str) -> Path | None:
    """The folder of that name, if there is one; what the system takes for no path at all is none."""
    try:
        path = Path(name).expanduser()
        return path.resolve() if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, the home of nobody, a zero byte
        return None


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Low, middle and late residual streams: (2, L//2, L-3), or a spread that stays distinct on tiny targets."""
    ids = {2, num_layers // 2, num_layers - 3} if num_layers >= 8 else {1, num_layers // 2, num_layers - 1}
    return tuple(sorted(i for i in ids if 0 < i < num_layers)) or (num_layers,)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads((path / "config.json").read_text())
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(
            f"{path} has no readable config.json ({error.__class__.__name__})",
            "a Hugging Face folder of a causal LM",
            "give the folder that holds config.json, tokenizer and *.safetensors",
        ) from error
    config = raw.get("text_config") or raw
    if not isinstance(config, dict):
        raise TargetError(f"{path}/config.json: text_config is {config!r}", "a JSON object")
    missing = [k for k in _SIZES if k not in config]
    if missing:
        raise TargetError(f"{path}/config.json lacks {', '.join(missing)}", "the config of a decoder-only LM")
    wrong = [f"{k}={config[k]!r}" for k in _SIZES if not isinstance(config[k], int) or config[k] < 1]
    if wrong:
        raise TargetError(f"{path}/config.json has {', '.join(wrong)}", "whole numbers from 1 up")
    return dict(config)


def _check_folder(path: Path) -> None:
    if not any(path.glob("*.safetensors")):
        raise TargetError(
            f"{path} holds no *.safetensors",
            "weights in safetensors (pickled weights are never loaded)",
            "convert the model with save_pretrained(..., safe_serialization=True)",
        )
    if not any((path / f).exists() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise TargetError(
            f"{path} holds no tokenizer", "tokenizer.json or tokenizer.model", "copy it beside the weights"
        )


def _fetch(name: str) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise TargetError(
            f"there is no target {name!r}",
            f"an embedded name ({', '.join(EMBEDDED)}), an existing folder, or a hub id such as org/model",
            "check the spelling, or give the path of the folder",
        )
    from huggingface_hub import snapshot_download  # only a hub target needs it

    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise TargetError(
            f"{name} cannot be fetched from the hub ({error.__class__.__name__}: {str(error).splitlines()[0]})",
            "a public model, or HF_TOKEN set for a gated one",
            "check the id and the network, or download it elsewhere and give its folder",
        ) from error
