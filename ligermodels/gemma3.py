"""Gemma 3 for text: ``"gemma3_text"`` (270M, 1B) and the text tower of ``"gemma3"`` (4B, 12B, 27B); arXiv 2503.19786.

What differs from Gemma 2: heads of q and k are normed before they are turned, in place of the soft cap on scores; five
layers of six see a sliding window; and those turn by a rope table of their own (θ 1e4), while the layers that see
everything have θ 1e6, in larger models stretched linearly. Shapes as in llama.py: B S H A K D I V.

A ``"gemma3"`` folder whose config has a ``vision_config`` gives the model that reads images too, see
gemma3_multimodal.py; its ``language_model`` is the model of this file. Without one only the text tower is loaded, and
a warning says what is left out.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import nn

from ligermodels.base import CausalLM, CausalLMOutput, Context
from ligermodels.checkpoints_convert.hf import Checkpoint, read_config
from ligermodels.checkpoints_convert.rewrites import text_tower
from ligermodels.errors import ConfigError, LigerError
from ligermodels.gemma import ScaledEmbedding, gemma_norm
from ligermodels.gemma2 import LAYER_TYPES, Gemma2Block, Gemma2Config
from ligermodels.kernels import qk_norm_rope
from ligermodels.layers.attention import attention
from ligermodels.layers.cache import KVCache
from ligermodels.layers.linear import linears
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.rotary import RotaryEmbedding, parse_rope


@dataclass
class Gemma3Config(Gemma2Config):
    """config.json of a Gemma 3 text model; keys and defaults as in Hugging Face's Gemma3TextConfig.

    ``rope`` turns the layers that see everything, ``local_rope`` those with a window. Old files spell them
    ``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq``; new ones nest ``rope_parameters`` by layer type.
    """

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    default_theta: ClassVar[float] = 1_000_000.0

    vocab_size: int = 262_208
    max_position_embeddings: int = 131_072
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False
    sliding_window_pattern: int = 6
    rope_local_base_freq: float | None = None

    def __post_init__(self) -> None:
        nested = self.rope_parameters or {}
        if not isinstance(nested, Mapping) or not nested.keys() <= set(LAYER_TYPES):
            raise ConfigError(f"rope_parameters of Gemma 3 must hold {' and '.join(LAYER_TYPES)}, found {nested!r}")
        self.rope_parameters = nested.get("full_attention")
        super().__post_init__()
        local = {
            "rope_parameters": nested.get("sliding_attention"),
            "rope_theta": self.rope_local_base_freq,
            "max_position_embeddings": self.max_position_embeddings,
        }
        self.local_rope = parse_rope(local, default_theta=10_000.0)
        if self.local_rope["rope_type"] in ("dynamic", "longrope"):
            raise ConfigError(f"rope_type {self.local_rope['rope_type']!r} of sliding_attention is not supported")
        if self.local_rope.get("partial_rotary_factor", 1) != 1:
            raise ConfigError("partial_rotary_factor of sliding_attention: Gemma 3 turns whole heads")
        self.rope_local_base_freq = self.local_rope["rope_theta"]
        self.rope_parameters = {"sliding_attention": dict(self.local_rope), "full_attention": dict(self.rope)}
        if self.attn_logit_softcapping is not None:
            raise ConfigError(f"attn_logit_softcapping {self.attn_logit_softcapping}: Gemma 3 has no cap on scores")

    @property
    def pattern(self) -> int:
        """Each so many-th layer sees everything."""
        if self.sliding_window_pattern < 1:
            raise ConfigError(f"sliding_window_pattern must be positive, found {self.sliding_window_pattern}")
        return self.sliding_window_pattern

    @classmethod
    def translate(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """From the config of a whole "gemma3": that of its text model, which may leave out all that is default."""
        if raw.get("model_type") != "gemma3":
            return raw
        text = raw.get("text_config") or {}
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config must be an object, found {text!r}")
        shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
        outer = {key: raw[key] for key in shared if raw.get(key) is not None}
        return {"model_type": cls.model_type, **text, **outer}

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"rope_parameters": copy.deepcopy(self.rope_parameters)}


class Gemma3Attention(nn.Module):
    """Gemma 2's, with normed heads of q and k in place of the soft cap: (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Gemma3Config, layer: int):
        super().__init__()
        H, A, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(H, A * D, bias=config.attention_bias)
        self.k_proj = nn.Linear(H, K * D, bias=config.attention_bias)
        self.v_proj = nn.Linear(H, K * D, bias=config.attention_bias)
        self.o_proj = nn.Linear(A * D, H, bias=config.attention_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps, offset=1.0, casting="gemma")
        self.k_norm = RMSNorm(D, config.rms_norm_eps, offset=1.0, casting="gemma")
        self.layer, self.head_dim, self.scale = layer, D, config.query_pre_attn_scalar**-0.5
        self.window, self.dropout = config.window(layer), config.attention_dropout

    def forward(self, h: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = linears(h, self.q_proj, self.k_proj, self.v_proj)
        q = rearrange(q, "b s (a d) -> b s a d", d=self.head_dim)  # (B, S, A·D) -> (B, S, A, D)
        k = rearrange(k, "b s (k d) -> b s k d", d=self.head_dim)  # (B, S, K, D)
        v = rearrange(v, "b s (k d) -> b s k d", d=self.head_dim)
        q, k = qk_norm_rope(
            q, k, self.q_norm.weight, self.k_norm.weight, context.cos, context.sin, self.q_norm.eps,
            offset=1.0, casting="gemma",
        )  # fmt: skip
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # (B, past + S, K, D)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, context.visible, scale=self.scale, window=self.window, dropout=dropout)
        return self.o_proj(rearrange(out, "b s a d -> b s (a d)"))


class Gemma3Block(Gemma2Block):
    attention_class = Gemma3Attention


class LigerGemma3(CausalLM):
    """A Gemma 3 text model with its head. ``LigerGemma3(config)`` has random weights; see also ``from_hub``."""

    config_class = Gemma3Config

    def __init__(self, config: Gemma3Config):
        super().__init__(config)
        layers = (Gemma3Block(config, i) for i in range(config.num_hidden_layers))
        D, longest = config.head_dim, config.max_position_embeddings
        self.model = nn.ModuleDict(
            {
                "embed_tokens": ScaledEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id),
                "layers": nn.ModuleList(layers),
                "norm": gemma_norm(config),
                "rotary_emb": RotaryEmbedding(config.rope, D, longest),
                "rotary_emb_local": RotaryEmbedding(config.local_rope, D, longest),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self.init_weights()

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
    ) -> CausalLM:
        """As every family's, but a folder whose config has a ``vision_config`` gives a ``LigerGemma3Multimodal``."""
        if read_config(folder).get("vision_config") is None:
            return super().from_pretrained(folder, dtype=dtype, device=device)
        from ligermodels.gemma3_multimodal import LigerGemma3Multimodal  # here, for it is built on this file

        return LigerGemma3Multimodal.from_pretrained(folder, dtype=dtype, device=device)

    @classmethod
    def to_model_names(cls, weights: Checkpoint) -> Checkpoint:
        return text_tower(super().to_model_names(weights))

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
        token_type_ids: torch.Tensor | None = None,
    ) -> CausalLMOutput:
        """Next-token logits and, with ``labels``, the loss: arguments, shapes and errors as ``LigerLlama.forward``.

        ``inputs_embeds`` are taken as they are, not times √H. token_type_ids (B, S), 1 at image tokens: those of one
        image, neighbours in a row, see each other in both directions.
        """
        context = self.prepare(input_ids, attention_mask, position_ids, cu_seqlens, cache)
        if token_type_ids is not None:
            image = number_images(token_type_ids, input_ids.shape)
            context = context._replace(visible=dataclasses.replace(context.visible, image=image, _masks={}))
        cos, sin = self.model.rotary_emb_local(context.position_ids, context.end)
        local = context._replace(cos=cos, sin=sin)  # for the layers with a window
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # (B, S) -> (B, S, H)
        for layer, kind in zip(self.model.layers, self.config.layer_types, strict=True):
            x = self.run_layer(layer, x, local if kind == "sliding_attention" else context)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        hidden = self.model.norm(x)
        softcap = self.config.final_logit_softcapping
        return self.output(hidden, labels, cu_seqlens, logits_to_keep, num_items_in_batch, softcap)


def number_images(token_type_ids: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """(B, S): 0, 1, … at the image tokens (1) of each row's first, second, … run of them, -1 elsewhere."""
    if token_type_ids.shape != shape:
        raise LigerError(
            f"token_type_ids must have the shape of input_ids {tuple(shape)}, found {token_type_ids.shape}"
        )
    is_image = token_type_ids == 1
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    return torch.where(is_image, starts.cumsum(1) - 1, -1)
