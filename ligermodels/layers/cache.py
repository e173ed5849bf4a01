"""The key/value cache: keys and values of the positions a model has already seen."""

from __future__ import annotations

import torch

from ligermodels.errors import LigerError


class KVCache:
    """Static buffers, (B, max_length, num_key_value_heads, head_dim) for keys and values of every layer.

    ``length`` positions are filled. A layer writes its new keys behind them with ``append``; the model calls
    ``advance`` once all layers have.
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
    ):
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise LigerError(f"{name} of a cache must be a whole number from 1 to 2147483647, found {value!r}")
        shape = (num_layers, batch_size, max_length, num_key_value_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.batch_size, self.max_length, self.length = batch_size, max_length, 0

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
        """Store k, v (B, S, K, D) of ``layer``; give keys and values of all length + S positions."""
        start, end = self.length, self.length + k.shape[1]
        with torch.no_grad():
            self.keys[layer, :, start:end] = k
            self.values[layer, :, start:end] = v
        # Under autocast k and v are narrower than the buffers.
        if torch.is_grad_enabled():
            # The past is a constant, the new positions keep their gradient. Copies also where k and v need none: the
            # queries may, and then backward needs the keys as they are now, not as the next forward leaves the buffer.
            past_k, past_v = self.keys[layer, :, :start], self.values[layer, :, :start]
            return torch.cat((past_k.to(k.dtype), k), 1), torch.cat((past_v.to(v.dtype), v), 1)
        return self.keys[layer, :, :end].to(k.dtype), self.values[layer, :, :end].to(v.dtype)

    def advance(self, new: int) -> None:
        self.length += new
