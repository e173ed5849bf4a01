"""A tiny model of every dense family, with wiring that shows what one of them alone does."""

from __future__ import annotations

import torch

import ligermodels

BASE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}  # fmt: skip
# With experts, on top of a dense family's keys: tiny_model("llama", **SPARSE["mixtral"]).
SPARSE = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
CONFIGS = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma", "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", "sliding_window": 9, "query_pre_attn_scalar": 16, "pad_token_id": 0},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 7,
               "pad_token_id": 0},
    "phi3": {"model_type": "phi3", "num_attention_heads": 2, "pad_token_id": 0},
    "glm": {"model_type": "glm", "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0},
}  # fmt: skip


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> ligermodels.base.CausalLM:
    """Random weights, the same in every call, ready to train."""
    config = BASE | CONFIGS[family] | changes
    cls = ligermodels.MODELS[config["model_type"]]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(cls.config_class.from_hf(config)).to(dtype).train()
