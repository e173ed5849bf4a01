"""Opening a GGUF file with the package ``gguf`` (extra ``ligermodels[gguf]``), with errors that name the file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligermodels.checkpoints_convert.files import content_hint
from ligermodels.checkpoints_convert.streamed import to_dtype
from ligermodels.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader

__all__ = ["GGUFTensor", "load_tensor", "read_gguf"]

_SLICE = 4 << 20  # elements dequantised at once: 16 MiB of fp32, and a few times that inside the package


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: its shape in torch's order, its quantisation, and its rows of blocks in the mapped file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata (key → number, bool, text or list) and tensors of a little-endian GGUF. The file stays mapped.

    Of a model split over several files, ``path`` names the first, NAME-00001-of-0000N.gguf; the others lie beside it.
    Raises CheckpointError if the package gguf is missing and if a file is not a GGUF, damaged, cut short or missing.
    """
    metadata, tensors = _read_one(path)
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count < 100_000:
        raise CheckpointError(f"{path}: split.count is {str(count)[:80]}, expected the number of files")
    if count <= 1:
        return metadata, tensors
    named = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if named is None or metadata.get("split.no") != 0 or named[3] != f"{count:05d}":
        raise CheckpointError(f"{path} is a part of {count}: give the first, NAME-00001-of-{count:05d}.gguf")
    others = [path.with_name(f"{named[1]}-{part:05d}-of-{named[3]}.gguf") for part in range(2, count + 1)]
    missing = [other.name for other in others if not other.is_file()]
    if missing:
        raise CheckpointError(f"{path} is a part of {count}, of which are missing: {', '.join(missing[:5])}")
    for other in others:
        more = _read_one(other)[1]
        twice = tensors.keys() & more.keys()
        if twice:
            raise CheckpointError(f"{other}: tensor {min(twice)} is in another part, too")
        tensors |= more
    return metadata, tensors


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        import gguf  # noqa: F401 - whether it is there
    except ImportError as error:
        raise CheckpointError("reading GGUF files needs the package gguf: pip install 'ligermodels[gguf]'") from error
    try:
        with open(path, "rb") as file:
            start = file.read(512)
        if not start.startswith(b"GGUF"):
            hint = content_hint(start)
            raise CheckpointError(f"{path} is not a GGUF file" + (f": {hint}" if hint else ""))
        reader = _open(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # the package lets a damaged file end in whatever error comes first
        raise CheckpointError(f"{path} is damaged, cut short or of an unknown kind of GGUF: {error}") from error
    if reader.byte_order != "I":  # "S" for swapped: dequantisation would take its numbers for native ones
        raise CheckpointError(f"{path} is a GGUF of the other byte order: only little-endian ones can be read")

    end, before = 0, ""
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
        if tensor.data_offset < end:
            raise CheckpointError(f"{path}: tensor {tensor.name} begins within {before}, so one of them is wrong")
        end, before = tensor.data_offset + tensor.n_bytes, tensor.name
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        if not tensor.n_elements:
            raise CheckpointError(f"{path}: tensor {tensor.name} {list(shape)} is empty")
        tensors[tensor.name] = GGUFTensor(tensor.name, shape, tensor.tensor_type, tensor.data)
    return metadata, tensors


def _open(path: Path) -> GGUFReader:
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any) -> np.ndarray:
            """Without the package's silence about reads beyond the end, which makes it loop over a damaged count."""
            self.data = np.asarray(self.data)  # the same mapping; slicing it as np.memmap takes over twice the time
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"the file ends at byte {len(self.data)}, within what its header describes")
            return super()._get(offset, dtype, count, *rest, **named)

    with np.errstate(all="raise"):  # sums of 64-bit offsets that wrap around
        return Reader(path)


def load_tensor(
    path: Path, tensor: GGUFTensor, dtype: torch.dtype, rows: tuple[int, int] | None = None, offset: float = 0.0
) -> torch.Tensor:
    """Dequantise one tensor of the file ``path``, or some of its rows (all dimensions but the last are rows).

    ``offset`` is added in fp32, before the numbers are rounded to ``dtype``. With ``rows`` the result has two
    dimensions. Raises CheckpointError if the package cannot dequantise this kind, and for an overflow of ``dtype``.
    """
    import numpy as np
    from gguf.quants import dequantize

    width = tensor.shape[-1]
    begin, end = rows or (0, math.prod(tensor.shape[:-1]))
    result = torch.empty((end - begin, width), dtype=dtype, device="cpu")
    blocks = tensor.data.reshape(math.prod(tensor.shape[:-1]), -1)
    step = max(1, _SLICE // width)
    for start in range(begin, end, step):
        stop = min(start + step, end)
        try:
            # a copy, since torch warns of memory that it must not write to
            values = torch.from_numpy(dequantize(np.array(blocks[start:stop]), tensor.kind))
        except NotImplementedError as error:
            kind = tensor.kind.name
            raise CheckpointError(f"{path}: tensor {tensor.name} is {kind}, which gguf cannot dequantise") from error
        if offset:
            values += offset
        if values.dtype != torch.float32:
            values = values.float()
        result[start - begin : stop - begin] = to_dtype(values, dtype, f"{path}: tensor {tensor.name}")
    return result if rows else result.view(tensor.shape)
