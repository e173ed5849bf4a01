"""LLaVA 1.5: ``"model_type": "llava"`` (Liu et al. 2023, arXiv 2310.03744), and others that are wired like it.

CLIP's ViT-L/14 at 336 pixels, a projector of two linear layers with gelu between them, and a Llama (Vicuna). The
features are the hidden states of one layer, by default the last but one, without the class token ("default"; "full"
keeps it): 576 for an image. They take the places of the prompt's image tokens. Where the config lists several layers,
their hidden states are put side by side.

The text model may be any class of ``text_classes``, the tower CLIP's or SigLIP's. Shapes: N images, T hidden states of
an image in the tower, F = N·(T or T - 1) features, B rows, S positions, H width of the text model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ligermodels.base import CausalLMOutput
from ligermodels.errors import ConfigError
from ligermodels.layers.cache import KVCache
from ligermodels.llama import LigerLlama
from ligermodels.mistral import LigerMistral
from ligermodels.multimodal import MultimodalConfig, MultimodalLM
from ligermodels.qwen2 import LigerQwen2
from ligermodels.vision import activation


@dataclass
class LlavaConfig(MultimodalConfig):
    """config.json of a LLaVA; keys and defaults as in Hugging Face's LlavaConfig."""

    model_type: ClassVar[str] = "llava"
    architecture: ClassVar[str] = "LlavaForConditionalGeneration"
    text_classes: ClassVar[dict[str, type]] = {"llama": LigerLlama, "mistral": LigerMistral, "qwen2": LigerQwen2}

    image_token_index: int = 32000
    projector_hidden_act: str = "gelu"
    vision_feature_select_strategy: str = "default"
    vision_feature_layer: int | list[int] = -2
    multimodal_projector_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        activation(self.projector_hidden_act, "projector_hidden_act")
        if self.vision_feature_select_strategy not in ("default", "full"):
            raise ConfigError(
                "vision_feature_select_strategy must be 'default' (without the first hidden state) or 'full', found "
                f"{self.vision_feature_select_strategy!r}"
            )
        depth = self.vision_config.num_hidden_layers
        for layer in self.feature_layers or [None]:
            if layer is None or not -depth - 1 <= layer <= depth:
                raise ConfigError(
                    f"vision_feature_layer {self.vision_feature_layer!r}: the tower has hidden states "
                    f"{-depth - 1} to {depth}"
                )

    @property
    def feature_layers(self) -> list[int]:
        layers = self.vision_feature_layer
        return layers if isinstance(layers, list) else [layers]

    @property
    def features_per_image(self) -> int:
        """How many image tokens stand for one image (a tile of it in LLaVA-NeXT)."""
        return self.vision_config.num_tokens - (self.vision_feature_select_strategy == "default")


class LlavaProjector(nn.Module):
    """linear_2(gelu(linear_1(x))): (N, T, width of the tower · layers) -> (N, T, H)."""

    def __init__(self, config: LlavaConfig):
        super().__init__()
        H, bias = config.text_config.hidden_size, config.multimodal_projector_bias
        self.linear_1 = nn.Linear(config.vision_config.hidden_size * len(config.feature_layers), H, bias=bias)
        self.linear_2 = nn.Linear(H, H, bias=bias)
        self.act = activation(config.projector_hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.act(self.linear_1(x)))


class LigerLlava(MultimodalLM):
    """A LLaVA with its language-model head. ``LigerLlava(config)`` has random weights; see also ``from_hub``."""

    config_class = LlavaConfig

    def __init__(self, config: LlavaConfig):
        super().__init__(config)
        self.multi_modal_projector = LlavaProjector(config)
        self.init_weights()

    def project(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """pixel_values (N, C, image_size, image_size) -> (N, features_per_image, H)."""
        states = self.vision_tower(pixel_values, self.config.feature_layers)
        if self.config.vision_feature_select_strategy == "default":
            states = [x[:, 1:] for x in states]
        return self.multi_modal_projector(torch.cat(states, -1))

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        pixel_values: torch.Tensor | None = None,
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
        ``config.features_per_image`` image tokens in input_ids. Labels at image tokens are ignored. Raises LigerError
        for unfit inputs, with both numbers where tokens and features do not match.
        """
        features = None if pixel_values is None else self.project(pixel_values).flatten(0, 1)  # (F, H)
        embeddings, labels = self.with_images(input_ids, features, self.config.features_per_image, labels, cache)
        return self.language_model(
            input_ids, inputs_embeds=embeddings, labels=labels, attention_mask=attention_mask,
            position_ids=position_ids, cu_seqlens=cu_seqlens, cache=cache, logits_to_keep=logits_to_keep,
            num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
