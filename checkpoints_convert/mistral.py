"""Mistral's own layout ↔ Hugging Face: ``params.json`` beside ``consolidated.safetensors``, one file or with an index.

The names are Meta's, and so is the order of the rows of q and k (see meta.py); the width of the MLP and of a head stand
in params.json. Mixtral's experts are ``layers.0.feed_forward.experts.3.w1.weight``, their router
``layers.0.feed_forward.gate.weight``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoints_convert.companions import companions
from ligermodels.checkpoints_convert.files import read_json
from ligermodels.checkpoints_convert.gguf_layout import deinterleave, interleave
from ligermodels.checkpoints_convert.hf import Checkpoint, TensorInfo
from ligermodels.checkpoints_convert.meta import (
    HF_CONFIG,
    PARAMS,
    SIZES,
    heads_of,
    meta_name,
    number,
    read_beside,
    shapes_of,
    whole,
)
from ligermodels.checkpoints_convert.save import to_json
from ligermodels.checkpoints_convert.streamed import (
    Source,
    expect_shapes,
    open_files,
    write_shards,
)
from ligermodels.errors import CheckpointError, ConfigError

__all__ = ["open_mistral", "write_mistral"]

STEM = "consolidated"
# What newer files ask for and no model here can.
_REFUSED = ("quantization", "vision_encoder", "multimodal", "yarn", "llama_4_scaling", "lora", "q_lora_rank")


def open_mistral(folder: Path) -> Source:
    """A folder of Mistral's layout as a source; only headers are read. Raises CheckpointError naming key or tensor."""
    tensors = open_files(folder, STEM)
    config = _config(folder, tensors)
    expected = _shapes(config)
    expect_shapes(folder, tensors, {_theirs(ours): shape for ours, shape in expected.items()}, f"this {PARAMS}")
    checkpoint = Checkpoint(folder, tensors)

    def make(ours: str) -> torch.Tensor:
        tensor, heads = checkpoint.read(_theirs(ours)), heads_of(config, ours)
        return deinterleave(tensor, heads) if heads else tensor

    meta = {
        ours: torch.empty(shape, dtype=tensors[_theirs(ours)].dtype, device="meta") for ours, shape in expected.items()
    }
    config["torch_dtype"] = str(meta["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    return Source(folder, config, meta, make, companions(folder))


def _theirs(ours: str) -> str:
    for old, new in ((".block_sparse_moe.gate.", ".feed_forward.gate."), (".block_sparse_moe.", ".feed_forward.")):
        if old in ours:
            return ours.removeprefix("model.").replace(old, new)
    return meta_name(ours)


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    shapes = shapes_of(config)
    if config["model_type"] != "mixtral":
        return shapes
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    out = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for layer in range(config["num_hidden_layers"]):
        moe = f"model.layers.{layer}.block_sparse_moe"
        out[f"{moe}.gate.weight"] = (experts, hidden)
        for e in range(experts):
            out |= {f"{moe}.experts.{e}.{w}.weight": (inner, hidden) for w in ("w1", "w3")}
            out[f"{moe}.experts.{e}.w2.weight"] = (hidden, inner)
    return out


def _config(folder: Path, tensors: dict[str, TensorInfo]) -> dict:
    path = folder / PARAMS
    params = read_json(path)
    for key in _REFUSED:
        if params.get(key):
            raise CheckpointError(f"{path}: {key} {str(params[key])[:80]!r} is not supported")
    embedding = tensors.get("tok_embeddings.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{folder} lacks the tensor tok_embeddings.weight")
    heads, layers = whole(path, params, "n_heads"), whole(path, params, "n_layers")
    if layers > len(tensors):
        raise CheckpointError(f"{path}: n_layers is {layers}, but there are {len(tensors)} tensors")
    window = params.get("sliding_window")
    window = None if window is None else whole(path, params, "sliding_window")
    # The first models stood without it: then 10⁴ with a window, 10⁶ without, as in Mistral's own code.
    theta = number(path, params, "rope_theta", 10_000.0 if window else 1_000_000.0)
    longest = whole(path, params, "max_position_embeddings", whole(path, params, "max_seq_len", 32768))
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": embedding.shape[0],
        "hidden_size": whole(path, params, "dim"),
        "intermediate_size": whole(path, params, "hidden_dim"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": whole(path, params, "n_kv_heads", heads),
        "head_dim": whole(path, params, "head_dim", max(1, params["dim"] // heads)),
        "max_position_embeddings": longest,
        "rms_norm_eps": number(path, params, "norm_eps"),
        "rope_theta": theta,
        "sliding_window": window,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }
    if params.get("vocab_size") not in (None, embedding.shape[0]):
        raise CheckpointError(
            f"{path}: vocab_size is {params['vocab_size']}, but tok_embeddings.weight has {embedding.shape[0]} rows"
        )
    if config["head_dim"] % 2 or heads % config["num_key_value_heads"]:
        raise CheckpointError(f"{path}: head_dim must be even, and n_heads a multiple of n_kv_heads")
    moe = params.get("moe")
    if moe:
        if not isinstance(moe, dict):
            raise CheckpointError(f"{path}: moe must be an object, found {moe!r}")
        experts = whole(path, moe, "num_experts")
        if experts > len(tensors):
            raise CheckpointError(f"{path}: num_experts is {experts}, but there are {len(tensors)} tensors")
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts}
        config["num_experts_per_tok"] = whole(path, moe, "num_experts_per_tok")
        if config["num_experts_per_tok"] > experts:
            raise CheckpointError(
                f"{path}: num_experts_per_tok is {config['num_experts_per_tok']}, of {experts} experts"
            )
    fixed = [*SIZES, "model_type", "rms_norm_eps", "sliding_window"]
    fixed += ["rope_theta"] if "rope_theta" in params else []
    fixed += ["num_local_experts", "num_experts_per_tok"] if moe else []
    beside = read_beside(folder, config, fixed)
    for key, value in {"rope_scaling": None, "layer_types": _layer_types(config)}.items():
        if beside.get(key) not in (None, value):
            raise CheckpointError(f"{folder / HF_CONFIG}: {key} is {str(beside[key])[:200]}, {PARAMS} says {value}")
    return config | beside


def _layer_types(config: dict) -> list[str]:
    """All layers have the window, or none."""
    return ["sliding_attention" if config["sliding_window"] else "full_attention"] * config["num_hidden_layers"]


def write_mistral(
    source: Source, target: Path, *, max_shard_size: int | str | None = None, force: bool = False, plan: object = None
) -> Path:
    """Write ``source`` (a Mistral or Mixtral, its config complete) in Mistral's layout, and return the folder.

    One file, or, with ``max_shard_size``, numbered ones with an index. Raises ConfigError naming the key of a config
    that has no form there.
    """
    config = source.config
    if config["model_type"] not in ("mistral", "mixtral"):
        raise ConfigError(f"{source.path}: model_type {config['model_type']!r} is neither 'mistral' nor 'mixtral'")
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default":
        raise ConfigError(f"{source.path}: rope_type {rope['rope_type']!r} has no form in Mistral's layout")
    if config.get("layer_types") not in (None, _layer_types(config)):
        raise ConfigError(f"{source.path}: layer_types has no form in Mistral's layout: all layers have sliding_window")
    shapes = _shapes(config)
    expect_shapes(source.path, source.tensors, shapes, f"a {config['model_type']} in Mistral's layout")
    params: dict[str, Any] = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": rope["rope_theta"],
    }
    if config.get("sliding_window"):
        params["sliding_window"] = config["sliding_window"]
    if config["model_type"] == "mixtral":
        params["moe"] = {
            "num_experts": config["num_local_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
        }
    back = {_theirs(ours): ours for ours in shapes}

    def make(theirs: str) -> torch.Tensor:
        tensor, heads = source.make(back[theirs]), heads_of(config, back[theirs])
        return interleave(tensor, heads) if heads else tensor

    files = {**source.files, HF_CONFIG: config}
    renamed = {theirs: source.tensors[ours] for theirs, ours in back.items()}
    out = Source(source.path, config, renamed, make, files)
    text = to_json(params, PARAMS)
    size = max_shard_size or 2**62
    return write_shards(out, target, STEM, (PARAMS, text), max_shard_size=size, force=force, plan=plan)
