"""Tiny folders of many families, and what a conversion there and back must keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family_checks import scaled_hf
from tiny import TINY

import ligermodels
from ligermodels.checkpoints_convert.hf import open_checkpoint, read_config

# 8 heads of q, 2 of k: a mix-up of 4 and 2 shows. Meta's heads are H / A wide.
LLAMA = {**TINY, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
LLAMA_32 = {
    **LLAMA,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
SHARED = {k: v for k, v in TINY.items() if k not in ("attention_bias", "mlp_bias")} | {"num_hidden_layers": 2}
MISTRAL = SHARED | {"model_type": "mistral", "sliding_window": 8}
MIXTRAL = SHARED | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
GLM = SHARED | {"model_type": "glm", "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0}


def folder_of(config: dict, folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """transformers' folder of random weights, with the config as given."""
    scaled_hf(config).to(dtype).save_pretrained(folder)
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": name}))
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(folder).stream())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def resolved(folder: Path) -> dict[str, Any]:
    return ligermodels.MODELS[read_config(folder)["model_type"]].config_class.from_hf(folder).to_hf()


def check_same_model(a: Path, b: Path) -> None:
    assert same(tensors_of(a), tensors_of(b))
    first, second = resolved(a), resolved(b)
    assert {key: second.get(key) for key in first} == first
