"""Llama: 1, 2, 3, 3.1, 3.2, 3.3, CodeLlama, TinyLlama, SmolLM2, and whatever else says ``"model_type": "llama"``.

The family that the others are described against (Touvron et al. 2023; Grattafiori et al. 2024): pre-norm blocks, rotary
positions in half-split layout, grouped-query attention, SwiGLU. Parameter names are Hugging Face's.

Shapes: B batch, S sequence, H hidden_size, A attention heads, K key/value heads, D head_dim, I intermediate_size,
V vocabulary. A·D need not be H. Heads stay third, (B, S, heads, D), everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import nn

from ligermodels.base import CausalLM, CausalLMOutput, Context
from ligermodels.config import Config
from ligermodels.errors import ConfigError
from ligermodels.kernels import rope
from ligermodels.layers.attention import attention
from ligermodels.layers.cache import KVCache
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.linear import linears
from ligermodels.layers.memory import recompute
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.rotary import RotaryEmbedding


@dataclass
class LlamaConfig(Config):
    """config.json of a Llama; keys and defaults as in Hugging Face's LlamaConfig."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    mlp_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act {self.hidden_act!r}: the MLP of {self.model_type} is gated by silu")
        if self.rope.get("partial_rotary_factor", 1) != 1:  # transformers ignores it, or fails on it
            raise ConfigError(
                f"partial_rotary_factor {self.rope['partial_rotary_factor']}: {self.model_type} turns whole heads"
            )


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions: (B, S, H) -> (B, S, H)."""

    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        H, A, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(H, A * D, bias=config.attention_bias)
        self.k_proj = nn.Linear(H, K * D, bias=config.attention_bias)
        self.v_proj = nn.Linear(H, K * D, bias=config.attention_bias)
        self.o_proj = nn.Linear(A * D, H, bias=config.attention_bias)
        self.layer, self.head_dim, self.scale = layer, D, D**-0.5
        self.dropout = config.attention_dropout

    def forward(self, h: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = linears(h, self.q_proj, self.k_proj, self.v_proj)
        q = rearrange(q, "b s (a d) -> b s a d", d=self.head_dim)  # (B, S, A·D) -> (B, S, A, D)
        k = rearrange(k, "b s (k d) -> b s k d", d=self.head_dim)  # (B, S, K, D)
        v = rearrange(v, "b s (k d) -> b s k d", d=self.head_dim)
        q, k = rope(q, k, context.cos, context.sin)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # (B, past + S, K, D)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, context.visible, scale=self.scale, dropout=dropout)
        return self.o_proj(rearrange(out, "b s a d -> b s (a d)"))


class LlamaMLP(GatedMLP):
    """down(silu(gate(h)) · up(h)): (B, S, H) -> (B, S, H)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        H, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(H, intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(intermediate, H, bias=config.mlp_bias)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.gated(h, (self.gate_proj, self.up_proj), self.down_proj, "silu")  # (B, S, I) inside


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, S, H) -> (B, S, H)."""

    attention_class: ClassVar[type[nn.Module]] = LlamaAttention  # families that differ here alone put theirs
    mlp_class: ClassVar[type[nn.Module]] = LlamaMLP
    ends_with_mlp: ClassVar[bool] = True  # what the MLP gives is only added: running again for backward needs it not

    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        self.self_attn = self.attention_class(config, layer)
        self.mlp = self.mlp_class(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute = True

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        h, x = self.input_layernorm(x, fork=True)  # the same x; its gradients meet in the norm's backward
        with recompute(h, self.input_layernorm, x, enabled=self.recompute):
            attended = self.self_attn(h, context)
        h, residual = self.post_attention_layernorm(attended, x)  # residual = x + attended, in the same pass
        with recompute(h, self.post_attention_layernorm, residual, enabled=self.recompute):
            return residual + self.mlp(h)


class LigerLlama(CausalLM):
    """A Llama with its language-model head. ``LigerLlama(config)`` has random weights; see also ``from_hub``."""

    config_class = LlamaConfig
    block_class: ClassVar[type[nn.Module]] = LlamaBlock

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        layers = (self.block_class(config, i) for i in range(config.num_hidden_layers))
        self.model = nn.ModuleDict(
            {
                "embed_tokens": Embedding(config.vocab_size, config.hidden_size, config.pad_token_id),
                "layers": nn.ModuleList(layers),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
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
        inputs_embeds: torch.Tensor | None = None,
    ) -> CausalLMOutput:
        """Next-token logits and, with ``labels``, the loss.

        input_ids (B, S); labels (B, S), -100 ignored, shifted inside; attention_mask (B, cached + S), nonzero = keep;
        position_ids (B or 1, S), by default counted from the cache's length (or each document's start); cu_seqlens
        int32 (documents + 1,) packs documents in the row(s): bounds over the B·S positions, neither attention nor loss
        crosses them. ``cache`` from ``make_cache`` is appended to. The loss is the mean over supervised tokens, or
        their sum over ``num_items_in_batch`` (for gradient accumulation). ``inputs_embeds`` (B, S, H) takes the place
        of the ids' embeddings (multimodal models put images there); the ids are then only checked.

        logits (B, S, V), or of the last ``logits_to_keep`` positions. With labels they are left out while a gradient is
        recorded or the model trains, unless ``logits_to_keep`` asks for some. Raises LigerError for unfit inputs.
        """
        context = self.prepare(input_ids, attention_mask, position_ids, cu_seqlens, cache)
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # (B, S) -> (B, S, H)
        for layer in self.model.layers:
            x = self.run_layer(layer, x, context)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        hidden = self.model.norm(x)
        return self.output(hidden, labels, cu_seqlens, logits_to_keep, num_items_in_batch)
