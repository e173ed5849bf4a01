"""Rotary position embedding tables: every published way of spelling and scaling them.

The rotation itself is ``ligermodels.kernels.rope``; this file makes its cos and sin. RoPE is Su et al. 2021; the
scalings are position interpolation ("linear", Chen et al. 2023), NTK-aware ("dynamic"), YaRN (Peng et al. 2023),
LongRoPE (Ding et al. 2024) and the one of Llama 3.1 ("llama3").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ligermodels.errors import ConfigError, LigerError

# What a scaling cannot do without. A file that lacks one is broken; guessing would silently change every logit.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow",
            "mscale", "mscale_all_dim", "partial_rotary_factor", "original_max_position_embeddings")  # fmt: skip
_MAX_POSITION = 1 << 24  # fp32 counts no further: beyond, two positions would share an angle


def parse_rope(config: Mapping[str, Any], *, default_theta: float = 10_000.0) -> dict[str, Any]:
    """One dict ``{"rope_type", "rope_theta", …}`` from any spelling of a Hugging Face config.

    Old files have top-level ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling: null | {"type" | "rope_type",
    "factor", …}``; files of transformers 5 have ``rope_parameters: {…}``. A value inside the dict beats the top-level
    key, which beats ``default_theta``. Raises ConfigError for an unknown or missing type and a missing or wrong value.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key} must be an object or null, found {given!r}")
    rope = {k: v for k, v in given.items() if v is not None and k not in ("type", "rope_type")}
    rope_type = given.get("rope_type", given.get("type"))
    if rope_type is None:
        if rope.keys() - {"rope_theta", "partial_rotary_factor"}:
            raise ConfigError(f"{key} has no 'rope_type' (old spelling 'type'): {dict(given)!r}")
        rope_type = "default"
    if not isinstance(rope_type, str):
        raise ConfigError(f"rope_type in {key} must be a name, found {rope_type!r}")
    if rope_type == "su":  # the first name of LongRoPE, in Phi-3 files
        rope_type = "longrope"
    if rope_type not in _REQUIRED:
        raise ConfigError(f"unknown rope_type {rope_type!r} in {key}; known are {', '.join(sorted(_REQUIRED))}")
    for name in ("rope_theta", "partial_rotary_factor"):
        if config.get(name) is not None:
            rope.setdefault(name, config[name])
    rope.setdefault("rope_theta", default_theta)
    if rope_type in ("llama3", "yarn", "longrope"):
        # The top-level key wins (Phi-3 keeps the trained length there); without either, the length of the file itself.
        original = config.get("original_max_position_embeddings")
        if original is not None:
            rope["original_max_position_embeddings"] = original
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    for name in _REQUIRED[rope_type]:
        if name not in rope:
            raise ConfigError(f"{key} of rope_type {rope_type!r} has no {name!r}: {dict(given)!r}")
    for name in _NUMBERS:
        value = rope.get(name)
        if value is not None and not _is_positive(value):
            raise ConfigError(f"{name} of the rope settings must be a positive number, found {value!r}")
    for name in ("short_factor", "long_factor"):
        if name in rope and not (isinstance(rope[name], list | tuple) and all(map(_is_positive, rope[name]))):
            raise ConfigError(f"{name} of the rope settings must be a list of positive numbers, found {rope[name]!r}")
    if rope["rope_theta"] <= 1:  # the angles would not fall with the dimension, and yarn divides by log(theta)
        raise ConfigError(f"rope_theta must be above 1, found {rope['rope_theta']!r}")
    if rope_type == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise ConfigError(
            f"low_freq_factor {rope['low_freq_factor']} must be below high_freq_factor {rope['high_freq_factor']}"
        )
    if rope_type == "longrope" and rope["original_max_position_embeddings"] <= 1:  # cos and sin are divided by its log
        found = rope["original_max_position_embeddings"]
        raise ConfigError(f"original_max_position_embeddings of rope_type 'longrope' must be above 1, found {found}")
    return {"rope_type": rope_type, **rope}


def _is_positive(value: Any) -> bool:
    """A number that torch can hold, above 0. NaN is not above 0; JSON knows Infinity and ints of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**63


def inverse_frequencies(
    rope: Mapping[str, Any], rotary_dim: int, max_position_embeddings: int, length: int = 0
) -> tuple[torch.Tensor, float]:
    """(inv_freq (rotary_dim/2,) fp32 on the CPU, factor for cos and sin), for a sequence of ``length`` positions.

    ``length`` matters to "dynamic" (the base grows beyond max_position_embeddings) and "longrope" (the long factors
    hold for all positions once the sequence is longer than the model was trained for).
    """
    kind, theta = rope["rope_type"], rope["rope_theta"]
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").float() / rotary_dim
    if kind == "dynamic":
        stretch = rope["factor"] * max(length, max_position_embeddings) / max_position_embeddings
        theta = theta * (stretch - (rope["factor"] - 1)) ** (rotary_dim / (rotary_dim - 2))
    inv_freq = 1.0 / theta**exponent
    if kind == "linear":
        return inv_freq / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, rotary_dim)
    if kind == "longrope":
        return _longrope(exponent, rope, max_position_embeddings, length)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Wavelengths longer than the trained context are stretched by ``factor``, short ones kept, a ramp between."""
    low, high, trained = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((trained / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / rope["factor"] + smooth * inv_freq


def _yarn(inv_freq: torch.Tensor, rope: Mapping[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often within the trained context are kept, slow ones are divided by ``factor``."""
    trained, factor, theta = rope["original_max_position_embeddings"], rope["factor"], rope["rope_theta"]

    def dimension(turns: float) -> float:  # the dimension that makes `turns` rotations over the trained context
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 * (low == high)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)

    def mscale(m: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    scaling = rope.get("attention_factor")
    if scaling is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        scaling = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]) if both else mscale()
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), scaling


def _longrope(
    exponent: torch.Tensor, rope: Mapping[str, Any], max_position_embeddings: int, length: int
) -> tuple[torch.Tensor, float]:
    """One factor per dimension, from one of two lists; cos and sin are scaled by √(1 + ln c / ln trained)."""
    trained = rope["original_max_position_embeddings"]
    name = "long_factor" if length > trained else "short_factor"
    for key in ("short_factor", "long_factor"):  # both, lest the wrong one be met only in a long sequence
        if len(rope[key]) != exponent.shape[0]:
            raise ConfigError(
                f"{key} of the rope settings must have {exponent.shape[0]} numbers, found {len(rope[key])}"
            )
    factors = torch.tensor(rope[name], dtype=torch.float32, device="cpu")
    inv_freq = 1.0 / (factors * rope["rope_theta"] ** exponent)
    factor = rope.get("factor") or max_position_embeddings / trained
    scaling = rope.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return inv_freq, scaling


class RotaryEmbedding(nn.Module):
    """cos and sin, (B or 1, S, rotary_dim/2) in fp32, for given positions. Made once per forward, used by all layers.

    The frequencies stay in fp32 on whatever device the model moves to, also through ``model.to(torch.bfloat16)``:
    in bf16 every position above 256 would get a wrong angle.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_position_embeddings: int):
        super().__init__()
        self.rope, self.max_position_embeddings = dict(rope), max_position_embeddings
        self.rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > head_dim:
            raise ConfigError(f"rotary dimension must be even and at most head_dim {head_dim}, found {self.rotary_dim}")
        if rope["rope_type"] == "dynamic" and self.rotary_dim == 2:
            raise ConfigError("rope_type 'dynamic' needs a rotary dimension above 2: its exponent is d / (d - 2)")
        self._exact, self.scaling = inverse_frequencies(rope, self.rotary_dim, max_position_embeddings)
        self._last: tuple[bool | int, torch.device, torch.Tensor] | None = None  # where they depend on the length
        device = torch.get_default_device()
        inv_freq = self._exact if device.type == "meta" else self._exact.to(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        self.inv_freq = self._exact.to(self.inv_freq.device)
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies are other ones for a longer sequence."""
        return self.rope["rope_type"] in ("dynamic", "longrope")

    @property
    def border(self) -> int | None:
        """The length up to which LongRoPE turns by its short factors, beyond it by its long ones; None: no such."""
        return self.rope["original_max_position_embeddings"] if self.rope["rope_type"] == "longrope" else None

    def forward(self, position_ids: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``position_ids`` (B or 1, S); ``length`` = the largest position + 1, known on the host."""
        if length > _MAX_POSITION:
            raise LigerError(
                f"position {length - 1} is beyond {_MAX_POSITION - 1}, the last that fp32 angles can tell apart"
            )
        inv_freq = self._for_length(length, position_ids.device) if self.depends_on_length else self.inv_freq
        angle = position_ids[..., None].float() * inv_freq.to(position_ids.device)  # (B, S, rotary_dim/2)
        return angle.cos() * self.scaling, angle.sin() * self.scaling

    def _for_length(self, length: int, device: torch.device) -> torch.Tensor:
        """Frequencies for ``length`` positions, on the device; the last ones are kept: copying waits for the device."""
        kind = length if self.border is None else length > self.border
        if torch.compiler.is_compiling() or self._last is None or self._last[:2] != (kind, device):
            inv_freq, _ = inverse_frequencies(self.rope, self.rotary_dim, self.max_position_embeddings, length)
            inv_freq = inv_freq.to(device)
            if torch.compiler.is_compiling():
                return inv_freq
            self._last = kind, device, inv_freq
        return self._last[2]
