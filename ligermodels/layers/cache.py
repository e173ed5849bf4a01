"""The key/value cache: keys and values of the positions a model has already seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ligermodels.errors import LigerError

SLACK = 16  # positions that a ring holds beyond its window, so that the last few can be taken back


class Step(NamedTuple):
    """One new position of every row, described on the device alone: a captured forward then serves every length."""

    position: torch.Tensor  # (1,) int64: where the new keys go, the same place for all rows
    start: torch.Tensor  # (B,) int64: each row's first position that is not padding
    longest: int  # known on the host when captured; only rotary tables that depend on the length look at it
    counters: torch.Tensor  # int32 zeros, B · num_key_value_heads: see decode_attention


class KVCache:
    """Static buffers for keys and values, one pair a layer: (B, room, num_key_value_heads, head_dim).

    ``length`` positions are filled. A layer writes its new keys behind them with ``append``; the model calls
    ``advance`` once all layers have. Position p lies in slot p mod room: a layer whose ``window`` is not None is a ring
    that holds little more than the window, so its memory does not grow with ``max_length``.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        windows: Sequence[int | None] | None = None,
    ):
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise LigerError(f"{name} of a cache must be a whole number from 1 to 2147483647, found {value!r}")
        self.windows = list(windows) if windows is not None else [None] * num_layers
        rooms = [max_length if window is None else min(max_length, window + SLACK) for window in self.windows]
        shapes = [(batch_size, room, num_key_value_heads, head_dim) for room in rooms]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.batch_size, self.max_length, self.length = batch_size, max_length, 0
        self.step: Step | None = None  # set while a step is captured or run on the device's own count
        self.turned_for = 0  # the positions that the last keys' rotary frequencies were chosen for
        self._written = 0  # the most positions ever filled since the cache was empty

    def check(self, batch_size: int, new: int) -> None:
        """Raise LigerError unless ``new`` positions of ``batch_size`` rows fit."""
        if batch_size != self.batch_size:
            raise LigerError(f"the cache was made for {self.batch_size} rows, input_ids has {batch_size}")
        if self.length + new > self.max_length:
            raise LigerError(
                f"the cache holds {self.max_length} positions: {self.length} are used and {new} more do not fit; "
                "make it longer with make_cache(batch_size, max_length)"
            )

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k, v (B, S, K, D) of ``layer``; give the keys and values that these S queries may see, in their order.

        That is all length + S positions, or in a layer with a window the last window - 1 + S at most. While ``step``
        is set it is the whole buffers in the order of their slots: see ``ligermodels.kernels.decode_attention``.
        """
        if self.step is not None:
            for buffer, new in ((self.keys[layer], k), (self.values[layer], v)):
                buffer.index_copy_(1, self.step.position % buffer.shape[1], new.to(buffer.dtype))
            return self.keys[layer], self.values[layer]
        window = self.windows[layer]
        reach = self.length if window is None else min(self.length, window - 1)
        return self._append(self.keys[layer], k, reach), self._append(self.values[layer], v, reach)

    def _append(self, buffer: torch.Tensor, new: torch.Tensor, reach: int) -> torch.Tensor:
        end = self.length + new.shape[1]
        # The past is a constant, the new positions keep their gradient. Copies while gradients are recorded: a backward
        # needs the keys as they are now, not as the next forward leaves the buffer. Where the new keys overwrite old
        # ones, these are read first. Under autocast the new keys are narrower than the buffers.
        if self.length == 0:
            seen = new
        elif torch.is_grad_enabled() or end > buffer.shape[1]:
            seen = torch.cat((_last(buffer, self.length, reach).to(new.dtype), new), 1)
        else:
            seen = buffer[:, self.length - reach : end]
        with torch.no_grad():
            _store(buffer, new, end)
        return seen if seen is new else seen.to(new.dtype)

    def advance(self, new: int) -> None:
        """All layers have stored their keys and values of ``new`` more positions."""
        self.length += new
        self._written = max(self._written, self.length)

    def rewind(self, length: int) -> int:
        """Forget the positions from ``length`` on; returns how many are left.

        That is ``length``, or 0 where a ring has already overwritten keys that the next position would see.
        """
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self.length:
            raise LigerError(f"a cache of {self.length} positions cannot be cut to {length!r}")
        for window, keys in zip(self.windows, self.keys, strict=True):
            if window is not None and max(0, length - window + 1) < self._written - keys.shape[1]:
                length = 0
        self.length = length
        if length == 0:
            self._written = 0
        return length


def _last(buffer: torch.Tensor, end: int, count: int) -> torch.Tensor:
    """The ``count`` positions before ``end`` in their order: a view, or a copy where the ring's seam is among them."""
    room = buffer.shape[1]
    first = (end - count) % room
    if first + count <= room:
        return buffer[:, first : first + count]
    return torch.cat((buffer[:, first:], buffer[:, : first + count - room]), 1)


def _store(buffer: torch.Tensor, new: torch.Tensor, end: int) -> None:
    """Write ``new`` (B, S, K, D), the positions before ``end``, to their slots; of more than fit, the last."""
    room = buffer.shape[1]
    new = new[:, -room:]
    first = (end - new.shape[1]) % room
    fits = min(new.shape[1], room - first)
    buffer[:, first : first + fits] = new[:, :fits]
    buffer[:, : new.shape[1] - fits] = new[:, fits:]
