"""Writing a folder of Hugging Face layout: all of it or nothing, and nothing that is not ours touched."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath

import torch

from ligermodels.checkpoints_convert.files import CONFIG, INDEX, read_index
from ligermodels.checkpoints_convert.safetensors_file import (
    DTYPE_NAMES,
    MAX_TENSORS,
    known_dtypes,
    write_safetensors,
)
from ligermodels.errors import CheckpointError

__all__ = ["save_checkpoint", "save_streamed"]


def save_checkpoint(
    folder: str | os.PathLike,
    tensors: Mapping[str, torch.Tensor],
    config: dict,
    *,
    max_shard_size: int | str = "5GB",
    extra_json: Mapping[str, dict] = {},
) -> None:
    """Write ``tensors`` and ``config`` as a folder that transformers and ``open_checkpoint`` read.

    One model.safetensors, or, above ``max_shard_size`` (bytes, or "5GB" = 5·10⁹, "512MiB", …), numbered shards with an
    index. Tensors go to the host one at a time. ``extra_json`` maps further file names to their content, for example
    generation_config.json.

    Everything is written under temporary names first; only when all of it is on disk is config.json removed, the files
    renamed, and config.json put back last. So a save that fails leaves the old model or, at worst, a folder that does
    not load. Shards that an earlier save left are removed, and generation_config.json, unless ``extra_json`` has one;
    files of others, and the tokenizer's, are not touched.

    Raises CheckpointError for names that share memory (drop the tied one), tensors without data or with a dtype that
    is not F64, F32, F16 or BF16, values that are not JSON, and for a disk that refuses.
    """
    check_memory(tensors)
    save_streamed(folder, tensors, tensors.__getitem__, config, max_shard_size=max_shard_size, extra_json=extra_json)


def save_streamed(
    folder: str | os.PathLike,
    tensors: Mapping[str, torch.Tensor],
    make: Callable[[str], torch.Tensor],
    config: dict,
    *,
    max_shard_size: int | str = "5GB",
    extra_json: Mapping[str, dict] = {},
) -> None:
    """``save_checkpoint`` for tensors that come one at a time: ``make(name)`` is called when that one is written.

    ``tensors`` gives their shapes and dtypes (meta tensors will do). Holds one tensor at a time.
    """
    folder = Path(folder)
    limit = parse_size(max_shard_size)
    if not tensors:
        raise CheckpointError("there are no tensors to save")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {name} is {tensor.dtype}: only {known_dtypes()} can be saved")
    texts = {CONFIG: to_json(config, CONFIG)}
    for name, content in extra_json.items():
        if PurePosixPath(name).name != name or not name.endswith(".json") or name in (CONFIG, INDEX):
            raise CheckpointError(f"extra_json: {name!r} is not the name of a further .json file")
        texts[name] = to_json(content, name)

    shards = plan_shards(tensors, limit)
    if len(shards) > 1:
        texts[INDEX] = to_json(index_of(tensors, shards), INDEX)

    mark = f".{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stale = own_shards(folder) - set(shards)
        if (folder / CONFIG).exists():  # a model is replaced: its settings are not the new one's
            stale |= {"generation_config.json"} - texts.keys()
        try:
            for file, names in shards.items():
                write_safetensors(folder / (file + mark), {name: tensors[name] for name in names}, make)
            for file, text in texts.items():
                write_bytes(folder / (file + mark), text)
            # From here to the last line only names change, and without a config.json the folder does not load.
            for file in (CONFIG, INDEX):
                (folder / file).unlink(missing_ok=True)
            for file in [*shards, *(name for name in texts if name not in (CONFIG, INDEX)), INDEX]:
                if file in shards or file in texts:
                    os.replace(folder / (file + mark), folder / file)
            for file in stale:
                (folder / file).unlink(missing_ok=True)
            os.replace(folder / (CONFIG + mark), folder / CONFIG)
        finally:
            for file in [*shards, *texts]:
                (folder / (file + mark)).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"could not save to {folder}: {error}") from error


def parse_size(size: int | str) -> int:
    """Bytes, from a number of them or a text such as "5GB" (10⁹) or "512MiB" (2²⁰). Raises CheckpointError."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    value = 0
    if isinstance(size, int) and not isinstance(size, bool):
        value = size
    elif isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size, re.IGNORECASE)
        if match and match[2].upper() in units:
            value = int(float(match[1]) * units[match[2].upper()])
    if value <= 0:
        raise CheckpointError(f'max_shard_size: expected a number of bytes or a text such as "5GB", got {size!r}')
    return value


def check_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError for tensors without data, ones that are not dense, and two that share memory."""
    spans = []
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise CheckpointError(f"tensor {name} is on the meta device: it has no data to save")
        if tensor.layout != torch.strided:
            raise CheckpointError(f"tensor {name} is {tensor.layout}: only dense tensors can be saved")
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            end = begin + (last + 1) * tensor.element_size()
            spans.append((str(tensor.device), begin, end, tensor.is_contiguous(), name))
    spans.sort()
    for (device, begin, end, solid, name), (device2, begin2, _, solid2, name2) in pairwise(spans):
        # Strided views may interleave without sharing an element; only equal starts prove that they do.
        if device == device2 and begin2 < end and (begin == begin2 or (solid and solid2)):
            raise CheckpointError(f"tensors {name} and {name2} share memory: save one of them (drop the tied one)")


def to_json(value: object, name: str) -> bytes:
    """The content of the JSON file ``name``. Raises CheckpointError for what JSON cannot say."""
    try:
        # Sorted as transformers sorts them; other files (a tokenizer's vocabulary) keep their order.
        text = json.dumps(value, indent=2, sort_keys=name in (CONFIG, INDEX), ensure_ascii=False)
        return (text + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be written as JSON: {error}") from error


def plan_shards(tensors: Mapping[str, torch.Tensor], limit: int, stem: str = "model") -> dict[str, list[str]]:
    """File name → tensor names: filled in order, a shard is closed by the tensor that no longer fits.

    A tensor above the limit gets a shard of its own, and the open one stays open, as in huggingface_hub.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if size > limit:
            shards.append([name])
            continue
        if current and (used + size > limit or len(current) == MAX_TENSORS):
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += size
    if current:
        shards.append(current)
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def index_of(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, list[str]]) -> dict:
    """The content of the index beside ``shards`` (file name → tensor names)."""
    sizes = {
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
    }
    return {"metadata": sizes, "weight_map": {name: file for file, names in shards.items() for name in names}}


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def own_shards(folder: Path, stem: str = "model") -> set[str]:
    """Weight files of an earlier save: ``stem``.safetensors, and numbered shards that the present index names."""
    index = f"{stem}.safetensors.index.json"
    try:
        named = read_index(folder, index).values() if (folder / index).is_file() else ()
    except CheckpointError:
        named = ()  # an index that cannot be read names nothing that may be deleted
    numbered = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.safetensors")
    return {f"{stem}.safetensors", *filter(numbered.fullmatch, named)}
