"""The tensors a drafter's file must hold, checked by name, shape, dtype and value. No torch: raw bits through numpy."""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglenest.drafters.config import DrafterConfig
from eaglenest.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOATS = frozenset({"BF16", "F16", "F32"})
# sign excluded: all exponent bits set means infinite or not a number
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
_INTEGERS = {"I64": "<i8", "BOOL": "u1"}
_CHUNK = 1 << 22

Expected = dict[str, tuple[tuple[int, ...], frozenset[str]]]


def expected_tensors(config: DrafterConfig) -> Expected:
    """Every tensor of a checkpoint: name -> (shape, safetensors dtypes accepted).

    Names as vLLM and SGLang read them (`midlayer`, no `model.` prefix). `embed_tokens` is there only when the target's
    cannot be shared.
    """
    hidden, inner, target = config.hidden_size, config.intermediate_size, config.target_hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_aux * target),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(config.num_aux)}
    if config.attention_bias:
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        shapes |= {f"midlayer.self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    if not config.shares_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    expected: Expected = {name: (shape, FLOATS) for name, shape in shapes.items()}
    expected["d2t"] = ((config.draft_vocab_size,), frozenset({"I64"}))
    expected["t2d"] = ((config.vocab_size,), frozenset({"BOOL"}))
    return expected


class SafetensorsFile:
    """A safetensors file: names, shapes and dtypes from its header, raw bits from a memory map."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            with safe_open(path, framework="numpy"):  # the library proves the header sound: sizes, offsets, no gaps
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no safetensors file: {error}", "a complete safetensors file") from error
        self._file = path.open("rb")
        length = int.from_bytes(self._file.read(8), "little")
        self.tensors: dict[str, dict[str, Any]] = json.loads(self._file.read(length))
        self.tensors.pop("__metadata__", None)
        self._start = 8 + length
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self.tensors[name]["shape"])

    def dtype(self, name: str) -> str:
        """Dtype of one tensor, in safetensors' words."""
        return str(self.tensors[name]["dtype"])

    def bits(self, name: str, dtype: str, start: int = 0, count: int = -1) -> NDArray[Any]:
        """Elements `start` to `start + count` of a tensor, flat, as numpy `dtype`; copied, so the map may be closed."""
        import numpy as np

        begin, end = self.tensors[name]["data_offsets"]
        width = np.dtype(dtype).itemsize
        begin += start * width
        stop = end if count < 0 else min(end, begin + count * width)
        return np.frombuffer(self._map[self._start + begin : self._start + stop], dtype=dtype)


def check_structure(weights: SafetensorsFile, config: DrafterConfig, *, published: bool = False) -> None:
    """Names, shapes and dtypes must be exactly the config's.

    Args:
        published: someone else's EAGLE 3 checkpoint: it may repeat the target's embedding, and when its draft
            vocabulary is the whole one it may leave out `d2t` and `t2d`.

    Raises:
        CheckpointError: naming the tensor.
    """
    expected = expected_tensors(config)
    found = set(weights.tensors)
    if config.shares_embedding and "embed_tokens.weight" in found:
        if not published:
            raise CheckpointError(
                f"{weights.path} holds embed_tokens.weight",
                "none: hidden sizes agree, so the target's embedding is shared",
                "save the drafter without it",
            )
        found.discard("embed_tokens.weight")
    if published and config.draft_vocab_size == config.vocab_size:
        for name in {"d2t", "t2d"} - found:
            del expected[name]
    if missing := sorted(set(expected) - found):
        raise CheckpointError(f"{weights.path} lacks {missing}", f"the {len(expected)} tensors of its config.json")
    if extra := sorted(found - set(expected)):
        raise CheckpointError(f"{weights.path} holds unknown tensors {extra}", f"{sorted(expected)}")
    for name, (shape, dtypes) in expected.items():
        if weights.shape(name) != shape:
            raise CheckpointError(f"{weights.path}: {name} has shape {list(weights.shape(name))}", f"{list(shape)}")
        if weights.dtype(name) not in dtypes:
            raise CheckpointError(f"{weights.path}: {name} is {weights.dtype(name)}", " or ".join(sorted(dtypes)))


def check_values(weights: SafetensorsFile, config: DrafterConfig) -> None:
    """Floats must be finite, and the draft vocabulary a proper subset map. Call after `check_structure`.

    Raises:
        CheckpointError: naming the tensor.
    """
    import numpy as np

    for name in sorted(weights.tensors):
        if (kind := weights.dtype(name)) not in _EXPONENTS:
            continue
        dtype, mask = _EXPONENTS[kind]
        size = int(np.prod(weights.shape(name)))
        for start in range(0, size, _CHUNK):
            bits = weights.bits(name, dtype, start, _CHUNK)
            if bad := int(np.count_nonzero((bits & mask) == mask)):
                raise CheckpointError(
                    f"{weights.path}: {name} has {bad} infinite or NaN values", "finite weights", "train it again"
                )
    if "d2t" in weights.tensors:
        _check_vocabulary(weights, config)


def draft_ids_digest(weights: SafetensorsFile) -> str:
    """Hex sha256 of `d2t`, int64 little-endian."""
    return hashlib.sha256(weights.bits("d2t", _INTEGERS["I64"]).tobytes()).hexdigest()


def _check_vocabulary(weights: SafetensorsFile, config: DrafterConfig) -> None:
    import numpy as np

    offsets = weights.bits("d2t", _INTEGERS["I64"])
    ids = np.arange(len(offsets)) + offsets
    if np.any(outside := (ids < 0) | (ids >= config.vocab_size)):
        at = int(np.argmax(outside))
        raise CheckpointError(
            f"{weights.path}: d2t maps {at} to {int(ids[at])}", f"target ids i + d2t[i] within [0, {config.vocab_size})"
        )
    if np.any(falling := np.diff(ids) <= 0):
        at = int(np.argmax(falling)) + 1
        raise CheckpointError(
            f"{weights.path}: d2t maps {at} to {int(ids[at])}, after {int(ids[at - 1])}",
            "ids that rise without repeats",
        )
    if "t2d" not in weights.tensors:
        return
    mask = weights.bits("t2d", _INTEGERS["BOOL"])
    if np.any(mask > 1) or not np.array_equal(np.flatnonzero(mask), ids):
        raise CheckpointError(
            f"{weights.path}: t2d marks {int(np.count_nonzero(mask))} ids, not those of d2t",
            f"the {len(ids)} target ids that d2t names",
        )
