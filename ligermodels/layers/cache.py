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
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            # The past is a constant, the new positions keep their gradient.
            past_k, past_v = self.keys[layer, :, :start], self.values[layer, :, :start]
            return torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    def advance(self, new: int) -> None:
        self.length += new
