"""Mistral: 7B v0.1, v0.2, v0.3, Nemo, Large, and whatever else says ``"model_type": "mistral"``.

What differs from Llama (Jiang et al. 2023): attention slides. A query sees the last ``sliding_window`` keys, itself
included, in every layer; the reach still grows by a window per layer. Only v0.1 was published with a window (4096);
later files say null, which is plain causal attention. There are no biases. Nemo's heads are narrower than H / A.

Shapes: see llama.py. W is the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange

from ligermodels.base import Context
from ligermodels.config import check_windows
from ligermodels.kernels import rope
from ligermodels.layers.attention import attention
from ligermodels.layers.linear import linears
from ligermodels.llama import LigerLlama, LlamaAttention, LlamaBlock, LlamaConfig


@dataclass
class MistralConfig(LlamaConfig):
    """config.json of a Mistral; keys and defaults as in Hugging Face's MistralConfig.

    ``sliding_window`` absent means 4096, null means none. ``layer_types`` (one of "full_attention" and
    "sliding_attention" a layer), where a file has it, confines the window to some layers, as transformers' loader does.
    """

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    attention_bias: ClassVar[bool] = False  # no keys of this family: a file that has them is not heard
    mlp_bias: ClassVar[bool] = False

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_windows(self, self.sliding_window)

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, itself included; None for all."""
        if self.layer_types is None or self.layer_types[layer] == "sliding_attention":
            return self.sliding_window
        return None

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        if self.layer_types is None:  # the mere key, even null, makes transformers read a Ministral
            del out["layer_types"]
        return out


class MistralAttention(LlamaAttention):
    """Llama's, but for the window. In such a layer the cache holds little more than the window."""

    def __init__(self, config: MistralConfig, layer: int):
        super().__init__(config, layer)
        self.window = config.window(layer)

    def forward(self, h: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = linears(h, self.q_proj, self.k_proj, self.v_proj)
        q = rearrange(q, "b s (a d) -> b s a d", d=self.head_dim)  # (B, S, A·D) -> (B, S, A, D)
        k = rearrange(k, "b s (k d) -> b s k d", d=self.head_dim)  # (B, S, K, D)
        v = rearrange(v, "b s (k d) -> b s k d", d=self.head_dim)
        q, k = rope(q, k, context.cos, context.sin)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # (B, past + S, K, D)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, context.visible, scale=self.scale, window=self.window, dropout=dropout)
        return self.o_proj(rearrange(out, "b s a d -> b s (a d)"))


class MistralBlock(LlamaBlock):
    attention_class = MistralAttention


class LigerMistral(LigerLlama):
    """A Mistral with its language-model head; wired as Llama, with other blocks. See ``LigerLlama`` for ``forward``."""

    config_class = MistralConfig
    block_class = MistralBlock
