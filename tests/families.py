"""Tiny models of every supported family, and plain PyTorch training of the whole Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import greedysnake as gs
from greedysnake.models.huggingface import CausalLM
from reference import Batch, Trained

VOCABULARY, TOKENS = 61, 12
DOCUMENTS = (5, 4, 3)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 8, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied, window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3 window": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": MIXED,
    },
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4, "layer_types": MIXED},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4, "layer_types": MIXED},
    "gemma3 untied": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": MIXED,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 5.0,
    },
    "phi3": {"model_type": "phi3"},
    "gpt2": {"model_type": "gpt2", "n_inner": 40, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt2 untied": {
        "model_type": "gpt2",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
    "opt": {"model_type": "opt", "ffn_dim": 40, "dropout": 0.0, "max_position_embeddings": 32},
    "opt projected": {
        "model_type": "opt",
        "ffn_dim": 40,
        "dropout": 0.0,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 16,
        "tie_word_embeddings": False,
    },
    "gpt_neox": {"model_type": "gpt_neox"},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **EXPERTS},
    "mixtral balanced": {"model_type": "mixtral", "num_local_experts": 4, **EXPERTS, "output_router_logits": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "mlp_only_layers": [1],
        **EXPERTS,
    },
    "qwen3_moe balanced": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "mlp_only_layers": [1],
        **EXPERTS,
        "output_router_logits": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": MIXED,
        **EXPERTS,
    },
    "gpt_oss balanced": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": MIXED,
        **EXPERTS,
        "output_router_logits": True,
    },
}
OPTIMIZER = gs.AdamW(lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
"""An eps above the noise of fp32: gradients that are zero but for rounding must not become whole steps."""


def make_config(family: str, **changes: object) -> Any:
    from transformers import CONFIG_MAPPING

    options = {**SIZES, **FAMILIES[family], **changes}
    kind = options.pop("model_type")
    if kind in ("gpt2", "opt", "gpt_neox"):
        options.pop("num_key_value_heads")
    return CONFIG_MAPPING[kind](**options)


def make_batches(step: int) -> list[Batch]:
    """A plain, a padded and a packed micro-batch."""
    generator = torch.Generator().manual_seed(100 + step)

    def ids(rows: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (rows, TOKENS), generator=generator)

    plain, padded, packed = ids(2), ids(3), ids(2)
    mask, padded_labels = torch.ones_like(padded), padded.clone()
    for row, length in enumerate((TOKENS, 7, 9)):
        mask[row, length:], padded_labels[row, length:] = 0, -100
    padded_labels[0, :4] = -100
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(2, -1).contiguous()
    return [
        {"input_ids": plain, "labels": plain.clone()},
        {"input_ids": padded, "labels": padded_labels, "attention_mask": mask},
        {
            "input_ids": packed,
            "labels": torch.where(positions == 0, -100, packed),
            "position_ids": positions,
        },
    ]


def count(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def whole_loss(model: nn.Module, batch: Batch, *, apart: bool) -> torch.Tensor:
    """Summed loss of Hugging Face's own forward. `apart` runs packed documents one by one, as if never packed."""
    if apart and "position_ids" in batch:
        losses, start = [], 0
        for length in DOCUMENTS:
            part = slice(start, start := start + length)
            document = {name: batch[name][:, part] for name in ("input_ids", "labels")}
            losses.append(whole_loss(model, document, apart=False))
        return torch.stack(losses).sum()
    loss = model(**batch, use_cache=False).loss
    return loss * count(batch)  # type: ignore[no-any-return]


def train_whole(
    model: nn.Module,
    batches_of: Callable[[int], list[Batch]],
    num_steps: int,
    *,
    apart: bool = True,
    max_grad_norm: float = 1.0,
) -> Trained:
    named = dict(model.named_parameters())
    decaying = {name: p for name, p in named.items() if p.dim() >= 2 and "bias" not in name}
    groups = [
        {"params": list(decaying.values()), "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for name, p in named.items() if name not in decaying], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    trained = Trained()
    model.train()
    for step in range(num_steps):
        batches = batches_of(step)
        total, loss_sum = sum(count(batch) for batch in batches), 0.0
        for batch in batches:
            loss = whole_loss(model, batch, apart=apart)
            (loss / total).backward()
            loss_sum += loss.item()
        trained.norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), max_grad_norm)))
        adamw.step()
        adamw.zero_grad()
        trained.losses.append(loss_sum / total)
    trained.parameters = {name: parameter.detach() for name, parameter in named.items()}
    return trained


def whole_model(model: CausalLM, parameters: dict[str, torch.Tensor]) -> nn.Module:
    """Hugging Face's model with these values, which are named as the engine does it."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_config(
        model.config, attn_implementation=model.attn_implementation, dtype=torch.float32
    )
    values = {model.name_in_model(name): value for name, value in parameters.items()}
    missing, unexpected = whole.load_state_dict(values, strict=False)
    tied = set(whole.all_tied_weights_keys)
    assert set(missing) <= tied and not unexpected, (missing, unexpected)
    return whole  # type: ignore[no-any-return]
