"""Folders in Hugging Face layout: config.json beside model.safetensors, or beside shards and their index.

Nothing that is read is trusted: every file is checked against its own header, and the index against the files, before
the first weight is allocated. Old folders with ``pytorch_model.bin`` (pickles) are read without running code.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch

from ligermodels.checkpoints_convert.files import (
    CONFIG,
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    PICKLES,
    SINGLE,
    is_file,
    listed,
    other_layout,
    read_index,
    read_json,
)
from ligermodels.checkpoints_convert.pickle_file import kind_of, load_pickle
from ligermodels.checkpoints_convert.quantised import plain_tensors
from ligermodels.checkpoints_convert.reading import TensorInfo, stream_tensors
from ligermodels.checkpoints_convert.safetensors_file import (
    DTYPE_NAMES,
    Entry,
    known_dtypes,
    read_header,
)
from ligermodels.checkpoints_convert.save import save_checkpoint, save_streamed
from ligermodels.errors import CheckpointError, ConfigError

_T = TypeVar("_T")

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "check_names",
    "open_checkpoint",
    "read_config",
    "save_checkpoint",
    "save_streamed",
]

# Buffers that old versions of transformers stored; RoPE tables and positions are recomputed.
_JUNK = re.compile(r"(^|\.)(rotary_emb\.inv_freq|embeddings\.position_ids)$")


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
        mapped: bool = False,
        ahead: int = 0,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)`` in file order.

        Each tensor is allocated once, at ``dtype`` (default: the file's) and on ``device``, and owned by the caller.
        ``mapped`` lets it be a map of its file instead (copy on write; on the CPU, where no cast is asked for), which
        costs no time and, until it is used, no memory; such a file must be replaced, never overwritten in place. Beyond
        the tensors a few MiB a core are used (pinned if ``device`` is CUDA), and ``ahead`` bytes of tensors in work.

        Raises CheckpointError for a name that the folder lacks, for a dtype that is not floating, and for a file that
        changed or ended since it was opened.
        """
        if dtype is not None and dtype not in DTYPE_NAMES:
            raise CheckpointError(f"weights can be read as {known_dtypes()}, not as {dtype}")
        wanted = list(self.tensors if names is None else dict.fromkeys(names))
        unknown = [name for name in wanted if name not in self.tensors]
        if unknown:
            raise CheckpointError(f"{self.folder} holds no tensor {listed(unknown)}")
        wanted.sort(key=lambda name: (str(self.tensors[name].file), self.tensors[name].start))
        infos = [(name, self.tensors[name]) for name in wanted]
        return stream_tensors(infos, dtype=dtype, device=torch.device(device), mapped=mapped, ahead=ahead)

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """One tensor, as ``stream`` would yield it."""
        return next(self.stream([name], dtype=dtype, device=device))[1]


def read_config(folder: str | PathLike) -> dict:
    """The config.json of ``folder`` (or the JSON file that ``folder`` names) as a dict.

    Raises CheckpointError if there is no such folder, ConfigError if the file is missing or not a JSON object.
    """
    try:
        path = Path(folder)
    except TypeError:
        raise CheckpointError(f"expected the path of a model folder, found {folder!r}") from None
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        raise CheckpointError(f"{str(folder)!r:.200} is no path: {error}") from None
    if not exists:
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
            hint = "; if this is the name of a hub repository, use from_hub"
        raise CheckpointError(f"there is no folder {path}{hint}")
    if path.is_file() and path.suffix != ".json":
        hint = f"give the folder that holds it and {CONFIG}"
        if path.suffix.lower() == ".gguf":
            hint = f"make a folder of it first: ligermodels convert {path} FOLDER"
        raise CheckpointError(f"{path} is a file; {hint}")
    if path.is_dir():
        path = path / CONFIG
        if not is_file(path):
            hint = other_layout({file.name for file in path.parent.iterdir()})
            raise ConfigError(
                f"{path.parent} holds no {CONFIG}: it is not a model folder in Hugging Face layout"
                + (f"; {hint}" if hint else "")
            )
    return read_json(path, ConfigError)


def open_checkpoint(folder: str | PathLike) -> Checkpoint:
    """Check the weights of a folder and say where each tensor lies, reading headers only.

    Reads model.safetensors.index.json and the shards it names, or model.safetensors, or else the same of
    pytorch_model.bin (only through torch's ``weights_only``, which runs no code); any other file is left alone. Rotary
    and position buffers are dropped. fp8 weights with scales are read as numbers again.

    Raises CheckpointError, naming the file, for shards that are missing (all at once), cut short, or something else
    (git-LFS pointer, web page); for an index that disagrees with its shards; for tensors that are not floating (the
    scheme of quantised ones is named); and for folders without weights.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}: expected a model folder in Hugging Face layout")
    index, files = weight_files(folder)
    weight_map = None if index is None else read_index(folder, index)
    if weight_map is not None:
        files = sorted(set(weight_map.values()))
        missing = [name for name in files if not is_file(folder / name)]
        if missing:
            raise _missing(folder, index or "", files, missing)
    data: dict[str, dict[str, torch.Tensor]] = {}
    if files == [PICKLE] or index == PICKLE_INDEX:
        data = _each(folder, files, load_pickle)
        found = {
            file: {name: Entry(kind_of(t), tuple(t.shape), 0, 0) for name, t in tensors.items()}
            for file, tensors in data.items()
        }
    else:
        found = _each(folder, files, read_header)
    owner = {name: file for file in files for name in found[file]}
    if weight_map is not None:
        # The index decides who owns a tensor; a tensor of a named shard that it forgets is kept, and judged by name.
        astray = {name: file for name, file in weight_map.items() if name not in found[file]}
        if astray:
            name, file = next(iter(astray.items()))
            where = f"it is in {owner[name]}" if name in owner else "no shard holds it"
            raise CheckpointError(
                f"{folder / (index or '')} places tensor {name} in {file}, but {where}"
                + (f" (and {len(astray) - 1} more tensors like this)" if len(astray) > 1 else "")
                + ": the index belongs to other shards"
            )
        owner |= weight_map
    paths = {file: folder / file for file in files}
    entries = {name: (paths[file], found[file][name]) for name, file in owner.items() if not _JUNK.search(name)}
    if not entries:
        raise CheckpointError(f"{folder} holds no weights: {', '.join(files)} has no tensors")
    tensors = plain_tensors(folder, entries, _quantization(folder))
    if data:
        tensors = {name: replace(info, data=data[owner[name]][name]) for name, info in tensors.items()}
    return Checkpoint(folder, tensors)


def weight_files(folder: Path) -> tuple[str | None, list[str]]:
    """The index that a folder's weights are read by, or None and the one file. Raises CheckpointError if none is there.

    An index comes before a single file, safetensors before pickles. Where both an index and a single file are there,
    a warning says which is read: transformers takes the other.
    """
    for index, single in ((INDEX, SINGLE), (PICKLE_INDEX, PICKLE)):
        if is_file(folder / index):
            if is_file(folder / single) and single not in read_index(folder, index).values():
                warnings.warn(
                    f"{folder} holds both {index} with its shards and {single}: the shards are read; "
                    "delete what is left over of another save",
                    stacklevel=4,
                )
            return index, []
        if is_file(folder / single):
            return None, [single]
    raise _no_weights(folder)


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
        lines.append(f"  missing: {listed(missing)}")
    if unexpected:
        lines.append("  unexpected: " + listed([f"{name} (in {found[name].file.name})" for name in unexpected]))
    if misshapen:
        shapes = [
            f"{name} (in {found[name].file.name}: {list(found[name].shape)}, the model has {list(expected[name])})"
            for name in misshapen
        ]
        lines.append("  other shape: " + listed(shapes))
    hint = _prefix_hint(missing, unexpected) or _family_hint(checkpoint.folder, model_type)
    if hint:
        lines.append("  " + hint)
    raise CheckpointError("\n".join(lines))


# ---------------------------------------------------------------------------------------------------------- folders


def _each(folder: Path, files: list[str], read: Callable[[Path], _T]) -> dict[str, _T]:
    """``read`` of every file; all that are broken are told at once."""
    results: dict[str, _T] = {}
    broken: list[tuple[str, CheckpointError]] = []
    for name in files:
        try:
            results[name] = read(folder / name)
        except CheckpointError as error:
            broken.append((name, error))
    if broken:
        others = [name for name, _ in broken[1:]]
        more = f" (and {len(others)} more files are broken: {listed(others)})" if others else ""
        raise CheckpointError(f"{broken[0][1]}{more}") from broken[0][1]
    return results


def _missing(folder: Path, index: str, files: list[str], missing: list[str]) -> CheckpointError:
    single = SINGLE if index == INDEX else PICKLE
    hint = f"; {single} is there: delete {index} if it is a leftover" if is_file(folder / single) else ""
    return CheckpointError(
        f"{folder} lacks {len(missing)} of the {len(files)} files that {index} names: "
        f"{listed(missing, 20)} (an unfinished download? fetch them again){hint}"
    )


def _no_weights(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    others = [name for name in names if name.endswith(".safetensors")]
    hint = other_layout(set(names))
    if not hint and others:
        hint = f"{listed(others)} cannot be used without an index, as nothing says which files belong together"
    if not hint and pickles:
        hint = f"{listed(pickles)} cannot be used without {PICKLE_INDEX}; one file alone is read if named {PICKLE}"
    return CheckpointError(
        f"{folder} holds no weights: neither {SINGLE} nor {INDEX} nor {PICKLE} is there" + (f"; {hint}" if hint else "")
    )


def _quantization(folder: Path) -> object:
    try:
        return read_config(folder).get("quantization_config")
    except (CheckpointError, ConfigError):
        return None


# ------------------------------------------------------------------------------------------------------------ names


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
