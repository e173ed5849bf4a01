"""Folders in Hugging Face layout: config.json beside model.safetensors, or beside shards and their index.

Nothing that is read is trusted: every file is checked against its own header, and the index against the files, before
the first weight is allocated. Weights are read with plain ``readinto`` straight into their final memory. (A memory map
would be shorter, but its pages count as resident, which doubles the peak.) Pickles are never opened.

safetensors layout: 8 bytes little-endian header length N, N bytes of JSON
``{name: {"dtype", "shape", "data_offsets": [start, end]}, "__metadata__": {str: str}}``, then the tensors' bytes.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

import torch

from ligermodels.errors import CheckpointError, ConfigError

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "check_names",
    "open_checkpoint",
    "read_config",
    "save_checkpoint",
    "save_streamed",
]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")

# Bits per element, so that every header can be checked; only the four below them are weights.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64}
_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_MAX_HEADER = 100_000_000  # what safetensors itself accepts
_MAX_JSON = 100_000_000
_STAGING = 16 << 20  # two halves; small beside any model, large enough that system calls do not show
_READ = 1 << 30  # one read() moves less than 2 GiB on Linux, and fails above it on macOS

# Buffers that old versions of transformers stored; RoPE tables and positions are recomputed.
_JUNK = re.compile(r"(^|\.)(rotary_emb\.inv_freq|embeddings\.position_ids)$")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: bytes ``start`` to ``end`` of ``file``, counted from the file's beginning."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checked folder. Holds no weights and no open file; read it with ``stream`` or ``read``."""

    folder: Path
    tensors: dict[str, TensorInfo]

    def stream(
        self,
        names: Iterable[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)`` in file order, with one file open at a time.

        Each tensor is allocated once, at ``dtype`` (default: the file's) and on ``device``, and owned by the caller.
        Beyond the tensors themselves 16 MiB are used (pinned if ``device`` is CUDA).

        Raises CheckpointError for a name that the folder lacks, for a dtype that is not floating, and for a file that
        changed or ended since it was opened.
        """
        if dtype is not None and dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"weights can be read as {_known_dtypes()}, not as {dtype}")
        wanted = list(self.tensors if names is None else dict.fromkeys(names))
        unknown = [name for name in wanted if name not in self.tensors]
        if unknown:
            raise CheckpointError(f"{self.folder} holds no tensor {_listed(unknown)}")
        return self._stream(wanted, dtype, torch.device(device))

    def _stream(
        self, names: list[str], dtype: torch.dtype | None, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        names.sort(key=lambda name: (str(self.tensors[name].file), self.tensors[name].start))
        staging = None
        for path, group in groupby(names, key=lambda name: self.tensors[name].file):
            with _open(path) as file:
                for name in group:
                    info = self.tensors[name]
                    # The device is spelt out: the caller may be under torch.device("meta").
                    tensor = torch.empty(info.shape, dtype=dtype or info.dtype, device=device)
                    file.seek(info.start)
                    if device.type == "cpu" and tensor.dtype == info.dtype:
                        _fill(file, tensor.view(-1), name)
                    else:
                        staging = staging or _Staging(device)
                        staging.fill(file, tensor.view(-1), info.dtype, name)
                    yield name, tensor

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """One tensor, as ``stream`` would yield it."""
        return next(self.stream([name], dtype=dtype, device=device))[1]


def read_config(folder: str | os.PathLike) -> dict:
    """The config.json of ``folder`` (or the JSON file that ``folder`` names) as a dict.

    Raises CheckpointError if there is no such folder, ConfigError if the file is missing or not a JSON object.
    """
    try:
        path = Path(folder)
    except TypeError:
        raise CheckpointError(f"expected the path of a model folder, found {folder!r}") from None
    if not path.exists():
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
            hint = "; if this is the name of a hub repository, use from_hub"
        raise CheckpointError(f"there is no folder {path}{hint}")
    if path.is_file() and path.suffix != ".json":
        raise CheckpointError(f"{path} is a file; give the folder that holds it and {CONFIG}")
    if path.is_dir():
        path = path / CONFIG
        if not path.is_file():
            raise ConfigError(f"{path.parent} holds no {CONFIG}: it is not a model folder in Hugging Face layout")
    return _read_json(path, ConfigError)


def open_checkpoint(folder: str | os.PathLike) -> Checkpoint:
    """Check the weights of a folder and say where each tensor lies, reading headers only.

    Reads model.safetensors.index.json and the shards it names, or model.safetensors; any other file is left alone.
    Rotary and position buffers are dropped. Raises CheckpointError, naming the file, for shards that are missing (all
    at once), cut short, or something else (git-LFS pointer, web page, pickle); for an index that disagrees with its
    shards; for tensors that are not F64, F32, F16 or BF16 (quantised weights); and for folders without safetensors.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}: expected a model folder in Hugging Face layout")
    if (folder / INDEX).is_file():
        weight_map = _read_index(folder)
    elif (folder / SINGLE).is_file():
        weight_map = None
    else:
        raise _no_weights(folder)

    files = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        hint = f"; {SINGLE} is there: delete {INDEX} if it is a leftover" if (folder / SINGLE).is_file() else ""
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(files)} files that {INDEX} names: "
            f"{', '.join(missing)} (an unfinished download? fetch them again){hint}"
        )
    headers = {name: _read_header(folder / name) for name in files}

    owner = {name: file for file in files for name in headers[file]}
    if weight_map is not None:
        # The index decides who owns a tensor; a tensor of a named shard that it forgets is kept, and judged by name.
        astray = {name: file for name, file in weight_map.items() if name not in headers[file]}
        if astray:
            name, file = next(iter(astray.items()))
            where = f"it is in {owner[name]}" if name in owner else "no shard holds it"
            raise CheckpointError(
                f"{folder / INDEX} places tensor {name} in {file}, but {where}"
                + (f" (and {len(astray) - 1} more tensors like this)" if len(astray) > 1 else "")
                + ": the index belongs to other shards"
            )
        owner |= weight_map

    tensors = {}
    for name, file in owner.items():
        if _JUNK.search(name):
            continue
        kind, shape, start, end = headers[file][name]
        if kind not in _DTYPES:
            raise _quantised(folder, folder / file, name, kind)
        tensors[name] = TensorInfo(folder / file, _DTYPES[kind], shape, start, end)
    if not tensors:
        raise CheckpointError(f"{folder} holds no weights: {', '.join(files)} has no tensors")
    return Checkpoint(folder, tensors)


def check_names(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    optional: Collection[str] = (),
    model_type: str | None = None,
) -> None:
    """Raise one CheckpointError unless the folder holds exactly the ``expected`` names with their shapes.

    ``optional`` names may be absent (a tied head). ``model_type`` is the family that the caller builds, for a hint when
    the folder's config.json says another. Lists up to five missing, unexpected and misshapen tensors each.
    """
    found = checkpoint.tensors
    allowed = set(expected) | set(optional)
    missing = [name for name in expected if name not in found and name not in optional]
    unexpected = [name for name in found if name not in allowed]
    misshapen = [name for name in expected if name in found and found[name].shape != tuple(expected[name])]
    if not (missing or unexpected or misshapen):
        return

    lines = [f"the tensors in {checkpoint.folder} do not fit the model:"]
    if missing:
        lines.append(f"  missing: {_listed(missing)}")
    if unexpected:
        lines.append("  unexpected: " + _listed([f"{name} (in {found[name].file.name})" for name in unexpected]))
    if misshapen:
        shapes = [
            f"{name} (in {found[name].file.name}: {list(found[name].shape)}, the model has {list(expected[name])})"
            for name in misshapen
        ]
        lines.append("  other shape: " + _listed(shapes))
    hint = _prefix_hint(missing, unexpected) or _family_hint(checkpoint.folder, model_type)
    if hint:
        lines.append("  " + hint)
    raise CheckpointError("\n".join(lines))


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
    not load. Shards that an earlier save left are removed; files of others are not touched.

    Raises CheckpointError for names that share memory (drop the tied one), tensors without data or with a dtype that
    is not F64, F32, F16 or BF16, values that are not JSON, and for a disk that refuses.
    """
    _check_memory(tensors)
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
    limit = _parse_size(max_shard_size)
    if not tensors:
        raise CheckpointError("there are no tensors to save")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"tensor {name} is {tensor.dtype}: only {_known_dtypes()} can be saved")
    texts = {CONFIG: _to_json(config, CONFIG)}
    for name, content in extra_json.items():
        if PurePosixPath(name).name != name or not name.endswith(".json") or name in (CONFIG, INDEX):
            raise CheckpointError(f"extra_json: {name!r} is not the name of a further .json file")
        texts[name] = _to_json(content, name)

    shards = _plan_shards(tensors, limit)
    if len(shards) > 1:
        index = {
            "metadata": {
                "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
                "total_size": sum(_nbytes(tensor) for tensor in tensors.values()),
            },
            "weight_map": {name: file for file, names in shards.items() for name in names},
        }
        texts[INDEX] = _to_json(index, INDEX)

    mark = f".{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stale = _own_files(folder) - set(shards)
        try:
            for file, names in shards.items():
                _write_safetensors(folder / (file + mark), {name: tensors[name] for name in names}, make)
            for file, text in texts.items():
                _write_bytes(folder / (file + mark), text)
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


# ---------------------------------------------------------------------------------------------------------- reading


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from error


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without numpy (which torch does not require)."""
    size = _nbytes(tensor)
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fill(file: BinaryIO, tensor: torch.Tensor, name: str) -> None:
    """Read as many bytes as ``tensor`` (CPU, contiguous) has into its memory."""
    memory = _memory(tensor)
    done = 0
    while done < len(memory):
        try:
            count = file.readinto(memory[done : done + _READ])
        except OSError as error:
            raise CheckpointError(f"cannot read tensor {name} from {file.name}: {error.strerror}") from error
        if not count:
            raise CheckpointError(
                f"{file.name} ended while tensor {name} was read ({done} of {len(memory)} bytes): did it change?"
            )
        done += count


class _Staging:
    """Two small host buffers through which tensors are cast or sent to a device, one being read as the other drains."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_cuda = device.type == "cuda"
        self.halves = torch.empty(2, _STAGING // 2, dtype=torch.uint8, device="cpu", pin_memory=on_cuda)
        self.events = [torch.cuda.Event(), torch.cuda.Event()] if on_cuda else None

    def fill(self, file: BinaryIO, target: torch.Tensor, dtype: torch.dtype, name: str) -> None:
        for turn, part in enumerate(target.split(_STAGING // 2 // dtype.itemsize)):
            half = self.halves[turn % 2].view(dtype)[: part.numel()]
            if self.events is None:
                _fill(file, half, name)
                part.copy_(half)
                continue
            event = self.events[turn % 2]
            event.synchronize()  # the copy that last used this half has left it
            _fill(file, half, name)
            # A cast during the transfer would run on the host in pageable memory, so transfer first.
            part.copy_(half if dtype == part.dtype else half.to(self.device, non_blocking=True), non_blocking=True)
            event.record(torch.cuda.current_stream(self.device))


def _read_json(path: Path, error: type[CheckpointError | ConfigError]) -> dict:
    try:
        size = path.stat().st_size
        if size > _MAX_JSON:
            raise error(f"{path} has {size} bytes: far too large for a {path.name}")
        content = path.read_bytes()
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}") from cause
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {_content_hint(content[:512]) or cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    weight_map = _read_json(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path}: "weight_map" must map tensor names to file names')
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_inside(file):
            raise CheckpointError(f"{path} places tensor {name} in {file!r}, which is not a file of the folder")
    return weight_map


def _is_inside(name: str) -> bool:
    """Whether a name read from a file stays in the folder. Lexical: links of the hub's cache lead out, and may."""
    if not name or "\0" in name or "\\" in name or PureWindowsPath(name).drive:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """``{name: (dtype, shape, start, end)}`` of one safetensors file, checked; offsets are in the file."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(512)
        if not start:
            raise CheckpointError(f"{path} is empty (an unfinished download? fetch it again)")
        if size < 8:
            raise CheckpointError(f"{path} has only {size} bytes: a safetensors file has at least 8 (fetch it again)")
        length = int.from_bytes(start[:8], "little")
        if length > _MAX_HEADER:
            hint = _content_hint(start)  # all that it knows begins with bytes that make an absurd length
            if hint:
                raise CheckpointError(f"{path} is not a safetensors file: {hint}")
            raise CheckpointError(
                f"{path} is not a safetensors file: its first 8 bytes give a header of {length} bytes "
                f"(at most {_MAX_HEADER} are allowed)"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is cut short within its header: at least {8 + length} bytes expected, {size} found "
                "(fetch it again)"
            )
        file.seek(8)
        raw = file.read(length)
    if len(raw) < length:
        raise CheckpointError(f"{path} ended while its header was read")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a broken header: {error}") from error

    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        entries[name] = _check_entry(path, name, entry)
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
    return {name: (kind, shape, base + begin, base + end) for name, (kind, shape, begin, end) in entries.items()}


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _check_entry(path: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
        numbers = (*shape, begin, end)
        good = isinstance(kind, str) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise CheckpointError(f"{path}: the header's entry for tensor {name} is broken: {str(entry)[:200]}")
    if kind not in _BITS:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {kind[:40]!r}")
    expected = math.prod(shape) * _BITS[kind] // 8
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name} ({kind}, {list(shape)}) needs {expected} bytes, the header gives {end - begin}"
        )
    return kind, shape, begin, end


def _content_hint(start: bytes) -> str:
    """What a file is that should have been something else, judged by its first bytes; "" if there is nothing to say."""
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"size (\d+)", start)
        real = f" for a file of {size[1].decode()} bytes" if size else ""
        return f"it is a git-LFS pointer{real}; run `git lfs pull` in the repository, or download the file itself"
    if re.match(rb"\s*<(!doctype|html|\?xml)", start, re.IGNORECASE):
        return "it is a web page; a login or error page was saved in its place, download the file again"
    if start.startswith(b"GGUF"):
        return "it is a GGUF file; convert it with `python -m ligermodels.checkpoints_convert FILE FOLDER`"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
        return "it is a pickle (torch.save), which can run code when it is opened, and is not read"
    return ""


def _no_weights(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    if not pickles:
        pickles = [name for name in names if name.endswith((".bin.index.json",))]
    if pickles:
        return CheckpointError(
            f"{folder} holds its weights only as pickles ({_listed(pickles)}), which can run code when they are "
            "opened, and are not read. If you trust their author, convert them once with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(NEW_FOLDER)"
        )
    hint = ""
    ggufs = [name for name in names if name.endswith(".gguf")]
    others = [name for name in names if name.endswith(".safetensors")]
    if ggufs:
        hint = f"; convert {ggufs[0]} with `python -m ligermodels.checkpoints_convert FILE FOLDER`"
    elif others:
        hint = f"; {_listed(others)} cannot be used without an index, as nothing says which files belong together"
    return CheckpointError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there{hint}")


def _quantised(folder: Path, file: Path, name: str, kind: str) -> CheckpointError:
    try:
        quantization = read_config(folder).get("quantization_config")
    except (CheckpointError, ConfigError):
        quantization = None
    scheme = quantization.get("quant_method") if isinstance(quantization, dict) else None
    said = f" (config.json says: {scheme})" if scheme else ""
    return CheckpointError(
        f"{folder} looks quantised{said}: tensor {name} in {file.name} is {kind}, and reading it as plain weights "
        f"would be wrong. Use the unquantised repository; weights may be {_known_dtypes()}"
    )


def _known_dtypes() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPE_NAMES)


# ------------------------------------------------------------------------------------------------------------ names


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _prefix_hint(missing: list[str], unexpected: list[str]) -> str:
    """Say so if one prefix, too many or too few, explains most of what does not match."""
    wanted, surplus = set(missing), set(unexpected)
    enough = len(unexpected) / 2

    def explains(rename: Callable[[str], str | None]) -> bool:
        return sum(rename(name) in wanted for name in surplus) > enough

    for prefix in ("module.", "_orig_mod.", "model.", "base_model.model."):
        if explains(lambda name, p=prefix: name.removeprefix(p) if name.startswith(p) else None):
            return f'the names in the folder carry the prefix "{prefix}": strip it (a wrapper was saved with the model)'
        if explains(lambda name, p=prefix: p + name):
            return f'the names in the folder lack the prefix "{prefix}"'
    for part in (r"_orig_mod\.", r"module\.", r"(_orig_mod|module)\."):
        if explains(lambda name, p=part: re.sub(p, "", name)):
            return "the names in the folder carry the wrappers' parts _orig_mod. or module.: strip them"
    return ""


def _family_hint(folder: Path, model_type: str | None) -> str:
    try:
        found = read_config(folder).get("model_type")
    except (CheckpointError, ConfigError):
        return ""
    if not isinstance(found, str) or found == model_type:
        return ""
    built = f", the class is for {model_type!r}" if model_type else ""
    return f"config.json says model_type {found!r}{built}: ligermodels.from_pretrained picks the class by it"


# ----------------------------------------------------------------------------------------------------------- writing


def _parse_size(size: int | str) -> int:
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


def _check_memory(tensors: Mapping[str, torch.Tensor]) -> None:
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


def _to_json(value: object, name: str) -> bytes:
    try:
        # Sorted as transformers sorts them; other files (a tokenizer's vocabulary) keep their order.
        text = json.dumps(value, indent=2, sort_keys=name in (CONFIG, INDEX), ensure_ascii=False)
        return (text + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be written as JSON: {error}") from error


def _plan_shards(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, list[str]]:
    """File name → tensor names: filled in order, a shard is closed by the tensor that no longer fits.

    A tensor above the limit gets a shard of its own, and the open one stays open, as in huggingface_hub.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, tensor in tensors.items():
        size = _nbytes(tensor)
        if size > limit:
            shards.append([name])
            continue
        if current and used + size > limit:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += size
    if current:
        shards.append(current)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], make: Callable[[str], torch.Tensor]) -> None:
    # Widest dtype first keeps every tensor aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        tensor = tensors[name]
        end = position + _nbytes(tensor)
        kind = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in names:
            tensor = make(name).detach().to("cpu").contiguous()
            if (tensor.shape, tensor.dtype) != (tensors[name].shape, tensors[name].dtype):
                raise CheckpointError(f"tensor {name} was made as {tensor.dtype} {list(tensor.shape)}, unlike promised")
            file.write(_memory(tensor))
        file.flush()
        os.fsync(file.fileno())


def _write_bytes(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _own_files(folder: Path) -> set[str]:
    """Weight files of an earlier save: model.safetensors, and numbered shards that the present index names."""
    own = {SINGLE}
    try:
        named = _read_index(folder).values() if (folder / INDEX).is_file() else ()
    except CheckpointError:
        named = ()  # an index that cannot be read names nothing that may be deleted
    return own | {file for file in named if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", file)}
