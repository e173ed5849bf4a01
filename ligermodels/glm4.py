"""GLM-4-0414, 9B and 32B: ``"model_type": "glm4"``.

What differs from GLM: what attention and MLP give is normalised once more before it joins the residual stream, four
norms a layer. ``post_attention_layernorm`` is, as in Llama, the norm *before* the MLP (in Gemma 2 the same name means
the one after attention); the two new ones are ``post_self_attn_layernorm`` and ``post_mlp_layernorm``. The 32B has no
biases.

Shapes: see glm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ligermodels.base import Context
from ligermodels.glm import GlmBlock, GlmConfig, LigerGlm
from ligermodels.layers.memory import recompute
from ligermodels.layers.norm import RMSNorm


@dataclass
class Glm4Config(GlmConfig):
    """config.json of a GLM-4-0414; keys and defaults as in Hugging Face's Glm4Config, which are GlmConfig's."""

    model_type: ClassVar[str] = "glm4"
    architecture: ClassVar[str] = "Glm4ForCausalLM"

    @classmethod
    def translate(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return raw  # no other layout: a "chatglm" file is a GLM's


class Glm4Block(GlmBlock):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): (B, S, H) -> (B, S, H)."""

    ends_with_mlp = False  # a norm follows

    def __init__(self, config: Glm4Config, layer: int):
        super().__init__(config, layer)
        self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        h, x = self.input_layernorm(x, fork=True)  # the same x; its gradients meet in the norm's backward
        with recompute(h, self.input_layernorm, x, enabled=self.recompute):
            attended = self.self_attn(h, context)
        attended = self.post_self_attn_layernorm(attended)
        h, residual = self.post_attention_layernorm(attended, x)  # residual = x + attended, in the same pass
        with recompute(h, self.post_attention_layernorm, residual, enabled=self.recompute):
            fed = self.mlp(h)
        return residual + self.post_mlp_layernorm(fed)


class LigerGlm4(LigerGlm):
    """A GLM-4-0414 with its language-model head; GLM with other blocks. See ``LigerLlama`` for ``forward``."""

    config_class = Glm4Config
    block_class = Glm4Block
