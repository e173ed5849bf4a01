"""Checkpoints of a training run: written so that a kill at any moment leaves the last good one, and resumed exactly.

    OUT/checkpoint-00000100/         a folder in Hugging Face layout (or of a LoRA adapter), usable as it is, and
        training_state.pt            weights in the precision of training, optimiser, data position, RNG, step

A checkpoint is written under another name, flushed to the disk, and then renamed, which is one atomic operation.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ligermodels.errors import CheckpointError

STATE = "training_state.pt"
_NAME = re.compile(r"checkpoint-(\d{8,})")


class Checkpoints:
    """The checkpoints in a folder; the newest ``keep`` of them stay."""

    def __init__(self, folder: str | Path, *, keep: int = 2):
        self.folder, self.keep = Path(folder), max(1, keep)

    def all(self) -> list[Path]:
        """Complete ones, the newest last."""
        if not self.folder.is_dir():
            return []
        found = [(int(m[1]), path) for path in self.folder.iterdir() if (m := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def latest(self) -> Path | None:
        """The newest complete one."""
        return found[-1] if (found := self.all()) else None

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """Write the checkpoint of ``step``: ``write(folder)`` writes the model, ``state`` is plain data and tensors.

        Raises CheckpointError if it cannot be written; the ones before are then untouched.
        """
        final = self.folder / f"checkpoint-{step:08d}"
        partial = self.folder / f".partial-{final.name}"
        if final.exists():  # resumed there and stopped at once: it is this state
            return final
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".partial-*"):  # of a save, or of a removal, that was killed
                shutil.rmtree(left)
            partial.mkdir()
            write(partial)
            torch.save({"step": step, **state}, partial / STATE)
            for path in (*partial.rglob("*"), partial):
                _flush(path)
            partial.rename(final)
            _flush(self.folder)
            for old in self.all()[: -self.keep]:
                shutil.rmtree(old.rename(self.folder / f".partial-{old.name}"))
        except OSError as error:
            raise CheckpointError(f"{final}: the checkpoint could not be written: {error}") from error
        return final

    def finish(self, write: Callable[[Path], None], name: str = "final") -> Path:
        """Write a result of the run to FOLDER/final (or another name), which appears when it is complete."""
        final, partial = self.folder / name, self.folder / f".partial-{name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        return final

    def load(self) -> dict[str, Any]:
        """State of the newest one, on the CPU. Raises CheckpointError if there is none or it cannot be read."""
        path = self.latest()
        if path is None:
            raise CheckpointError(f"{self.folder}: no checkpoint to resume from")
        try:
            return torch.load(path / STATE, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds
            raise CheckpointError(
                f"{path / STATE}: not a state that can be resumed ({type(error).__name__}). Remove {path} to resume "
                "from the one before"
            ) from error


def _flush(path: Path) -> None:
    """Make sure that a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def random_state() -> dict[str, Any]:
    """State of torch's generators, on the CPU and on every GPU in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators to what ``random_state`` gave; those of GPUs only if there are as many as then."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


class StopSignal:
    """``with StopSignal() as stop:`` SIGINT (Ctrl-C) or SIGTERM sets ``stop.received``; a second one acts as usual.

    The first says on stderr what it does, as a step may take minutes. Only in the main thread, where Python allows it;
    elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        except ValueError:
            pass
        return self

    def _receive(self, number: int, frame: Any) -> None:
        self.received = signal.Signals(number)
        self.__exit__()
        # Past Python's buffers: the signal may have come while they are written to.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{self.received.name}: stopping after this step, a second one stops at once\n".encode())

    def __exit__(self, *exc: Any) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
