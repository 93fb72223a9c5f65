"""A small copy of a model's configuration: the same classes and kinds of layer, tiny sizes."""

from __future__ import annotations

import copy
from typing import Any

HEADS, HEAD_SIZE, EXPERTS, LATENT = 4, 16, 4, 16
HIDDEN = HEADS * HEAD_SIZE
VOCABULARY = 96
WINDOW = 4

SIZES: dict[str, int] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "global_head_dim": HEAD_SIZE,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": HEAD_SIZE,
    "laurel_rank": HEAD_SIZE,
    "intermediate_size": 2 * HIDDEN,
    "ffn_dim": 2 * HIDDEN,
    "ffn_hidden_size": 2 * HIDDEN,
    "n_inner": 2 * HIDDEN,
    "moe_intermediate_size": HIDDEN,
    "shared_expert_intermediate_size": HIDDEN,
    "shared_intermediate_size": HIDDEN,
    "intermediate_size_mlp": 2 * HIDDEN,
    "q_lora_rank": LATENT,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": HEAD_SIZE,
    "qk_nope_head_dim": HEAD_SIZE,
    "qk_head_dim": 2 * HEAD_SIZE,
    "v_head_dim": HEAD_SIZE,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
}
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink(config: Any, num_layers: int) -> Any:
    """The configuration with tiny sizes and the first `num_layers` layers. Nothing random happens in its forward."""
    small = copy.deepcopy(config)
    for name, size in SIZES.items():
        if _is_size(getattr(small, name, None)):
            setattr(small, name, size)
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if _is_size(groups):
        small.num_key_value_heads = HEADS if groups == heads else 1 if groups == 1 else HEADS // 2
    if _is_size(getattr(config, "word_embed_proj_dim", None)):
        small.word_embed_proj_dim = HIDDEN if config.word_embed_proj_dim == config.hidden_size else HIDDEN // 2
    for name in CHOSEN_EXPERTS:
        if _is_size(getattr(small, name, None)):
            setattr(small, name, min(getattr(small, name), EXPERTS // 2))
    for name in TOKENS:
        if _is_size(getattr(small, name, None)) and getattr(small, name) >= VOCABULARY:
            setattr(small, name, 0)
    _shorten_lists(small, config.num_hidden_layers, num_layers)
    small.num_hidden_layers = num_layers
    _shorten_rotary_factors(small)
    for name, value in list(vars(small).items()):
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(small, name, 0.0)
    return small


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shorten_lists(config: Any, old: int, new: int) -> None:
    """Lists with an entry for every layer."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == old:
            setattr(config, name, value[:new])


def _shorten_rotary_factors(config: Any) -> None:
    """Some rotary embeddings have a factor for every pair of a head's dimensions."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    for name in ("short_factor", "long_factor"):
        if isinstance(parameters.get(name), list):
            parameters[name] = parameters[name][: int(HEAD_SIZE * share) // 2]
