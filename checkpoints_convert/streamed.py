"""A model on its way from one layout to another: config and tensors in Hugging Face's terms, made one at a time.

Every reader of a layout gives a ``Source``, every writer takes one, so that n readers and m writers make n·m
conversions. Writers work in a folder beside their target and move the result there at the very end; what an interrupted
run left in it is used again where it is proved to be what this run would write.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoints_convert.companions import TEMPLATE_FOLDER, companions, refuse_link, remove_stale
from ligermodels.checkpoints_convert.files import CONFIG, INDEX, is_file, listed, read_index
from ligermodels.checkpoints_convert.hf import Checkpoint, TensorInfo, open_checkpoint
from ligermodels.checkpoints_convert.safetensors_file import DTYPE_NAMES, DTYPES, read_header, write_safetensors
from ligermodels.checkpoints_convert.save import index_of, own_shards, parse_size, plan_shards, to_json, write_bytes
from ligermodels.errors import CheckpointError

__all__ = ["Source", "WorkFolder", "expect_shapes", "from_checkpoint", "open_hf", "write_hf", "write_shards"]

_PLAN = "plan.json"
_DONE = " done"  # after the plan's hash: all files are written, and only have to be moved
_OURS = re.compile(rf"[0-9a-f]{{64}}({_DONE})?")
_REPLACED = "replaced"  # the marker of the model in whose place the new one comes


@dataclass(frozen=True)
class Source:
    """``tensors``: Hugging Face name → shape and dtype (a meta tensor). ``make(name)`` reads that one, on the CPU.

    ``config`` is a Hugging Face config.json with every key present that the family's arithmetic needs. ``files`` are
    copied along: name → path of a file, or the content of a JSON file.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    make: Callable[[str], torch.Tensor]
    files: dict[str, Path | dict] = field(default_factory=dict)

    def cast(self, dtype: torch.dtype | None) -> Source:
        """The same weights rounded to ``dtype``; None keeps each tensor's own. Overflow is an error."""
        if dtype is None:
            first = next(t.dtype for t in self.tensors.values())
            return replace(self, config=with_dtype(self.config, first))
        make = self.make

        def rounded(name: str) -> torch.Tensor:
            return to_dtype(make(name), dtype, f"{self.path}: tensor {name}")

        tensors = {name: torch.empty(t.shape, dtype=dtype, device="meta") for name, t in self.tensors.items()}
        return replace(self, config=with_dtype(self.config, dtype), tensors=tensors, make=rounded)

    def add_files(self, texts: dict[str, bytes]) -> dict[str, Path]:
        """Add the files that are given by content to ``texts``; returns those to copy, by name, that are not there."""
        texts |= {name: to_json(content, name) for name, content in self.files.items() if isinstance(content, dict)}
        return {name: path for name, path in self.files.items() if isinstance(path, Path) and name not in texts}


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """``tensor`` rounded to ``dtype``. Raises CheckpointError where a finite number would become infinite."""
    out = tensor.to(dtype)
    narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if narrower and not torch.isfinite(out).all() and torch.isfinite(tensor).all():
        raise CheckpointError(f"{what} holds numbers up to {tensor.abs().max().item():g}, too large for {dtype}")
    return out


def says_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config.json ties the head to the embedding; where the key is absent, the family's default holds."""
    tied = config.get("tie_word_embeddings")
    return str(config.get("model_type")).startswith("gemma") if tied is None else bool(tied)


def with_dtype(config: dict, dtype: torch.dtype) -> dict:
    """``config`` saying that the weights are of ``dtype``, under the old key and the new one."""
    name = str(dtype).removeprefix("torch.")
    return config | {"dtype": name, "torch_dtype": name}


def expect_shapes(path: Path, found: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raise CheckpointError unless ``found`` (name → something with a shape) has exactly the ``expected`` shapes."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"{path} lacks the tensors {listed(missing)}")
    unknown = [name for name in found if name not in expected]
    if unknown:
        raise CheckpointError(f"{path} holds tensors that {what} has not: {listed(unknown)}")
    for name, shape in expected.items():
        if tuple(found[name].shape) != tuple(shape):
            raise CheckpointError(f"{path}: tensor {name} is {list(found[name].shape)}, expected {list(shape)}")


def from_checkpoint(checkpoint: Checkpoint, config: dict, files: Mapping[str, Path | dict]) -> Source:
    """A checked checkpoint, as it is, as a source."""
    tensors = {
        name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in checkpoint.tensors.items()
    }
    return Source(checkpoint.folder, config, tensors, checkpoint.read, dict(files))


def open_hf(folder: Path, config: dict) -> Source:
    """A folder of Hugging Face layout with its complete ``config``. Raises as ``open_checkpoint`` does."""
    return from_checkpoint(open_checkpoint(folder), config, companions(folder))


# ------------------------------------------------------------------------------------------------------------- writing


class WorkFolder:
    """The folder beside ``target`` (``target``.partial) in which it grows, and its move into place.

    >>> with WorkFolder(target, names, plan, marker="config.json", force=False) as work:
    ...     if not work.finished:
    ...         write(work.path / "config.json")  # and all other ``names``

    ``names`` are the files that the target will hold; None if it is one file itself. ``marker`` is the file without
    which it does not load. ``own`` are files of an earlier model of this layout in the target. ``plan`` is anything
    that JSON can write and that differs between runs that write different bytes: what an interrupted run of the same
    plan left is kept, that of another is removed. An error leaves the folder for the next run. ``finished``: such a run
    had written everything, and only the move is left to do.

    With ``force``, a model in the target (its marker or its weights are there) is replaced with all that belongs to
    one: ``own``, and tokenizer, templates, generation config, as known by their names. Files of other names stay.

    Raises CheckpointError if the target (one of its names, in an existing folder) is there and ``force`` is not given.
    """

    def __init__(
        self,
        target: Path,
        names: Iterable[str] | None,
        plan: object,
        *,
        marker: str = "",
        own: Iterable[str] = (),
        force: bool = False,
    ) -> None:
        if target.name in ("", ".."):  # "." has no name that another could be made of
            target = Path(os.path.abspath(target))
            if not target.name:
                raise CheckpointError(f"{target} cannot be the target: give a folder")
        self.target, self.is_file, self.force = target, names is None, force
        self.names = [target.name] if names is None else list(names)
        self.marker, self.own, self._held = marker, set(own), None
        self.path = target.with_name(target.name + ".partial")
        self.plan = hashlib.sha256(json.dumps([plan, self.names], sort_keys=True, default=str).encode()).hexdigest()
        self.finished = self._is_finished()
        self._check()

    def _place(self, name: str) -> Path:
        return self.target if self.is_file else self.target / name

    def _left(self) -> list[str]:
        """Names that are still to be moved."""
        return [name for name in self.names if (self.path / name).exists()]

    def _is_finished(self) -> bool:
        """Whether a run of this plan was killed after its last file was written: what is not here is there."""
        if _plan_in(self.target) == self.plan + _DONE:  # killed between the renaming of the folder and the end
            return not self.force
        if _plan_in(self.path) != self.plan + _DONE:
            return False
        left = self._left()
        moved = all(self._place(name).exists() for name in self.names if name not in left)
        return moved and (bool(left) or not self.force)

    def _check(self) -> None:
        target, how = self.target, "choose another name, or pass force (--force)"
        if target.is_symlink() and not target.exists():
            raise CheckpointError(f"{target} is a link to {os.readlink(target)}, which is not there")
        if self.is_file and target.is_dir():
            raise CheckpointError(f"{target} is a folder: give the file to write")
        if not self.is_file and target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file: give the folder to write")
        if self.force or any(name.startswith(f"{TEMPLATE_FOLDER}/") for name in self.names):
            refuse_link(target)
        if self.force:
            return
        names = self._left() if self.finished else self.names if self.is_file else {*self.names, *self.own}
        taken = sorted(name for name in names if os.path.lexists(self._place(name)))
        if taken and self.is_file:
            raise CheckpointError(f"{target} already exists: {how}")
        if taken:
            raise CheckpointError(f"{target} already holds {taken[0]}: {how}")

    def __enter__(self) -> WorkFolder:
        try:
            plan = self.path / _PLAN
            if self.path.exists():
                found, empty = _plan_in(self.path), {_PLAN} if _is_empty(plan) else set()
                if found is None and {path.name for path in self.path.iterdir()} - empty:
                    raise CheckpointError(f"{self.path} is in the way, and it is not ours: move it away")
                if found is not None:
                    self._lock(plan)
                if found != self.plan and not self.finished:
                    self._remove()
            self.path.mkdir(parents=True, exist_ok=True)
            if _plan_in(self.path) is None:
                write_bytes(plan, self.plan.encode())
            self._lock(plan)
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.path}: {error}") from error
        return self

    def _lock(self, plan: Path) -> None:
        """Two runs at once would write into each other's files. The lock ends with the process, however that ends."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        if self._held is not None:
            self._held.close()
        self._held = open(plan, "a")  # noqa: SIM115 - held until the run ends
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held.close()
            raise CheckpointError(f"another run is writing to {self.path}: wait for it, or end it") from None
        except OSError:
            pass  # a file system without locks

    def write(self, texts: Mapping[str, bytes], copies: Mapping[str, Path]) -> None:
        """The files beside the weights, by name."""
        for name, text in texts.items():
            write_bytes(self.path / name, text)
        for name, path in copies.items():
            (self.path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, self.path / name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._leave(error)
        finally:
            if self._held is not None:
                self._held.close()

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, OSError):
            raise CheckpointError(f"could not write {self.path}: {error}") from error
        if error is None:
            try:
                self._finish()
            except OSError as failed:
                raise CheckpointError(f"could not move {self.path} to {self.target}: {failed}") from failed

    def _finish(self) -> None:
        """Only names change here. Without its marker a folder does not load, so that one goes first and comes last."""
        self._check()
        left = self._left()
        if left and not self.finished:
            with open(self.path / _PLAN, "a") as plan:
                plan.write(_DONE)
        if left and not self.is_file and not self.target.exists():
            tops = {name.split("/")[0] for name in self.names}
            for stray in {path.name for path in self.path.iterdir()} - {*tops, _PLAN}:
                (self.path / stray).unlink()
            os.replace(self.path, self.target)
        elif left:
            self._replace(left)
        if self.path.exists():
            self._remove()
        if not self.is_file and _plan_in(self.target) is not None:
            (self.target / _PLAN).unlink()

    def _replace(self, left: list[str]) -> None:
        """Move ``left`` into a folder that is there, in the place of the model that it may hold."""
        old = self.path / _REPLACED
        if self.marker and self._place(self.marker).exists():
            os.replace(self._place(self.marker), old)
        if old.exists() or any(self._place(name).exists() for name in self.own):
            remove_stale(self.target, self.names)
        for name in self.own - set(self.names):
            self._place(name).unlink(missing_ok=True)
        for name in sorted(left, key=lambda name: name == self.marker):
            self._place(name).parent.mkdir(exist_ok=True)
            os.replace(self.path / name, self._place(name))

    def _remove(self) -> None:
        """The folder goes, and last of it the plan: without one, what is left would not be known as ours."""
        for path in self.path.iterdir():
            if path.name != _PLAN:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.rmtree(self.path)


def _plan_in(folder: Path) -> str | None:
    """What the plan of a run in ``folder`` says; None if there is none, or a file of that name that no run wrote."""
    path = folder / _PLAN
    if not is_file(path) or path.stat().st_size > 100:
        return None
    text = path.read_text(errors="replace")
    return text if _OURS.fullmatch(text) else None


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.stat().st_size


def write_hf(
    source: Source, target: Path, *, max_shard_size: int | str = "5GB", force: bool = False, plan: object = None
) -> Path:
    """Write a folder of Hugging Face layout: weights, index, config.json and the source's files. Returns it.

    At most one tensor is held at a time. Raises CheckpointError for a target that is taken, and as the source's
    ``make`` does.
    """
    text = to_json(source.config, CONFIG)
    return write_shards(source, target, "model", (CONFIG, text), max_shard_size=max_shard_size, force=force, plan=plan)


def write_shards(
    source: Source,
    target: Path,
    stem: str,
    config: tuple[str, bytes],
    *,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    plan: object = None,
) -> Path:
    """Write ``source.tensors`` as ``stem``.safetensors, or above ``max_shard_size`` as numbered shards with an index.

    ``config`` (name, content) and the source's files go beside them. ``plan`` tells this run from one on other input.
    """
    shards = plan_shards(source.tensors, parse_size(max_shard_size), stem)
    texts, index = dict([config]), f"{stem}.safetensors.index.json"
    if len(shards) > 1:
        texts[index] = to_json(index_of(source.tensors, shards), INDEX)
    copies = source.add_files(texts)
    layout = {name: [str(t.dtype), list(t.shape)] for name, t in source.tensors.items()}
    work = WorkFolder(
        target,
        [*shards, *texts, *copies],
        [plan, layout, list(shards)],
        marker=config[0],
        own={*own_shards(target, stem), index},
        force=force,
    )
    with work, progress(source.tensors, target) as bar:
        if work.finished:
            return target
        for file, names in shards.items():
            wanted = {name: source.tensors[name] for name in names}
            if _is_finished(work.path / file, wanted):
                for name in names:
                    bar.update(wanted[name].nbytes)
                continue

            def make(name: str) -> torch.Tensor:
                tensor = source.make(name)
                bar.update(tensor.nbytes)
                return tensor

            unfinished = work.path / (file + ".tmp")
            write_safetensors(unfinished, wanted, make)
            os.replace(unfinished, work.path / file)
        work.write(texts, copies)
    return target


def progress(tensors: Mapping[str, torch.Tensor], target: Path) -> Any:
    """A bar in bytes, shown on a terminal only."""
    from tqdm import tqdm

    total = sum(t.nbytes for t in tensors.values())
    return tqdm(total=total, desc=f"writing {target.name}", unit="B", unit_scale=True, disable=None)


def _is_finished(path: Path, wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether an earlier run finished this shard: a sound file of the right size that holds just these tensors."""
    if not path.is_file():
        return False
    try:
        header = read_header(path)
    except CheckpointError:
        return False
    found = {name: (kind, shape) for name, (kind, shape, *_) in header.items()}
    return found == {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in wanted.items()}


def open_files(folder: Path, stem: str) -> dict[str, TensorInfo]:
    """The tensors of ``stem``.safetensors, or of the files that its index names: headers are read and checked.

    Raises CheckpointError naming the file that is missing or broken, or a tensor that is not of a floating dtype.
    """
    index, files = f"{stem}.safetensors.index.json", [f"{stem}.safetensors"]
    if (folder / index).is_file():
        files = sorted(set(read_index(folder, index).values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {listed(missing)}")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, (kind, shape, start, end) in read_header(folder / file).items():
            if kind not in DTYPES:
                raise CheckpointError(f"{folder / file}: tensor {name} is {kind}: expected a floating dtype")
            if name in tensors:
                raise CheckpointError(f"{folder / file}: tensor {name} is in {tensors[name].file.name}, too")
            tensors[name] = TensorInfo(folder / file, DTYPES[kind], shape, start, end)
    return tensors


def fingerprint(*paths: Path) -> list:
    """What tells a source from another, or from itself after a change: names, sizes and times of its files.

    Shards in a folder within (an index may name such), named chat templates and all parts of a split GGUF are among
    them.
    """
    files: set[Path] = set()
    patterns = ("*", "*/*.safetensors", f"{TEMPLATE_FOLDER}/*.jinja")
    for path in paths:
        part = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})", path.stem)
        if path.is_dir():
            files |= {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
        elif part is not None:
            parts = path.parent.glob(f"*-of-{part[2]}{path.suffix}")
            files |= {file for file in parts if file.name.startswith(part[1])}
        else:
            files.add(path)
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]
