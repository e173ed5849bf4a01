"""Qwen 3, dense: 0.6B to 32B, base, Instruct, Thinking, and whatever else says ``"model_type": "qwen3"``.

What differs from Llama (Yang et al. 2025): every head of q and k is normalised before it is rotated, by one weight of D
numbers for all heads of q and one for all of k; one kernel does both. ``head_dim`` is 128 unless the file says
otherwise, never H / A. The windows are Qwen 2's, the biases are not: ``attention_bias`` (q, k, v and o) is off in all
published files. Up to 4B the head is tied to the embedding, and the files hold a copy of it all the same.

Shapes: see llama.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange

from ligermodels.base import Context
from ligermodels.kernels import qk_norm_rope
from ligermodels.layers.attention import attention
from ligermodels.layers.linear import linears
from ligermodels.layers.memory import recompute
from ligermodels.layers.norm import RMSNorm
from ligermodels.llama import LigerLlama, LlamaAttention, LlamaBlock
from ligermodels.qwen2 import Qwen2Config


@dataclass
class Qwen3Config(Qwen2Config):
    """config.json of a Qwen 3; keys and defaults as in Hugging Face's Qwen3Config. Windows as in ``Qwen2Config``."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    head_dim: int = 128
    attention_bias: bool = False


class Qwen3Attention(LlamaAttention):
    """Llama's, with normed heads of q and k, and a window where the layer has one: (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.window = config.window(layer)
        self.recompute = True

    def forward(self, h: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = linears(h, self.q_proj, self.k_proj, self.v_proj)
        q = rearrange(q, "b s (a d) -> b s a d", d=self.head_dim)  # (B, S, A·D) -> (B, S, A, D)
        k = rearrange(k, "b s (k d) -> b s k d", d=self.head_dim)  # (B, S, K, D)
        v = rearrange(v, "b s (k d) -> b s k d", d=self.head_dim)

        def turn(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights = self.q_norm.weight, self.k_norm.weight
            return qk_norm_rope(q, k, *weights, context.cos, context.sin, self.q_norm.eps)

        turned_q, turned_k = turn(q, k)
        # q and k are kept for the norms' backward anyway, so attention need not keep them turned as well.
        with recompute((turned_q, turned_k), turn, q, k, enabled=self.recompute):
            if context.cache is not None:
                turned_k, v = context.cache.append(self.layer, turned_k, v)  # (B, past + S, K, D)
            dropout = self.dropout if self.training else 0.0
            out = attention(
                turned_q, turned_k, v, context.visible, scale=self.scale, window=self.window, dropout=dropout
            )
        return self.o_proj(rearrange(out, "b s a d -> b s (a d)"))


class Qwen3Block(LlamaBlock):
    attention_class = Qwen3Attention


class LigerQwen3(LigerLlama):
    """A dense Qwen 3 with its language-model head; wired as Llama. See ``LigerLlama`` for ``forward``."""

    config_class = Qwen3Config
    block_class = Qwen3Block
