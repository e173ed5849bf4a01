"""Activations in pinned host memory, on their way while the GPU computes.

A layer's saved tensors of at least ``smallest`` bytes are copied to the host on a stream of their own while the next
layers run forward, and back while the layers after it run backward. Host memory is a pool of pinned chunks that later
steps use again; nothing waits on the host.

Memory is freed by the order of the work on the GPU and not by when the host gets there: ``lag`` layers later the
compute stream waits for the copy, and only then the tensors are let go of. So peak memory is the same in every step.
With copies shorter than ``lag`` layers' compute nothing ever waits.

H200 with PCIe 5: about 50 GB/s each way, so 64 GiB of block inputs (32 layers · 262,144 tokens · 4,096 · 2 bytes) take
1.4 s each way, beside a forward of more than 35 s.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from ligermodels.layers.memory import Kept, Packer, address

CHUNK = 32 * 2**20  # bytes; a power of two, as torch rounds pinned allocations up to one
SMALLEST = 16 * 2**20


class HostPool:
    """Chunks of host memory, pinned for CUDA, that are handed out and taken back."""

    def __init__(self, chunk: int = CHUNK):
        self.chunk, self.free, self.chunks = chunk, [], 0

    def reserve(self, size: int, pinned: bool = True) -> None:
        """Make room now: pinning takes the host a second for a few GiB, which would be in the first step else."""
        self.free += self.take(size, pinned)

    def take(self, size: int, pinned: bool) -> list[torch.Tensor]:
        """Chunks for ``size`` bytes."""
        count = -(-size // self.chunk)
        while len(self.free) < count:
            self.free.append(torch.empty(self.chunk, dtype=torch.uint8, device="cpu", pin_memory=pinned))
            self.chunks += 1
        return [self.free.pop() for _ in range(count)]


class Stored:
    """One storage: on the device until the copy out is done, on the host, and again on the device when fetched."""

    def __init__(self, offload: Offload, t: torch.Tensor):
        self.offload, self.device = offload, t.device
        storage = t.untyped_storage()
        self.size = storage.nbytes()
        self.on_device: torch.Tensor | None = _bytes_of(storage, t.device)
        self.host = offload.pool.take(self.size, t.is_cuda)
        self.saved = self.used = 0
        self.arrived: Any = None
        with offload.beside(self.device, out=True) as done:
            for part, chunk in self._parts(self.on_device):
                chunk.copy_(part, non_blocking=True)
        self.gone = done()

    def _parts(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pieces = flat.split(self.offload.pool.chunk)
        return [(p, c[: p.numel()]) for p, c in zip(pieces, self.host, strict=True)]

    def release(self) -> None:
        """Let go of the device's memory, in the order of the device's work."""
        if self.gone is not None:
            torch.cuda.current_stream(self.device).wait_event(self.gone)
        self.on_device = None

    def fetch(self) -> None:
        """Start the copy back, if it has not been."""
        if self.on_device is None:
            self.on_device = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            with self.offload.beside(self.device, out=False) as done:
                if self.gone is not None:
                    torch.cuda.current_stream(self.device).wait_event(self.gone)
                for part, chunk in self._parts(self.on_device):
                    part.copy_(chunk, non_blocking=True)
            self.arrived = done()

    def storage(self) -> torch.UntypedStorage:
        """On the device, for work that is enqueued now; the last user of a backward lets go of it."""
        self.fetch()
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        found = self.on_device.untyped_storage()
        self.used += 1
        if self.used == self.saved:
            self.on_device, self.arrived, self.used = None, None, 0
        return found

    def __del__(self) -> None:
        if self.on_device is not None and self.arrived is not None:  # fetched and not used: memory still written to
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        self.offload.pool.free += self.host


class _View(NamedTuple):
    stored: Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> torch.Tensor:
        storage = self.stored.storage()
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.size, self.stride)


class Scope(Packer):
    """The saved tensors of one layer in one forward. ``apart``: addresses of what is not to be moved (parameters)."""

    def __init__(self, offload: Offload, apart: set[int]):
        self.offload, self.apart = offload, apart
        self.stored: dict[int, Stored] = {}

    def pack(self, t: torch.Tensor) -> Any:
        plain = type(t) is torch.Tensor and t.layout == torch.strided
        if not plain or t.untyped_storage().nbytes() < self.offload.smallest or address(t) in self.apart:
            return Kept(t, t._version)
        stored = self.stored.get(address(t))
        if stored is None:
            self.stored[address(t)] = stored = Stored(self.offload, t)
        stored.saved += 1
        return _View(stored, t.dtype, t.size(), t.stride(), t.storage_offset())

    def settle(self) -> list[weakref.ref[Stored]]:
        """Release the device's memory; addresses mean nothing from here on. Returns what can be fetched."""
        for stored in self.stored.values():
            stored.release()
        found = [weakref.ref(stored) for stored in self.stored.values()]
        self.stored = {}
        return found


class Offload:
    """Which layers of a model wait in host memory, and when they are copied. One per model.

    lag: after so many further layers a layer's device memory is freed, and so many before its backward it comes back.
    """

    def __init__(self, lag: int = 1, *, pool: HostPool | None = None, smallest: int = SMALLEST):
        self.lag, self.pool, self.smallest = lag, pool or HostPool(), smallest
        self._streams: dict[Any, Any] = {}
        self.begin()

    def __deepcopy__(self, memo: Any) -> Offload:
        return Offload(self.lag, smallest=self.smallest)

    def __reduce__(self) -> Any:
        return Offload, (self.lag,)

    def begin(self) -> None:
        """A new forward."""
        self.recent: collections.deque[Scope | None] = collections.deque(maxlen=self.lag)

    def scope(self, apart: set[int]) -> Scope:
        """Of one layer's forward; ``apart`` as in ``Scope``."""
        return Scope(self, apart)

    def passed(self, scope: Scope | None, out: torch.Tensor) -> None:
        """A layer has run: ``scope`` is what of it is offloaded, ``out`` what it gave."""
        if len(self.recent) == self.lag and self.recent[0] is not None:
            found = self.recent[0].settle()
            # The gradient of ``out`` exists when the backward of this layer begins.
            if out.requires_grad:
                out.register_hook(lambda grad: _fetch(found))  # weak: a loss may outlive its backward
        self.recent.append(scope)

    @contextlib.contextmanager
    def beside(self, device: torch.device, *, out: bool) -> Any:
        """A stream of its own for copies ``out`` of the device or back, behind what is enqueued now. Gives a function
        that, called after the copies, returns an event to wait for (None without CUDA)."""
        if device.type != "cuda":
            yield lambda: None
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        outwards, back = self._streams[device]
        stream = outwards if out else back
        stream.wait_stream(torch.cuda.current_stream(device))
        if out:
            stream.wait_stream(back)  # a chunk may be handed out again while it is still read
        with torch.cuda.stream(stream):
            yield stream.record_event


def _fetch(found: list[weakref.ref[Stored]]) -> None:
    for reference in found:
        if (stored := reference()) is not None:
            stored.fetch()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def apart_of(layer: nn.Module, context: Any) -> set[int]:
    """Addresses of what layers save but must not be moved: their parameters, and the tables that all of them share."""
    shared = [t for t in (*context, *vars(context.visible).values()) if isinstance(t, torch.Tensor)]
    return {address(t) for t in (*layer.parameters(), *shared)}
