"""Vision towers: CLIP's ViT (LLaVA, LLaVA-NeXT) and SigLIP's (Gemma 3), images in, hidden states of patches out.

Both are the same pre-norm transformer without causality (Dosovitskiy et al. 2021): an image is cut into square patches,
each is projected to the width, a learned position is added, then x + attention(norm(x)), x + mlp(norm(x)) with biases
everywhere. What differs: CLIP (Radford et al. 2021) puts a class token first, norms once before the first layer, its
patch projection has no bias, and its MLP is gated by quick_gelu, x·σ(1.702·x); SigLIP (Zhai et al. 2023) has patches
only and gelu in tanh form. Parameter names are Hugging Face's, also CLIP's ``pre_layrnorm``.

Shapes: N images, C channels, P patches of an image (image_size / patch_size)², T tokens (P, or P + 1 with the class
token, which is first), H hidden_size, A attention heads, D = H / A, I intermediate_size.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

from ligermodels.config import check_range, check_type
from ligermodels.errors import ConfigError, LigerError
from ligermodels.inputs import need_tensor
from ligermodels.kernels import layer_norm
from ligermodels.layers.memory import recompute


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """CLIP's approximation of gelu, elementwise."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str, key: str = "hidden_act") -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of this name. Raises ConfigError, naming the config's ``key``, for an unknown one."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"{key} {name!r} is not known here; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@dataclass
class VisionConfig:
    """``vision_config`` of a config.json. Keys that no tower reads are kept in ``extra`` and written back."""

    model_type: ClassVar[str]
    class_tokens: ClassVar[int]

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            if typing.get_origin(hint) is ClassVar or name == "extra":
                continue
            check_type(f"vision_config.{name}", getattr(self, name), hint)
            if hint is int:
                check_range(f"vision_config.{name}", getattr(self, name), 1, 2**20)
        check_range("vision_config.attention_dropout", self.attention_dropout, 0, 1)
        activation(self.hidden_act, "vision_config.hidden_act")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"vision_config: hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.image_size < self.patch_size:
            raise ConfigError(f"vision_config: patch_size {self.patch_size} exceeds image_size {self.image_size}")

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """T: hidden states of one image."""
        return self.patches_per_side**2 + self.class_tokens

    def to_hf(self) -> dict[str, Any]:
        """The ``vision_config`` that transformers reads."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        return {"model_type": self.model_type} | out | copy.deepcopy(self.extra)


@dataclass
class ClipVisionConfig(VisionConfig):
    """Keys and defaults as in Hugging Face's CLIPVisionConfig."""

    model_type: ClassVar[str] = "clip_vision_model"
    class_tokens: ClassVar[int] = 1


@dataclass
class SiglipVisionConfig(VisionConfig):
    """Keys and defaults as in Hugging Face's SiglipVisionConfig, but for the pooling head, which no model here has."""

    model_type: ClassVar[str] = "siglip_vision_model"
    class_tokens: ClassVar[int] = 0

    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    vision_use_head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision_use_head:
            raise ConfigError("vision_config.vision_use_head must be false: no model here uses the pooling head")


def read_vision_config(raw: Any, *, default: str) -> VisionConfig:
    """From the ``vision_config`` of a config.json, of model_type ``default`` if it names none. Raises ConfigError."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"vision_config must be an object, found {raw!r}")
    kind = raw.get("model_type", default)
    if kind not in TOWERS:
        raise ConfigError(f"vision_config.model_type {kind!r} is not in the zoo, which has {', '.join(TOWERS)}")
    cls = TOWERS[kind].config_class
    names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
    ours = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype")  # ours to write
    extra = {k: copy.deepcopy(v) for k, v in raw.items() if k not in names and k not in ours}
    return cls(**{k: v for k, v in raw.items() if k in names}, extra=extra)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm's parameters, the fused kernel's arithmetic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class VisionAttention(nn.Module):
    """Every token sees all tokens of its image: (N, T, H) -> (N, T, H)."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        H = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(H, H) for _ in "qkvo")
        self.heads, self.dropout = config.num_attention_heads, config.attention_dropout

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        projected = (self.q_proj(h), self.k_proj(h), self.v_proj(h))
        q, k, v = (rearrange(x, "n t (a d) -> n a t d", a=self.heads) for x in projected)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(rearrange(out, "n a t d -> n t (a d)"))


class VisionMLP(nn.Module):
    """fc2(act(fc1(h))): (N, T, H) -> (N, T, H)."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = activation(config.hidden_act)
        self.recompute = True

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        inner = self.fc1(h)  # (N, T, I)
        active = self.act(inner)
        with recompute(active, lambda: self.act(inner), enabled=self.recompute):
            return self.fc2(active)


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (N, T, H) -> (N, T, H)."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = VisionMLP(config)
        self.recompute = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer_norm1(x)
        with recompute(h, lambda: self.layer_norm1(x), enabled=self.recompute):
            x2 = x + self.self_attn(h)
        h = self.layer_norm2(x2)
        with recompute(h, lambda: self.layer_norm2(x2), enabled=self.recompute):
            return x2 + self.mlp(h)


class VisionTower(nn.Module):
    """What both towers are: ``tower(pixel_values, layers)`` gives the hidden states of the layers asked for."""

    config_class: ClassVar[type[VisionConfig]] = VisionConfig

    def __init__(self, config: VisionConfig):
        super().__init__()
        H, p = config.hidden_size, config.patch_size
        self.config, self.activation_memory = config, "fast"
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(config.num_channels, H, p, p, bias=not config.class_tokens),
                "position_embedding": nn.Embedding(config.num_tokens, H),
            }
        )
        layers = (VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = LayerNorm(H, config.layer_norm_eps)  # not used by LLaVA, but in its files

    def set_activation_memory(self, level: str) -> None:
        """As ``CausalLM.set_activation_memory``: "block" keeps the inputs of the layers only, "none" keeps all."""
        self.activation_memory = level
        for module in self.modules():
            if hasattr(module, "recompute"):
                module.recompute = level not in ("none", "block")

    def patches(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, C, image_size, image_size) -> (N, P, H), not yet with positions."""
        c, projection = self.config, self.embeddings.patch_embedding
        expected = (c.num_channels, c.image_size, c.image_size)
        need_tensor("pixel_values", pixel_values)
        if pixel_values.dim() != 4 or pixel_values.shape[1:] != expected or not pixel_values.is_floating_point():
            raise LigerError(
                f"pixel_values must be floating point images of shape (N, {', '.join(map(str, expected))}), found "
                f"{pixel_values.dtype} {tuple(pixel_values.shape)}; ImageProcessor makes them"
            )
        # A convolution whose stride is its kernel is one product for each patch, and that repeats bit for bit.
        p, side = c.patch_size, c.patches_per_side * c.patch_size
        cut = rearrange(pixel_values[..., :side, :side], "n c (h p) (w q) -> n (h w) (c p q)", p=p, q=p)
        return F.linear(cut.to(projection.weight.dtype), projection.weight.flatten(1), projection.bias)

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, C, image_size, image_size) -> (N, T, H): the input of the first layer."""
        return self.patches(pixel_values) + self.embeddings.position_embedding.weight

    def forward(self, pixel_values: torch.Tensor, layers: list[int]) -> list[torch.Tensor]:
        """pixel_values (N, C, image_size, image_size) -> (N, T, H) for each of ``layers``.

        Layers count as Hugging Face's ``hidden_states``: 0 is the input of the first layer, i the output of the i-th,
        and negative ones count from the end. Layers above the highest are not run. Raises LigerError for other shapes.
        """
        wanted = [i if i >= 0 else self.config.num_hidden_layers + 1 + i for i in layers]
        x = self.embed(pixel_values)
        states = {0: x}
        for i, layer in enumerate(self.encoder.layers[: max(wanted)], 1):
            if self.activation_memory == "block" and torch.is_grad_enabled():
                random = self.training and self.config.attention_dropout > 0
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=random)
            else:
                x = layer(x)
            if i in wanted:
                states[i] = x
        return [states[i] for i in wanted]


class SiglipVisionTower(VisionTower):
    """Patches and positions only."""

    config_class = SiglipVisionConfig


class ClipVisionTower(VisionTower):
    """With a class token, and a norm before the first layer."""

    config_class = ClipVisionConfig

    def __init__(self, config: ClipVisionConfig):
        super().__init__(config)
        H = config.hidden_size
        self.embeddings.class_embedding = nn.Parameter(torch.empty(H))
        nn.init.normal_(self.embeddings.class_embedding, std=config.initializer_range)
        self.pre_layrnorm = LayerNorm(H, config.layer_norm_eps)  # spelt so in the files

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixel_values)
        x = torch.cat((self.embeddings.class_embedding.expand(x.shape[0], 1, -1), x), 1)  # (N, P, H) -> (N, P + 1, H)
        return self.pre_layrnorm(x + self.embeddings.position_embedding.weight)


TOWERS: dict[str, type[VisionTower]] = {"clip_vision_model": ClipVisionTower, "siglip_vision_model": SiglipVisionTower}
