"""Phi-3 mini and medium, Phi-3.5-mini, phi-4, Phi-4-mini: ``"model_type": "phi3"``.

What differs from Llama (Abdin et al. 2024):
- q, k, v come from one product, ``qkv_proj`` with rows [q | k | v], and gate and up from another, ``gate_up_proj``;
- every layer may have the same sliding window (``sliding_window`` keys, the query's own among them; null: none);
- the rotation may leave the last dimensions of a head alone (``partial_rotary_factor``), and long-context files scale
  it by LongRoPE, whose old names in Phi-3 files are "su" and "yarn". The length trained for stands at the top level of
  config.json. A sequence longer than that is rotated by the long factors from its first position on, so a cache that
  was filled below that length is wrong beyond it: ``generate`` fills it anew at the crossing;
- in training, ``resid_pdrop`` drops from what attention and MLP add to the residual stream. ``embd_pdrop`` is kept in
  the config but applied nowhere, as in transformers.

Shapes: B batch, S sequence, H hidden_size, A attention heads, K key/value heads, D head_dim, I intermediate_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from ligermodels.base import Context
from ligermodels.config import Config, check_range, check_windows
from ligermodels.errors import ConfigError
from ligermodels.kernels import rope
from ligermodels.layers.attention import attention
from ligermodels.layers.memory import recompute
from ligermodels.layers.mlp import GatedMLP
from ligermodels.llama import LigerLlama, LlamaBlock


@dataclass
class Phi3Config(Config):
    """config.json of a Phi-3; keys and defaults as in Hugging Face's Phi3Config."""

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 32000
    pad_token_id: int | None = 32000
    sliding_window: int | None = None
    partial_rotary_factor: float = 1.0
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act {self.hidden_act!r}: Phi-3's MLP is gated by silu")
        if self.attention_bias:
            raise ConfigError("attention_bias true: Phi-3's projections have no bias")
        check_windows(self, self.sliding_window)
        for name in ("resid_pdrop", "embd_pdrop"):
            check_range(name, getattr(self, name), 0, 1)
        if self.rope["rope_type"] not in ("default", "longrope"):
            raise ConfigError(f"rope_type {self.rope['rope_type']!r}: Phi-3 knows 'default' and 'longrope'")
        self.partial_rotary_factor = self.rope["partial_rotary_factor"]

    @property
    def drops(self) -> bool:
        return super().drops or self.resid_pdrop > 0

    @classmethod
    def translate(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """LongRoPE under the name "yarn", which only Phi-3 files give it, becomes "longrope"."""
        for key in ("rope_scaling", "rope_parameters"):
            given = raw.get(key)
            if isinstance(given, dict) and given.get("rope_type", given.get("type")) == "yarn":
                raw = {**raw, key: {**given, "rope_type": "longrope"}}
        return raw


class Phi3Attention(nn.Module):
    """Llama's, with a window, and q, k and v from one product: (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Phi3Config, layer: int):
        super().__init__()
        H, A, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.qkv_proj = nn.Linear(H, (A + 2 * K) * D, bias=False)
        self.o_proj = nn.Linear(A * D, H, bias=False)
        self.layer, self.head_dim, self.scale = layer, D, D**-0.5
        self.heads = [A, K, K]
        self.window, self.dropout = config.sliding_window, config.attention_dropout

    def forward(self, h: torch.Tensor, context: Context) -> torch.Tensor:
        qkv = rearrange(self.qkv_proj(h), "b s (n d) -> b s n d", d=self.head_dim)  # (B, S, H) -> (B, S, A + 2K, D)
        q, k, v = qkv.split(self.heads, dim=2)  # (B, S, A, D), (B, S, K, D) twice: views
        q, k = rope(q, k, context.cos, context.sin)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # (B, past + S, K, D)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, context.visible, scale=self.scale, window=self.window, dropout=dropout)
        return self.o_proj(rearrange(out, "b s a d -> b s (a d)"))


class Phi3MLP(GatedMLP):
    """down(silu(gate(h)) · up(h)): (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.gated(h, (self.gate_up_proj,), self.down_proj, "silu")  # (B, S, 2I), then (B, S, I) inside


class Phi3Block(LlamaBlock):
    """Llama's wiring, with dropout of what joins the residual stream: (B, S, H) -> (B, S, H)."""

    attention_class = Phi3Attention
    mlp_class = Phi3MLP

    def __init__(self, config: Phi3Config, layer: int):
        super().__init__(config, layer)
        self.dropout = config.resid_pdrop

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        h, x = self.input_layernorm(x, fork=True)  # the same x; its gradients meet in the norm's backward
        with recompute(h, self.input_layernorm, x, enabled=self.recompute):
            attended = F.dropout(self.self_attn(h, context), self.dropout, self.training)
        h, residual = self.post_attention_layernorm(attended, x)  # residual = x + attended, in the same pass
        with recompute(h, self.post_attention_layernorm, residual, enabled=self.recompute):
            return residual + F.dropout(self.mlp(h), self.dropout, self.training)


class LigerPhi3(LigerLlama):
    """A Phi-3 with its language-model head; wired as Llama, with other blocks. See ``LigerLlama`` for ``forward``."""

    config_class = Phi3Config
    block_class = Phi3Block
