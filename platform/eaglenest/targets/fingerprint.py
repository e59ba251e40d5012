"""What makes a target this target: digests of its weights, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

# What decides the target's output distribution and the meaning of its token ids. Index and cache files do not.
WEIGHTS = ("*.safetensors",)
REST = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")
CONFIG_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "rope_parameters", "rms_norm_eps")
# Only some configs have these: older ones, scaled or capped logits.
_ROPE = ("rope_theta", "rope_scaling")
_LOGITS = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")
SPECIAL_KEYS = (*_ROPE, *_LOGITS, "attention_multiplier", "embedding_multiplier", "residual_multiplier")


def sha256_file(path: Path, chunk: int = 1 << 22) -> str:
    """Hex sha256 of a file, read in pieces of `chunk` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(chunk):
            digest.update(block)
    return digest.hexdigest()


def target_fingerprint(path: Path, memo_dir: Path | None = None) -> str:
    """Hex sha256 over a target folder's weights, tokenizer, chat template and the shape-giving config keys.

    Args:
        path: a local Hugging Face folder.
        memo_dir: where digests of large files are remembered by path, size and modification time; None: no memory.
    """
    files = sorted({f for pattern in WEIGHTS + REST for f in path.glob(pattern)})
    memo_file = memo_dir / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}.json" if memo_dir else None
    memo: dict[str, str] = {}
    if memo_file and memo_file.exists():
        try:
            memo = json.loads(memo_file.read_text())
        except (OSError, ValueError):
            memo = {}
    fresh: dict[str, str] = {}
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        key = f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}"
        fresh[key] = memo.get(key) or sha256_file(file)
        digest.update(f"{file.name}={fresh[key]}\n".encode())
    raw = json.loads((path / "config.json").read_text())
    config = raw.get("text_config") or raw
    special = {k: config[k] for k in SPECIAL_KEYS if config.get(k) is not None}
    digest.update(json.dumps({k: config.get(k) for k in CONFIG_KEYS} | special, sort_keys=True).encode())
    digest.update(_inline_template(path).encode())
    if memo_file and fresh != memo:
        memo_file.parent.mkdir(parents=True, exist_ok=True)
        partial = memo_file.with_suffix(f".{os.getpid()}.part")
        partial.write_text(json.dumps(fresh))
        partial.replace(memo_file)
    return digest.hexdigest()


def _inline_template(path: Path) -> str:
    """The chat template of older folders, which keep it inside tokenizer_config.json."""
    file = path / "tokenizer_config.json"
    if not file.exists():
        return ""
    template = json.loads(file.read_text()).get("chat_template")
    return json.dumps(template, sort_keys=True) if template else ""
