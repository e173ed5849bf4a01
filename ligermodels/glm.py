"""GLM-4-9B and its elders ChatGLM2 and ChatGLM3: ``"model_type": "glm"``, and the remote-code layout "chatglm".

What differs from Llama (GLM team 2024):
- the first half of each head is rotated (``partial_rotary_factor`` 0.5), in interleaved pairs (2j, 2j + 1);
- q, k and v have biases, o has none; gate and up come from one product, ``gate_up_proj``.

Folders of model_type "chatglm" (ChatGLM2-6B, ChatGLM3-6B, glm-4-9b) hold the same network under other keys and names.
``GlmConfig.translate`` renames the keys, ``checkpoints_convert.rewrites`` the tensors; ``save_pretrained`` then writes
a "glm" folder. In half precision their own code rounds elsewhere (a norm once, cos and sin to the model's dtype): there
the numbers are those of transformers' ``glm``, not bit for bit those of the remote code.

``rope_ratio`` r multiplies the base of the rotation. Only chatglm2-6b-32k divides the positions by r instead ("linear"
scaling), and nothing in its config.json but ``_name_or_path`` says so: with "chatglm2" in that name the positions are
divided. Put ``"rope_scaling": {"type": "linear", "factor": r}`` there for a copy of it that lost its name.

Shapes: B batch, S sequence, H hidden_size, A attention heads, K key/value heads, D head_dim, I intermediate_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import nn

from ligermodels.base import Context
from ligermodels.config import Config
from ligermodels.errors import ConfigError
from ligermodels.kernels import rope
from ligermodels.layers.attention import attention
from ligermodels.layers.linear import linears
from ligermodels.llama import LigerLlama, LlamaBlock
from ligermodels.phi3 import Phi3MLP

# ChatGLM's key -> ours, with the default of its remote code where that is not ours.
_RENAMED = {
    "padded_vocab_size": ("vocab_size", 65024),
    "num_layers": ("num_hidden_layers", 28),
    "ffn_hidden_size": ("intermediate_size", 13696),
    "kv_channels": ("head_dim", 128),
    "multi_query_group_num": ("num_key_value_heads", 1),
    "layernorm_epsilon": ("rms_norm_eps", 1e-5),
    "seq_length": ("max_position_embeddings", 2048),
    "add_qkv_bias": ("attention_bias", False),
}
# What the remote code can do and this model cannot: (the value that fits, the remote default).
_FIXED = {
    "rmsnorm": (True, True),
    "post_layer_norm": (True, True),
    "original_rope": (True, True),
    "multi_query_attention": (True, False),
    "add_bias_linear": (False, False),
    "apply_residual_connection_post_layernorm": (False, False),
    "fp32_residual_connection": (False, False),
    "hidden_dropout": (0, 0),
    "quantization_bit": (0, 0),
    "pre_seq_len": (None, None),
    "vision_config": (None, None),
    "position_encoding_2d": (None, None),  # the first ChatGLM-6B, another network under the same model_type
}
# Without effect on the numbers, or about the remote code itself.
_IGNORED = ("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion", "classifier_dropout",
            "prefix_projection", "auto_map", "_name_or_path", "rope_ratio")  # fmt: skip


@dataclass
class GlmConfig(Config):
    """config.json of a GLM; keys and defaults as in Hugging Face's GlmConfig. Also reads model_type "chatglm"."""

    model_type: ClassVar[str] = "glm"
    architecture: ClassVar[str] = "GlmForCausalLM"

    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = 151329
    partial_rotary_factor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act {self.hidden_act!r}: GLM's MLP is gated by silu")
        if self.eos_token_id is None:
            self.eos_token_id = [151329, 151336, 151338]
        self.partial_rotary_factor = self.rope["partial_rotary_factor"]

    @classmethod
    def translate(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The keys of a "chatglm" file in GLM's names; other files unchanged. Raises ConfigError naming key and value
        for what the remote code knows and GLM does not."""
        if raw.get("model_type") != "chatglm":
            return raw
        for key, (fits, default) in _FIXED.items():
            if raw.get(key, default) != fits:
                raise ConfigError(f"{key} {raw.get(key, default)!r} of a chatglm config: only {fits!r} is supported")
        if raw.get("kv_channels", 0) is None:
            raise ConfigError("kv_channels null of a chatglm config: expected the size of a head")
        out = {k: v for k, v in raw.items() if k not in (*_RENAMED, *_FIXED, *_IGNORED)}
        out |= {ours: raw.get(theirs, default) for theirs, (ours, default) in _RENAMED.items()}
        out.setdefault("pad_token_id", None)  # GLM's default is beyond ChatGLM's vocabulary
        ratio = raw.get("rope_ratio", 1)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < float("inf"):
            raise ConfigError(f"rope_ratio of a chatglm config must be a positive number, found {ratio!r}")
        if "chatglm2" in str(raw.get("_name_or_path")).lower() and ratio != 1:
            out.setdefault("rope_scaling", {"rope_type": "linear", "factor": ratio})
        elif not out.get("rope_scaling"):
            out["rope_theta"] = 10_000.0 * ratio
        return out | {"model_type": cls.model_type}


class GlmAttention(nn.Module):
    """Llama's, turned in neighbouring pairs, with no bias of o: (B, S, H) -> (B, S, H)."""

    def __init__(self, config: GlmConfig, layer: int):
        super().__init__()
        H, A, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(H, A * D, bias=config.attention_bias)
        self.k_proj = nn.Linear(H, K * D, bias=config.attention_bias)
        self.v_proj = nn.Linear(H, K * D, bias=config.attention_bias)
        self.o_proj = nn.Linear(A * D, H, bias=False)
        self.layer, self.head_dim, self.scale = layer, D, D**-0.5
        self.dropout = config.attention_dropout

    def forward(self, h: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = linears(h, self.q_proj, self.k_proj, self.v_proj)
        q = rearrange(q, "b s (a d) -> b s a d", d=self.head_dim)  # (B, S, A·D) -> (B, S, A, D)
        k = rearrange(k, "b s (k d) -> b s k d", d=self.head_dim)  # (B, S, K, D)
        v = rearrange(v, "b s (k d) -> b s k d", d=self.head_dim)
        q, k = rope(q, k, context.cos, context.sin, interleaved=True)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # (B, past + S, K, D)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, context.visible, scale=self.scale, dropout=dropout)
        return self.o_proj(rearrange(out, "b s a d -> b s (a d)"))


class GlmBlock(LlamaBlock):
    attention_class = GlmAttention
    mlp_class = Phi3MLP


class LigerGlm(LigerLlama):
    """A GLM with its language-model head; wired as Llama, with other blocks. See ``LigerLlama`` for ``forward``."""

    config_class = GlmConfig
    block_class = GlmBlock
