"""A model → one GGUF file that llama.cpp reads: F32, F16, BF16 or Q8_0.

As llama.cpp's own converter has it, norms, biases and routers stay in fp32; in a Q8_0 file matrices whose rows are no
multiple of 32 stay in fp16. The header is written by the package ``gguf``, the tensors follow one by one, so that an
interrupted run goes on after the last that is surely on disk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligermodels.checkpoints_convert.files import open_file
from ligermodels.checkpoints_convert.gguf_config import metadata_of, rope_tensors
from ligermodels.checkpoints_convert.gguf_layout import Entry, interleave, layout
from ligermodels.checkpoints_convert.gguf_tokenizer import tokenizer_metadata
from ligermodels.checkpoints_convert.safetensors_file import DTYPES
from ligermodels.checkpoints_convert.streamed import Source, WorkFolder, expect_shapes, progress, to_dtype
from ligermodels.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

__all__ = ["KINDS", "write_gguf"]

KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}  # by the names of --dtype
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # general.file_type
_ALIGN = 32
_SLICE = 4 << 20  # elements converted at once
_SYNC = 256 << 20  # bytes between two points at which an interrupted run can go on


def write_gguf(
    source: Source, target: Path, *, kind: str | None = None, force: bool = False, plan: object = None
) -> Path:
    """Write ``source`` to the file ``target`` and return it. ``kind``: F32, F16, BF16, Q8_0; None: the source's dtype,
    or F32 where its matrices are of several.

    Raises CheckpointError if the package gguf is missing, for a tensor that is missing, unknown or overflows fp16, and
    a target that is taken; ConfigError for what the format or llama.cpp's code for the family cannot say.
    """
    try:
        from gguf import GGMLQuantizationType
    except ImportError as error:
        raise CheckpointError("writing GGUF files needs the package gguf: pip install 'ligermodels[gguf]'") from error

    config = source.config
    keys = metadata_of(config, source.path)
    entries, constants = layout(config), rope_tensors(config)
    shapes = {}
    for entry in entries.values():
        shapes |= dict.fromkeys(entry.names, entry.shape[1:] if len(entry.names) > 1 else entry.shape)
    expect_shapes(source.path, source.tensors, shapes, f"a GGUF of type {config['model_type']}")
    if kind is None:  # one that holds every matrix as it is
        plain = [name for key, entry in entries.items() if _kind(key, entry, "F16") == "F16" for name in entry.names]
        widest = reduce(torch.promote_types, {source.tensors[name].dtype for name in plain})
        double = next((name for name, t in source.tensors.items() if t.dtype == torch.float64), None)
        if double is not None:
            raise CheckpointError(
                f"{source.path}: tensor {double} is float64: say in which dtype to write it (--dtype)"
            )
        kind = KINDS[str(widest).removeprefix("torch.")]
    entries = {name: Entry(tuple(t.shape), ()) for name, t in constants.items()} | entries
    kinds = {name: GGMLQuantizationType[_kind(name, entry, kind)] for name, entry in entries.items()}
    keys |= tokenizer_metadata(source.files, config, source.path)
    keys = {"general.name": source.path.name, "general.file_type": _FILE_TYPES[kind]} | keys
    if kind == "Q8_0":
        keys["general.quantization_version"] = 2

    if force and target.is_file():
        with open_file(target) as file:
            start = file.read(4)
        if start not in (b"", b"GGUF"):
            raise CheckpointError(f"{target} is a file, and not a GGUF: force (--force) replaces a model only")
    with WorkFolder(target, None, [plan, kind], force=force) as work:
        if work.finished:
            return target
        head = _header(work.path / "header", keys, entries, kinds)
        file, note = work.path / target.name, work.path / "progress.json"
        done = _resume(file, note, head)
        shown = {name: torch.empty(_nbytes(entry, kinds[name]), dtype=torch.uint8) for name, entry in entries.items()}
        with progress(shown, target) as bar, open(file, "r+b" if done else "wb") as out:
            if not done:
                out.write(head)
                done = len(head)
            out.seek(done)
            position, synced = len(head), done
            for name, entry in entries.items():
                size = _nbytes(entry, kinds[name])
                end = position + size + -size % _ALIGN
                bar.update(size)
                if end > done:
                    for chunk in _chunks(name, entry, kinds[name], source, constants):
                        out.write(chunk)
                    out.write(bytes(-size % _ALIGN))
                    if out.tell() != end:
                        raise CheckpointError(f"{file}: tensor {name} ended at {out.tell()}, expected {end}")
                    if end - synced >= _SYNC:
                        _sync(out, note, end)
                        synced = end
                position = end
            _sync(out, note, position)
    return target


def _kind(name: str, entry: Entry, kind: str) -> str:
    if len(entry.shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    return "F16" if kind == "Q8_0" and entry.shape[-1] % 32 else kind


def _nbytes(entry: Entry, kind: GGMLQuantizationType) -> int:
    from gguf.constants import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    return math.prod(entry.shape) // block * size


def _header(path: Path, keys: dict[str, Any], entries: dict[str, Entry], kinds: dict) -> bytes:
    """Everything before the first tensor, padded to where that begins."""
    import numpy as np
    from gguf import GGUFWriter

    architecture = next(key for key in keys if key.endswith(".block_count")).removesuffix(".block_count")
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    for name, entry in entries.items():
        size = _nbytes(entry, kinds[name])
        writer.add_tensor_info(name, entry.shape, np.dtype(np.float32), size, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    head = path.read_bytes()
    return head + bytes(-len(head) % _ALIGN)


def _resume(file: Path, note: Path, head: bytes) -> int:
    """How many bytes of ``file`` are surely what this run would write; the rest is cut off."""
    try:
        done = json.loads(note.read_text())["bytes"]
        with open(file, "r+b") as found:
            fits = type(done) is int and len(head) <= done <= os.fstat(found.fileno()).st_size
            if fits and found.read(len(head)) == head:
                found.truncate(done)
                return done
    except (OSError, ValueError, KeyError, TypeError):
        pass
    note.unlink(missing_ok=True)
    return 0


def _sync(out: Any, note: Path, position: int) -> None:
    """Data first, then the note of how far it goes."""
    out.flush()
    os.fsync(out.fileno())
    unfinished = note.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"bytes": position}))
    os.replace(unfinished, note)


def _chunks(
    name: str, entry: Entry, kind: GGMLQuantizationType, source: Source, constants: dict[str, torch.Tensor]
) -> Iterator[memoryview | bytes]:
    """The bytes of one tensor, weight by weight and some rows at a time."""
    from gguf.quants import quantize

    width = entry.shape[-1]
    for ours in entry.names or (name,):
        tensor = source.make(ours) if entry.names else constants[name]
        what = f"{source.path}: tensor {ours}"
        if entry.heads:
            tensor = interleave(tensor, entry.heads)
        if entry.offset:
            tensor = to_dtype(tensor, torch.float32, what) + entry.offset
        rows = tensor.reshape(-1, width)
        step = max(1, _SLICE // width)
        for part in rows.split(step):
            if kind.name == "Q8_0":
                yield quantize(to_dtype(part, torch.float32, what).numpy(), kind).tobytes()
                continue
            yield to_dtype(part, DTYPES[kind.name], what).contiguous().view(torch.uint8).numpy().tobytes()
