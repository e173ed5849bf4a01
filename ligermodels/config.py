"""Configurations: a dataclass per family with Hugging Face's names, read from and written to config.json."""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from ligermodels.checkpoints_convert.hf import read_config
from ligermodels.errors import ConfigError
from ligermodels.layers.rotary import parse_rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_LARGEST = 2**31 - 1  # of a size; the product of two still fits an int64
_MOST_LAYERS = 10_000  # a mistyped number would build modules for hours


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A floating dtype from its torch object or its name ("bfloat16"). Raises ConfigError for anything else."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclasses.dataclass
class Config:
    """What every decoder has. A family's subclass adds its keys and sets its own defaults for missing ones.

    Rope settings may come in any published spelling; ``rope`` holds them in one. Keys that no model here reads are
    kept in ``extra`` and written back by ``to_hf``.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    default_theta: ClassVar[float] = 10_000.0

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    bos_token_id: int | list[int] | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    rope_theta: float | None = None
    rope_scaling: dict | None = None
    rope_parameters: dict | None = None
    dtype: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            check_type(field.name, getattr(self, field.name), hints[field.name])
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "max_position_embeddings"):  # fmt: skip
            check_range(name, getattr(self, name), 1, _LARGEST)
        check_range("num_hidden_layers", self.num_hidden_layers, 1, _MOST_LAYERS)
        check_range("rms_norm_eps", self.rms_norm_eps, 0, 1)
        check_range("initializer_range", self.initializer_range, 0, _LARGEST)
        check_range("attention_dropout", self.attention_dropout, 0, 1)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}, and head_dim is not given"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        check_range("head_dim", self.head_dim, 1, _LARGEST)
        check_range("num_attention_heads · head_dim", self.num_attention_heads * self.head_dim, 1, _LARGEST)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ConfigError(f"pad_token_id {self.pad_token_id} is not in a vocabulary of {self.vocab_size}")
        if self.dtype is not None:
            self.dtype = str(resolve_dtype(self.dtype)).removeprefix("torch.")
        self.rope = parse_rope({**self.extra, **vars(self)}, default_theta=self.default_theta)
        self.rope_theta = self.rope["rope_theta"]

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> typing.Self:
        """From a config.json: a dict, the file, or its folder. Raises ConfigError naming key and value."""
        raw = dict(source) if isinstance(source, Mapping) else read_config(source)
        raw = cls.translate(raw)
        found = raw.pop("model_type", cls.model_type)
        if found != cls.model_type:
            raise ConfigError(
                f"model_type is {found!r}, but {cls.__name__} reads {cls.model_type!r}: "
                "ligermodels.from_pretrained picks the class that fits"
            )
        old_dtype = raw.pop("torch_dtype", None)
        if raw.get("dtype") is None:
            raw["dtype"] = old_dtype
        for name in ("architectures", "transformers_version"):  # ours to write
            raw.pop(name, None)
        names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        known = {k: copy.deepcopy(v) for k, v in raw.items() if k in names}
        return cls(**known, extra={k: copy.deepcopy(v) for k, v in raw.items() if k not in names})

    @property
    def drops(self) -> bool:
        """Whether training draws random numbers in a block, so that running a block again must draw the same."""
        return self.attention_dropout > 0

    @classmethod
    def translate(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Hook for families whose files come in other layouts too: their keys in this family's names."""
        return raw

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers (old and new) and others read: both rope spellings, both dtype keys."""
        out = {"architectures": [self.architecture], "model_type": self.model_type}
        out |= {f.name: copy.deepcopy(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "extra"}
        rope = dict(self.rope)
        out["rope_parameters"] = rope
        out["rope_scaling"] = None
        if rope["rope_type"] != "default":
            out["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        out["torch_dtype"] = self.dtype
        return out | copy.deepcopy(self.extra)


def check_windows(config: Any, window: int | None) -> None:
    """Raise ConfigError unless ``window`` is positive or None and fits ``layer_types``, where there are such."""
    if window is not None and window < 1:
        raise ConfigError(f"sliding_window must be null (no window) or at least 1 (itself), found {window}")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return
    if len(kinds) != config.num_hidden_layers:
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {config.num_hidden_layers}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer_types must say 'full_attention' or 'sliding_attention', found {kind!r}")
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("layer_types has 'sliding_attention', but sliding_window is null or switched off")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ConfigError unless ``value`` is of the annotated type (an int will do for a float; a bool is no int)."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = tuple(typing.get_origin(t) or t for t in allowed)
    if float in plain:
        plain += (int,)
    if (isinstance(value, bool) and bool not in plain) or not isinstance(value, plain):
        expected = " or ".join("null" if t is type(None) else getattr(t, "__name__", str(t)) for t in allowed)
        raise ConfigError(f"{name} must be {expected}, found {value!r}")
    if isinstance(value, list):
        item = next(typing.get_args(t)[0] for t in allowed if typing.get_origin(t) is list)
        if any(isinstance(x, bool) or not isinstance(x, item) for x in value):
            raise ConfigError(f"{name} must be a list of {item.__name__}, found {value!r}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low ≤ value ≤ high."""
    if not low <= value <= high:  # false for NaN too
        raise ConfigError(f"{name} must be between {low} and {high}, found {value}")
