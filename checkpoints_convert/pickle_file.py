"""Old weight files, ``pytorch_model.bin``: pickles, which torch's ``weights_only`` reader opens without running code.

They are mapped, not read: a tensor's bytes enter memory when they are used. Only the zip format (torch 1.6, 2020, and
later) can be mapped.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import warnings
import zipfile
from pathlib import Path

import torch

from ligermodels.checkpoints_convert.files import content_hint, listed
from ligermodels.checkpoints_convert.safetensors_file import DTYPE_NAMES
from ligermodels.errors import CheckpointError

# All that torch.save names for a dict of dense tensors and numbers, as "module name".
_ALLOWED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|torch (Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage"
)
_MAX_OPERATIONS = 1_000_000  # a tensor takes some 25; each may leave an object in memory
_MAX_PICKLE = 10_000_000  # the names and shapes alone; the numbers lie beside it in the archive


def load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one pickle by name, mapped from the file.

    Raises CheckpointError, naming the file, for anything but a dict of dense tensors: a pickle that asks to run code
    (it is not run), a file that is cut short, and the format of torch before 1.6.
    """
    check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        asks = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), "")
        raise CheckpointError(
            f"{path} holds more than tensors, and was not opened, as that could run code: {asks or error!r:.300}"
        ) from error
    except Exception as error:  # a damaged pickle fails in as many ways as there are instructions in it
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {str(error)[:200]} (fetch it again)"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected tensors by name")
    wrong = [str(name)[:100] for name, value in content.items() if not _is_plain(name, value)]
    if wrong:
        raise CheckpointError(f"{path} must hold dense tensors by name, but not so are {listed(wrong)}")
    return {name: tensor.detach() for name, tensor in content.items()}


def _check_names(path: Path, content: bytes) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in damaged text
            for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
                if count > _MAX_OPERATIONS:
                    raise CheckpointError(f"{path} has a pickle of over {_MAX_OPERATIONS} operations, far too many")
                if operation.name == "GLOBAL" and _ALLOWED.fullmatch(argument):
                    continue
                if operation.name in ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "BYTEARRAY8"):
                    what = str(argument).replace(" ", ".") if operation.name == "GLOBAL" else operation.name
                    raise CheckpointError(
                        f"{path} holds more than tensors, and was not opened, as that could run code: it names "
                        f"{what:.200}"
                    )
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged pickle ends in
        raise CheckpointError(f"{path} is damaged: {error} (fetch it again)") from error


def _is_plain(name: object, value: object) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def kind_of(tensor: torch.Tensor) -> str:
    """The safetensors name of a tensor's dtype, where it is one of weights, else torch's."""
    return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def check_archive(path: Path) -> None:
    """Raise CheckpointError unless ``path`` is a whole zip archive of torch.save whose pickle names tensors only.

    torch's ``weights_only`` reader runs no code, but knows names (``bytearray``) that can ask for any amount of memory.
    So the pickle is read as text first.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(512)
            if not start:
                raise CheckpointError(f"{path} is empty (an unfinished download? fetch it again)")
            if not start.startswith(b"PK\x03\x04"):
                hint = "" if start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04") else content_hint(start)
                raise CheckpointError(
                    f"{path} is not a file of torch.save: "
                    + (
                        hint
                        or "expected a zip archive (files of torch before 1.6 must be saved again with a newer one)"
                    )
                )
            with zipfile.ZipFile(file) as archive:
                for record in archive.infolist():
                    if record.compress_type != zipfile.ZIP_STORED:
                        raise CheckpointError(f"{path}: {record.filename} is compressed, which torch.save never does")
                    if record.filename.endswith(".pkl") and record.file_size > _MAX_PICKLE:
                        raise CheckpointError(f"{path}: {record.filename} has {record.file_size} bytes, far too many")
                    if record.filename.endswith(".pkl"):
                        _check_names(path, archive.read(record))
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is cut short or damaged: {error} (fetch it again)") from error
