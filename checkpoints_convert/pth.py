"""Files of ``torch.save``: read as byte ranges, without running what is in them.

torch reads the pickle, once it is seen to name tensors only (pickle_file.py), into tensors without storage, of which
their places in the file are kept. So a .pth is then read like a safetensors file: tensor by tensor, and not mapped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ligermodels.checkpoints_convert.hf import Checkpoint, TensorInfo
from ligermodels.checkpoints_convert.pickle_file import check_archive
from ligermodels.checkpoints_convert.safetensors_file import DTYPE_NAMES
from ligermodels.errors import CheckpointError

__all__ = ["open_pth", "save_pth"]


def open_pth(path: Path) -> Checkpoint:
    """The tensors of a ``torch.save``d state dict (or of its entry "model"), as byte ranges; nothing is loaded.

    Raises CheckpointError naming the file: not of torch's zip format (since 1.6), cut short, a pickle that names
    anything but plain floating tensors, a tensor that is not contiguous or lies outside the file.
    """
    path = Path(path)
    check_archive(path)
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            state = torch.load(path, weights_only=True)
        if isinstance(state, dict) and isinstance(state.get("model"), dict):
            state = state["model"]
        if not isinstance(state, dict) or not state:
            raise CheckpointError(f"{path} holds no state dict, but {type(state).__name__}")
        size = os.path.getsize(path)
        tensors = {str(name): _place(path, name, value, size) for name, value in state.items()}
    except CheckpointError:
        raise
    except Exception as error:  # torch raises whatever comes first in a damaged file
        text = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {text}") from error
    return Checkpoint(path.parent, tensors)


def _place(path: Path, name: object, value: object, size: int) -> TensorInfo:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{path}: {str(name)[:80]!r} is {type(value).__name__}: expected names and tensors only")
    if value.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{path}: tensor {name} is {value.dtype}: expected a floating dtype")
    if not value.is_contiguous():
        raise CheckpointError(f"{path}: tensor {name} is not stored row by row")
    storage = value.untyped_storage()
    begin = storage._checkpoint_offset + value.storage_offset() * value.element_size()
    end = begin + value.numel() * value.element_size()
    if end > storage._checkpoint_offset + storage.nbytes() or end > size:
        raise CheckpointError(f"{path}: tensor {name} {list(value.shape)} ends at byte {end}, beyond the file's end")
    return TensorInfo(path, value.dtype, tuple(value.shape), begin, end)


def save_pth(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a state dict that ``torch.load(weights_only=True)`` reads, by way of a temporary name."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        torch.save(dict(tensors), str(unfinished))  # given a name, not a file, it copies no tensor
    except RuntimeError as error:  # what torch makes of a full disk, or of a file above a limit
        raise CheckpointError(f"could not write {unfinished} (is the disk full?): {str(error)[:200]}") from error
    with open(unfinished, "rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
