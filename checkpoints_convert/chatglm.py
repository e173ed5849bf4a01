"""A GLM → the layout of ChatGLM's own ("remote") code: other names, q, k and v in one tensor, other keys in the config.

The way back is not here: such a folder is read like any other, its names by ``rewrites.to_model_names``, its keys by
``GlmConfig``. The code that such a folder's ``auto_map`` would name is THUDM's and is not written; nor is ``auto_map``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoints_convert.files import CONFIG
from ligermodels.checkpoints_convert.rewrites import to_chatglm_names
from ligermodels.checkpoints_convert.save import to_json
from ligermodels.checkpoints_convert.streamed import Source, write_shards
from ligermodels.errors import CheckpointError, ConfigError

__all__ = ["write_chatglm"]

_QKV = re.compile(r"(.*\.self_attn\.)[qkv]_proj(\..*)")


def write_chatglm(
    source: Source, target: Path, *, max_shard_size: int | str = "5GB", force: bool = False, plan: object = None
) -> Path:
    """Write ``source`` (a glm, its config complete) in ChatGLM's layout, and return the folder.

    Raises ConfigError naming the key of a config that ChatGLM's code does not know.
    """
    groups: dict[str, list[str]] = {}  # one name, or those of q, k and v
    for ours in source.tensors:
        part = _QKV.fullmatch(ours)
        groups.setdefault(ours if part is None else f"{part[1]}{part[2]}", []).append(ours)
    names, tensors = {}, {}
    for group in groups.values():
        try:
            renamed = to_chatglm_names({ours: source.tensors[ours] for ours in group})
        except CheckpointError as error:
            raise CheckpointError(f"{source.path}: {error}") from error
        (theirs, tensor), *_ = renamed.items()
        names[theirs], tensors[theirs] = group, tensor

    def make(theirs: str) -> torch.Tensor:
        return to_chatglm_names({ours: source.make(ours) for ours in names[theirs]})[theirs]

    config = _config(source.config, source.path)
    out = Source(source.path, config, tensors, make, source.files)
    text = to_json(config, CONFIG)
    return write_shards(out, target, "model", (CONFIG, text), max_shard_size=max_shard_size, force=force, plan=plan)


def _config(config: dict[str, Any], where: Path) -> dict[str, Any]:
    fits = {
        "model_type": "glm",
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
    }
    for key, value in fits.items():
        if config[key] != value:
            raise ConfigError(f"{where}: {key} {config[key]!r} has no form in ChatGLM's layout: expected {value!r}")
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default":
        raise ConfigError(f"{where}: rope_type {rope['rope_type']!r} has no form in ChatGLM's layout")
    ratio = rope["rope_theta"] / 10_000
    return {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "padded_vocab_size": config["vocab_size"],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "kv_channels": config["head_dim"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "seq_length": config["max_position_embeddings"],
        "rope_ratio": int(ratio) if ratio == int(ratio) else ratio,
        "add_qkv_bias": config["attention_bias"],
        "attention_dropout": config["attention_dropout"],
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "apply_residual_connection_post_layernorm": False,
        "fp32_residual_connection": False,
        "hidden_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "torch_dtype": config["dtype"],
    }
