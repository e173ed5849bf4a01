"""Gemma 3 with images: ``"model_type": "gemma3"`` (4B, 12B, 27B); arXiv 2503.19786.

SigLIP's tower at 896 pixels, after its last norm; the 64 × 64 features are averaged by 4 × 4 to 256, normed by
1 + weight, and multiplied by one matrix, which is stored (tower, text). They take the places of the image tokens, and
are not scaled by √H as the embeddings of the text are. The text model is gemma3.py's, with one difference where there
are images: the tokens of one image see each other in both directions, in layers with a window within that window.

Shapes: N images, P = p·p patches of an image, M tokens of an image, W width of the tower, H of the text model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import reduce
from torch import nn

from ligermodels.base import CausalLMOutput
from ligermodels.errors import ConfigError
from ligermodels.gemma3 import LigerGemma3
from ligermodels.inputs import need_tensor
from ligermodels.layers.cache import KVCache
from ligermodels.layers.norm import RMSNorm
from ligermodels.multimodal import MultimodalConfig, MultimodalLM


@dataclass
class Gemma3MultimodalConfig(MultimodalConfig):
    """config.json of a whole Gemma 3; keys and defaults as in Hugging Face's Gemma3Config."""

    model_type: ClassVar[str] = "gemma3"
    architecture: ClassVar[str] = "Gemma3ForConditionalGeneration"
    text_classes: ClassVar[Mapping[str, type]] = {"gemma3_text": LigerGemma3}
    default_tower: ClassVar[str] = "siglip_vision_model"

    image_token_index: int = 262_144
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000
    mm_tokens_per_image: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        patches, tokens = self.vision_config.patches_per_side, math.isqrt(max(self.mm_tokens_per_image, 0))
        if tokens**2 != self.mm_tokens_per_image or tokens == 0 or patches % tokens:
            raise ConfigError(
                f"mm_tokens_per_image {self.mm_tokens_per_image}: the {patches} × {patches} patches of an image cannot "
                "be averaged to a square of so many tokens"
            )
        if self.vision_config.class_tokens:
            raise ConfigError("vision_config: the tower of a 'gemma3' has no class token (siglip_vision_model)")


class Gemma3Projector(nn.Module):
    """(N, P, W) -> (N, M, H): averaged over squares of patches, normed, multiplied."""

    def __init__(self, config: Gemma3MultimodalConfig):
        super().__init__()
        W, H = config.vision_config.hidden_size, config.text_config.hidden_size
        self.mm_input_projection_weight = nn.Parameter(torch.empty(W, H))
        nn.init.normal_(self.mm_input_projection_weight, std=config.text_config.initializer_range)
        self.mm_soft_emb_norm = RMSNorm(W, config.vision_config.layer_norm_eps, offset=1.0, casting="gemma")
        self.patches = config.vision_config.patches_per_side
        self.square = self.patches // math.isqrt(config.mm_tokens_per_image)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = reduce(x, "n (r i c j) w -> n (r c) w", "mean", i=self.square, j=self.square, c=self.patches // self.square)
        return self.mm_soft_emb_norm(x) @ self.mm_input_projection_weight


class LigerGemma3Multimodal(MultimodalLM):
    """A whole Gemma 3, which ``LigerGemma3.from_pretrained`` gives where config.json has a ``vision_config``."""

    config_class = Gemma3MultimodalConfig

    def __init__(self, config: Gemma3MultimodalConfig):
        super().__init__(config)
        self.multi_modal_projector = Gemma3Projector(config)
        self.init_weights()

    def project(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """pixel_values (N, C, image_size, image_size) -> (N, mm_tokens_per_image, H)."""
        (x,) = self.vision_tower(pixel_values, [-1])  # (N, P, W)
        return self.multi_modal_projector(self.vision_tower.post_layernorm(x))

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        pixel_values: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> CausalLMOutput:
        """Next-token logits and, with ``labels``, the loss: as ``LigerLlama.forward``, after looking at the images.

        pixel_values (N, C, image_size, image_size), the N images of all rows in order; each needs
        ``config.mm_tokens_per_image`` image tokens in input_ids. Labels at image tokens are ignored.

        token_type_ids (B, S) is 1 where tokens see the others of their image in both directions. Left out, with images
        it is 1 at the image tokens, as the model was trained (and as transformers' processor, though not its model, has
        it); zeros give plain causal attention. Raises LigerError for unfit inputs.
        """
        features = None
        need_tensor("input_ids", input_ids)
        if pixel_values is not None:
            features = self.project(pixel_values).flatten(0, 1)  # (N·M, H)
            if token_type_ids is None:
                token_type_ids = (input_ids == self.config.image_token_index).to(torch.int32)
        embeddings, labels = self.with_images(input_ids, features, self.config.mm_tokens_per_image, labels, cache)
        return self.language_model(
            input_ids, inputs_embeds=embeddings, labels=labels, attention_mask=attention_mask,
            position_ids=position_ids, cu_seqlens=cu_seqlens, cache=cache, logits_to_keep=logits_to_keep,
            num_items_in_batch=num_items_in_batch, token_type_ids=token_type_ids,
        )  # fmt: skip
