"""GGUF (llama.cpp's single file) → a folder in Hugging Face layout: weights, config, tokenizer, chat template.

What differs but the names is told in gguf_layout.py (rows, norms, experts), gguf_config.py and gguf_tokenizer.py. The
file is read and its weights are dequantised by the package ``gguf`` (extra ``ligermodels[gguf]``).

Through a GGUF weights in fp16, bf16 or fp32 come back bit for bit, but for the norms of Gemmas: 1 + weight is stored in
fp32, which keeps a weight to 2^-24.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ligermodels.checkpoints_convert.gguf_config import config_of
from ligermodels.checkpoints_convert.gguf_file import GGUFTensor, load_tensor, read_gguf
from ligermodels.checkpoints_convert.gguf_layout import Entry, deinterleave, layout
from ligermodels.checkpoints_convert.gguf_tokenizer import generation_config_of, tokenizer_config_of, tokenizer_of
from ligermodels.checkpoints_convert.streamed import Source, expect_shapes, fingerprint, write_hf
from ligermodels.errors import CheckpointError

__all__ = ["convert_gguf", "open_gguf"]

_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # config_of reads them


def convert_gguf(
    gguf_file: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    force: bool = False,
) -> Path:
    """Convert a GGUF into ``folder`` (Hugging Face layout) and return its path.

    Writes the weights at ``dtype`` (None: that of the file, or bfloat16 where it is quantised), config.json,
    generation_config.json, tokenizer.json and tokenizer_config.json with the chat template. Holds one tensor at a time.

    Raises CheckpointError if the package ``gguf`` is missing, the file is no GGUF or is damaged, its architecture,
    tokenizer or a tensor is not known here, or if ``folder`` already holds a model and ``force`` is not given.
    """
    path, folder = Path(gguf_file), Path(folder)
    source = open_gguf(path, dtype=dtype)
    plan = [fingerprint(path), str(dtype)]
    return write_hf(source, folder, max_shard_size=max_shard_size, force=force, plan=plan)


def open_gguf(path: Path, *, dtype: torch.dtype | None = None) -> Source:
    """A GGUF as a source of Hugging Face's names, config and tokenizer. Raises CheckpointError as ``convert_gguf``."""
    metadata, entries = read_gguf(path)
    dtype = dtype or _own_dtype(entries)
    config = config_of(path, metadata, entries, dtype)
    expected = _with_packed_attention(layout(config), entries, config)
    stored = {name: entry for name, entry in entries.items() if name not in _ROPE_TENSORS}
    expect_shapes(
        path, stored, {name: entry.shape for name, entry in expected.items()}, f"a model of type {config['model_type']}"
    )
    generation = generation_config_of(path, config, metadata)
    config["eos_token_id"] = generation.get("eos_token_id")
    files: dict[str, Path | dict] = {"generation_config.json": generation}
    tokenizer = tokenizer_of(path, metadata)
    if tokenizer is not None and len(metadata["tokenizer.ggml.tokens"]) > config["vocab_size"]:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens lists {len(metadata['tokenizer.ggml.tokens'])} tokens, but "
            f"token_embd.weight has {config['vocab_size']} rows"
        )
    if tokenizer is not None:
        files |= {
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": tokenizer_config_of(path, config, metadata),
        }

    places: dict[str, tuple[str, Entry, tuple[int, int] | None]] = {}  # which rows of which tensor a weight is
    tensors = {}
    for name, entry in expected.items():
        if len(entry.names) == 1:
            places[entry.names[0]] = (name, entry, None)
            tensors[entry.names[0]] = torch.empty(entry.shape, dtype=dtype, device="meta")
            continue
        start = 0
        for ours, rows in zip(entry.names, _rows(entry, config), strict=True):
            places[ours] = (name, entry, (start, start + rows))
            shape = (rows,) if len(entry.shape) == 1 else (rows, entry.shape[-1])
            tensors[ours] = torch.empty(shape, dtype=dtype, device="meta")
            start += rows

    def make(ours: str) -> torch.Tensor:
        name, entry, rows = places[ours]
        if len(entry.shape) == 1:  # a bias or a norm: one row
            tensor = load_tensor(path, entries[name], dtype, offset=-entry.offset)
            tensor = tensor if rows is None else tensor[slice(*rows)].clone()
        else:
            tensor = load_tensor(path, entries[name], dtype, rows)
        return deinterleave(tensor, entry.heads) if entry.heads else tensor

    return Source(path, config, tensors, make, files)


def _own_dtype(entries: dict[str, GGUFTensor]) -> torch.dtype:
    """A dtype for all matrices (norms, biases and routers are always fp32), or bfloat16 if any is quantised."""
    kinds = {
        entry.kind.name
        for name, entry in entries.items()
        if len(entry.shape) > 1 and not name.endswith("ffn_gate_inp.weight")
    }
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if not kinds <= plain.keys():
        return torch.bfloat16
    return plain[kinds.pop()] if len(kinds) == 1 else torch.float32


def _with_packed_attention(expected: dict[str, Entry], entries: dict, config: dict) -> dict[str, Entry]:
    """GLMs converted from their remote layout have q, k and v in one tensor, as there."""
    if not config["model_type"].startswith("glm"):
        return expected
    out = dict(expected)
    for layer in range(config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            packed, parts = f"blk.{layer}.attn_qkv.{kind}", [f"blk.{layer}.attn_{x}.{kind}" for x in "qkv"]
            if packed in entries and parts[0] in expected:
                shapes = [out.pop(part).shape for part in parts]
                rows = sum(shape[0] for shape in shapes)
                names = tuple(f"model.layers.{layer}.self_attn.{x}_proj.{kind}" for x in "qkv")
                out[packed] = Entry((rows, *shapes[0][1:]), names)
    return out


def _rows(entry: Entry, config: dict) -> list[int]:
    """How many rows of a tensor belong to each of its weights: experts alike, or q, k and v."""
    if len(entry.shape) == 3:
        return [entry.shape[1]] * len(entry.names)
    key = config["num_key_value_heads"] * config["head_dim"]
    return [entry.shape[0] - 2 * key, key, key]
