"""Gemma 1 (2B, 7B, CodeGemma): ``"model_type": "gemma"`` (Gemma Team 2024, arXiv 2403.08295).

What differs from Llama: embeddings are multiplied by √H, norms by 1 + weight in fp32 before they round, the MLP is
gated by gelu (tanh form), head and embedding are one by default, and head_dim is 256 whatever H and A are. Attention
is Llama's. Shapes as in llama.py: B S H A K D I V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ligermodels.base import CausalLM, CausalLMOutput
from ligermodels.config import Config
from ligermodels.errors import ConfigError
from ligermodels.layers.cache import KVCache
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.rotary import RotaryEmbedding
from ligermodels.llama import LlamaBlock


@dataclass
class GemmaConfig(Config):
    """config.json of a Gemma; keys and defaults as in Hugging Face's GemmaConfig.

    The activation is always the tanh form of gelu: published files say ``hidden_act: "gelu"`` and mean it.
    """

    model_type: ClassVar[str] = "gemma"
    architecture: ClassVar[str] = "GemmaForCausalLM"

    vocab_size: int = 256_000
    hidden_size: int = 3072
    intermediate_size: int = 24_576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    bos_token_id: int | list[int] | None = 2
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.hidden_act not in ("gelu", "gelu_pytorch_tanh"):
            raise ConfigError(f"hidden_act {self.hidden_act!r}: the MLP of {name} is gated by gelu_pytorch_tanh")
        if self.hidden_activation not in (None, "gelu_pytorch_tanh"):
            raise ConfigError(
                f"hidden_activation {self.hidden_activation!r}: the MLP of {name} is gated by gelu_pytorch_tanh"
            )
        if self.use_bidirectional_attention:
            raise ConfigError("use_bidirectional_attention true is an embedding model; the models here are causal")
        if self.rope.get("partial_rotary_factor", 1) != 1:
            raise ConfigError(f"partial_rotary_factor {self.rope['partial_rotary_factor']}: {name} turns whole heads")


class ScaledEmbedding(Embedding):
    """An embedding times √H. The factor is rounded to the weight's dtype first, as in training (bf16: √3072 = 55.5)."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(input_ids)  # (B, S) -> (B, S, H)
        return x * torch.full((), self.embedding_dim**0.5, dtype=self.weight.dtype, device=x.device)


def gemma_norm(config: GemmaConfig) -> RMSNorm:
    """x̂·(1 + weight) over H in fp32, rounded once."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0, casting="gemma")


class GemmaMLP(GatedMLP):
    """down(gelu(gate(h)) · up(h)): (B, S, H) -> (B, S, H)."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        H, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, intermediate, bias=False)
        self.up_proj = nn.Linear(H, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, H, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.gated(h, (self.gate_proj, self.up_proj), self.down_proj, "gelu_tanh")  # (B, S, I) inside


class GemmaBlock(LlamaBlock):
    """Llama's wiring with Gemma's norms and MLP."""

    mlp_class = GemmaMLP

    def __init__(self, config: GemmaConfig, layer: int):
        super().__init__(config, layer)
        self.input_layernorm = gemma_norm(config)
        self.post_attention_layernorm = gemma_norm(config)


class LigerGemma(CausalLM):
    """A Gemma with its language-model head. ``LigerGemma(config)`` has random weights; see also ``from_hub``."""

    config_class = GemmaConfig

    def __init__(self, config: GemmaConfig):
        super().__init__(config)
        layers = (GemmaBlock(config, i) for i in range(config.num_hidden_layers))
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
        return self.output(hidden, labels, cu_seqlens, logits_to_keep, num_items_in_batch)
