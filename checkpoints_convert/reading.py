"""From files into memory: where a tensor lies, and how it gets to its place, its dtype and its device.

Nothing is allocated but the tensors and small staging buffers. To the CPU without a cast a tensor can be a map of its
file (copy on write). Else threads read it in chunks with plain ``readinto``, straight into its memory, or through a
buffer where it is cast, dequantised or sent to a GPU: there each thread has two pinned buffers and a stream of its own,
so that one buffer is read into while the other drains.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from ligermodels.checkpoints_convert.files import open_file
from ligermodels.checkpoints_convert.safetensors_file import memory
from ligermodels.errors import CheckpointError

CHUNK = 4 << 20  # what one thread reads at a time; a buffer of it is small, and system calls do not show beside it
_READ = 1 << 30  # one read() moves less than 2 GiB on Linux, and fails above it on macOS
THREADS = 16  # at most; one core copies some 5-10 GB/s out of the page cache, a GPU takes 50


@dataclass(frozen=True)
class Scaled:
    """How fp8 values become numbers: each is multiplied by the scale of its block of ``block`` (rows, columns)."""

    scale: TensorInfo
    block: tuple[int, int]
    first_row: int = 0  # of the stored tensor, where this one is a part of it

    def columns(self, columns: int) -> int:
        """How many blocks make up a row."""
        return -(-columns // self.block[1])


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: bytes ``start`` to ``end`` of ``file``, counted from the file's beginning.

    ``dtype`` is what it is read as by default. A tensor may also be the concatenation of ``parts`` (its values are
    theirs, one after the other; file, start and end are then the first part's), fp8 numbers with scales, or ``data``:
    a tensor of a pickle, mapped from its file.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    parts: tuple[TensorInfo, ...] = ()
    scaled: Scaled | None = None
    data: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def is_fp8(self) -> bool:
        return self.scaled is not None or any(part.is_fp8 for part in self.parts)

    @staticmethod
    def joined(parts: Iterable[TensorInfo], shape: tuple[int, ...]) -> TensorInfo:
        """A tensor of ``shape`` whose values are those of ``parts``, in order (experts stacked, gate over up, …)."""
        parts = tuple(parts)
        if not parts or sum(prod(part.shape) for part in parts) != prod(shape):
            raise CheckpointError(
                f"{len(parts)} parts {[list(p.shape) for p in parts[:3]]} do not make up {list(shape)}"
            )
        return TensorInfo(parts[0].file, parts[0].dtype, tuple(shape), parts[0].start, parts[0].end, parts)

    def rows(self, start: int, end: int) -> TensorInfo:
        """Rows ``start`` to ``end``: a range of the same bytes."""
        if self.parts:
            raise CheckpointError(f"rows of a tensor that is joined from {len(self.parts)} parts cannot be taken")
        row = (self.end - self.start) // self.shape[0]
        return replace(
            self,
            shape=(end - start, *self.shape[1:]),
            start=self.start + start * row,
            end=self.start + end * row,
            scaled=self.scaled and replace(self.scaled, first_row=self.scaled.first_row + start),
            data=None if self.data is None else self.data[start:end],
        )


def stream_tensors(
    wanted: Iterable[tuple[str, TensorInfo]],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device,
    mapped: bool = False,
    ahead: int = 0,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` in the order of ``wanted``, each of them complete (on CUDA: for the current stream).

    ``mapped`` lets a tensor be a map of its file where nothing has to be changed. Up to ``ahead`` bytes of tensors are
    in work beyond the one that is waited for. Raises CheckpointError for a file that changed since it was checked.
    """
    maps: dict[Path, torch.UntypedStorage] = {}
    taken: set[int] = set()
    pending: deque[tuple[str, torch.Tensor, list[Future]]] = deque()
    in_work = 0
    with _Readers(device) as readers:
        for name, info in wanted:
            target = dtype or info.dtype
            if mapped and device.type == "cpu" and _can_be_mapped(info, target):
                pending.append((name, _map(info, maps, taken, name), []))
            else:
                # The device is spelt out: the caller may be under torch.device("meta").
                tensor = torch.empty(info.shape, dtype=target, device=readers.device)
                pending.append((name, tensor, readers.submit(info, tensor.view(-1), name)))
            in_work += pending[-1][1].nbytes
            while pending and in_work > ahead:
                in_work -= pending[0][1].nbytes
                yield readers.finish(*pending.popleft())
        while pending:
            yield readers.finish(*pending.popleft())


# ---------------------------------------------------------------------------------------------------------- mapping


def _can_be_mapped(info: TensorInfo, dtype: torch.dtype) -> bool:
    if info.data is not None:
        return info.dtype == dtype and info.data.is_contiguous() and info.data.dtype == dtype
    plain = not info.parts and info.scaled is None and info.dtype == dtype and info.end > info.start
    return plain and info.start % dtype.itemsize == 0


def _map(info: TensorInfo, maps: dict[Path, torch.UntypedStorage], taken: set[int], name: str) -> torch.Tensor:
    if info.data is not None:
        address = info.data.untyped_storage().data_ptr()
        shared = address in taken  # a pickle may hold one memory under two names, and training one must not train both
        taken.add(address)
        return info.data.clone() if shared else info.data
    if info.file not in maps:
        try:
            # A private map: what is written to it never reaches the file.
            size = info.file.stat().st_size
            whole = torch.from_file(str(info.file), shared=False, size=size, dtype=torch.uint8, device="cpu")
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot map {info.file}: {error}") from error
        maps.clear()  # files come one after the other; the tensors keep the maps that they need
        maps[info.file] = whole.untyped_storage()
    storage = maps[info.file]
    if info.end > storage.nbytes():
        raise _ended(info.file, name, max(0, storage.nbytes() - info.start), info.end - info.start)
    # A storage of its own: whoever saves or shares this tensor gets its bytes and not those of the whole file.
    own = storage[info.start : info.end]
    return torch.empty(0, dtype=info.dtype, device="cpu").set_(own, 0, info.shape)


# ---------------------------------------------------------------------------------------------------------- reading


def _ended(path: object, name: str, done: int, expected: int) -> CheckpointError:
    return CheckpointError(f"{path} ended while tensor {name} was read ({done} of {expected} bytes): did it change?")


def fill(file: BinaryIO, start: int, tensor: torch.Tensor, name: str) -> None:
    """Read as many bytes as ``tensor`` (CPU, contiguous) has, from byte ``start`` on, into its memory."""
    target = memory(tensor)
    file.seek(start)
    done = 0
    while done < len(target):
        try:
            count = file.readinto(target[done : done + _READ])
        except OSError as error:
            raise CheckpointError(f"cannot read tensor {name} from {file.name}: {error.strerror}") from error
        if not count:
            raise _ended(file.name, name, done, len(target))
        done += count


class _Mine(threading.local):
    """What one reading thread has: an open file, its buffers (on CUDA two, with events that say when each is free)."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.file: BinaryIO | None = None
        self.buffers: list[torch.Tensor | None] = [None, None]
        self.events: list[torch.cuda.Event | None] = [None, None]
        self.stream: torch.cuda.Stream | None = None
        self.turn = 0


class _Readers:
    """Threads that fill tensors chunk by chunk."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        if self.cuda and device.index is None:  # the threads would take another one for the current
            self.device = torch.device("cuda", torch.cuda.current_device())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = {"cuda": THREADS, "cpu": THREADS // 2}.get(device.type, 1)
        self.pool = ThreadPoolExecutor(min(threads, cores), "ligermodels-read")
        self.mine = _Mine()
        self.files: list[BinaryIO] = []
        self.streams: list[torch.cuda.Stream] = []

    def __enter__(self) -> _Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        for file in self.files:
            file.close()
        for stream in self.streams:  # after an error copies may be under way into memory that is free already
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def submit(self, info: TensorInfo, target: torch.Tensor, name: str) -> list[Future]:
        """Begin to fill ``target`` (flat). On the meta device there is nothing to fill."""
        if self.device.type == "meta":
            return []
        ready = None
        if self.cuda:  # its memory may still be in use by what the current stream was asked for before
            ready = torch.cuda.current_stream(self.device).record_event()
        futures: list[Future] = []
        done = 0
        for part in info.parts or (info,):
            count = prod(part.shape)
            works = self._works(part, target[done : done + count], name)
            futures += [self.pool.submit(self._run, work, ready) for work in works]
            done += count
        return futures

    def finish(self, name: str, tensor: torch.Tensor, futures: list[Future]) -> tuple[str, torch.Tensor]:
        for future in futures:
            event = future.result()
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)
        return name, tensor

    def _works(self, info: TensorInfo, target: torch.Tensor, name: str) -> Iterator[Callable[[], None]]:
        """The chunks of a tensor that is not joined, as calls."""
        if info.parts:
            raise CheckpointError(f"tensor {name} is joined from parts that are joined themselves")
        if info.data is not None:
            yield partial(self._move, info.data.reshape(-1), target)
        elif info.scaled is not None:
            scale = stream_tensors([(name, info.scaled.scale)], dtype=torch.float32, device=torch.device("cpu"))
            matrix = next(scale)[1].view(-1, info.scaled.columns(info.shape[1]))
            step = max(1, CHUNK // 4 // max(1, info.shape[1]))  # their fp32 values take four times as much
            for row in range(0, info.shape[0], step):
                part = info.rows(row, min(row + step, info.shape[0]))
                begin = row * info.shape[1]
                yield partial(self._scale, part, matrix, target[begin : begin + prod(part.shape)], name)
        else:
            width = info.dtype.itemsize
            straight = self.device.type == "cpu" and info.dtype == target.dtype
            for number, part in enumerate(target.split(CHUNK // width)):
                work = self._read if straight else self._convert
                yield partial(work, info, info.start + number * CHUNK, part, name)

    # ------------------------------------------------------------------ what follows runs in a thread of the pool

    def _run(self, work: Callable[[], None], ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        if not self.cuda:
            work()
            return None
        mine = self.mine
        if mine.stream is None:
            mine.stream = torch.cuda.Stream(self.device)
            self.streams.append(mine.stream)
        with torch.cuda.stream(mine.stream):
            mine.stream.wait_event(ready)
            work()
            event = mine.stream.record_event()
        mine.events[mine.turn] = event
        return event

    def _read(self, info: TensorInfo, start: int, target: torch.Tensor, name: str) -> None:
        mine = self.mine
        if mine.path != info.file:
            if mine.file is not None:
                mine.file.close()
            mine.file, mine.path = open_file(info.file), info.file
            self.files.append(mine.file)
        fill(mine.file, start, target, name)  # type: ignore[arg-type]

    def _staged(self, info: TensorInfo, start: int, count: int, dtype: torch.dtype, name: str) -> torch.Tensor:
        """``count`` numbers of the file, in a buffer of this thread; valid until the second call from now."""
        mine, size = self.mine, count * dtype.itemsize
        mine.turn = 1 - mine.turn if self.cuda else 0
        busy = mine.events[mine.turn]
        if busy is not None:
            busy.synchronize()  # the copy that last used this buffer has left it
        buffer = mine.buffers[mine.turn]
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(max(size, CHUNK), dtype=torch.uint8, device="cpu", pin_memory=self.cuda)
            mine.buffers[mine.turn] = buffer
        numbers = buffer[:size].view(dtype)
        self._read(info, start, numbers, name)
        return numbers

    def _convert(self, info: TensorInfo, start: int, target: torch.Tensor, name: str) -> None:
        self._move(self._staged(info, start, target.numel(), info.dtype, name), target)

    def _move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.dtype != target.dtype:  # a cast on the way would run on the host in pageable memory
            source = source.to(self.device, non_blocking=self.cuda)
        target.copy_(source, non_blocking=self.cuda)

    def _scale(self, info: TensorInfo, scales: torch.Tensor, target: torch.Tensor, name: str) -> None:
        """fp8 numbers, each times the scale of its block, in fp32."""
        rows, columns = info.shape
        scaled = info.scaled
        assert scaled is not None
        raw = self._staged(info, info.start, rows * columns, torch.float8_e4m3fn, name)
        block_rows = torch.arange(scaled.first_row, scaled.first_row + rows) // scaled.block[0]
        wide = scales[block_rows].to(self.device).repeat_interleave(scaled.block[1], 1)[:, :columns]  # (rows, columns)
        values = raw.to(self.device, non_blocking=self.cuda).view(rows, columns).float()
        target.copy_((values * wide).view(-1))


# -------------------------------------------------------------------------------------------------------- comparing


def same_values(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors hold the same numbers, read chunk by chunk: two buffers, whatever their size."""
    if a.shape != b.shape:
        return False
    if a.dtype != b.dtype or any(i.parts or i.scaled or i.data is not None for i in (a, b)):
        cpu = torch.device("cpu")
        (_, x), (_, y) = stream_tensors([("", a), ("", b)], dtype=torch.float32, device=cpu)
        return torch.equal(x, y)
    buffers = [torch.empty(CHUNK, dtype=torch.uint8, device="cpu") for _ in range(2)]
    with open_file(a.file) as file_a, open_file(b.file) as file_b:
        for offset in range(0, a.end - a.start, CHUNK):
            count = min(CHUNK, a.end - a.start - offset)
            x, y = (buffer[:count] for buffer in buffers)
            fill(file_a, a.start + offset, x, "")
            fill(file_b, b.start + offset, y, "")
            words = torch.int64 if count % 8 == 0 else torch.uint8  # bits: eight bytes at a time are five times faster
            if not torch.equal(x.view(words), y.view(words)) and not torch.equal(x.view(a.dtype), y.view(a.dtype)):
                return False  # not even as numbers (0 and -0 are equal)
    return True
