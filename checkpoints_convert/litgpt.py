"""LitGPT's layout → Hugging Face: ``lit_model.pth`` beside ``model_config.yaml`` (once ``lit_config.json``).

q, k and v are one tensor. ``attn.qkv`` holds the rows [q | k | v]; older files have ``attn.attn``, whose rows go group
by group: the queries that share a key, then that key, then its value. Norms of Gemmas are stored as in Hugging Face.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoints_convert.companions import companions
from ligermodels.checkpoints_convert.files import MAX_CONFIG
from ligermodels.checkpoints_convert.gguf_layout import CLASSES, layout
from ligermodels.checkpoints_convert.meta import number, whole
from ligermodels.checkpoints_convert.pth import open_pth
from ligermodels.checkpoints_convert.reading import same_values
from ligermodels.checkpoints_convert.streamed import Source, expect_shapes
from ligermodels.errors import CheckpointError

__all__ = ["open_litgpt"]

WEIGHTS = "lit_model.pth"
CONFIGS = ("model_config.yaml", "lit_config.json")

_TOP = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "lm_head": "lm_head"}
_LAYER = {
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.proj",
    "mlp.gate_proj": "mlp.fc_1",
    "mlp.up_proj": "mlp.fc_2",
    "mlp.down_proj": "mlp.proj",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "norm_2",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_QK = {"self_attn.q_norm": "attn.norm_q", "self_attn.k_norm": "attn.norm_k"}
# Settings of other networks than those here: (the value that fits, LitGPT's default).
_FIXED = {
    "parallel_residual": (False, True),
    "shared_attention_norm": (False, False),
    "norm_class_name": ("RMSNorm", "LayerNorm"),
    "rotary_percentage": (1.0, 0.25),
    "lm_head_bias": (False, False),
    "rope_condense_ratio": (1, 1),
}


def open_litgpt(folder: Path) -> Source:
    """A LitGPT folder as a source; only headers are read.

    Families: Llama, Mistral, Qwen 2 and 3, Gemma 1, 2 and 3. Raises CheckpointError naming the key or tensor that is
    missing, wrong, or of a network that is not here.
    """
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} lacks {WEIGHTS}")
    path = next((folder / name for name in CONFIGS if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{folder} holds {WEIGHTS}, but neither of {' and '.join(CONFIGS)}")
    said = _read_config(path)
    stored = open_pth(folder / WEIGHTS)
    config = _config(path, said, stored.tensors)
    head, embedding = (stored.tensors.get(name) for name in ("lm_head.weight", "transformer.wte.weight"))
    if head is None or embedding is None:  # LitGPT ties nothing: it stores both, of a tied model the same twice
        raise CheckpointError(f"{folder / WEIGHTS} lacks lm_head.weight or transformer.wte.weight")
    config["tie_word_embeddings"] = config["model_type"].startswith("gemma") and same_values(head, embedding)
    names = _names(config)
    qkv = "attn.qkv" if any(".attn.qkv." in name for name in stored.tensors) else "attn.attn"
    biased = ("weight", "bias") if config["model_type"] == "qwen2" else ("weight",)
    shapes, packed = {entry.names[0]: entry.shape for entry in layout(config).values()}, {}
    for layer in range(config["num_hidden_layers"]):
        rows = sum(shapes[f"model.layers.{layer}.self_attn.{x}_proj.weight"][0] for x in "qkv")
        for kind in biased:
            packed[f"transformer.h.{layer}.{qkv}.{kind}"] = (rows, config["hidden_size"])[
                : 2 if kind == "weight" else 1
            ]
    expected = {theirs: shapes[ours] for ours, theirs in names.items()} | packed
    found = dict(stored.tensors)
    if config["tie_word_embeddings"]:
        del found["lm_head.weight"]
    expect_shapes(folder / WEIGHTS, found, expected, f"a {config['model_type']} of this {path.name}")

    def make(ours: str) -> torch.Tensor:
        if ours in names:
            return stored.read(names[ours])
        _, _, layer, _, projection, kind = ours.split(".")
        tensor = stored.read(f"transformer.h.{layer}.{qkv}.{kind}")
        return _part(tensor, projection[0], config, by_group=qkv == "attn.attn")

    dtype = stored.tensors["transformer.wte.weight"].dtype
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    meta = {ours: torch.empty(shape, dtype=dtype, device="meta") for ours, shape in shapes.items()}
    odd = next((n for n, t in found.items() if t.dtype != dtype), None)
    if odd is not None:
        raise CheckpointError(f"{folder / WEIGHTS}: tensor {odd} is not {dtype} as the embedding is")
    return Source(folder, config, meta, make, companions(folder))


def _part(tensor: torch.Tensor, which: str, config: dict, *, by_group: bool) -> torch.Tensor:
    """The rows of q, k or v."""
    heads, groups, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    each = heads // groups
    if not by_group:
        start = {"q": 0, "k": heads, "v": heads + groups}[which] * head
        return tensor[start : start + (heads if which == "q" else groups) * head].clone()
    grouped = tensor.view(groups, each + 2, head, *tensor.shape[1:])  # (groups, queries + key + value, D, …)
    rows = {"q": slice(0, each), "k": slice(each, each + 1), "v": slice(each + 1, each + 2)}[which]
    return grouped[:, rows].reshape(-1, *tensor.shape[1:])


def _read_config(path: Path) -> dict[str, Any]:
    import yaml  # huggingface_hub depends on it

    try:
        if path.stat().st_size > MAX_CONFIG:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes: too large for a config")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".yaml" and ("&" in text or "*" in text):
            # An alias may unfold to any size; such a config has none. (Texts with these signs are not ours to guess.)
            tokens = yaml.scan(text, Loader=yaml.SafeLoader)
            if any(isinstance(token, yaml.AnchorToken | yaml.AliasToken) for token in tokens):
                raise CheckpointError(f"{path} uses aliases, which a config has no need of")
        said = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except CheckpointError:
        raise
    except Exception as error:  # of the two parsers
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(said, dict):
        raise CheckpointError(f"{path} must hold an object, found {type(said).__name__}")
    return said


def _config(path: Path, said: dict, tensors: dict) -> dict:
    for key, (fits, default) in _FIXED.items():
        if said.get(key, default) != fits:
            raise CheckpointError(f"{path}: {key} {said.get(key, default)!r}: only {fits!r} is supported")
    heads, hidden = whole(path, said, "n_head"), whole(path, said, "n_embd")
    layers = whole(path, said, "n_layer")
    if layers > len(tensors):
        raise CheckpointError(f"{path}: n_layer is {layers}, but there are {len(tensors)} tensors")
    name = str(said.get("name") or "").lower()
    family = _family(path, said, tensors, name)
    gemma = family.startswith("gemma")
    vocab = whole(path, said, "padded_vocab_size")
    config: dict[str, Any] = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": whole(path, said, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": whole(path, said, "n_query_groups", heads),
        "head_dim": whole(path, said, "head_size", max(1, hidden // heads)),
        "max_position_embeddings": whole(path, said, "block_size", 4096),
        "rms_norm_eps": number(path, said, "norm_eps", 1e-5),
        "rope_theta": float(number(path, said, "rope_base", 10_000)),
        "rope_scaling": _scaling(path, said),
        "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if heads % config["num_key_value_heads"] or config["head_dim"] % 2:
        raise CheckpointError(f"{path}: n_head must be a multiple of n_query_groups, and head_size even")
    for key, fits in _fitting(family, config["head_dim"]).items():
        if said.get(key, fits[0]) not in fits:
            raise CheckpointError(f"{path}: {key} {str(said[key])[:80]}: of a {family} only {fits[0]} is supported")
    if family == "mistral":
        config["sliding_window"] = said.get("sliding_window_size")
    if gemma:
        config["hidden_activation"] = "gelu_pytorch_tanh"
    if family in ("gemma2", "gemma3_text"):
        config["sliding_window"] = whole(path, said, "sliding_window_size")
        scalar = said.get("attention_scores_scalar")
        config["query_pre_attn_scalar"] = config["head_dim"] if scalar is None else scalar
        config["final_logit_softcapping"] = said.get("final_logit_softcapping")
        if family == "gemma2":
            config["attn_logit_softcapping"] = said.get("attention_logit_softcapping")
        else:
            config["rope_local_base_freq"] = float(number(path, said, "rope_local_base_freq", 10_000))
    indices = said.get("sliding_window_indices")
    if indices is not None and config.get("sliding_window") is not None:
        if not isinstance(indices, list) or len(indices) < layers:
            raise CheckpointError(f"{path}: sliding_window_indices must have {layers} entries")
        if said.get("rope_indices") not in (None, indices):
            raise CheckpointError(f"{path}: rope_indices must be sliding_window_indices: a window has the local rope")
        config["layer_types"] = ["sliding_attention" if i else "full_attention" for i in indices[:layers]]
    return config


def _fitting(family: str, head_dim: int) -> dict[str, tuple]:
    """Settings that the family's arithmetic fixes: the values that fit, first the usual one."""
    gemma, sandwich = family.startswith("gemma"), family in ("gemma2", "gemma3_text")
    fitting: dict[str, tuple] = {
        "scale_embeddings": (gemma,),
        "norm_1": (True,),
        "norm_2": (True,),
        "post_attention_norm": (sandwich,),
        "post_mlp_norm": (sandwich,),
        "norm_qk_type": ("default",),
        "rope_interleave": (False,),
        "latent_attention": (None,),
    }
    if not sandwich:
        fitting |= {"attention_scores_scalar": (None, head_dim), "final_logit_softcapping": (None,)}
        if family != "mistral":
            fitting["sliding_window_size"] = (None,)
    if family != "gemma2":
        fitting["attention_logit_softcapping"] = (None,)
    if family != "gemma3_text":
        fitting["rope_local_base_freq"] = (None,)
    return fitting | ({"gelu_approximate": ("tanh",)} if gemma else {})


def _family(path: Path, said: dict, tensors: dict, name: str) -> str:
    mlp, norm_qk = said.get("mlp_class_name"), bool(said.get("norm_qk"))
    biased = said.get("attn_bias") or said.get("bias", True)
    if mlp == "GemmaMLP":
        sandwich = any(".post_attention_norm." in tensor for tensor in tensors)
        return "gemma3_text" if norm_qk else "gemma2" if sandwich else "gemma"
    if mlp != "LLaMAMLP" or name.startswith(("phi", "olmo")):
        raise CheckpointError(f"{path}: {said.get('name')!r} with mlp_class_name {mlp!r} is not converted so far")
    if norm_qk:
        return "qwen3"
    if biased:
        if said.get("bias", True):
            raise CheckpointError(f"{path}: bias true: a model with biases everywhere is not supported")
        return "qwen2"
    return "mistral" if name.startswith("mistral") or said.get("sliding_window_size") is not None else "llama"


def _scaling(path: Path, said: dict) -> dict | None:
    adjust = said.get("rope_adjustments")
    if not adjust:
        return None
    if not isinstance(adjust, dict):
        raise CheckpointError(f"{path}: rope_adjustments must be an object, found {adjust!r}")
    factor = number(path, adjust, "factor")
    if adjust.keys() == {"factor"}:
        return {"rope_type": "linear", "factor": float(factor)}
    return {
        "rope_type": "llama3",
        "factor": float(factor),
        "low_freq_factor": float(number(path, adjust, "low_freq_factor")),
        "high_freq_factor": float(number(path, adjust, "high_freq_factor")),
        "original_max_position_embeddings": whole(path, adjust, "original_max_seq_len"),
    }


def _names(config: dict) -> dict[str, str]:
    """Ours → theirs for all but q, k and v."""
    parts = dict(_LAYER)
    if config["model_type"] in ("gemma2", "gemma3_text"):
        parts |= _SANDWICH
    if config["model_type"] in ("qwen3", "gemma3_text"):
        parts |= _QK
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _TOP.items()}
    if config["tie_word_embeddings"]:
        del names["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        names |= {
            f"model.layers.{layer}.{ours}.weight": f"transformer.h.{layer}.{theirs}.weight"
            for ours, theirs in parts.items()
        }
    return names
