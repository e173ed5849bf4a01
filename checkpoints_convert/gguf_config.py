"""GGUF's metadata ↔ Hugging Face's config.json, family by family.

What a GGUF says of itself is what llama.cpp's code does not know already. So some of a config.json has no key there:
Gemma 2's and 3's scale of the scores follows from the number of layers, Qwen's windows do not exist. What cannot be
said is refused, not dropped. One key is our own, ``ligermodels.model_type``: under the architecture ``llama`` it tells
a Mistral from a Llama.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoints_convert.gguf_file import GGUFTensor, load_tensor
from ligermodels.checkpoints_convert.gguf_layout import ARCHITECTURES, CLASSES
from ligermodels.errors import CheckpointError, ConfigError

__all__ = ["config_of", "metadata_of", "rope_tensors"]

MODEL_TYPE = "ligermodels.model_type"
_PARTIAL = ("phi3", "glm", "glm4")  # rotate a part of each head
# Keys of arithmetic that the families here have not, and the values that mean that there is none of it.
_REFUSED = {
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "leading_dense_block_count": (0,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
_LARGE = {"gemma2": 46, "gemma3_text": 62}  # the 27Bs, whose scores are scaled by (H / A)^-½ instead of D^-½


# ------------------------------------------------------------------------------------------------ GGUF → config.json


def need(path: Path, metadata: dict, key: str, kind: type = object) -> Any:
    """The value of ``key``, checked to be of ``kind``."""
    if key not in metadata:
        raise CheckpointError(f"{path} lacks the key {key}")
    value = metadata[key]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise CheckpointError(f"{path}: {key} is {str(value)[:80]!r}, expected {kind.__name__}")
    return value


def need_positive(path: Path, metadata: dict, key: str, kind: type = int) -> Any:
    """The value of ``key``, checked to be a positive finite number of ``kind``."""
    value = need(path, metadata, key, kind)
    if not 0 < value < math.inf:
        raise CheckpointError(f"{path}: {key} is {value}, expected a positive number")
    return value


def _decimal(value: float) -> float:
    """GGUF stores fp32: 9.999999747378752e-06 was 1e-05. The shortest decimal with the same fp32 value."""
    import numpy as np

    return float(str(np.float32(value)))


def config_of(path: Path, metadata: dict, entries: dict[str, GGUFTensor], dtype: torch.dtype) -> dict:
    """The config.json of a GGUF's model. Raises CheckpointError naming the key that is missing, wrong or unknown."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES.values():
        known = ", ".join(dict.fromkeys(ARCHITECTURES.values()))
        raise CheckpointError(f"{path} is of architecture {architecture!r}: those that can be converted are {known}")

    def size(key: str, default: int | None = None) -> int:
        key = f"{architecture}.{key}"
        value = metadata.get(key, default)
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # one value for each layer
            value = value[0]
        value = need_positive(path, {} if value is None else {key: value}, key)
        if value >= 2**31:
            raise CheckpointError(f"{path}: {key} is {value}, too large for a size")
        return value

    experts = metadata.get(f"{architecture}.expert_count", 0)
    family = _family(path, metadata, architecture, bool(experts))
    none = dict(_REFUSED)
    if "rope_factors_long.weight" not in entries:
        none["rope.scaling.attn_factor"] = (1,)
    none |= {"gemma2": {}, "gemma3_text": {"attn_logit_softcapping": (0,)}}.get(
        family, {"attn_logit_softcapping": (0,), "final_logit_softcapping": (0,)}
    )
    if family in ("gemma2", "gemma3_text"):
        none["attention.sliding_window_pattern"] = (2 if family == "gemma2" else 6,)
    for key, harmless in none.items():
        value = metadata.get(f"{architecture}.{key}", harmless[0])
        if value not in harmless:
            raise CheckpointError(f"{path}: {architecture}.{key} is {str(value)[:80]}, which a {family} here has not")
    if "token_embd.weight" not in entries or len(entries["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{path} lacks the tensor token_embd.weight (vocabulary, hidden size)")
    hidden, heads = size("embedding_length"), size("attention.head_count")
    usual = size("rope.dimension_count", max(1, hidden // heads)) if family not in _PARTIAL else max(1, hidden // heads)
    head_dim = size("attention.key_length", usual)
    rotary = size("rope.dimension_count", head_dim // 2 if family.startswith("glm") else head_dim)
    value_dim = size("attention.value_length", head_dim)
    if head_dim != value_dim or head_dim % 2 or rotary % 2 or rotary > head_dim:
        raise CheckpointError(
            f"{path}: heads need one even {architecture}.attention.key_length ({head_dim}), "
            f".value_length ({value_dim}) and {architecture}.rope.dimension_count ({rotary})"
        )
    if rotary != head_dim and family not in _PARTIAL:
        raise CheckpointError(
            f"{path}: {architecture}.rope.dimension_count is {rotary}, but a {family} turns whole heads of {head_dim}"
        )
    layers = size("block_count")
    if layers > len(entries):
        raise CheckpointError(
            f"{path}: {architecture}.block_count is {layers}, but the file has {len(entries)} tensors"
        )
    base = f"{architecture}.rope.freq_base"
    theta = need_positive(path, {base: 1e6 if family == "gemma3_text" else 1e4} | metadata, base, float)
    eps = need_positive(path, metadata, f"{architecture}.attention.layer_norm_rms_epsilon", float)
    config = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "vocab_size": entries["token_embd.weight"].shape[0],
        "rms_norm_eps": _decimal(eps),
        "rope_theta": _decimal(theta),
        "rope_scaling": _rope_scaling(path, metadata, entries, rotary, theta),
        "hidden_act": "silu",
        "attention_bias": any(f"blk.0.{part}.bias" in entries for part in ("attn_q", "attn_qkv")),
        "tie_word_embeddings": "output.weight" not in entries,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise CheckpointError(
            f"{path}: {architecture}.attention.head_count {heads} is no multiple of head_count_kv "
            f"{config['num_key_value_heads']}"
        )
    window = metadata.get(f"{architecture}.attention.sliding_window")
    if window and family in ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text"):
        window = size("attention.sliding_window")
    if family in ("mistral", "mixtral", "qwen2", "phi3"):
        del config["attention_bias"]  # no key of theirs
    if family == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in entries
    elif family in ("mistral", "mixtral"):
        config["sliding_window"] = window or None
    elif family in ("qwen2", "qwen3", "qwen3_moe"):
        config["use_sliding_window"] = False
    elif family.startswith("gemma"):
        config |= _gemma(path, metadata, config, window)
    elif family == "phi3":
        config |= {"sliding_window": window or None, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config["original_max_position_embeddings"] = size(
            "rope.scaling.original_context_length", size("context_length")
        )
    if family in _PARTIAL:
        config["partial_rotary_factor"] = rotary / head_dim
    if family == "mixtral":
        config |= {"num_local_experts": size("expert_count"), "num_experts_per_tok": size("expert_used_count")}
    elif family == "qwen3_moe":
        config |= {
            "num_experts": size("expert_count"),
            "num_experts_per_tok": size("expert_used_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp's code always does
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    router = entries.get("blk.0.ffn_gate_inp.weight")
    if experts and (router is None or router.shape[0] != experts):
        raise CheckpointError(
            f"{path}: {architecture}.expert_count is {experts}, but blk.0.ffn_gate_inp.weight differs"
        )
    ids = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    for name, key in ids.items():
        number = metadata.get(f"tokenizer.ggml.{key}")
        if number is not None and (type(number) is not int or not 0 <= number < config["vocab_size"]):
            raise CheckpointError(
                f"{path}: tokenizer.ggml.{key} is {number}, not in a vocabulary of {config['vocab_size']}"
            )
        config[name] = number
    return config


def _family(path: Path, metadata: dict, architecture: str, experts: bool) -> str:
    if architecture == "llama":
        said = metadata.get(MODEL_TYPE)
        family = "mixtral" if experts else said if said in ("llama", "mistral") else "llama"
    else:
        family = next(ours for ours, theirs in ARCHITECTURES.items() if theirs == architecture)
    if experts and family not in ("mixtral", "qwen3_moe"):
        raise CheckpointError(f"{path} is a mixture of experts ({architecture}.expert_count): {family} has none")
    return family


def _gemma(path: Path, metadata: dict, config: dict, window: int | None) -> dict:
    family, architecture = config["model_type"], metadata["general.architecture"]
    values: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if family == "gemma":
        return values
    if not window:
        raise CheckpointError(f"{path} lacks the key {architecture}.attention.sliding_window")

    def cap(name: str) -> float | None:
        key = f"{architecture}.{name}"
        return _decimal(need_positive(path, metadata, key, float)) if metadata.get(key) else None

    values |= {
        "query_pre_attn_scalar": _scalar(config),
        "sliding_window": window,
        "final_logit_softcapping": cap("final_logit_softcapping"),
    }
    if family == "gemma2":
        return values | {"attn_logit_softcapping": cap("attn_logit_softcapping")}
    local = f"{architecture}.rope.freq_base_swa"
    theta = _decimal(need_positive(path, {local: 1e4} | metadata, local, float))
    return values | {"rope_local_base_freq": theta, "sliding_window_pattern": 6}


def _scalar(config: dict) -> int:
    """Gemma 2's and 3's query_pre_attn_scalar, as llama.cpp derives it."""
    large = config["num_hidden_layers"] == _LARGE[config["model_type"]]
    return config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]


def _rope_scaling(path: Path, metadata: dict, entries: dict, rotary: int, theta: float) -> dict | None:
    if "rope_freqs.weight" in entries:
        return _llama3_scaling(path, entries["rope_freqs.weight"], rotary, theta)
    rope = f"{metadata['general.architecture']}.rope."
    prefix = rope + "scaling."
    if "rope_factors_long.weight" in entries or "rope_factors_short.weight" in entries:
        scaling: dict[str, Any] = {"type": "longrope"}
        for length in ("long", "short"):
            name = f"rope_factors_{length}.weight"
            if name not in entries or entries[name].shape != (rotary // 2,):
                raise CheckpointError(f"{path} needs the tensor {name} with {rotary // 2} numbers")
            factors = load_tensor(path, entries[name], torch.float32)
            if not ((factors > 0) & torch.isfinite(factors)).all():
                raise CheckpointError(f"{path}: tensor {name} must hold positive numbers")
            scaling[f"{length}_factor"] = [_decimal(factor) for factor in factors.tolist()]
        if prefix + "attn_factor" in metadata:
            attention = _decimal(need_positive(path, metadata, prefix + "attn_factor", float))
            longest = need_positive(path, metadata, f"{metadata['general.architecture']}.context_length")
            original = need_positive(path, metadata, prefix + "original_context_length")
            if not math.isclose(attention, _longrope_attention(longest, original), rel_tol=1e-5):
                scaling["attention_factor"] = attention
        return scaling
    kind = metadata.get(prefix + "type", "none")
    if kind == "none" and rope + "scale_linear" in metadata:  # the spelling of old files
        return {"rope_type": "linear", "factor": _decimal(need_positive(path, metadata, rope + "scale_linear", float))}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{path}: unknown {prefix}type {kind!r}: 'none', 'linear' and 'yarn' can be converted")
    scaling = {"rope_type": kind, "factor": _decimal(need_positive(path, metadata, prefix + "factor", float))}
    if kind == "yarn":
        original = need_positive(path, metadata, prefix + "original_context_length")
        scaling["original_max_position_embeddings"] = original
        for beta, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            key = f"{prefix}yarn_{beta}"
            value = _decimal(need_positive(path, {key: usual} | metadata, key, float))
            if value != usual:
                scaling[beta] = value
    return scaling


def _longrope_attention(longest: int, original: int) -> float:
    """√(1 + ln c / ln o) with c = longest / o: what cos and sin are multiplied by unless a config says otherwise."""
    if longest <= original or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(longest / original) / math.log(original))


def _llama3_scaling(path: Path, entry: GGUFTensor, rotary: int, theta: float) -> dict:
    """Llama 3.1's scaling is stored as its result, one divisor per frequency. Find the constants that give it."""
    if entry.shape != (rotary // 2,):
        raise CheckpointError(f"{path}: tensor {entry.name} is {list(entry.shape)}, expected {[rotary // 2]}")
    found = load_tensor(path, entry, torch.float32).double()
    scaling = {
        "rope_type": "llama3",
        "factor": 1.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # The slowest frequency is divided by the factor, or by less where even its wave is short.
    smooth = 1 / _llama3_divisors(scaling | {"factor": math.inf}, rotary, theta)[-1].item()
    if smooth < 1 and found[-1] > 0:
        exact = (1 - smooth) / max(1 / found[-1].item() - smooth, 1e-9)
        for factor in (_decimal(found[-1].item()), float(f"{exact:.4g}"), exact):
            scaling["factor"] = factor
            if torch.equal(_llama3_divisors(scaling, rotary, theta).float().double(), found):
                break
    if not torch.allclose(found, _llama3_divisors(scaling, rotary, theta), rtol=1e-4):
        raise CheckpointError(
            f"{path}: rope_freqs.weight is not what Llama 3's scaling gives (low 1, high 4, original length 8192)"
        )
    return scaling


def _llama3_divisors(rope: dict, rotary: int, theta: float) -> torch.Tensor:
    """By how much Llama 3.1's scaling divides each frequency, (rotary/2,) in fp64."""
    wavelength = 2 * math.pi * theta ** (torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((rope["original_max_position_embeddings"] / wavelength - low) / (high - low)).clamp(0, 1)
    return 1 / (smooth + (1 - smooth) / rope["factor"])


# ------------------------------------------------------------------------------------------------ config.json → GGUF


def rotary_dim(config: dict) -> int:
    """How many dimensions of a head are rotated."""
    return int(config["head_dim"] * (_rope(config).get("partial_rotary_factor") or 1.0))


def _rope(config: dict) -> dict:
    """The rope settings of the layers that see everything."""
    rope = config["rope_parameters"]
    return rope.get("full_attention", rope)


def rope_tensors(config: dict) -> dict[str, torch.Tensor]:
    """The tensors (rotary/2,) in fp32 that say a scaling which has no keys: Llama 3.1's, and LongRoPE's two lists."""
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        return {"rope_freqs.weight": _llama3_divisors(rope, rotary_dim(config), rope["rope_theta"]).float()}
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
            for length in ("long", "short")
        }
    return {}


def metadata_of(config: dict, where: Path) -> dict[str, int | float | str]:
    """GGUF keys → values that llama.cpp's loader asks for, from a complete config (as ``Config.to_hf`` gives it).

    Raises ConfigError naming the key of config.json that a GGUF, or llama.cpp's code for the family, cannot say.
    """
    family = config["model_type"]
    if family not in ARCHITECTURES:
        raise ConfigError(f"{where}: there is no GGUF of model_type {family!r}; there is of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[family]

    def refuse(key: str, why: str) -> None:
        raise ConfigError(f"{where}: {key} {config.get(key)!r} cannot be said in a GGUF: {why}")

    rope, rotary = _rope(config), rotary_dim(config)
    keys: dict[str, int | float | str] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": rotary,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.get("attention_bias") and family not in ("llama", "qwen2", "glm", "glm4", "mistral", "mixtral"):
        refuse("attention_bias", f"llama.cpp's {architecture} has no biases")
    if family in ("gemma", "gemma2") and not config["tie_word_embeddings"]:
        refuse("tie_word_embeddings", f"llama.cpp's {architecture} has no head of its own")
    if family in ("qwen2", "qwen3", "qwen3_moe") and config.get("use_sliding_window"):
        refuse("use_sliding_window", f"llama.cpp's {architecture} has no windows")
    kinds = config.get("layer_types")
    if family in ("mistral", "mixtral") and kinds and len(set(kinds)) > 1:
        refuse("layer_types", "every layer has the same window there")
    if family in ("gemma2", "gemma3_text"):
        pattern = 2 if family == "gemma2" else 6
        usual = [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
            for i in range(config["num_hidden_layers"])
        ]
        if kinds != usual:
            refuse("layer_types", f"there, each {pattern}th layer sees everything and no other")
        if config["query_pre_attn_scalar"] != _scalar(config):
            refuse("query_pre_attn_scalar", f"llama.cpp takes {_scalar(config)} for a model of these sizes")
        keys["attention.sliding_window"] = config["sliding_window"]
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(cap):
                keys[cap] = float(config[cap])
            elif family == "gemma2":
                refuse(cap, "llama.cpp's gemma2 always caps, at 50 and 30 unless told otherwise")
    if family == "gemma3_text":
        local = config["rope_parameters"]["sliding_attention"]
        if local["rope_type"] != "default":
            refuse("rope_parameters", "layers with a window are not scaled there")
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    if family in ("mistral", "mixtral") and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if family == "phi3":
        keys["attention.sliding_window"] = config.get("sliding_window") or 0
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if family == "mixtral":
        keys |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    if family == "qwen3_moe":
        if not config.get("norm_topk_prob"):
            refuse("norm_topk_prob", "llama.cpp's qwen3moe always normalises")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            refuse("mlp_only_layers", "every layer has experts there")
        keys |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    keys |= _scaling_keys(config, rope, architecture, where)
    return {f"{architecture}.{key}": value for key, value in keys.items()} | {MODEL_TYPE: family}


def _scaling_keys(config: dict, rope: dict, architecture: str, where: Path) -> dict[str, int | float | str]:
    kind = rope["rope_type"]
    if kind == "default":
        return {}
    if kind == "llama3" and architecture == "llama":
        usual = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
        odd = [key for key, value in usual.items() if rope[key] != value]
        if odd:
            raise ConfigError(f"{where}: {odd[0]} {rope[odd[0]]!r}: only {usual[odd[0]]} can be read back from a GGUF")
        return {}
    if kind == "longrope" and architecture == "phi3":
        longest, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]
        factor = rope.get("factor") or longest / original
        attention = rope.get("attention_factor") or _longrope_attention(factor * original, original)
        return {"rope.scaling.attn_factor": float(attention)}
    if kind in ("linear", "yarn"):
        keys: dict[str, int | float | str] = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            usual = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
            for key in (*usual, "attention_factor", "mscale", "mscale_all_dim"):
                if rope.get(key, usual.get(key)) != usual.get(key):
                    raise ConfigError(f"{where}: {key} {rope[key]!r} of a yarn scaling is not converted")
            keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        return keys
    raise ConfigError(f"{where}: rope_type {kind!r} has no form in a GGUF of architecture {architecture!r}")
