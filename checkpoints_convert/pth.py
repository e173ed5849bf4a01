"""Files of ``torch.save``: read as byte ranges, without running what is in them.

A pickle is a program. torch's ``weights_only`` reader runs only a harmless part of the language, but even that can ask
for any amount of memory. So the pickle is first read as text: it may name nothing but tensors of floating dtypes. Then
torch reads it into tensors without storage, of which only their places in the file are kept.
"""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from ligermodels.checkpoints_convert.hf import Checkpoint, TensorInfo, _content_hint
from ligermodels.errors import CheckpointError

__all__ = ["open_pth", "save_pth"]

_ALLOWED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch FloatStorage",
    "torch HalfStorage",
    "torch BFloat16Storage",
    "torch DoubleStorage",
}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MAX_PICKLE = 50_000_000  # bytes; a thousand tensors take 0.1 MB


def open_pth(path: Path) -> Checkpoint:
    """The tensors of a ``torch.save``d state dict (or of its entry "model"), as byte ranges; nothing is loaded.

    Raises CheckpointError naming the file: not of torch's zip format (since 1.6), cut short, a pickle that names
    anything but plain floating tensors, a tensor that is not contiguous or lies outside the file.
    """
    path = Path(path)
    _check_pickle(path)
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


def _check_pickle(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            start = file.read(512)
        if not start.startswith(b"PK\x03\x04"):
            hint = _content_hint(start) if start.startswith((b"version ", b"<")) else "an unfinished download, or saved"
            hint += " by torch before 1.6: load and save it again" if hint.startswith("an ") else ""
            raise CheckpointError(f"{path} is not a file of torch.save's zip format: {hint}")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise CheckpointError(f"{path} is a compressed archive: torch.save stores plain bytes")
            pickles = [member for member in members if member.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE:
                raise CheckpointError(f"{path} holds {len(pickles)} data.pkl: expected one, of at most 50 MB")
            content = archive.read(pickles[0])
        for operation, argument, _ in pickletools.genops(content):
            if operation.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4") or (
                operation.name == "GLOBAL" and argument not in _ALLOWED
            ):
                what = repr(argument.replace(" ", ".")) if argument else operation.name
                raise CheckpointError(
                    f"{path} names {what} and not only plain tensors: it is not read, nothing was run"
                )
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except CheckpointError:
        raise
    except Exception as error:  # zipfile and pickletools, too
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from error


def _place(path: Path, name: object, value: object, size: int) -> TensorInfo:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{path}: {str(name)[:80]!r} is {type(value).__name__}: expected names and tensors only")
    if value.dtype not in _DTYPES:
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
    torch.save(dict(tensors), str(unfinished))  # given a name, not a file, it copies no tensor
    with open(unfinished, "rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
