"""What a model folder is made of: the names of its files, its JSON, and what a file is that should be another.

Nothing that is read is trusted: sizes are checked before files are read, and every fault names its file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from ligermodels.errors import CheckpointError, ConfigError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")

MAX_CONFIG = 2_000_000  # published ones have at most a tenth; parsed JSON may take twenty times its size
_MAX_INDEX = 50_000_000  # 140,000 tensors, the most ever published, take 20 MB


def listed(names: Sequence[str], limit: int = 5) -> str:
    """The first few of many names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def open_file(path: Path) -> BinaryIO:
    """``path`` for reading without a buffer. Raises CheckpointError."""
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
    except ValueError as error:  # a lone surrogate; a null byte
        raise CheckpointError(f"cannot open {str(path)!r}: no file can have this name") from error


def is_file(path: Path) -> bool:
    """As Path.is_file, but False, not an exception, for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long; a lone surrogate; a null byte
        return False


@lru_cache(256)  # an index names the same file for hundreds of tensors
def is_inside(name: str) -> bool:
    """Whether a name read from a file stays in its folder. Lexical: links of the hub's cache lead out, and may."""
    if not name or "\0" in name or "\\" in name or PureWindowsPath(name).drive:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""


def read_text(path: Path) -> str:
    """The text in ``path``. Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def read_json(
    path: Path, error: type[CheckpointError | ConfigError] = CheckpointError, *, limit: int = MAX_CONFIG
) -> dict:
    """The JSON object in ``path``, of at most ``limit`` bytes. Raises ``error``."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise error(f"{path} has {size} bytes: far too large for a {path.name} (at most {limit} are read)")
        content = path.read_bytes()
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}") from cause
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {content_hint(content[:512]) or cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_index(folder: Path, index: str = INDEX) -> dict[str, str]:
    """The index's map from tensor to file, every file in the folder by its name. Raises CheckpointError."""
    path = folder / index
    weight_map = read_json(path, limit=_MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path}: "weight_map" must map tensor names to file names')
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_inside(file):
            raise CheckpointError(
                f"{path} places tensor {name[:200]} in {file!r:.200}, which is not a file of the folder"
            )
    return weight_map


def content_hint(start: bytes) -> str:
    """What a file is that should have been something else, judged by its first bytes; "" if there is nothing to say."""
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"size (\d+)", start)
        real = f" for a file of {size[1].decode()} bytes" if size else ""
        return f"it is a git-LFS pointer{real}; run `git lfs pull` in the repository, or download the file itself"
    if re.match(rb"\s*<(!doctype|html|\?xml)", start, re.IGNORECASE):
        return "it is a web page; a login or error page was saved in its place, download the file again"
    if start.startswith(b"GGUF"):
        return "it is a GGUF file; convert it with `ligermodels convert FILE FOLDER`"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
        return f"it is a pickle (torch.save); rename it to {PICKLE} to have it read, safely, as one"
    return ""


def other_layout(names: set[str]) -> str:
    """How to go on with a folder that holds a model in another layout, judged by the files' names; "" if unknown."""
    convert = "convert it with `ligermodels convert FOLDER NEW_FOLDER`"
    if "adapter_config.json" in names:
        return "it is a LoRA adapter, not a model: merge it into its base model with `ligermodels convert`"
    if "params.json" in names and any(re.fullmatch(r"consolidated\.\d\d\.pth", name) for name in names):
        return f"it is in Meta's layout (params.json, consolidated.*.pth); {convert}"
    if "params.json" in names and any(re.fullmatch(r"consolidated.*\.safetensors", name) for name in names):
        return f"it is in Mistral's layout (params.json, consolidated.safetensors); {convert}"
    if "lit_model.pth" in names:
        return f"it is in LitGPT's layout (lit_model.pth); {convert}"
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        return f"convert {ggufs[0]} with `ligermodels convert FILE NEW_FOLDER`"
    return ""
