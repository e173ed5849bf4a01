"""Mixtral: 8x7B, 8x22B, and whatever else says ``"model_type": "mixtral"``.

What differs from Mistral (Jiang et al. 2024): the MLP of every layer is a mixture of experts. A router scores E gated
MLPs for each token, its k best get the token, and their results are added with weights that sum to 1. Published with
E = 8, k = 2: a token passes a quarter of the parameters. All weights of a layer's experts are two stacked parameters;
files hold them expert by expert, as w1 (gate), w3 (up) and w2 (down) below ``block_sparse_moe``.

An auxiliary loss, on request, keeps the experts equally busy. No published file asks for it; fine-tuning may.

Shapes: see llama.py. E experts, k of them a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ligermodels.base import CausalLMOutput, Context
from ligermodels.checkpoints_convert.rewrites import to_expert_names
from ligermodels.config import check_windows
from ligermodels.errors import ConfigError
from ligermodels.inputs import check_mask
from ligermodels.layers.cache import KVCache
from ligermodels.layers.memory import recompute
from ligermodels.layers.moe import Experts, Routing, SparseMoe, load_balancing_loss
from ligermodels.layers.norm import RMSNorm
from ligermodels.llama import LigerLlama, LlamaConfig
from ligermodels.mistral import MistralAttention


@dataclass
class MixtralConfig(LlamaConfig):
    """config.json of a Mixtral; keys and defaults as in Hugging Face's MixtralConfig.

    ``output_router_logits`` asks for the auxiliary loss: it is reported as ``aux_loss`` and added, times
    ``router_aux_loss_coef``, to the loss.
    """

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    default_theta: ClassVar[float] = 1e6
    attention_bias: ClassVar[bool] = False  # no keys of this family: a file that has them is not heard
    mlp_bias: ClassVar[bool] = False

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_windows(self, self.sliding_window)
        check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok)
        if not 0 <= self.router_jitter_noise < 1:
            raise ConfigError(f"router_jitter_noise must be from 0 to below 1, found {self.router_jitter_noise}")

    @property
    def drops(self) -> bool:
        return super().drops or self.router_jitter_noise > 0

    def window(self, layer: int) -> int | None:
        """How many keys a query sees, itself included; None for all."""
        return self.sliding_window


def check_experts(name: str, experts: int, per_token: int) -> None:
    """Raise ConfigError unless a token can have that many different experts."""
    if not 1 <= per_token <= experts:
        raise ConfigError(f"num_experts_per_tok must be from 1 to {name} {experts}, found {per_token}")


class MixtralBlock(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)): (B, S, H) -> (B, S, H), and what the router decided."""

    def __init__(self, config: MixtralConfig, layer: int):
        super().__init__()
        self.self_attn = MistralAttention(config, layer)
        self.mlp = SparseMoe(
            config.hidden_size, config.intermediate_size, config.num_local_experts, config.num_experts_per_tok,
            jitter=config.router_jitter_noise,
        )  # fmt: skip
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute = True

    def forward(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, Routing]:
        h, x = self.input_layernorm(x, fork=True)  # the same x; its gradients meet in the norm's backward
        with recompute(h, self.input_layernorm, x, enabled=self.recompute):
            attended = self.self_attn(h, context)
        h, residual = self.post_attention_layernorm(attended, x)  # residual = x + attended, in the same pass
        with recompute(h, self.post_attention_layernorm, residual, enabled=self.recompute):
            out, routing = self.mlp(h)
        return residual + out, routing


class LigerMixtral(LigerLlama):
    """A Mixtral with its language-model head: Llama's wiring, but that every layer also says what its router did."""

    config_class = MixtralConfig
    block_class = MixtralBlock

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
        """As ``LigerLlama.forward``. Where the config says ``output_router_logits``, ``aux_loss`` () fp32 is the
        load-balancing loss over the tokens that ``attention_mask`` keeps, and ``loss`` includes it, times
        ``router_aux_loss_coef``. It is a mean over the tokens of this call: accumulated batches balance each by itself.

        Here ``attention_mask`` (B, S) may go with ``cu_seqlens``, which alone says who sees whom; the mask then marks
        padding with 0 at the end of a document, or as a document of its own. Labels of -100 are no padding.
        """
        packed = cu_seqlens is not None
        context = self.prepare(input_ids, None if packed else attention_mask, position_ids, cu_seqlens, cache)
        if packed and attention_mask is not None:
            check_mask(attention_mask, tuple(input_ids.shape), document=context.visible.document)
        x = self.model.embed_tokens(input_ids)  # (B, S) -> (B, S, H)
        routings = []
        for layer in self.model.layers:
            x, routing = self.run_layer(layer, x, context)
            if self.config.output_router_logits and routing is not None:
                routings.append(routing)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        hidden = self.model.norm(x)
        out = self.output(hidden, labels, cu_seqlens, logits_to_keep, num_items_in_batch)
        if not routings:
            return out
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        aux_loss = load_balancing_loss(routings, mask)
        loss = None if out.loss is None else out.loss + self.config.router_aux_loss_coef * aux_loss
        return out._replace(loss=loss, aux_loss=aux_loss)

    def init_weights(self) -> None:
        """As all families; the experts' stacked weights are drawn like those of a Linear."""
        super().init_weights()
        for module in self.modules():
            if isinstance(module, Experts):
                for weight in module.parameters():
                    nn.init.normal_(weight, std=self.config.initializer_range)

    @classmethod
    def to_published_names(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return to_expert_names(tensors, mixtral=True)
