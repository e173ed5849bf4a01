"""Which tensors a GGUF has for each family, under which names, and how their rows differ from Hugging Face's.

Three things differ besides the names. Under the architecture ``llama``, llama.cpp rotates neighbouring pairs
(2j, 2j+1) where Hugging Face rotates (j, j + D/2), so the rows of q and k are stored interleaved, head by head. For
Gemmas a norm's file holds 1 + weight. Experts are stacked: one tensor (experts, out, in) for all of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ARCHITECTURES", "CLASSES", "Entry", "deinterleave", "interleave", "layout"]

# Hugging Face's model_type → general.architecture.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "glm": "chatglm",
    "glm4": "glm4",
}
# Hugging Face's model_type → the class in its config.json.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
}

_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_GATED = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_PACKED = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_PRE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_QK = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_GEMMA_SANDWICH = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM_SANDWICH = _PRE | {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
_MIXTRAL = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
_QWEN_MOE = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_EXPERTS = {  # family: the config's keys of how many and how wide, names of the parts, module whose children they are
    "mixtral": ("num_local_experts", "intermediate_size", _MIXTRAL, "block_sparse_moe.experts"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size", _QWEN_MOE, "mlp.experts"),
}

_PARTS = {
    "llama": _PRE | _ATTENTION | _GATED,
    "mistral": _PRE | _ATTENTION | _GATED,
    "mixtral": _PRE | _ATTENTION | {"block_sparse_moe.gate": "ffn_gate_inp"},
    "qwen2": _PRE | _ATTENTION | _GATED,
    "qwen3": _PRE | _ATTENTION | _QK | _GATED,
    "qwen3_moe": _PRE | _ATTENTION | _QK | {"mlp.gate": "ffn_gate_inp"},
    "gemma": _PRE | _ATTENTION | _GATED,
    "gemma2": _GEMMA_SANDWICH | _ATTENTION | _GATED,
    "gemma3_text": _GEMMA_SANDWICH | _ATTENTION | _QK | _GATED,
    "phi3": _PRE | {"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"} | _PACKED,
    "glm": _PRE | _ATTENTION | _PACKED,
    "glm4": _GLM_SANDWICH | _ATTENTION | _PACKED,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a GGUF: its shape, the Hugging Face tensors whose rows it holds one after the other, the number of
    heads whose rows are interleaved (0: none are), and what is added to its numbers."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    heads: int = 0
    offset: float = 0.0


def layout(config: dict[str, Any]) -> dict[str, Entry]:
    """GGUF name → ``Entry`` for a model of this (complete) Hugging Face config. A tied head is left out."""
    family = config["model_type"]
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    offset = 1.0 if family.startswith("gemma") else 0.0
    result = {
        "token_embd.weight": Entry((vocab, hidden), ("model.embed_tokens.weight",)),
        "output_norm.weight": Entry((hidden,), ("model.norm.weight",), offset=offset),
    }
    if not config["tie_word_embeddings"]:
        result["output.weight"] = Entry((vocab, hidden), ("lm_head.weight",))
    interleaved = ARCHITECTURES[family] == "llama"
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if interleaved else {}
    shapes, biased, experts = _shapes(config), _biased(config), _experts(config)
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in _PARTS[family].items():
            name, shape, plus = f"model.layers.{layer}.{ours}", shapes[ours], offset if "norm" in ours else 0.0
            turned = heads.get(theirs, 0)
            result[f"blk.{layer}.{theirs}.weight"] = Entry(shape, (f"{name}.weight",), turned, plus)
            if ours in biased:
                result[f"blk.{layer}.{theirs}.bias"] = Entry(shape[:1], (f"{name}.bias",), turned)
        for ours, (theirs, shape, module) in experts.items():
            names = tuple(f"model.layers.{layer}.{module}.{e}.{ours}.weight" for e in range(shape[0]))
            result[f"blk.{layer}.{theirs}.weight"] = Entry(shape, names)
    return result


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    router = (config.get("num_local_experts") or config.get("num_experts") or 0, hidden)
    norms = dict.fromkeys((*_GEMMA_SANDWICH, *_GLM_SANDWICH), (hidden,))
    return norms | {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.qkv_proj": (q + 2 * kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.gate_up_proj": (2 * inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "block_sparse_moe.gate": router,
        "mlp.gate": router,
    }


def _biased(config: dict) -> tuple[str, ...]:
    family = config["model_type"]
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if family == "qwen2":
        return qkv
    biased = qkv if config.get("attention_bias") and family not in ("mistral", "mixtral", "phi3") else ()
    if biased and not family.startswith("glm"):
        biased += ("self_attn.o_proj",)
    return biased + (tuple(_GATED) if family == "llama" and config.get("mlp_bias") else ())


def _experts(config: dict) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """An expert's part → (GGUF name, stacked shape, the module whose children the experts are)."""
    if config["model_type"] not in _EXPERTS:
        return {}
    count_key, inner_key, names, module = _EXPERTS[config["model_type"]]
    count, inner, hidden = config[count_key], config[inner_key], config["hidden_size"]
    return {
        part: (theirs, (count, hidden, inner) if "down" in theirs else (count, inner, hidden), module)
        for part, theirs in names.items()
    }


def interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (x0, x1, …, y0, y1, …) to (x0, y0, x1, y1, …): half-split rotation to neighbours."""
    halves = tensor.view(heads, 2, -1, *tensor.shape[1:])  # (heads, 2, D/2, …)
    return halves.transpose(1, 2).reshape(tensor.shape)


def deinterleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (x0, y0, x1, y1, …) to (x0, x1, …, y0, y1, …): the inverse of ``interleave``."""
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])  # (heads, D/2, 2, …)
    return pairs.transpose(1, 2).reshape(tensor.shape)
