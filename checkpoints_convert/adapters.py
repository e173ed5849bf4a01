"""LoRA adapters in PEFT's layout: ``adapter_config.json`` beside ``adapter_model.safetensors``.

LoRA (Hu et al. 2021, arXiv 2106.09685) adds scale·B·A to a weight (out, in), with A (r, in), B (out, r) and scale
alpha / r, or alpha / √r with ``use_rslora`` (Kalajdzievski 2023). In the file a module ``model.layers.0.mlp.up_proj``
has ``base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`` and ``….lora_B.weight``; an embedding (V, H) has
``….lora_embedding_A`` (r, V) and ``….lora_embedding_B`` (H, r). ``modules_to_save`` are whole weights under
``base_model.model.NAME.weight``, which replace the base's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoints_convert.files import listed, read_json
from ligermodels.checkpoints_convert.hf import Checkpoint, TensorInfo
from ligermodels.checkpoints_convert.safetensors_file import DTYPES, known_dtypes, read_header, write_safetensors
from ligermodels.checkpoints_convert.save import check_memory, to_json, write_bytes
from ligermodels.checkpoints_convert.streamed import Source, WorkFolder, says_tied, to_dtype
from ligermodels.errors import CheckpointError

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "Adapter", "merge_adapter", "merged", "read_adapter", "save_adapter"]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")

# Settings that change what the adapter computes and that are not computed here. Each is off by default.
_REFUSED = (
    "use_dora", "use_qalora", "lora_bias", "layer_replication", "trainable_token_indices", "target_parameters",
    "megatron_config", "alora_invocation_tokens", "arrow_config", "use_bdlora",
)  # fmt: skip
# Ways to start A and B that leave the base as it is. Others (pissa, olora, loftq, corda, …) change it as well.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """A checked adapter, without its numbers: ``pairs`` maps a module's name (the base model's) to (A, B), ``saved``
    the name of a base tensor to the one that replaces it. Read them with ``read``."""

    folder: Path
    config: dict[str, Any]
    pairs: dict[str, tuple[TensorInfo, TensorInfo]]
    saved: dict[str, TensorInfo]
    embeddings: frozenset[str]  # those modules of ``pairs`` that are embeddings: A (r, V), B (H, r)

    def read(self, info: TensorInfo, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor of ``pairs`` or ``saved``, on the CPU."""
        return Checkpoint(self.folder, {"adapter": info}).read("adapter", dtype=dtype)

    def scale(self, module: str) -> float:
        """alpha / r of ``module``, or alpha / √r with ``use_rslora``; ``alpha_pattern`` may give it its own alpha."""
        alpha = _by_pattern(self.config, "alpha_pattern", module, self.config.get("lora_alpha", 8))
        rank = self.pairs[module][0].shape[0]
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def read_adapter(folder: str | Path) -> Adapter:
    """Open an adapter folder, reading headers only.

    Raises CheckpointError, naming file, key or tensor: for a missing or broken file, pickled weights, a setting that
    changes the result and is not supported (DoRA, biases, PiSSA and other starts that alter the base, …), a pair that
    lacks its half, and ranks that disagree.
    """
    folder = Path(folder)
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {ADAPTER_CONFIG}: it is not an adapter in PEFT's layout")
    config = read_json(path)
    _check_config(path, config)
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        other = folder / "adapter_model.bin"
        hint = f"; {other.name} is a pickle, which is not read: save the adapter with safe_serialization=True"
        raise CheckpointError(f"{folder} holds no {ADAPTER_WEIGHTS}" + (hint if other.exists() else ""))
    halves: dict[str, dict[str, TensorInfo]] = {}
    saved: dict[str, TensorInfo] = {}
    embeddings = set()
    for key, (kind, shape, start, end) in read_header(weights).items():
        if kind not in DTYPES:
            raise CheckpointError(f"{weights}: tensor {key} is {kind}: expected one of {known_dtypes()}")
        if not key.startswith(_PREFIX):
            raise CheckpointError(f"{weights}: tensor {key} does not begin with {_PREFIX!r}, as PEFT's do")
        name, info = key.removeprefix(_PREFIX), TensorInfo(weights, DTYPES[kind], shape, start, end)
        found = _PAIR.fullmatch(name)
        if found is None:
            if ".lora_" in name or not name.endswith((".weight", ".bias")):
                raise CheckpointError(f"{weights}: tensor {key} is no part of a plain LoRA")
            name = name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
            name = name.replace(".modules_to_save.", ".")
            if name in saved:
                raise CheckpointError(f"{weights} replaces {name} twice, the second time as {key}")
            saved[name] = info
            continue
        sides = halves.setdefault(found["module"], {})
        if found["side"] in sides or (sides and bool(found["embedding"]) != (found["module"] in embeddings)):
            raise CheckpointError(f"{weights} has two pairs for {found['module']}, the second with {key}")
        sides[found["side"]] = info
        if found["embedding"]:
            embeddings.add(found["module"])
    if not halves and not saved:
        raise CheckpointError(f"{weights} holds no tensors")
    pairs = {}
    for module, sides in halves.items():
        if sides.keys() != {"A", "B"}:
            raise CheckpointError(f"{weights}: {module} has only half of its pair, lora_{next(iter(sides))}")
        a, b = sides["A"], sides["B"]
        rank = _by_pattern(config, "rank_pattern", module, config["r"])
        if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == rank:
            raise CheckpointError(
                f"{weights}: {module} has A {list(a.shape)} and B {list(b.shape)}: expected matrices of rank {rank}"
            )
        pairs[module] = (a, b)
    return Adapter(folder, config, pairs, saved, frozenset(embeddings))


def _check_config(path: Path, config: dict) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{path}: peft_type {config['peft_type']!r}: only 'LORA' is supported")
    for key in _REFUSED:
        if config.get(key):
            raise CheckpointError(f"{path}: {key} {config[key]!r} is not supported: only plain LoRA is")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias {config['bias']!r} is not supported: only 'none' is")
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool | str | None) or start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{path}: init_lora_weights {start!r} changes the base model's own weights, so the adapter does not fit "
            "the published base. Convert it with PEFT first (path_initial_model_for_weight_conversion)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if type(rank) is not int or not 0 < rank < 2**31:
        raise CheckpointError(f"{path}: r must be a positive whole number, found {rank!r}")
    numbers = {"lora_alpha": alpha}
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{path}: {key} must map module names to numbers, found {patterns!r}")
        for pattern, value in patterns.items():
            # PEFT takes regular expressions here. Read as such, one from a stranger could run for ever.
            if not re.fullmatch(r"\^?[\w.]+", pattern):
                raise CheckpointError(f"{path}: {key} {pattern!r}: only plain module names are supported")
            numbers[f"{key}[{pattern!r}]"] = value
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:
            raise CheckpointError(f"{path}: {key} must be a number, found {value!r}")


def _by_pattern(config: dict, key: str, module: str, default: float) -> float:
    """The value of the first pattern that is ``module`` or its last parts ("^" in front: only the whole name)."""
    for pattern, value in (config.get(key) or {}).items():
        whole = pattern.startswith("^")
        name = pattern.removeprefix("^")
        if module == name or (not whole and module.endswith("." + name)):
            return value
    return default


def save_adapter(
    folder: str | Path,
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    config: Mapping[str, Any],
    *,
    saved: Mapping[str, torch.Tensor] = {},
    embeddings: frozenset[str] | set[str] = frozenset(),
    force: bool = True,
) -> Path:
    """Write an adapter that PEFT and ``read_adapter`` load, and return its folder.

    ``pairs``: a module's name in the base model → (A (r, in), B (out, r)); for names in ``embeddings`` (A (r, V),
    B (H, r)). ``saved``: name of a base tensor → its replacement. ``config`` needs ``r``, ``lora_alpha`` and
    ``target_modules``; what PEFT's loader needs besides is added. Nothing is loadable until all of it is written.
    Raises CheckpointError for a config that ``read_adapter`` would refuse, and a disk that refuses.
    """
    folder = Path(folder)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "base_model_name_or_path": None, "lora_dropout": 0.0, "modules_to_save": None, "use_rslora": False,
        "init_lora_weights": True, **config,
    }  # fmt: skip
    _check_config(folder / ADAPTER_CONFIG, config)
    tensors = {_PREFIX + name: tensor.detach() for name, tensor in saved.items()}
    for module, (a, b) in pairs.items():
        rank = _by_pattern(config, "rank_pattern", module, config["r"])
        if a.dim() != 2 or b.dim() != 2 or not a.shape[0] == b.shape[1] == rank:
            raise CheckpointError(
                f"{module} has A {list(a.shape)} and B {list(b.shape)}: expected matrices of rank {rank}"
            )
        kind = ("embedding_", "") if module in embeddings else ("", ".weight")
        for side, tensor in zip("AB", (a, b), strict=True):
            tensors[f"{_PREFIX}{module}.lora_{kind[0]}{side}{kind[1]}"] = tensor.detach()
    if not tensors:
        raise CheckpointError("there is no adapter to save: no pairs, and no modules to save")
    check_memory(tensors)
    names = [ADAPTER_WEIGHTS, ADAPTER_CONFIG]
    with WorkFolder(folder, names, None, marker=ADAPTER_CONFIG, force=force) as work:
        write_safetensors(work.path / ADAPTER_WEIGHTS, tensors, tensors.__getitem__)
        write_bytes(work.path / ADAPTER_CONFIG, to_json(config, ADAPTER_CONFIG))
    return folder


def merged(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    *,
    fan_in_fan_out: bool = False,
    what: str = "the merged weight",
) -> torch.Tensor:
    """weight (out, in) + scale·b (out, r)·a (r, in), in fp32 and rounded once to the weight's dtype.

    ``fan_in_fan_out``: the weight is stored (in, out). Returns a new tensor. Raises CheckpointError for unfit shapes,
    and, naming ``what``, where the sum is too large for the dtype.
    """
    shape = weight.shape[::-1] if fan_in_fan_out else weight.shape
    if weight.dim() != 2 or (b.shape[0], a.shape[1]) != tuple(shape):
        raise CheckpointError(f"B·A is {[b.shape[0], a.shape[1]]}, but the weight is {list(weight.shape)}")
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta = b.to(wide) @ a.to(wide)
    return to_dtype(weight.to(wide) + scale * (delta.T if fan_in_fan_out else delta), weight.dtype, what)


def merge_adapter(base: Source, adapter: Adapter) -> Source:
    """The base with the adapter in its weights, tensor by tensor as they are made.

    A tied head is untied where the adapter changes it or the embedding alone, since the two then differ. Raises
    CheckpointError for a module that the base has not, for shapes that do not fit, for numbers too large for the base's
    dtype, and for an adapter of both that PEFT kept tied.
    """
    embed, head = "model.embed_tokens", "lm_head"
    touched = {*adapter.pairs, *(name.rpartition(".")[0] for name in adapter.saved)}
    tensors, config = dict(base.tensors), dict(base.config)
    ends = {module for module in touched if module.split(".")[-1] in ("embed_tokens", head)}
    if says_tied(config) and ends:
        plain = ends <= {embed, head} and f"{embed}.weight" in tensors
        if adapter.config.get("ensure_weight_tying") or not plain:
            raise CheckpointError(
                f"{adapter.folder} adapts {min(ends)} of {base.path}, whose head and embedding are tied: such an "
                "adapter (ensure_weight_tying, or of a vision-language model) is not merged"
            )
        tensors.setdefault(f"{head}.weight", tensors[f"{embed}.weight"])
        config["tie_word_embeddings"] = False
    unknown = [name for name in (*(f"{m}.weight" for m in adapter.pairs), *adapter.saved) if name not in tensors]
    if unknown:
        raise CheckpointError(f"{adapter.folder} adapts what {base.path} has not: {listed(unknown)}")
    for name, info in adapter.saved.items():
        if info.shape != tuple(tensors[name].shape):
            raise CheckpointError(
                f"{adapter.folder}: {name} is {list(info.shape)}, in {base.path} it is {list(tensors[name].shape)}"
            )
    transposed = bool(adapter.config.get("fan_in_fan_out"))
    for module, (a, b) in adapter.pairs.items():
        stored = tuple(tensors[f"{module}.weight"].shape)
        product = (b.shape[0], a.shape[1])
        if stored != (product[::-1] if transposed or module in adapter.embeddings else product):
            raise CheckpointError(
                f"{adapter.folder}: B·A of {module} is {list(product)}, in {base.path} its weight is {list(stored)}"
            )

    def make(name: str) -> torch.Tensor:
        if name in adapter.saved:
            weight = adapter.read(adapter.saved[name])
            weight = to_dtype(weight, tensors[name].dtype, f"{adapter.saved[name].file}: tensor {name}")
        else:
            weight = base.make(f"{embed}.weight" if name not in base.tensors else name)
        module = name.removesuffix(".weight")
        if module not in adapter.pairs or not name.endswith(".weight"):
            return weight
        a, b = (adapter.read(info) for info in adapter.pairs[module])
        flip = transposed or module in adapter.embeddings
        what = f"{base.path} with {adapter.folder}: tensor {name}"
        return merged(weight, a, b, adapter.scale(module), fan_in_fan_out=flip, what=what)

    return replace(base, tensors=tensors, config=config, make=make)
