"""Quantised weights: fp8 with scales is read as numbers again, every other scheme is refused by its name.

fp8 (e4m3) comes with its scales beside it: ``X.weight_scale_inv`` for blocks of 128 × 128 (DeepSeek-V3, Qwen3-…-FP8;
a factor in spite of its name), or ``X.weight_scale`` for the tensor, its rows, or blocks (compressed-tensors, fbgemm,
ModelOpt). The weight is ``fp8 · scale`` of its block.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from ligermodels.checkpoints_convert.reading import Scaled, TensorInfo
from ligermodels.checkpoints_convert.safetensors_file import DTYPES, Entry, known_dtypes
from ligermodels.errors import CheckpointError

_FP8_METHODS = (None, "fp8", "compressed-tensors", "fbgemm_fp8", "modelopt")
# Ranges of activations and of the key/value cache: of use to fp8 products only.
_ACTIVATIONS = re.compile(r"\.(input_scale(_ub)?|activation_scale|output_scale|[qkv]_scale)$")

# What the names of the tensors say, where config.json says nothing.
_BY_NAME = {
    "GPTQ": r"\.g_idx$",
    "AWQ": r"\.qweight$",
    "bitsandbytes (8 bit)": r"\.SCB$",
    "bitsandbytes (4 bit)": r"\.(absmax|quant_map|quant_state\..*)$",
    "compressed-tensors": r"\.(weight_packed|weight_shape)$",
    "HQQ": r"\.W_q$",
    "MXFP4": r"_blocks$",
    "int8 or fp8 with scales": r"\.weight_scale(_inv)?$",
}


def scheme(quantization: object, names: Mapping[str, object]) -> str | None:
    """The name of a quantisation scheme, from config.json's ``quantization_config`` or else the tensors' names."""
    if isinstance(quantization, dict) and isinstance(quantization.get("quant_method"), str):
        return quantization["quant_method"]
    for name, pattern in _BY_NAME.items():
        if any(re.search(pattern, tensor) for tensor in names):
            return name
    return None


def plain_tensors(
    folder: Path, entries: Mapping[str, tuple[Path, Entry]], quantization: object
) -> dict[str, TensorInfo]:
    """Where each tensor lies, for ``entries`` as ``{name: (file, header entry)}``; fp8 is joined with its scales.

    Raises CheckpointError, naming the scheme, for tensors that are not numbers in a floating dtype.
    """
    tensors = {
        name: TensorInfo(file, DTYPES[e.kind], e.shape, e.start, e.end)
        for name, (file, e) in entries.items()
        if e.kind in DTYPES
    }
    others = {name: found for name, found in entries.items() if name not in tensors}
    if not others:
        return tensors
    method = scheme(quantization, entries)
    known = isinstance(quantization, dict) and isinstance(quantization.get("quant_method"), str)
    used: set[str] = set()
    for name, (file, entry) in others.items():
        scale_name = next((n for n in (f"{name}_scale_inv", f"{name}_scale") if n in tensors), None)
        if entry.kind != "F8_E4M3" or scale_name is None or (known and method not in _FP8_METHODS):
            said = f" (config.json says: {method})" if known else f" (its names look like {method})" if method else ""
            raise CheckpointError(
                f"{folder} looks quantised{said}: tensor {name} in {file.name} is {entry.kind}"
                + (" without a scale" if entry.kind == "F8_E4M3" and not known else "")
                + f", and reading it as plain weights would be wrong. Use the unquantised repository; weights may be "
                f"{known_dtypes()}, or fp8 (e4m3) with scales"
            )
        scale = tensors[scale_name]
        block = _block(file, name, entry.shape, scale_name, scale.shape, quantization)
        tensors[name] = TensorInfo(
            file, torch.bfloat16, entry.shape, entry.start, entry.end, scaled=Scaled(scale, block)
        )
        used.add(scale_name)
    idle = [name for name in tensors if _ACTIVATIONS.search(name)]
    warnings.warn(
        f"{folder}: {len(others)} tensors are fp8 and are read as numbers again (fp8 × scale); the model is not "
        "quantised" + (f". Not used are {len(idle)} scales of activations" if idle else ""),
        stacklevel=4,
    )
    return {name: info for name, info in tensors.items() if name not in used and name not in idle}


def _block(
    file: Path, name: str, shape: tuple[int, ...], scale_name: str, scales: tuple[int, ...], quantization: object
) -> tuple[int, int]:
    """Rows and columns that share a scale. Raises CheckpointError where the shapes do not say it."""
    if len(shape) == 2 and 0 not in shape:
        if math.prod(scales) == 1:
            return shape
        if scales in ((shape[0], 1), (shape[0],)):
            return 1, shape[1]
        block = _declared_block(quantization)
        if block and scales == (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
            return block
        said = f"blocks of {list(block)}" if block else "no weight_block_size"
    else:
        said = "matrices only"
    raise CheckpointError(
        f"{file}: tensor {name} is fp8 {list(shape)} and its scale {scale_name} is {list(scales)}: expected one scale "
        f"for all, one a row, or one a block (config.json's quantization_config says {said})"
    )


def _declared_block(quantization: object) -> tuple[int, int] | None:
    if not isinstance(quantization, dict):
        return None
    found = quantization.get("weight_block_size")
    groups = quantization.get("config_groups")
    if found is None and isinstance(groups, dict):
        weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)]
        found = next((w.get("block_structure") for w in weights if isinstance(w, dict)), None)
    if isinstance(found, list) and len(found) == 2 and all(type(n) is int and n > 0 for n in found):
        return found[0], found[1]
    return None
