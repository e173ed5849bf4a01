"""Gemma 2 (2B, 9B, 27B): ``"model_type": "gemma2"`` (Gemma Team 2024, arXiv 2408.00118).

What differs from Gemma: four norms a layer, before and after each of attention and MLP ("sandwich"); even layers see a
sliding window only; scores are scaled by query_pre_attn_scalar^-½, not D^-½; scores and logits are bounded by soft
caps, c·tanh(x / c). Shapes as in llama.py: B S H A K D I V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import nn

from ligermodels.base import CausalLM, CausalLMOutput, Context
from ligermodels.config import check_windows
from ligermodels.errors import ConfigError
from ligermodels.gemma import GemmaConfig, GemmaMLP, ScaledEmbedding, gemma_norm
from ligermodels.kernels import rope
from ligermodels.layers.attention import attention
from ligermodels.layers.cache import KVCache
from ligermodels.layers.linear import linears
from ligermodels.layers.memory import recompute
from ligermodels.layers.rotary import RotaryEmbedding

LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass
class Gemma2Config(GemmaConfig):
    """config.json of a Gemma 2; keys and defaults as in Hugging Face's Gemma2Config.

    ``layer_types`` names the layers that see only ``sliding_window`` keys, themselves included; where it is missing,
    every layer does but each second one.
    """

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    pattern: ClassVar[int] = 2  # each pattern-th layer sees everything

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPES[(i + 1) % self.pattern == 0] for i in range(self.num_hidden_layers)]
        check_windows(self, self.sliding_window)
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 2**31:
                raise ConfigError(f"{name} must be positive, found {value!r}")

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, itself included; None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


class Gemma2Attention(nn.Module):
    """Llama's, with a window, a soft cap on the scores and a scale of its own: (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Gemma2Config, layer: int):
        super().__init__()
        H, A, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(H, A * D, bias=config.attention_bias)
        self.k_proj = nn.Linear(H, K * D, bias=config.attention_bias)
        self.v_proj = nn.Linear(H, K * D, bias=config.attention_bias)
        self.o_proj = nn.Linear(A * D, H, bias=config.attention_bias)
        self.layer, self.head_dim, self.scale = layer, D, config.query_pre_attn_scalar**-0.5
        self.window, self.softcap = config.window(layer), config.attn_logit_softcapping
        self.dropout = config.attention_dropout

    def forward(self, h: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = linears(h, self.q_proj, self.k_proj, self.v_proj)
        q = rearrange(q, "b s (a d) -> b s a d", d=self.head_dim)  # (B, S, A·D) -> (B, S, A, D)
        k = rearrange(k, "b s (k d) -> b s k d", d=self.head_dim)  # (B, S, K, D)
        v = rearrange(v, "b s (k d) -> b s k d", d=self.head_dim)
        q, k = rope(q, k, context.cos, context.sin)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # (B, past + S, K, D)
        out = attention(
            q, k, v, context.visible, scale=self.scale, window=self.window, softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.o_proj(rearrange(out, "b s a d -> b s (a d)"))


class Gemma2Block(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): (B, S, H) -> (B, S, H)."""

    attention_class: ClassVar[type[nn.Module]] = Gemma2Attention  # Gemma 3 differs here alone

    def __init__(self, config: Gemma2Config, layer: int):
        super().__init__()
        self.self_attn = self.attention_class(config, layer)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = gemma_norm(config)
        self.post_attention_layernorm = gemma_norm(config)
        self.pre_feedforward_layernorm = gemma_norm(config)
        self.post_feedforward_layernorm = gemma_norm(config)
        self.recompute = True

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        h, x = self.input_layernorm(x, fork=True)  # the same x; its gradients meet in the norm's backward
        with recompute(h, self.input_layernorm, x, enabled=self.recompute):
            attended = self.self_attn(h, context)
        attended = self.post_attention_layernorm(attended)
        h, residual = self.pre_feedforward_layernorm(attended, x)  # residual = x + attended, in the same pass
        with recompute(h, self.pre_feedforward_layernorm, residual, enabled=self.recompute):
            out = self.mlp(h)
        return residual + self.post_feedforward_layernorm(out)


class LigerGemma2(CausalLM):
    """A Gemma 2 with its language-model head. ``LigerGemma2(config)`` has random weights; see also ``from_hub``."""

    config_class = Gemma2Config

    def __init__(self, config: Gemma2Config):
        super().__init__(config)
        layers = (Gemma2Block(config, i) for i in range(config.num_hidden_layers))
        self.model = nn.ModuleDict(
            {
                "embed_tokens": ScaledEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id),
                "layers": nn.ModuleList(layers),
                "norm": gemma_norm(config),
                "rotary_emb": RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self.init_weights()

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> CausalLMOutput:
        """Next-token logits and, with ``labels``, the loss: arguments, shapes and errors as ``LigerLlama.forward``."""
        context = self.prepare(input_ids, attention_mask, position_ids, cu_seqlens, cache)
        x = self.model.embed_tokens(input_ids)  # (B, S) -> (B, S, H), times √H
        for layer in self.model.layers:
            x = self.run_layer(layer, x, context)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        hidden = self.model.norm(x)
        softcap = self.config.final_logit_softcapping
        return self.output(hidden, labels, cu_seqlens, logits_to_keep, num_items_in_batch, softcap)
