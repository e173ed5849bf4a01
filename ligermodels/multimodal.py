"""What models that read images have in common: a vision tower, a projector, and a text model of the zoo, unchanged.

    pixel_values -> vision_tower -> multi_modal_projector -> one feature for each image token of the prompt
    input_ids    -> the text model's embeddings, features in the places of the image tokens -> the text model

Parameters are named as in published files: ``vision_tower.…``, ``multi_modal_projector.…``, ``language_model.model.…``
and ``language_model.lm_head.weight``. So ``model.vision_tower.requires_grad_(False)`` freezes the tower, and whatever
works on a text model (LoRA, for one) works on ``model.language_model``. A family's file adds its config, its projector
and the way from pixels to features.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ligermodels import generation
from ligermodels.base import CausalLM
from ligermodels.checkpoints_convert.hf import Checkpoint, read_config
from ligermodels.checkpoints_convert.rewrites import vision_language
from ligermodels.config import Config, check_type, resolve_dtype
from ligermodels.errors import ConfigError, LigerError
from ligermodels.inputs import check_ids, need_tensor
from ligermodels.layers.cache import KVCache
from ligermodels.layers.memory import split_level
from ligermodels.vision import TOWERS, VisionConfig, read_vision_config

if TYPE_CHECKING:
    from ligermodels.planner import Plan
    from ligermodels.tokenizer import Tokenizer


@dataclass
class MultimodalConfig:
    """config.json of a model that reads images: the configs of its text model and its tower, and what joins them.

    Keys that no model here reads are kept in ``extra`` and written back by ``to_hf``. What generation and training ask
    of any config (vocab_size, eos_token_id, tie_word_embeddings, …) is answered from ``text_config``.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    text_classes: ClassVar[Mapping[str, type[CausalLM]]]  # by model_type; the first is the default
    default_tower: ClassVar[str] = "clip_vision_model"

    text_config: Config
    vision_config: VisionConfig
    image_token_index: int
    dtype: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            if typing.get_origin(hint) is not ClassVar and name != "extra":
                check_type(name, getattr(self, name), hint)
        if self.image_token_index < 0:
            raise ConfigError(f"image_token_index must not be negative, found {self.image_token_index}")
        if self.dtype is not None:
            self.dtype = str(resolve_dtype(self.dtype)).removeprefix("torch.")

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> typing.Self:
        """From a config.json: a dict, the file, or its folder. Raises ConfigError naming key and value."""
        raw = dict(source) if isinstance(source, Mapping) else read_config(source)
        found = raw.pop("model_type", cls.model_type)
        if found != cls.model_type:
            raise ConfigError(f"model_type is {found!r}, but {cls.__name__} reads {cls.model_type!r}")
        for key in ("text_config", "vision_config"):
            if not isinstance(raw.get(key), Mapping):
                raise ConfigError(f"{key} of a {cls.model_type!r} must be an object, found {raw.get(key)!r}")
        text, vision = dict(raw.pop("text_config")), raw.pop("vision_config")
        kind = text.setdefault("model_type", next(iter(cls.text_classes)))
        if kind not in cls.text_classes:
            raise ConfigError(
                f"text_config.model_type {kind!r}: the text model of a {cls.model_type!r} may be "
                f"{', '.join(cls.text_classes)} here"
            )
        # The flag may stand outside, inside, or in both places; a tied head has no tensor of its own in the file.
        tied = raw.pop("tie_word_embeddings", None)
        if tied or (tied is not None and "tie_word_embeddings" not in text):
            text["tie_word_embeddings"] = tied
        if "image_token_index" not in raw and "image_token_id" in raw:
            raw["image_token_index"] = raw.pop("image_token_id")
        dtypes = (
            raw.pop("dtype", None),
            raw.pop("torch_dtype", None),
            text.pop("dtype", None),
            text.pop("torch_dtype", None),
        )
        for name in ("architectures", "transformers_version"):  # ours to write
            raw.pop(name, None)
        names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        return cls(
            text_config=cls.text_classes[kind].config_class.from_hf(text),
            vision_config=read_vision_config(vision, default=cls.default_tower),
            dtype=next((x for x in dtypes if x is not None), None),
            **{k: copy.deepcopy(v) for k, v in raw.items() if k in names},
            extra={k: copy.deepcopy(v) for k, v in raw.items() if k not in names},
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers and others read."""
        out = {"architectures": [self.architecture], "model_type": self.model_type}
        out |= {f.name: copy.deepcopy(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "extra"}
        text = self.text_config.to_hf()
        for key in ("dtype", "torch_dtype"):  # said once, for the whole model
            text.pop(key, None)
        out |= {"text_config": text, "vision_config": self.vision_config.to_hf(), "torch_dtype": self.dtype}
        return out | {"tie_word_embeddings": self.tie_word_embeddings} | copy.deepcopy(self.extra)

    def _special(self, key: str) -> int | list[int] | None:
        return self.extra[key] if self.extra.get(key) is not None else getattr(self.text_config, key)

    eos_token_id = property(lambda self: self._special("eos_token_id"))
    pad_token_id = property(lambda self: self._special("pad_token_id"))
    vocab_size = property(lambda self: self.text_config.vocab_size)
    hidden_size = property(lambda self: self.text_config.hidden_size)
    num_hidden_layers = property(lambda self: self.text_config.num_hidden_layers)
    max_position_embeddings = property(lambda self: self.text_config.max_position_embeddings)

    @property
    def tie_word_embeddings(self) -> bool:
        return self.text_config.tie_word_embeddings

    @tie_word_embeddings.setter
    def tie_word_embeddings(self, value: bool) -> None:
        self.text_config.tie_word_embeddings = value


class MultimodalLM(CausalLM):
    """Base of the families that read images. A subclass adds ``multi_modal_projector`` and its ``forward``."""

    config_class: ClassVar[type[MultimodalConfig]]
    text_prefix = "language_model."

    def __init__(self, config: MultimodalConfig):
        super().__init__(config)
        self.vision_tower = TOWERS[config.vision_config.model_type](config.vision_config)
        self.language_model = config.text_classes[config.text_config.model_type](config.text_config)

    @property
    def model(self) -> nn.ModuleDict:
        return self.language_model.model

    @property
    def lm_head(self) -> nn.Module:
        return self.language_model.lm_head

    @classmethod
    def to_model_names(cls, weights: Checkpoint) -> Checkpoint:
        return vision_language(weights)

    def init_weights(self) -> None:
        """Tower and projector: normal(0, initializer_range of the tower), biases 0. The text model has its own rule."""
        std = self.config.vision_config.initializer_range
        for part in (self.vision_tower, self.multi_modal_projector):
            for module in part.modules():
                if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
                    nn.init.normal_(module.weight, std=std)
                    if getattr(module, "bias", None) is not None:
                        nn.init.zeros_(module.bias)

    def set_activation_memory(self, level: str | Sequence[str], *, lag: int = 1) -> None:
        """As for any model; ``level`` may be one for each layer of the text model.

        The tower has three of the levels: it keeps the inputs of its layers only where the text model is at "block" or
        "attention" in any layer, everything at "none", and what is not cheap to rebuild at any other level.
        """
        self.language_model.set_activation_memory(level, lag=lag)
        levels = {split_level(x)[0] for x in ([level] if isinstance(level, str) else level)}
        self.vision_tower.set_activation_memory(
            "block" if levels & {"block", "attention"} else "none" if levels == {"none"} else "fast"
        )
        self.activation_memory = self.language_model.activation_memory

    def fit_memory(self, budget_gib: float, batch: int, seq: int, **options: Any) -> Plan:
        raise LigerError("fit_memory plans for text models; with images use set_activation_memory")

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Room for keys and values of ``max_length`` positions, image tokens among them, of ``batch_size`` rows."""
        return self.language_model.make_cache(batch_size, max_length)

    def check_cache(self, cache: KVCache) -> None:
        """Raise LigerError unless ``cache`` is one that the text model may use."""
        self.language_model.check_cache(cache)

    # ------------------------------------------------------------------------------------------------------ forward

    def with_images(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        tokens: int | Sequence[int],
        labels: torch.Tensor | None,
        cache: KVCache | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the text model is given for ids (B, S) whose image tokens are ``features`` (F, H), in the order of the
        rows: embeddings (B, S, H), None where it may look them up itself, and labels (B, S) without image tokens.

        ``tokens``: how many of the features an image has, each or all of them alike. Raises LigerError where the image
        tokens are not those of the images; see ``merge`` for GPUs.
        """
        need_tensor("input_ids", input_ids)
        embeddings = self.merge(input_ids, features, tokens, decodes=cache is not None and cache.length > 0)
        if labels is not None:
            need_tensor("labels", labels)
        if labels is not None and labels.shape == input_ids.shape:
            labels = labels.masked_fill(input_ids == self.config.image_token_index, -100)  # nobody says an image token
        return embeddings, labels

    def merge(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        tokens: int | Sequence[int],
        *,
        decodes: bool = False,
    ) -> torch.Tensor | None:
        """(B, S, H): embeddings of the ids, but ``features`` (F, H) in the places of the image tokens, in order.

        Image tokens are counted, and no row may end within an image, where values can be read without waiting, and on a
        GPU in the first batch. If a later batch there has another count, its image tokens are NaN, and so the loss.
        With ``decodes`` a single token a row may be an image token that the model itself has said. None where there are
        neither features nor image tokens.
        """
        compiling = torch.compiler.is_compiling()
        capturing = input_ids.is_cuda and torch.cuda.is_current_stream_capturing()
        read = not compiling and not capturing and (input_ids.device.type == "cpu" or not self._ids_checked)
        check_ids(input_ids, self.config.vocab_size, read_on_gpu=read)
        is_image = input_ids == self.config.image_token_index
        wanted = 0 if features is None else features.shape[0]
        said = decodes and input_ids.shape[1] == 1 and features is None
        if read and not input_ids.is_meta and not said:
            self._check_counts(is_image.sum(1).tolist(), wanted, tokens)
        if not compiling:
            self._ids_checked = True
        if features is None:
            if read or said:
                return None
            return self.model.embed_tokens(input_ids).masked_fill(is_image[..., None], torch.nan)
        embeddings = self.model.embed_tokens(input_ids.masked_fill(is_image, 0))
        flat = embeddings.flatten(0, 1)  # (B, S, H) -> (B·S, H)
        seen = is_image.flatten().cumsum(0)
        # Where the first, second, … image token stands: found without a wait for the device, unlike by nonzero.
        rank = torch.arange(1, wanted + 1, device=seen.device)
        place = torch.searchsorted(seen, rank).clamp(max=flat.shape[0] - 1)
        features = features.to(flat.dtype)
        if not read:
            features = features.masked_fill(seen[-1] != wanted, torch.nan)
        return flat.index_copy(0, place, features).view_as(embeddings)

    def _check_counts(self, rows: list[int], wanted: int, tokens: int | Sequence[int]) -> None:
        """Raise LigerError unless the image tokens of each row are those of whole images, ``wanted`` in all."""
        found = (
            f"input_ids hold {sum(rows)} image tokens (id {self.config.image_token_index}; by row "
            f"{', '.join(map(str, rows[:16]))}), but pixel_values give {wanted} image features"
        )
        if sum(rows) != wanted:
            raise LigerError(
                f"{found}. ImageProcessor.expand writes as many tokens as an image has features; truncation may cut "
                "them off"
            )
        images = [tokens] * (wanted // tokens) if isinstance(tokens, int) else tokens
        ends = {0, *itertools.accumulate(images)}
        for row, end in enumerate(itertools.accumulate(rows)):
            if end not in ends:
                raise LigerError(f"{found} ({', '.join(map(str, images[:16]))} an image): row {row} ends within one")

    # --------------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        pixel_values: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | list[str] | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        row_numbers: Sequence[int] | None = None,
        logprobs: bool = False,
        cache: KVCache | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(B, S + new) ids: the prompts (B, S), padded on the left, and what follows. See ``generation.stream``.

        ``pixel_values`` (and, for LLaVA-NeXT, ``image_sizes``) as in ``forward``: of all images of the prompts. Where
        ``cache`` has the first positions already, the images must be all among them, or all behind them.
        """
        return generation.generate(
            self, input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, eos_token_id=eos_token_id,
            pad_token_id=pad_token_id, stop_strings=stop_strings, tokenizer=tokenizer, seed=seed,
            row_numbers=row_numbers, logprobs=logprobs,
            cache=cache, prompt_inputs=self._prompt(input_ids, cache, pixel_values, image_sizes),
        )  # fmt: skip

    def stream(
        self,
        input_ids: torch.Tensor,
        *,
        pixel_values: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | list[str] | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        row_numbers: Sequence[int] | None = None,
        logprobs: bool = False,
        cache: KVCache | None = None,
    ) -> Iterator[Any]:
        """Yields the (B,) ids of each new position. See ``generate`` for the arguments."""
        return generation.stream(
            self, input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, eos_token_id=eos_token_id,
            pad_token_id=pad_token_id, stop_strings=stop_strings, tokenizer=tokenizer, seed=seed,
            row_numbers=row_numbers, logprobs=logprobs,
            cache=cache, prompt_inputs=self._prompt(input_ids, cache, pixel_values, image_sizes),
        )  # fmt: skip

    def _prompt(
        self,
        input_ids: torch.Tensor,
        cache: KVCache | None,
        pixel_values: torch.Tensor | None,
        image_sizes: torch.Tensor | None,
    ) -> dict[str, torch.Tensor] | None:
        """What goes with the part of the prompt that is not in the cache, for ``generation``; on the model's device."""
        if pixel_values is None:
            return None
        need_tensor("pixel_values", pixel_values)
        need_tensor("input_ids", input_ids)
        if isinstance(cache, KVCache) and cache.length > 0:
            image = input_ids == self.config.image_token_index
            cached, new = (int(part.sum()) for part in (image[..., : cache.length], image[..., cache.length :]))
            if cached and new:
                raise LigerError(
                    f"the cache holds {cached} of the prompt's image tokens and {new} are new, so it cannot be told "
                    "which images are: rewind the cache to before them"
                )
            if not new:
                return None  # the cache has seen them
        found = {"pixel_values": pixel_values.to(self.device)}
        return found if image_sizes is None else found | {"image_sizes": image_sizes}
