"""Images in, ``pixel_values`` out, and prompts with as many image tokens as the model has features for them.

>>> processor = ImageProcessor.from_pretrained(folder)
>>> inputs = processor([Image.open("cat.jpg")])
>>> ids = tokenizer.encode(processor.expand("USER: <image>\\nWhat is this? ASSISTANT:", inputs))
>>> model.generate(torch.tensor([ids]), **inputs.arguments, max_new_tokens=50)

Equal, bit for bit, to transformers' processors with their PIL backend (``backend="pil"``: CLIPImageProcessor,
LlavaImageProcessor, LlavaNextImageProcessor, SiglipImageProcessor, Gemma3ImageProcessor). Their torchvision backend,
which transformers takes where torchvision is installed, resizes with other rounding: on a photo, with torchvision 0.28,
0.3 to 4 % of the values differ, most of them by 1/255 before normalising, a few by up to 11/255. Gemma 3's
pan-and-scan, off by default, is not here.

The steps, each if the settings ask for it: RGB (transparency on white), padding to a square, resizing (Pillow's
filters, in whole numbers from 0 to 255), cropping around the centre, times ``rescale_factor``, minus mean by deviation.
LLaVA-NeXT does that to the whole image, made square, and to each tile of the image fitted into the best grid.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ligermodels.checkpoints_convert.hf import read_config
from ligermodels.checkpoints_convert.hub import download
from ligermodels.errors import CheckpointError, ConfigError, LigerError
from ligermodels.gemma3_multimodal import Gemma3MultimodalConfig
from ligermodels.llava import LlavaConfig
from ligermodels.llava_next import LlavaNextConfig, best_resolution
from ligermodels.multimodal import MultimodalConfig

if TYPE_CHECKING:
    from PIL.Image import Image

CONFIGS: dict[str, type[MultimodalConfig]] = {
    c.model_type: c for c in (LlavaConfig, LlavaNextConfig, Gemma3MultimodalConfig)
}
NEW, OLD = "processor_config.json", "preprocessor_config.json"  # what transformers 5 writes, and what was published

_CLIP = {
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SIGLIP = {
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# What a setting is that a file leaves out, by the type that the file names.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": _CLIP,
    "LlavaNextImageProcessor": _CLIP,
    "SiglipImageProcessor": _SIGLIP,
    "Gemma3ImageProcessor": _SIGLIP | {"resample": 2},
}
_TYPES = {"llava": "CLIPImageProcessor", "llava_next": "LlavaNextImageProcessor", "gemma3": "Gemma3ImageProcessor"}


class ImageInputs(NamedTuple):
    """What a model is given of some images."""

    pixel_values: torch.Tensor  # fp32 (N, 3, H, W); of LLaVA-NeXT (N, most tiles, 3, H, W), padded with zeros
    image_sizes: torch.Tensor | None  # int64 (N, 2), height and width before processing: LLaVA-NeXT only
    tokens: list[int]  # image tokens that each image needs

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """For ``model(ids, **inputs.arguments)`` and ``model.generate``; pixel_values on the CPU."""
        found = {"pixel_values": self.pixel_values, "image_sizes": self.image_sizes}
        return {name: value for name, value in found.items() if value is not None}

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ImageInputs:
        """With pixel_values on ``device``; the sizes stay on the CPU, where the model reads them."""
        return self._replace(pixel_values=self.pixel_values.to(device, dtype))


class ImageProcessor:
    """``processor(images)`` for the model of this config, by the settings of its preprocessor_config.json."""

    def __init__(self, config: MultimodalConfig, settings: Mapping[str, Any] | None = None):
        """``settings`` are those of preprocessor_config.json. Raises ConfigError for ones that are not known here."""
        settings = dict(settings or {})
        kind = settings.get("image_processor_type") or _TYPES[config.model_type]
        self.kind = str(kind).removesuffix("Fast").removesuffix("Pil")
        if self.kind not in _DEFAULTS:
            raise ConfigError(f"image_processor_type {kind!r} is not known here; known are {', '.join(_DEFAULTS)}")
        if (self.kind == "LlavaNextImageProcessor") != isinstance(config, LlavaNextConfig):
            raise ConfigError(f"image_processor_type {kind!r} does not fit a model of type {config.model_type!r}")
        if settings.get("do_pan_and_scan"):
            raise ConfigError("do_pan_and_scan is not supported: an image is given to the model whole")
        given = {k: v for k, v in settings.items() if v is not None}
        s = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_pad": False}
        self.settings = s | _DEFAULTS[self.kind] | given
        self.config = config
        self.size = _size("size", self.settings["size"], square=self.kind == "Gemma3ImageProcessor")
        self.crop = (
            _size("crop_size", self.settings["crop_size"], square=True) if self.settings["do_center_crop"] else None
        )
        self._check_result()
        grids = settings.get("image_grid_pinpoints")
        if isinstance(config, LlavaNextConfig) and grids not in (None, config.image_grid_pinpoints):
            raise ConfigError(
                f"image_grid_pinpoints of the image processor {grids} are not those of the model "
                f"{config.image_grid_pinpoints}"
            )
        for name in ("image_mean", "image_std"):
            if not isinstance(self.settings[name], list) or len(self.settings[name]) != 3:
                raise ConfigError(f"{name} must be a list of three numbers, found {self.settings[name]!r}")
        self._files: dict[str, dict[str, Any]] = {}

    def _check_result(self) -> None:
        """Raise ConfigError unless images come out as the tower wants them."""
        side = self.config.vision_config.image_size
        found = self.crop or (self.size if self.settings["do_resize"] else {})
        if found != {"height": side, "width": side}:
            raise ConfigError(
                f"the image processor makes images of {found or 'any size'}, the model reads {side} × {side}"
            )

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ImageProcessor:
        """From a model's folder: config.json, and processor_config.json or preprocessor_config.json.

        Raises CheckpointError where these are missing, ConfigError for a model that reads no images.
        """
        raw = read_config(folder)
        kind = raw.get("model_type")
        if kind not in CONFIGS:
            raise ConfigError(f"{folder}: a model of type {kind!r} reads no images here; {', '.join(CONFIGS)} do")
        files = {name: read_config(Path(folder) / name) for name in (NEW, OLD) if (Path(folder) / name).is_file()}
        nested = files.get(NEW, {}).get("image_processor")
        if not nested and OLD not in files:
            raise CheckpointError(f"{folder} has no {OLD}, nor a {NEW} with an image_processor in it")
        processor = cls(CONFIGS[kind].from_hf(raw), nested or files[OLD])
        processor._files = files
        return processor

    @classmethod
    def from_hub(cls, repo_id: str, *, revision: str | None = None, token: str | None = None) -> ImageProcessor:
        """Download the settings of ``repo_id``, but no weights; see ``from_pretrained``."""
        return cls.from_pretrained(download(repo_id, revision=revision, token=token, weights=False))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files that this was read from, or a preprocessor_config.json, beside a model's."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in (self._files or {OLD: self.settings | {"image_processor_type": self.kind}}).items():
            (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    # ------------------------------------------------------------------------------------------------------- images

    def __call__(self, images: Any) -> ImageInputs:
        """One image or a list of them: paths, PIL images, or uint8 arrays or tensors (H, W), (H, W, C) or (C, H, W).

        C is 1, 3 or 4 (with transparency). Raises LigerError for anything else.
        """
        images = [_rgb(image) for image in (images if isinstance(images, list | tuple) else [images])]
        if not images:
            raise LigerError("there are no images to process")
        if not isinstance(self.config, LlavaNextConfig):
            tokens = self.config.mm_tokens_per_image if self._gemma else self.config.features_per_image
            return ImageInputs(torch.stack([self._tensor(image) for image in images]), None, [tokens] * len(images))
        sizes = [(image.height, image.width) for image in images]
        tiles = [torch.stack([self._tensor(tile) for tile in self._tiles(image)]) for image in images]
        pixel_values = torch.nn.utils.rnn.pad_sequence(tiles, batch_first=True)
        return ImageInputs(pixel_values, torch.tensor(sizes), [self.config.image_tokens(*size) for size in sizes])

    def _tensor(self, image: Image) -> torch.Tensor:
        """(3, H, W) fp32."""
        s = self.settings
        if self.kind == "LlavaImageProcessor" and s["do_pad"]:
            side = max(image.size)
            background = tuple(int(x * 255) for x in s["image_mean"])
            image = _on_canvas(image, (side, side), background)
        if s["do_resize"]:
            image = image.resize(self._target(image), s["resample"])
        if self.crop is not None:
            height, width = self.crop["height"], self.crop["width"]
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))  # black where the image does not reach
        x = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
        if s["do_rescale"]:
            x = x.double() * s["rescale_factor"]
        x = x.float()
        if s["do_normalize"]:
            x = (x - torch.tensor(s["image_mean"])) / torch.tensor(s["image_std"])
        return x.permute(2, 0, 1).contiguous()  # (H, W, 3) -> (3, H, W)

    def _target(self, image: Image) -> tuple[int, int]:
        """(width, height) to resize to."""
        if "shortest_edge" not in self.size:
            return self.size["width"], self.size["height"]
        edge, (width, height) = self.size["shortest_edge"], image.size
        long = int(edge * max(width, height) / min(width, height))
        return (edge, long) if width <= height else (long, edge)

    def _tiles(self, image: Image) -> list[Image]:
        """The whole image as a square, then the tiles, row by row, of the image fitted into its grid and padded."""
        height, width = best_resolution(image.height, image.width, self.config.image_grid_pinpoints)
        scale_w, scale_h = width / image.width, height / image.height
        if scale_w < scale_h:
            fitted = (width, min(math.ceil(image.height * scale_w), height))
        else:
            fitted = (min(math.ceil(image.width * scale_h), width), height)
        canvas = _on_canvas(image.resize(fitted, self.settings["resample"]), (width, height), (0, 0, 0))
        edge = self.size.get("shortest_edge")
        square = (edge, edge) if edge else (self.size["width"], self.size["height"])
        tile = self.config.vision_config.image_size
        corners = [(x, y) for y in range(0, height, tile) for x in range(0, width, tile)]
        tiles = [canvas.crop((x, y, x + tile, y + tile)) for x, y in corners]
        return [image.resize(square, self.settings["resample"]), *tiles]

    # ------------------------------------------------------------------------------------------------------ prompts

    @property
    def _gemma(self) -> bool:
        return isinstance(self.config, Gemma3MultimodalConfig)

    @property
    def placeholder(self) -> str:
        """What stands for an image in a prompt."""
        return "<start_of_image>" if self._gemma else self._files.get(NEW, {}).get("image_token", "<image>")

    def expand(self, text: str | Sequence[str], inputs: ImageInputs) -> str | list[str]:
        """``text`` (or each of several) with as many image tokens for each placeholder as its image needs.

        Images go to placeholders in order. Encode the result as usual. Raises LigerError, with both numbers, where
        there are not as many images as placeholders.
        """
        texts = [text] if isinstance(text, str) else list(text)
        found = sum(t.count(self.placeholder) for t in texts)
        if found != len(inputs.tokens):
            raise LigerError(
                f"the prompt has {found} times {self.placeholder}, but there are {len(inputs.tokens)} images"
            )
        counts = iter(inputs.tokens)
        out = []
        for t in texts:
            head, *rest = t.split(self.placeholder)
            out.append(head + "".join(self._image_text(next(counts)) + part for part in rest))
        return out[0] if isinstance(text, str) else out

    def _image_text(self, tokens: int) -> str:
        if self._gemma:
            return "\n\n<start_of_image>" + "<image_soft_token>" * tokens + "<end_of_image>\n\n"
        return self.placeholder * tokens


def _size(name: str, value: Any, *, square: bool) -> dict[str, int]:
    """{"shortest_edge": n} or {"height": h, "width": w}; old files have a number alone, of either meaning."""
    if isinstance(value, int):
        value = {"height": value, "width": value} if square else {"shortest_edge": value}
    found = {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else {}
    good = set(found) == {"height", "width"} or (name == "size" and set(found) == {"shortest_edge"})
    if not good or not all(type(x) is int and x > 0 for x in found.values()):
        raise ConfigError(f"{name} of the image processor must be height and width, or shortest_edge, found {value!r}")
    return found


def _rgb(image: Any) -> Image:
    """The image as Pillow's, without transparency: that is laid on white, as transformers does."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise LigerError('images need Pillow: pip install "ligermodels[vision]"') from error
    if isinstance(image, str | Path):
        try:
            with PIL.Image.open(image) as file:
                image = PIL.ImageOps.exif_transpose(file)  # as the camera was held
                image.load()
        except OSError as error:
            raise LigerError(f"{image} cannot be read as an image: {error}") from error
    if isinstance(image, PIL.Image.Image):
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    x = image if isinstance(image, torch.Tensor) else _as_tensor(image)
    if x.dtype != torch.uint8 or x.dim() not in (2, 3) or x.numel() == 0:
        raise LigerError(
            f"an array must be uint8 of shape (H, W), (H, W, C) or (C, H, W), found {x.dtype} {tuple(x.shape)}"
        )
    x = x.cpu()
    if x.dim() == 2:
        x = x[None]
    elif x.shape[0] not in (1, 3, 4):
        x = x.permute(2, 0, 1)
    if x.shape[0] not in (1, 3, 4):
        raise LigerError(
            f"an image has 1, 3 or 4 channels, first or last: found an array of shape {tuple(image.shape)}"
        )
    if x.shape[0] == 4:
        alpha = x[3:].double() / 255
        x = (alpha * x[:3] + (1 - alpha) * 255).round().to(torch.uint8)
    x = x.expand(3, -1, -1).permute(1, 2, 0).contiguous()  # (C, H, W) -> (H, W, 3)
    data = ctypes.string_at(x.data_ptr(), x.numel())
    return PIL.Image.frombytes("RGB", (x.shape[1], x.shape[0]), data)


def _as_tensor(image: Any) -> torch.Tensor:
    try:
        if any(stride < 0 for stride in getattr(image, "strides", None) or ()):  # a flipped view, which torch has not
            image = image.copy()
        return torch.as_tensor(image)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LigerError(
            f"an image must be a path, a PIL image, or a uint8 array or tensor, found {type(image).__name__}"
        ) from error


def _on_canvas(image: Image, size: tuple[int, int], color: tuple[int, int, int]) -> Image:
    """The image in the middle of a plain one of this (width, height)."""
    if image.size == size:
        return image
    from PIL.Image import new

    canvas = new("RGB", size, color)
    canvas.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    return canvas
