"""From files into memory: where a tensor lies, and how it gets to its place, its dtype and its device.

Nothing is allocated but the tensors and small staging buffers. To the CPU without a cast a tensor can be a map of its
file (copy on write). Else threads read it in chunks with plain ``readinto``, straight into its memory, or through a
buffer where it is cast or dequantised. On the way to a GPU the chunks go round a ring of pinned buffers: threads fill
them, the calling thread sends each on, in order and on its own stream, as soon as it is full.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from ligermodels.checkpoints_convert.files import open_file
from ligermodels.checkpoints_convert.safetensors_file import memory
from ligermodels.errors import CheckpointError

CHUNK = 8 << 20  # what one thread reads at a time: Python's share of a chunk (some 50 us) must not show beside it
_READ = 1 << 30  # one read() moves less than 2 GiB on Linux, and fails above it on macOS
THREADS = 16  # at most; one core copies some 5-10 GB/s out of the page cache, 16 about 40, a GPU takes 50
_SPARE = 4  # buffers of the ring beyond one a thread: full ones that wait for their turn, or are on their way
_GRAIN, _SMALL = 512, 1 << 20  # of torch's CUDA allocator: sizes are rounded up; up to this they share small segments


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
    pending: deque[tuple[str, torch.Tensor, list]] = deque()
    in_work = 0
    with (_Ring if device.type == "cuda" else _Readers)(device) as readers:
        for name, info in wanted:
            target = dtype or info.dtype
            if mapped and device.type == "cpu" and _can_be_mapped(info, target):
                pending.append((name, _map(info, maps, taken, name), []))
            else:
                # The device is spelt out: the caller may be under torch.device("meta").
                tensor = torch.empty(info.shape, dtype=target, device=device)
                pending.append((name, tensor, readers.submit(info, tensor.view(-1), name)))
            in_work += pending[-1][1].nbytes
            while pending and in_work > ahead:
                in_work -= pending[0][1].nbytes
                yield readers.finish(*pending.popleft())
        while pending:
            yield readers.finish(*pending.popleft())


def reserve(sizes: Iterable[int], device: torch.device) -> None:
    """Let torch's CUDA allocator find the memory for tensors of ``sizes`` bytes in one piece, if ``device`` is such.

    Else each is a cudaMalloc, which takes up to a millisecond. One block of their sum is allocated and freed at once:
    it stays in the allocator's cache, and the tensors are cut out of it without gaps. For those who load all of them,
    and keep them. The price: empty_cache() gives the piece back once none of them is left; until then, what is freed of
    it serves torch's own tensors alone.

    Nothing happens where it would not fit (loading will say so), where much is cached already (it is used first, and
    the block would come on top), where the allocator was told not to split such blocks (it would lie idle), and for
    allocators other than torch's own.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return
    total = sum(-(-size // _GRAIN) * _GRAIN for size in sizes if size > _SMALL)
    free = torch.cuda.mem_get_info(device)[0]
    stats = torch.cuda.memory_stats(device)
    cached = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
    largest = stats.get("max_split_size", -1)  # below 0: no limit
    if total <= free and cached < total / 8 and not 0 <= largest <= total:
        torch.empty(total, dtype=torch.uint8, device=device)


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


@dataclass(frozen=True)
class _Chunk:
    """``count`` numbers of ``info``, from byte ``start`` of its file on (of a tensor in memory: from number ``start``
    on), and their place; ``scales`` (blocks of rows, blocks of columns) for fp8."""

    name: str
    info: TensorInfo
    start: int
    count: int
    target: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.scales is not None else self.info.dtype

    def put(self, numbers: torch.Tensor) -> None:
        """Their values, cast or scaled, into their place. To CUDA (``numbers`` are pinned then) nothing waits."""
        device = self.target.device
        aside = device.type == "cuda"  # elsewhere the buffer is read into again as soon as this returns
        if self.scales is not None:
            numbers = self._scaled(numbers.to(device, non_blocking=aside))
        elif numbers.dtype != self.target.dtype:  # a cast on the way would run on the host in pageable memory
            numbers = numbers.to(device, non_blocking=aside)
        self.target.copy_(numbers, non_blocking=aside)

    def _scaled(self, raw: torch.Tensor) -> torch.Tensor:
        """fp8 numbers, each times the scale of its block, in fp32."""
        rows, columns = self.info.shape
        scaled, scales = self.info.scaled, self.scales
        assert scaled is not None and scales is not None
        block_rows = torch.arange(scaled.first_row, scaled.first_row + rows, device="cpu") // scaled.block[0]
        wide = scales[block_rows].to(raw.device).repeat_interleave(scaled.block[1], 1)[:, :columns]  # (rows, columns)
        return (raw.view(rows, columns).float() * wide).view(-1)


def _chunks(info: TensorInfo, target: torch.Tensor, name: str) -> Iterator[_Chunk]:
    """A tensor, whose values go to ``target`` (flat), cut into chunks."""
    done = 0
    for part in info.parts or (info,):
        if part.parts:
            raise CheckpointError(f"tensor {name} is joined from parts that are joined themselves")
        count = prod(part.shape)
        flat = target[done : done + count]
        if part.scaled is not None:
            scale = stream_tensors([(name, part.scaled.scale)], dtype=torch.float32, device=torch.device("cpu"))
            matrix = next(scale)[1].view(-1, part.scaled.columns(part.shape[1]))
            step = max(1, CHUNK // 4 // max(1, part.shape[1]))  # their fp32 values take four times as much
            for row in range(0, part.shape[0], step):
                some = part.rows(row, min(row + step, part.shape[0]))
                begin, size = row * part.shape[1], prod(some.shape)
                yield _Chunk(name, some, some.start, size, flat[begin : begin + size], matrix)
        else:
            if part.data is not None:
                part, first, width = replace(part, data=part.data.reshape(-1), dtype=part.data.dtype), 0, 1
            else:
                first, width = part.start, part.dtype.itemsize
            step = CHUNK // part.dtype.itemsize
            for begin in range(0, count, step):
                place = flat[begin : begin + step]
                yield _Chunk(name, part, first + begin * width, place.numel(), place)
        done += count


class _Mine(threading.local):
    """What one reading thread has: an open file and, where numbers change on their way, a buffer."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.file: BinaryIO | None = None
        self.buffer: torch.Tensor | None = None


class _Readers:
    """Threads that fill tensors chunk by chunk."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = min({"cuda": THREADS, "cpu": THREADS // 2}.get(device.type, 1), cores)
        self.pool = ThreadPoolExecutor(self.threads, "ligermodels-read")
        self.mine = _Mine()
        self.files: list[BinaryIO] = []

    def __enter__(self) -> _Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        for file in self.files:
            file.close()

    def submit(self, info: TensorInfo, target: torch.Tensor, name: str) -> list[Future]:
        """Begin to fill ``target`` (flat). On the meta device there is nothing to fill."""
        if self.device.type == "meta":
            return []
        return [self.pool.submit(self._work, chunk) for chunk in _chunks(info, target, name)]

    def finish(self, name: str, tensor: torch.Tensor, futures: list[Future]) -> tuple[str, torch.Tensor]:
        for future in futures:
            future.result()
        return name, tensor

    # ------------------------------------------------------------------ what follows runs in a thread of the pool

    def _work(self, chunk: _Chunk) -> None:
        if self.device.type == "cpu" and chunk.info.data is None and chunk.dtype == chunk.target.dtype:
            self._read(chunk, chunk.target)
        elif chunk.info.data is not None:
            chunk.put(chunk.info.data[chunk.start : chunk.start + chunk.count])
        else:
            mine, size = self.mine, chunk.count * chunk.dtype.itemsize
            if mine.buffer is None or len(mine.buffer) < size:
                mine.buffer = torch.empty(max(size, CHUNK), dtype=torch.uint8, device="cpu")
            chunk.put(self._read(chunk, mine.buffer[:size].view(chunk.dtype)))

    def _read(self, chunk: _Chunk, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers as they are stored, in ``numbers`` (CPU), which is returned."""
        if chunk.info.data is not None:
            return numbers.copy_(chunk.info.data[chunk.start : chunk.start + chunk.count])
        mine = self.mine
        if mine.path != chunk.info.file:
            file = open_file(chunk.info.file)
            if mine.file is not None:
                mine.file.close()
            mine.file, mine.path = file, chunk.info.file
            self.files.append(file)
        fill(mine.file, chunk.start, numbers, chunk.name)  # type: ignore[arg-type]
        return numbers


class _Slot:
    """A buffer of the ring; ``sent`` is when the copy out of it will be done, ``read`` the chunk that is being read."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.sent: torch.cuda.Event | None = None
        self.read: tuple[_Chunk, Future] | None = None


class _Ring(_Readers):
    """Threads that fill pinned buffers, whose content the calling thread sends on, in order, on its current stream.

    So what the stream did before with the memory of a new tensor is over, and what it does next finds the tensor whole.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pinned = device.type == "cuda"  # on the CPU, where tests run it, there is nothing to pin or to wait for
        self.slots = [_Slot() for _ in range(self.threads + _SPARE)]
        self.begun = self.done = 0  # chunks given to the threads, and chunks sent on

    def submit(self, info: TensorInfo, target: torch.Tensor, name: str) -> list[int]:
        for chunk in _chunks(info, target, name):
            if self.begun - self.done == len(self.slots):
                self._send()
            slot = self.slots[self.begun % len(self.slots)]
            slot.read = chunk, self.pool.submit(self._fill, slot, chunk)
            self.begun += 1
        return [self.begun]

    def finish(self, name: str, tensor: torch.Tensor, upto: list[int]) -> tuple[str, torch.Tensor]:
        while any(self.done < number for number in upto):
            self._send()
        return name, tensor

    def _send(self) -> None:
        """The oldest chunk goes on its way."""
        slot = self.slots[self.done % len(self.slots)]
        chunk, future = slot.read  # type: ignore[misc]
        chunk.put(future.result())
        if self.pinned:
            slot.sent = torch.cuda.current_stream(self.device).record_event(slot.sent)
        slot.read = None  # else it would hold its tensor's memory until the slot's next turn
        self.done += 1

    def _fill(self, slot: _Slot, chunk: _Chunk) -> torch.Tensor:  # in a thread of the pool
        if slot.sent is not None:
            slot.sent.synchronize()  # the copy that last used this buffer has left it
        size = chunk.count * chunk.dtype.itemsize
        if slot.buffer is None or len(slot.buffer) < size:
            slot.buffer = torch.empty(max(size, CHUNK), dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
        return self._read(chunk, slot.buffer[:size].view(chunk.dtype))


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
