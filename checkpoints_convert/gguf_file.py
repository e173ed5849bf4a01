"""Opening a GGUF file with the package ``gguf`` (extra ``ligermodels[gguf]``), with errors that name the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligermodels.checkpoints_convert.hf import _content_hint
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

    Raises CheckpointError if the package gguf is missing and if the file is not a GGUF, damaged or cut short.
    """
    try:
        import gguf  # noqa: F401 - whether it is there
    except ImportError as error:
        raise CheckpointError("reading GGUF files needs the package gguf: pip install 'ligermodels[gguf]'") from error
    try:
        with open(path, "rb") as file:
            start = file.read(512)
        if not start.startswith(b"GGUF"):
            hint = _content_hint(start)
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


def load_tensor(path: Path, tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise one tensor of the file ``path``, a slice of rows at a time.

    Raises CheckpointError if the package cannot dequantise this kind.
    """
    import numpy as np
    from gguf.quants import dequantize

    result = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    rows = result.view(-1, tensor.shape[-1])
    blocks = tensor.data.reshape(len(rows), -1)
    step = max(1, _SLICE // tensor.shape[-1])
    for begin in range(0, len(rows), step):
        try:
            # a copy, since torch warns of memory that it must not write to
            values = dequantize(np.array(blocks[begin : begin + step]), tensor.kind)
        except NotImplementedError as error:
            kind = tensor.kind.name
            raise CheckpointError(f"{path}: tensor {tensor.name} is {kind}, which gguf cannot dequantise") from error
        rows[begin : begin + step].copy_(torch.from_numpy(values))
    return result
