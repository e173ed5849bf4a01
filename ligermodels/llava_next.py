"""LLaVA-NeXT (1.6): ``"model_type": "llava_next"`` (Liu et al. 2024), LLaVA 1.5 at any resolution.

What differs from LLaVA 1.5: an image is seen several times, once whole and once in tiles of the tower's size. Of the
grids that the config allows (``image_grid_pinpoints``, [height, width] in pixels) the one is taken that keeps most of
the image's pixels and, of equals, wastes least; the image is fitted into it and padded. Of the grid's features those of
the padding are taken out again, each row of what is left ends with the learned ``image_newline``, and all of it follows
the features of the whole image. So the number of image tokens depends on the image's size, which ``forward`` is given.

Shapes: as in llava.py; P features of a tile, √P a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from einops import rearrange
from torch import nn

from ligermodels.base import CausalLMOutput
from ligermodels.errors import ConfigError, LigerError
from ligermodels.inputs import need_tensor
from ligermodels.layers.cache import KVCache
from ligermodels.llava import LigerLlava, LlavaConfig


@dataclass
class LlavaNextConfig(LlavaConfig):
    """config.json of a LLaVA-NeXT; keys and defaults as in Hugging Face's LlavaNextConfig."""

    model_type: ClassVar[str] = "llava_next"
    architecture: ClassVar[str] = "LlavaNextForConditionalGeneration"

    image_grid_pinpoints: list[list] = field(
        default_factory=lambda: [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        tile = self.vision_config.image_size
        for pair in self.image_grid_pinpoints or [None]:
            good = isinstance(pair, list) and len(pair) == 2 and all(type(x) is int and x > 0 for x in pair)
            if not good or pair[0] % tile or pair[1] % tile:
                raise ConfigError(
                    f"image_grid_pinpoints must hold pairs [height, width] of multiples of the tower's {tile} pixels, "
                    f"found {pair!r}"
                )
        if self.features_per_image != self.vision_config.patches_per_side**2:
            raise ConfigError(
                f"vision_feature_select_strategy {self.vision_feature_select_strategy!r} leaves "
                f"{self.features_per_image} features of a tile of {self.vision_config.patches_per_side} × "
                f"{self.vision_config.patches_per_side} patches, which are no grid"
            )

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tiles for an image of this size in pixels."""
        tile = self.vision_config.image_size
        best = best_resolution(height, width, self.image_grid_pinpoints)
        return best[0] // tile, best[1] // tile

    def image_tokens(self, height: int, width: int) -> int:
        """How many image tokens stand for an image of this size in pixels."""
        side, (rows, columns) = self.vision_config.patches_per_side, self.grid(height, width)
        top, left = margins(height, width, rows * side, columns * side)
        return side**2 + (rows * side - 2 * top) * (columns * side - 2 * left + 1)


def best_resolution(height: int, width: int, choices: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Of ``choices`` (height, width) the one that keeps most of the image's pixels and, of equals, wastes least."""

    def key(choice: Sequence[int]) -> tuple[int, int]:
        scale = min(choice[1] / width, choice[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - choice[0] * choice[1]

    return tuple(max(choices, key=key))  # of equal keys the first


def margins(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows above and below, columns left and right) that are padding, of a grid that an image was fitted into."""
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


class LigerLlavaNext(LigerLlava):
    """A LLaVA-NeXT with its language-model head. See also ``from_hub``."""

    config_class = LlavaNextConfig

    def __init__(self, config: LlavaNextConfig):
        super().__init__(config)
        H = config.text_config.hidden_size
        self.image_newline = nn.Parameter(torch.empty(H))
        nn.init.normal_(self.image_newline, std=H**-0.5)

    def image_features(self, pixel_values: torch.Tensor, sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Tiles of N images of these (height, width) in pixels -> the features of each, (its image tokens, H)."""
        need_tensor("pixel_values", pixel_values)
        tiles = [1 + rows * columns for rows, columns in (self.config.grid(*size) for size in sizes)]
        if pixel_values.dim() == 5:  # (N, most tiles, C, image_size, image_size), padded
            if pixel_values.shape[0] != len(sizes) or pixel_values.shape[1] < max(tiles):
                raise LigerError(
                    f"pixel_values hold {pixel_values.shape[0]} images of up to {pixel_values.shape[1]} tiles, "
                    f"image_sizes {len(sizes)} of up to {max(tiles)}"
                )
            pixel_values = torch.cat([image[:n] for image, n in zip(pixel_values, tiles, strict=True)])
        elif pixel_values.shape[0] != sum(tiles):
            raise LigerError(f"pixel_values hold {pixel_values.shape[0]} tiles, image_sizes ask for {sum(tiles)}")
        features = self.project(pixel_values).split(tiles)  # N times (tiles, P, H)
        return [self.pack(f, *size) for f, size in zip(features, sizes, strict=True)]

    def pack(self, features: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """(1 + rows·columns, P, H), the whole image and its tiles -> (image_tokens, H)."""
        rows, columns = self.config.grid(height, width)
        side = self.config.vision_config.patches_per_side
        grid = rearrange(features[1:], "(r c) (h w) d -> (r h) (c w) d", r=rows, c=columns, h=side, w=side)
        top, left = margins(height, width, rows * side, columns * side)
        grid = grid[top : rows * side - top, left : columns * side - left]
        newline = self.image_newline.to(grid.dtype).expand(grid.shape[0], 1, -1)
        return torch.cat((features[0], torch.cat((grid, newline), 1).flatten(0, 1)))

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        pixel_values: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> CausalLMOutput:
        """Next-token logits and, with ``labels``, the loss: as ``LigerLlama.forward``, after looking at the images.

        pixel_values (N, tiles, C, image_size, image_size), padded to the most tiles of an image, or (all tiles, C,
        image_size, image_size). image_sizes (N, 2): height and width of each image in pixels before it was cut; shapes
        depend on the values, so keep it on the CPU. An image needs ``config.image_tokens(height, width)`` image tokens
        in input_ids. Labels at image tokens are ignored. Raises LigerError for unfit inputs.
        """
        features, tokens = None, []
        if pixel_values is not None:
            images = self.image_features(pixel_values, read_sizes(image_sizes))  # N times (its image tokens, H)
            features, tokens = torch.cat(images), [len(image) for image in images]
        embeddings, labels = self.with_images(input_ids, features, tokens, labels, cache)
        return self.language_model(
            input_ids, inputs_embeds=embeddings, labels=labels, attention_mask=attention_mask,
            position_ids=position_ids, cu_seqlens=cu_seqlens, cache=cache, logits_to_keep=logits_to_keep,
            num_items_in_batch=num_items_in_batch,
        )  # fmt: skip


def read_sizes(image_sizes: torch.Tensor | Sequence[Sequence[int]] | None) -> list[tuple[int, int]]:
    """[(height, width), …] from what ``forward`` was given. Raises LigerError unless it is (N, 2) and positive."""
    sizes = image_sizes.tolist() if isinstance(image_sizes, torch.Tensor) else image_sizes
    good = (
        isinstance(sizes, Sequence) and len(sizes) > 0 and all(isinstance(s, Sequence) and len(s) == 2 for s in sizes)
    )
    if not good or not all(isinstance(x, int) and x > 0 for size in sizes for x in size):
        raise LigerError(f"image_sizes must be (N, 2), height and width of each image in pixels, found {image_sizes!r}")
    return [(height, width) for height, width in sizes]
