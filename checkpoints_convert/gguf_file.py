"""The layout of a GGUF file: its metadata, and where each tensor lies. Little-endian, versions 2 and 3.

Layout: "GGUF", version (u32), number of tensors and of keys (u64); per key: name, type (u32), value; per tensor: name,
number of dimensions (u32), dimensions (u64, the fastest first), type (u32), offset (u64); then, aligned, the data.
A string is its length (u64) and its bytes; an array its element type (u32), its length (u64) and its elements.

Read here rather than with the package ``gguf``, whose reader takes several seconds for a tokenizer's strings and does
not check lengths against the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligermodels.checkpoints_convert.hf import _content_hint
from ligermodels.errors import CheckpointError

__all__ = ["GGUFTensor", "read_gguf"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: ``nbytes`` bytes from ``start`` of the file, blocks of the quantisation ``kind`` (a gguf enum)."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata (key → number, bool, text or list) and tensors of a GGUF; shapes are in torch's order.

    Raises CheckpointError if the package gguf is missing and if the file is not a GGUF, damaged or cut short.
    """
    try:
        import gguf  # noqa: F401 - its table of block sizes is needed below
    except ImportError as error:
        raise CheckpointError("reading GGUF files needs the package gguf: pip install 'ligermodels[gguf]'") from error
    try:
        with open(path, "rb") as file:
            start = file.read(512)
            if not start.startswith(b"GGUF"):
                hint = _content_hint(start)
                raise CheckpointError(f"{path} is not a GGUF file" + (f": {hint}" if hint else ""))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Cursor(path, content).parse()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class _Cursor:
    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.position = path, content, 4

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        version, tensor_count, key_count = self.numbers("IQQ")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} has GGUF version {version}: 2 and 3 (little-endian) can be read")
        metadata = {}
        for _ in range(key_count):
            key = self.text()
            metadata[key] = self.value(*self.numbers("I"))
        infos = []
        for _ in range(tensor_count):
            name = self.text()
            (dimensions,) = self.numbers("I")
            self.claim(dimensions, 8)
            infos.append((name, self.numbers(f"{dimensions}Q"), *self.numbers("IQ")))

        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        base = -(-self.position // alignment) * alignment
        return metadata, {info[0]: self.tensor(base, *info) for info in infos}

    def tensor(self, base: int, name: str, dimensions: tuple[int, ...], number: int, offset: int) -> GGUFTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} has quantisation type {number}, which the installed gguf does not know"
            ) from error
        if not dimensions or dimensions[0] % block:
            raise CheckpointError(
                f"{self.path}: tensor {name} {list(dimensions)} does not split into {kind.name} blocks"
            )
        start, nbytes = base + offset, math.prod(dimensions) // block * block_bytes
        if start + nbytes > len(self.content):
            raise CheckpointError(
                f"{self.path} is cut short: tensor {name} ends at byte {start + nbytes}, the file has "
                f"{len(self.content)} (fetch it again)"
            )
        return GGUFTensor(name, kind, tuple(reversed(dimensions)), start, nbytes)

    def claim(self, count: int, size: int) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything is allocated for it."""
        if count * size > len(self.content) - self.position:
            raise CheckpointError(f"{self.path} is damaged or cut short within its metadata (fetch it again)")

    def numbers(self, layout: str) -> tuple:
        layout = "<" + layout
        self.claim(1, struct.calcsize(layout))
        values = struct.unpack_from(layout, self.content, self.position)
        self.position += struct.calcsize(layout)
        return values

    def text(self) -> str:
        (length,) = self.numbers("Q")
        self.claim(length, 1)
        self.position += length
        raw = self.content[self.position - length : self.position]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is damaged: {raw[:40]!r} in its metadata is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 4:
            raise CheckpointError(f"{self.path} is damaged: its metadata holds a value of the unknown type {kind}")
        element, count = self.numbers("IQ")
        if element in _SCALARS:
            self.claim(count, struct.calcsize("<" + _SCALARS[element]))
            return list(self.numbers(f"{count}{_SCALARS[element]}"))
        self.claim(count, 8)
        return [self.value(element, depth + 1) for _ in range(count)]
