"""GGUF (llama.cpp's single file) → a folder in Hugging Face layout: weights, config, tokenizer, chat template.

More differs than the names. For a Llama, llama.cpp rotates neighbouring pairs (2j, 2j+1) where Hugging Face rotates
(j, j + D/2), so a GGUF stores the rows of q and k interleaved, head by head; they are put back here. For a Gemma 3 it
stores 1 + weight of each norm. And a GGUF holds no tokenizer.json, only its raw material: tokens, merges or scores,
token kinds, and the name of a splitting rule.

The file is read and its weights are dequantised by the package ``gguf`` (extra ``ligermodels[gguf]``).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligermodels.checkpoints_convert.gguf_file import GGUFTensor, load_tensor, read_gguf
from ligermodels.checkpoints_convert.hf import CONFIG, INDEX, SINGLE, _listed, save_streamed
from ligermodels.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["convert_gguf"]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_NAMES = _LAYER_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# How a byte-level vocabulary expects its text to be cut, by tokenizer.ggml.pre (the patterns are part of the models).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_SPLITS: dict[str, str | None] = {name: _WORDS % "{1,3}" for name in _LLAMA3}
_SPLITS |= {"qwen2": _WORDS % "", "gpt-2": None, "gpt2": None, "smollm": None}  # None: GPT-2's rule, built in

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type


def convert_gguf(
    gguf_file: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    dtype: torch.dtype = torch.bfloat16,
    force: bool = False,
) -> Path:
    """Convert a GGUF of a Llama or a Gemma 3 (text) into ``folder`` (Hugging Face layout) and return its path.

    Writes model.safetensors (at ``dtype``), config.json, generation_config.json, tokenizer.json and
    tokenizer_config.json with the chat template. Holds one tensor at a time.

    Raises CheckpointError if the package ``gguf`` is missing, the file is no GGUF or is damaged, its architecture,
    tokenizer or a tensor is not known here, or if ``folder`` already holds a model and ``force`` is not given.
    """
    path, folder = Path(gguf_file), Path(folder)
    if not force and any((folder / name).exists() for name in (CONFIG, INDEX, SINGLE)):
        raise CheckpointError(f"{folder} already holds a model: choose another folder, or pass force (--force)")
    metadata, entries = read_gguf(path)
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "gemma3"):
        raise CheckpointError(
            f"{path} is of architecture {architecture!r}: only 'llama' and 'gemma3' can be converted so far"
        )

    config = _config(path, metadata, entries, dtype)
    sources = _sources(path, config, entries)
    tokenizer = _tokenizer(path, metadata)
    extra = {
        "generation_config.json": _generation_config(config, metadata),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _tokenizer_config(path, config, metadata),
    }
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    gemma = architecture == "gemma3"
    shapes = {name: torch.empty(entry.shape, dtype=dtype, device="meta") for name, entry in sources.items()}

    from tqdm import tqdm

    with tqdm(total=len(sources), desc=f"converting {path.name}", unit="tensor", disable=None) as bar:

        def make(name: str) -> torch.Tensor:
            projection = name.split(".")[-2]
            bar.update()
            if gemma:
                if projection.endswith("norm"):
                    return (load_tensor(path, sources[name], torch.float32) - 1).to(dtype)
                return load_tensor(path, sources[name], dtype)
            tensor = load_tensor(path, sources[name], dtype)
            return _deinterleave(tensor, heads[projection]) if projection in heads else tensor

        save_streamed(folder, shapes, make, config, extra_json=extra)
    return folder


# ------------------------------------------------------------------------------------------------------------ weights


def _deinterleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (x0, y0, x1, y1, …) to (x0, x1, …, y0, y1, …)."""
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])  # (heads, D/2, 2, …)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _sources(path: Path, config: dict, entries: dict[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """Hugging Face name → GGUF tensor, complete and of the right shapes."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer_shapes = {
        "attn_norm": (hidden,),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    layer_names = _LAYER_NAMES
    if config["model_type"] == "gemma3_text":
        layer_names, head = _GEMMA3_NAMES, (config["head_dim"],)
        layer_shapes |= {"attn_q_norm": head, "attn_k_norm": head}
        layer_shapes |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
    expected = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    names = dict(_TOP_NAMES)
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        for part, shape in layer_shapes.items():
            biased = config.get("attention_bias" if part.startswith("attn") else "mlp_bias") and len(shape) == 2
            for kind, kind_shape in (("weight", shape), *([("bias", shape[:1])] if biased else [])):
                name = f"blk.{layer}.{part}.{kind}"
                expected[name] = kind_shape
                names[name] = f"model.layers.{layer}.{layer_names[part]}.{kind}"

    unknown = [name for name in entries if name not in expected and name != "rope_freqs.weight"]
    if unknown:
        raise CheckpointError(
            f"{path} holds tensors that a model of type {config['model_type']} has not: {_listed(unknown)}"
        )
    missing = [name for name in expected if name not in entries]
    if missing:
        raise CheckpointError(f"{path} lacks the tensors {_listed(missing)}")
    for name, shape in expected.items():
        if entries[name].shape != shape:
            raise CheckpointError(f"{path}: tensor {name} is {list(entries[name].shape)}, expected {list(shape)}")
    return {names[name]: entries[name] for name in expected}


# ------------------------------------------------------------------------------------------------------------- config


def _decimal(value: float) -> float:
    """GGUF stores fp32: 9.999999747378752e-06 was 1e-05. The shortest decimal with the same fp32 value."""
    import numpy as np

    return float(str(np.float32(value)))


def _need(path: Path, metadata: dict, key: str, kind: type = object) -> Any:
    if key not in metadata:
        raise CheckpointError(f"{path} lacks the key {key}")
    value = metadata[key]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise CheckpointError(f"{path}: {key} is {str(value)[:80]!r}, expected {kind.__name__}")
    return value


def _positive(path: Path, metadata: dict, key: str, kind: type = int) -> Any:
    value = _need(path, metadata, key, kind)
    if not 0 < value < math.inf:
        raise CheckpointError(f"{path}: {key} is {value}, expected a positive number")
    return value


def _list(path: Path, metadata: dict, key: str, kind: type, length: int | None = None) -> list:
    values = _need(path, metadata, key, list)
    if not all(isinstance(value, kind) for value in values) or length not in (None, len(values)):
        many = "" if length is None else f"{length} "
        raise CheckpointError(f"{path}: {key} must list {many}values of type {kind.__name__}, found {len(values)}")
    return values


def _config(path: Path, metadata: dict, entries: dict[str, GGUFTensor], dtype: torch.dtype) -> dict:
    architecture = metadata["general.architecture"]

    def size(key: str, default: int | None = None) -> int:
        key = f"{architecture}.{key}"
        value = metadata.get(key, default)
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # one value for each layer
            value = value[0]
        return _positive(path, {} if value is None else {key: value}, key)

    if metadata.get(f"{architecture}.expert_count", 0):
        raise CheckpointError(f"{path} is a mixture of experts ({architecture}.expert_count): not converted so far")
    if "token_embd.weight" not in entries or len(entries["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{path} lacks the tensor token_embd.weight (vocabulary, hidden size)")
    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", size("rope.dimension_count", max(1, hidden // heads)))
    rotary = size("rope.dimension_count", head_dim)
    value_dim = size("attention.value_length", head_dim)
    if not head_dim == value_dim == rotary or head_dim % 2:
        raise CheckpointError(
            f"{path}: heads need one even {architecture}.attention.key_length ({head_dim}), "
            f".value_length ({value_dim}) and {architecture}.rope.dimension_count ({rotary})"
        )
    layers = size("block_count")
    if layers > len(entries):
        raise CheckpointError(
            f"{path}: {architecture}.block_count is {layers}, but the file has {len(entries)} tensors"
        )
    base = f"{architecture}.rope.freq_base"
    theta = _positive(path, {base: 1e6 if architecture == "gemma3" else 1e4} | metadata, base, float)
    eps = _positive(path, metadata, f"{architecture}.attention.layer_norm_rms_epsilon", float)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "rope_scaling": _rope_scaling(path, metadata, entries, head_dim, theta),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in entries,
        "mlp_bias": "blk.0.ffn_gate.bias" in entries,
        "tie_word_embeddings": "output.weight" not in entries,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
    if architecture == "gemma3":
        config = _gemma3_config(path, metadata, config, size("attention.sliding_window"))
    ids = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return config | {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in ids.items()}


def _gemma3_config(path: Path, metadata: dict, config: dict, window: int) -> dict:
    """What a Gemma 3 has beyond a Llama. The scale of its scores is not in the file; only the 27B differs from D^-½."""
    config = {k: v for k, v in config.items() if k not in ("hidden_act", "mlp_bias")}
    large = config["num_hidden_layers"] == 62
    cap = "gemma3.final_logit_softcapping"
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if large
        else config["head_dim"],
        "rope_local_base_freq": 10000.0,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": _positive(path, metadata, cap, float) if cap in metadata else None,
    }


def _rope_scaling(
    path: Path, metadata: dict, entries: dict[str, GGUFTensor], head_dim: int, theta: float
) -> dict | None:
    if "rope_freqs.weight" in entries:
        return _llama3_scaling(path, entries["rope_freqs.weight"], head_dim, theta)
    rope = f"{metadata['general.architecture']}.rope."
    prefix = rope + "scaling."
    kind = metadata.get(prefix + "type", "none")
    if kind == "none" and rope + "scale_linear" in metadata:  # the spelling of old files
        return {"rope_type": "linear", "factor": _decimal(_positive(path, metadata, rope + "scale_linear", float))}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{path}: unknown {prefix}type {kind!r}: 'none', 'linear' and 'yarn' can be converted")
    scaling = {"rope_type": kind, "factor": _decimal(_positive(path, metadata, prefix + "factor", float))}
    if kind == "yarn":
        original = _positive(path, metadata, prefix + "original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(path: Path, entry: GGUFTensor, head_dim: int, theta: float) -> dict:
    """Llama 3.1's scaling is stored as its result, one divisor per frequency. Find the constants that give it."""
    if entry.shape != (head_dim // 2,):
        raise CheckpointError(f"{path}: tensor {entry.name} is {list(entry.shape)}, expected {[head_dim // 2]}")
    found = load_tensor(path, entry, torch.float32).double()
    factor, low, high, original = found.max().item(), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    expected = 1 / (smooth + (1 - smooth) / factor)
    if not torch.allclose(found, expected, rtol=1e-4):
        raise CheckpointError(
            f"{path}: rope_freqs.weight is not what Llama 3's scaling gives (low 1, high 4, original length 8192)"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _generation_config(config: dict, metadata: dict) -> dict:
    """Ids to stop at: the end of the text, and of a turn where the file names another token for it."""
    stops = [config["eos_token_id"], metadata.get("tokenizer.ggml.eot_token_id")]
    stops = list(dict.fromkeys(stop for stop in stops if stop is not None))
    values = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": config["pad_token_id"],
    }
    return {name: value for name, value in values.items() if value is not None}


# ---------------------------------------------------------------------------------------------------------- tokenizer


def _adds(metadata: dict, which: str) -> bool:
    """Whether bos (eos) is put around a text. Old files do not say, and then llama.cpp's rule holds."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    default = which == "bos" and (sentencepiece or metadata.get("tokenizer.ggml.pre") in _LLAMA3)
    return metadata.get(f"tokenizer.ggml.add_{which}_token", default)


def _token(path: Path, metadata: dict, key: str) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{key}")
    if number is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    if type(number) is not int or not 0 <= number < len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.{key} is {number}, but there are {len(tokens)} tokens")
    return tokens[number]


def _tokenizer_config(path: Path, config: dict, metadata: dict) -> dict:
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # "what tokenizer.json says"
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
        "bos_token": _token(path, metadata, "bos_token_id"),
        "eos_token": _token(path, metadata, "eos_token_id"),
        "unk_token": _token(path, metadata, "unknown_token_id"),
        "pad_token": _token(path, metadata, "padding_token_id"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    return {name: value for name, value in values.items() if value is not None}


def _tokenizer(path: Path, metadata: dict) -> dict:
    """tokenizer.json as a dict."""
    import json

    from tokenizers import AddedToken, processors

    kind = _need(path, metadata, "tokenizer.ggml.model")
    tokens = _list(path, metadata, "tokenizer.ggml.tokens", str)
    kinds = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = _list(path, metadata, "tokenizer.ggml.token_type", int, len(tokens))
    vocab = {token: number for number, token in enumerate(tokens)}
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{path}: unknown tokenizer.ggml.model {kind!r}: 'gpt2' and 'llama' can be converted")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(path, metadata, vocab)
        else:
            tokenizer = _sentencepiece(path, metadata, vocab, kinds)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions for merges that do not fit the vocabulary
        raise CheckpointError(f"{path} holds an inconsistent tokenizer: {error}") from error

    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_kind in zip(tokens, kinds, strict=True)
            if token_kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    around = {which: _token(path, metadata, f"{which}_token_id") for which in ("bos", "eos") if _adds(metadata, which)}
    around = {which: token for which, token in around.items() if token is not None}
    if around:
        template = [*([around["bos"]] if "bos" in around else []), "$A", *([around["eos"]] if "eos" in around else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            pair=template + [part.replace("$A", "$B") for part in template],
            special_tokens=[(token, vocab[token]) for token in around.values()],
        )
    return json.loads(tokenizer.to_str())


def _byte_level(path: Path, metadata: dict, vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    rule = _need(path, metadata, "tokenizer.ggml.pre")
    if rule not in _SPLITS:
        raise CheckpointError(f"{path}: unknown tokenizer.ggml.pre {rule!r}: known are {', '.join(_SPLITS)}")
    merges = [tuple(merge.split(" ")) for merge in _list(path, metadata, "tokenizer.ggml.merges", str)]
    # Llama 3 takes a word that is in the vocabulary whole, whether or not merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule in _LLAMA3))
    pattern = _SPLITS[rule]
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if rule == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, metadata: dict, vocab: dict[str, int], kinds: list[int]) -> Tokenizer:
    """SentencePiece's BPE joins the neighbours whose union scores best: as merges, every split by falling score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list(path, metadata, "tokenizer.ggml.scores", float, len(kinds))
    merges = [
        (-scores[number], number, vocab[token[:cut]], token[:cut], token[cut:])
        for token, number in vocab.items()
        if kinds[number] == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    model = models.BPE(
        vocab=vocab,
        merges=pairs,
        unk_token=_token(path, metadata, "unknown_token_id") or ("<unk>" if "<unk>" in vocab else None),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    # Llama 2's own tokenizer.json: a space before each stretch of text, also after a special token.
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer
