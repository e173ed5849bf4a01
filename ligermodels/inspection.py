"""What a model is and whether its folder is sound, from config.json and headers alone: ``inspect`` and ``verify``."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ligermodels
from ligermodels.checkpoints_convert.files import CONFIG, INDEX, PICKLE, PICKLE_INDEX, PICKLES, read_index
from ligermodels.checkpoints_convert.hf import open_checkpoint, read_config, weight_files
from ligermodels.checkpoints_convert.hub import fetch_headers
from ligermodels.checkpoints_convert.pickle_file import kind_of, load_pickle
from ligermodels.checkpoints_convert.quantised import scheme
from ligermodels.checkpoints_convert.safetensors_file import BITS, DTYPES, read_header
from ligermodels.config import DTYPES as DTYPE_BY_NAME
from ligermodels.errors import CheckpointError, ConfigError, LigerError
from ligermodels.layers.meta import on_meta
from ligermodels.planner import plan_memory

Headers = dict[str, dict[str, tuple[str, tuple[int, ...]]]]  # file → tensor → (dtype, shape)


@dataclass(frozen=True)
class Summary:
    """``parameters`` counts a tied head once; ``kinds`` the stored tensors by dtype; sizes are bytes."""

    where: str
    model_type: str
    config: Any  # the family's config, or None where the zoo lacks the family
    parameters: int
    files: dict[str, int]
    kinds: dict[str, int]
    quantised: str | None
    dtype: torch.dtype | None

    @property
    def weights(self) -> int:
        """Bytes of the model in memory, at its dtype."""
        return self.parameters * (self.dtype or torch.float32).itemsize


def summarise(where: str | Path, *, revision: str | None = None, token: str | None = None) -> Summary:
    """What is in a folder, or in a repository of the hub (its config and headers are fetched, not its weights).

    Raises LigerError for a folder or repository that is none, and for files that cannot be read.
    """
    if Path(where).exists():
        folder = Path(where)
        raw, headers = read_config(folder), _local_headers(folder)
    else:
        if str(where).startswith((".", "/", "~")) or str(where).count("/") > 1:
            raise CheckpointError(f"there is no folder {where}")
        raw, headers = fetch_headers(str(where), revision=revision, token=token)
    tensors = {name: entry for entries in headers.values() for name, entry in entries.items()}
    model_type = str(raw.get("model_type"))
    model_class = ligermodels.MODELS.get(model_type)
    config = model_class.config_class.from_hf(raw) if model_class else None
    tied = raw.get("tie_word_embeddings") if config is None else config.tie_word_embeddings
    counted = {n: e for n, e in tensors.items() if not (tied and n.endswith("lm_head.weight")) and "inv_freq" not in n}
    is_quantised = any(kind not in DTYPES for kind, _ in counted.values())
    quantised = (scheme(raw.get("quantization_config"), tensors) or "unknown") if is_quantised else None
    declared = raw.get("dtype") or raw.get("torch_dtype")
    stored = next((DTYPES[kind] for _, (kind, _) in sorted(tensors.items()) if kind in DTYPES), None)
    dtype = DTYPE_BY_NAME.get(str(declared), stored)
    return Summary(
        str(where),
        model_type,
        config,
        sum(prod(shape) for _, shape in counted.values()),
        {file: sum(prod(s) * BITS.get(k, 8) // 8 for k, s in entries.values()) for file, entries in headers.items()},
        dict(Counter(kind for kind, _ in tensors.values())),
        quantised,
        dtype,
    )


def _local_headers(folder: Path) -> Headers:
    index, files = weight_files(folder)
    files = sorted(set(read_index(folder, index).values())) if index else files
    if files == [PICKLE] or index == PICKLE_INDEX:
        return {f: {n: (kind_of(t), tuple(t.shape)) for n, t in load_pickle(folder / f).items()} for f in files}
    return {f: {n: (e.kind, e.shape) for n, e in read_header(folder / f).items()} for f in files}


def cache_bytes(summary: Summary, batch: int, seq: int) -> int:
    """Keys and values of ``batch`` rows of ``seq`` positions."""
    c = getattr(summary.config, "text_config", summary.config)
    width = (summary.dtype or torch.float32).itemsize
    return 2 * c.num_hidden_layers * batch * seq * c.num_key_value_heads * c.head_dim * width


def training_memory(summary: Summary, batch: int, seq: int, level: str) -> int:
    """Peak bytes of a step of AdamW, all in the model's dtype, every layer at one level of activation memory.

    What tower and projector of a model that reads images keep for backward is not counted. See ``planner.py``.
    """
    with on_meta():
        model = ligermodels.MODELS[summary.model_type](copy.deepcopy(summary.config)).to(summary.dtype or torch.float32)
    text = getattr(model, "language_model", model)
    others = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in text.parameters())
    return plan_memory(text, 2.0**40, batch, seq, levels=(level,), reserve=0.0).peak + 4 * others


# ------------------------------------------------------------------------------------------------------------- verify


class Finding(NamedTuple):
    """``level`` is "ok", "note" (loads, but look at it) or "wrong" (does not load, or loads something else)."""

    level: str
    text: str


def findings(folder: str | Path, *, values: bool = False) -> Iterator[Finding]:
    """Check all that loading relies on, and what it does not look at, part by part: one fault does not hide another.

    Reads headers only, or with ``values`` every weight, to find NaN and infinity.
    """
    folder = Path(folder)
    raw: dict = {}
    checks: list[tuple[str, Callable[[], str]]] = []
    sound = {"config": False, "weights": False}

    def config() -> str:
        raw.update(read_config(folder))
        model_type = raw.get("model_type")
        if model_type not in ligermodels.MODELS:
            raise ConfigError(f"model_type {model_type!r} is not in the zoo, which has {', '.join(ligermodels.MODELS)}")
        ligermodels.MODELS[model_type].config_class.from_hf(raw)
        sound["config"] = True
        return f"{model_type}"

    def weights() -> str:
        checkpoint = open_checkpoint(folder)
        sound["weights"] = True
        files = sorted({info.file.name for info in checkpoint.tensors.values()})
        kinds = Counter(str(info.dtype).removeprefix("torch.") for info in checkpoint.tensors.values())
        if len(kinds) > 1:
            warnings.warn(f"tensors have several dtypes: {dict(kinds)}; all are read as one", stacklevel=2)
        declared = raw.get("dtype") or raw.get("torch_dtype")
        if declared in DTYPE_BY_NAME and declared not in kinds:
            warnings.warn(f"config.json says {declared}, the tensors are {', '.join(kinds)}", stacklevel=2)
        return f"{len(checkpoint.tensors)} tensors in {len(files)} file{'s' * (len(files) > 1)}"

    def fit() -> str:
        model = ligermodels.from_pretrained(folder, device="meta")
        return f"every tensor of {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters"

    def tokenizer() -> str:
        tokenizer = ligermodels.Tokenizer.from_pretrained(folder)
        count, rows = len(tokenizer), raw.get("vocab_size")
        if isinstance(rows, int) and count > rows:  # published ones do (Gemma 3: an image token that the text has not)
            warnings.warn(
                f"tokenizer.json has {count} tokens, the model {rows} rows: some ids cannot be fed", stacklevel=2
            )
        return f"{count} tokens"

    def generation() -> str:
        read_config(folder / "generation_config.json")
        return "is JSON"

    def finite() -> str:
        checkpoint = open_checkpoint(folder)
        bad = [name for name, tensor in checkpoint.stream() if not torch.isfinite(tensor).all()]
        if bad:
            raise CheckpointError(f"{len(bad)} tensors hold NaN or infinity: {', '.join(bad[:5])}")
        return f"all {len(checkpoint.tensors)} tensors are finite"

    checks = [(CONFIG, config), ("weights", weights), ("names and shapes", fit)]
    if (folder / "tokenizer.json").is_file():
        checks.append(("tokenizer", tokenizer))
    if (folder / "generation_config.json").is_file():
        checks.append(("generation_config.json", generation))
    if values:
        checks.append(("values", finite))
    said: set[str] = set()
    for name, check in checks:
        if (check is fit and not all(sound.values())) or (check is finite and not sound["weights"]):
            continue  # its faults are told already
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                finding = Finding("ok", f"{name}: {check()}")
            except LigerError as error:
                finding = Finding("wrong", f"{name}: {error}")
        for text in dict.fromkeys(str(w.message) for w in caught):
            if text not in said:
                yield Finding("note", text)
            said.add(text)
        yield finding
    if sound["weights"]:
        unread = _unread(folder)
        if unread:
            yield Finding("note", f"weight files that nothing reads: {', '.join(unread[:5])}")


def _unread(folder: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was told
        index, files = weight_files(folder)
    used = {*files, *(read_index(folder, index).values() if index else ())}
    kinds = (".safetensors", *PICKLES, INDEX, PICKLE_INDEX)
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if name.endswith(kinds) and name not in used and name != index)
