"""Qwen 3, mixtures of experts: 30B-A3B, 235B-A22B, and whatever else says ``"model_type": "qwen3_moe"``.

What differs from Qwen 3 (Yang et al. 2025): the MLP is a mixture of experts, as Mixtral's, but finer: E = 128 narrow
MLPs (I = ``moe_intermediate_size``), k = 8 of them a token. ``norm_topk_prob`` says whether the weights of a token's
experts add up to 1 (all published files: yes) or stay what the softmax over all E gave. Layers in ``mlp_only_layers``,
and those that ``decoder_sparse_step`` skips, have one plain MLP of ``intermediate_size``; no published file has any.
A window, where it is switched on, slides in all layers. Files name the experts gate_proj, up_proj, down_proj.

Shapes: see llama.py and mixtral.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ligermodels.base import Context
from ligermodels.checkpoints_convert.rewrites import to_expert_names
from ligermodels.config import check_windows
from ligermodels.errors import ConfigError
from ligermodels.layers.memory import recompute
from ligermodels.layers.moe import Routing, SparseMoe
from ligermodels.layers.norm import RMSNorm
from ligermodels.llama import LlamaConfig, LlamaMLP
from ligermodels.mixtral import LigerMixtral, check_experts
from ligermodels.qwen3 import Qwen3Attention


@dataclass
class Qwen3MoeConfig(LlamaConfig):
    """config.json of a Qwen 3 mixture; keys and defaults as in Hugging Face's Qwen3MoeConfig.

    ``num_local_experts``, as transformers 5 writes it, is read as ``num_experts``. The auxiliary loss is Mixtral's.
    """

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    mlp_bias: ClassVar[bool] = False  # no key of this family: a file that has it is not heard

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: list[int] | None = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mlp_only_layers = self.mlp_only_layers or []
        check_windows(self, self.sliding_window if self.use_sliding_window else None)
        for name in ("decoder_sparse_step", "moe_intermediate_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_experts:
            check_experts("num_experts", self.num_experts, self.num_experts_per_tok)
        elif self.num_experts < 0:
            raise ConfigError(f"num_experts must not be negative, found {self.num_experts}")

    @classmethod
    def translate(cls, raw: dict[str, Any]) -> dict[str, Any]:
        if "num_local_experts" in raw:
            experts = raw.pop("num_local_experts")
            raw.setdefault("num_experts", experts)
        return raw

    def window(self, layer: int) -> int | None:
        """How many keys a query sees, itself included; None for all."""
        return self.sliding_window if self.use_sliding_window else None

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        due = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and due and layer not in self.mlp_only_layers


class Qwen3MoeBlock(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)): (B, S, H) -> (B, S, H), and what a router decided, if any."""

    def __init__(self, config: Qwen3MoeConfig, layer: int):
        super().__init__()
        self.self_attn = Qwen3Attention(config, layer)
        if config.is_sparse(layer):
            self.mlp = SparseMoe(
                config.hidden_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok,
                normalise=config.norm_topk_prob,
            )  # fmt: skip
        else:
            self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute = True

    def forward(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, Routing | None]:
        h, x = self.input_layernorm(x, fork=True)  # the same x; its gradients meet in the norm's backward
        with recompute(h, self.input_layernorm, x, enabled=self.recompute):
            attended = self.self_attn(h, context)
        h, residual = self.post_attention_layernorm(attended, x)  # residual = x + attended, in the same pass
        with recompute(h, self.post_attention_layernorm, residual, enabled=self.recompute):
            out = self.mlp(h)
            out, routing = out if isinstance(out, tuple) else (out, None)
        return residual + out, routing


class LigerQwen3Moe(LigerMixtral):
    """A Qwen 3 mixture with its language-model head; wired as Mixtral. See ``LigerMixtral`` for ``forward``."""

    config_class = Qwen3MoeConfig
    block_class = Qwen3MoeBlock

    @classmethod
    def to_published_names(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return to_expert_names(tensors, mixtral=False)
