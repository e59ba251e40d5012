"""Tiny targets and drafters: random, sound, quick to make and to run. The stages that need a model share them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.module import Eagle3Drafter
from eaglenest.drafters.vocabulary import vocabulary_maps

VOCAB = 264
"""The 256 bytes, <|start|>, <|end|>, <|pad|>, and five ids that no text gives."""

START, END, PAD = 256, 257, 258

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention takes on a CPU
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": START,
    "eos_token_id": END,
    "pad_token_id": PAD,
}

SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def tiny_tokenizer() -> Any:
    """A tokenizer of bytes with a chat template, as `transformers` loads and saves it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>", "<|pad|>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
    )


def tiny_target(folder: Path, kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random causal LM of 4 layers, H = 64, saved to `folder` with tokenizer and chat template.

    Args:
        kind: `model_type` of `transformers`.
        changes: of its config.

    Returns:
        the model in float32, ready to run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(SIZES | SPECIAL.get(kind, {}) | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:  # norms of ones would hide a forgotten one
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def tiny_drafter(
    seed: int = 0, dtype: torch.dtype = torch.float64, vocabulary: Sequence[int] | None = None, **changes: Any
) -> Eagle3Drafter:
    """A drafter with H = 16 and random weights, norms and biases included.

    Args:
        vocabulary: target ids of the draft vocabulary, ascending; None: every second one.
        changes: of its config.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "target_hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 40,
        "aux_layer_ids": (1, 2, 3),
    }
    sizes |= changes
    ids = list(range(1, sizes["vocab_size"], 2)) if vocabulary is None else list(vocabulary)
    config = DrafterConfig(draft_vocab_size=len(ids), **sizes)
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config, torch.randn(config.vocab_size, config.hidden_size)).to(dtype)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    d2t, t2d = vocabulary_maps(ids, config.vocab_size)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    return drafter
