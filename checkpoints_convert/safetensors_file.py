"""One safetensors file: its header, checked; and how one is written.

Layout: 8 bytes little-endian header length N, N bytes of JSON
``{name: {"dtype", "shape", "data_offsets": [start, end]}, "__metadata__": {str: str}}``, then the tensors' bytes.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ligermodels.checkpoints_convert.files import content_hint, open_file
from ligermodels.errors import CheckpointError

# Bits per element, so that every header can be checked; only the four below them are weights.
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# safetensors itself takes headers of 100 MB, of which a hostile one makes gigabytes of Python objects. These limits
# keep that below 50 MB, and leave room for ten times what any published file has.
MAX_HEADER = 10_000_000
MAX_TENSORS = 60_000
MAX_METADATA = 1_000_000

_KEY = re.compile(rb'\s*"((?:[^"\\\x00-\x1f]|\\.){0,1000})"\s*:\s*')
_ENTRY = re.compile(rb"\{[^{}]{0,4000}\}")
_SEPARATOR = re.compile(rb"\s*([,}])")
_SPACE = re.compile(rb"\s*")


class Entry(NamedTuple):
    """One tensor of a header: the name of its dtype, its shape, and its first and last + 1 byte in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def known_dtypes() -> str:
    """The dtypes that weights may have, for messages."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without numpy (which torch does not require)."""
    size = tensor.nbytes
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


# ---------------------------------------------------------------------------------------------------------- reading


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name, after the header was checked against itself and the file's size.

    Reads the header alone. Raises CheckpointError, naming the file, for whatever is not a whole safetensors file.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(512)
        if not start:
            raise CheckpointError(f"{path} is empty (an unfinished download? fetch it again)")
        if size < 8:
            raise CheckpointError(f"{path} has only {size} bytes: a safetensors file has at least 8 (fetch it again)")
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER:
            hint = content_hint(start)  # all that it knows begins with bytes that make an absurd length
            if hint:
                raise CheckpointError(f"{path} is not a safetensors file: {hint}")
            raise CheckpointError(
                f"{path} is not a safetensors file: its first 8 bytes give a header of {length} bytes "
                f"(at most {MAX_HEADER} are read)"
            )
        if length == 0:
            raise CheckpointError(f"{path} begins with zeros (an unfinished download? fetch it again)")
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is cut short within its header: at least {8 + length} bytes expected, {size} found "
                "(fetch it again)"
            )
        file.seek(8)
        raw = file.read(length)
    if len(raw) < length:
        raise CheckpointError(f"{path} ended while its header was read")
    entries = parse_header(path, raw)
    position = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != position:
            raise CheckpointError(f"{path}: tensor {name} starts at byte {begin} of the data, expected {position}")
        position = end
    expected = 8 + length + position
    if size != expected:
        what = "is cut short" if size < expected else "is longer than its header says"
        raise CheckpointError(f"{path} {what}: {expected} bytes expected, {size} found (fetch it again)")
    base = 8 + length
    return {name: Entry(e.kind, e.shape, base + e.start, base + e.end) for name, e in entries.items()}


def parse_header(path: Path, raw: bytes) -> dict[str, Entry]:
    """The entries of a header's JSON, offsets counted from the data's beginning.

    Entry by entry: a JSON parser would first make objects of whatever the header holds, twenty times its size.
    """
    text = raw.rstrip(b" \t\r\n")
    entries: dict[str, Entry] = {}
    if re.fullmatch(rb"\{\s*\}", text):
        return entries
    try:
        if not text.startswith(b"{"):
            raise ValueError("it is not a JSON object")
        position, separator = 1, b","
        while separator == b",":
            key = _match(_KEY, text, position, 'a name such as "lm_head.weight"')
            name, position = json.loads(f'"{key[1].decode()}"'), key.end()
            if name == "__metadata__":
                position = _metadata_end(text, position)
            else:
                body = _match(_ENTRY, text, position, f'{{"dtype", "shape", "data_offsets"}} of tensor {name}')
                if name in entries:
                    raise ValueError(f"{name!r} occurs twice")
                if len(entries) == MAX_TENSORS:
                    raise ValueError(f"it lists more than {MAX_TENSORS} tensors")
                entries[name] = _check_entry(path, name, body[0].decode())
                position = body.end()
            end = _match(_SEPARATOR, text, position, "a comma or its end")
            separator, position = end[1], end.end()
        if position != len(text):
            raise ValueError(f"text follows its end at byte {position}")
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has a broken header: {error}") from error
    return entries


def _match(pattern: re.Pattern[bytes], text: bytes, position: int, expected: str) -> re.Match[bytes]:
    match = pattern.match(text, position)
    if match is None:
        found = text[position : position + 60].decode("utf-8", "replace")
        raise ValueError(f"expected {expected} at byte {position}, found {found!r}")
    return match


def _metadata_end(text: bytes, position: int) -> int:
    """The end of an object of strings that begins at ``position``. Its content is not wanted."""
    limit = position + MAX_METADATA

    def need(characters: bytes) -> bytes:
        nonlocal position
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        found = text[position : position + 1]
        if not found or found not in characters:
            raise ValueError(f"__metadata__ must map strings to strings; byte {position} is {found!r}")
        position += 1
        if position > limit:
            raise ValueError(f"__metadata__ has more than {MAX_METADATA} bytes")
        return found

    def string_end() -> None:
        nonlocal position
        while True:
            quote = text.find(b'"', position)
            if quote < 0 or quote > limit:
                raise ValueError(f"a string in __metadata__ does not end within {MAX_METADATA} bytes")
            escapes = quote - len(text[position:quote].rstrip(b"\\")) - position
            position = quote + 1
            if escapes % 2 == 0:
                return

    need(b"{")
    if need(b'"}') == b"}":
        return position
    while True:
        string_end()
        need(b":")
        need(b'"')
        string_end()
        if need(b",}") == b"}":
            return position
        need(b'"')


def _check_entry(path: Path, name: str, body: str) -> Entry:
    try:
        entry = json.loads(body)
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        good = isinstance(kind, str) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    except (KeyError, TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise CheckpointError(f"{path}: the header's entry for tensor {name} is broken: {body[:200]}")
    if kind not in BITS:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {kind[:40]!r}")
    expected = math.prod(shape) * BITS[kind] // 8
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name} ({kind}, {list(shape)!s:.99}) needs {expected} bytes, "
            f"the header gives {end - begin}"
        )
    return Entry(kind, shape, begin, end)


# ---------------------------------------------------------------------------------------------------------- writing


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], make: Callable[[str], torch.Tensor]) -> None:
    """Write one file and flush it to the disk. ``tensors`` gives shapes and dtypes, ``make(name)`` the values."""
    # Widest dtype first keeps every tensor aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        tensor = tensors[name]
        end = position + tensor.nbytes
        kind = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % 64)  # so that a memory map of it is as aligned as torch's own memory
    if len(raw) > MAX_HEADER:
        raise CheckpointError(f"{path.name} would need a header of {len(raw)} bytes: choose a smaller max_shard_size")
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in names:
            tensor = make(name).detach().to("cpu").contiguous()
            if (tensor.shape, tensor.dtype) != (tensors[name].shape, tensors[name].dtype):
                raise CheckpointError(f"tensor {name} was made as {tensor.dtype} {list(tensor.shape)}, unlike promised")
            file.write(memory(tensor))
        file.flush()
        os.fsync(file.fileno())
