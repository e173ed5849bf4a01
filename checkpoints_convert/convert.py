"""One conversion: recognise what is there, open it as a source, write it as what is wanted."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoints_convert.adapters import ADAPTER_CONFIG, merge_adapter, read_adapter
from ligermodels.checkpoints_convert.chatglm import write_chatglm
from ligermodels.checkpoints_convert.companions import TEMPLATE_FOLDER, TOKENIZER_PARTS, companions
from ligermodels.checkpoints_convert.files import CONFIG, INDEX, PICKLE, PICKLE_INDEX, SINGLE, content_hint, listed
from ligermodels.checkpoints_convert.from_gguf import open_gguf
from ligermodels.checkpoints_convert.hf import Checkpoint, open_checkpoint, read_config
from ligermodels.checkpoints_convert.litgpt import WEIGHTS as LITGPT_WEIGHTS
from ligermodels.checkpoints_convert.litgpt import open_litgpt
from ligermodels.checkpoints_convert.meta import PARAMS, open_meta, write_meta
from ligermodels.checkpoints_convert.mistral import open_mistral, write_mistral
from ligermodels.checkpoints_convert.rewrites import text_tower, to_model_names
from ligermodels.checkpoints_convert.streamed import (
    Source,
    fingerprint,
    from_checkpoint,
    open_hf,
    says_tied,
    with_dtype,
    write_hf,
)
from ligermodels.checkpoints_convert.to_gguf import KINDS, write_gguf
from ligermodels.errors import CheckpointError, ConfigError

__all__ = ["SOURCES", "TARGETS", "convert", "recognise"]

SOURCES = ("hf", "meta", "mistral", "gguf", "chatglm", "litgpt", "adapter")
TARGETS = ("hf", "meta", "mistral", "gguf", "chatglm")


def recognise(path: Path) -> str:
    """Which of ``SOURCES`` a file or folder is, judged by what it holds.

    Raises CheckpointError, listing what was found, if it is none of them, or several that may differ.
    """
    if not path.exists():
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
        hint = (
            f". If it is a repository of the hub, fetch it first: hf download {path} --local-dir FOLDER" if hub else ""
        )
        raise CheckpointError(f"there is no file or folder {path}{hint}")
    if path.is_file():
        with open(path, "rb") as file:
            start = file.read(512)
        if start.startswith(b"GGUF"):
            return "gguf"
        hint = content_hint(start) if start else "it is empty (an unfinished download? fetch it again)"
        raise CheckpointError(f"{path} is a file, and not a GGUF: {hint or 'give the folder that holds the model'}")
    names = sorted(file.name for file in path.iterdir())
    has = set(names).__contains__
    found = []
    if has(CONFIG) and any(map(has, (SINGLE, INDEX, PICKLE, PICKLE_INDEX))):
        found.append("chatglm" if read_config(path).get("model_type") == "chatglm" else "hf")
    if has(LITGPT_WEIGHTS):
        found.append("litgpt")
    if has(ADAPTER_CONFIG) and not found:
        found.append("adapter")
    if has(PARAMS) and not found:  # hub repositories have both, one made from the other
        if any(name.startswith("consolidated.") and name.endswith(".pth") for name in names):
            found.append("meta")
        if has("consolidated.safetensors") or has("consolidated.safetensors.index.json"):
            found.append("mistral")
    if not found and len(_ggufs(path)) == 1:
        found.append("gguf")
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{path} may be {' or '.join(found)}: say which (--from). It holds {listed(names, 12)}")
    raise CheckpointError(
        f"{path} holds no layout that is known here (config.json with {SINGLE} or {INDEX}; {PARAMS} with "
        f"consolidated.00.pth or consolidated.safetensors; {LITGPT_WEIGHTS}; {ADAPTER_CONFIG}; one GGUF). "
        f"It holds {listed(names, 12) or 'nothing'}"
    )


def _ggufs(folder: Path) -> list[Path]:
    """GGUF files of a folder; of one split over several files, the first."""
    files = sorted(folder.glob("*.gguf"))
    return [f for f in files if not re.search(r"-\d{5}-of-\d{5}$", f.stem) or "-00001-of-" in f.stem]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str,
    from_: str = "auto",
    dtype: str | None = None,
    base: str | Path | None = None,
    max_shard_size: int | str | None = None,
    force: bool = False,
) -> Path:
    """Convert the model in ``source`` to the layout ``to`` at ``target``, and return that path.

    ``to``: one of ``TARGETS``. ``from_``: one of ``SOURCES``, or "auto". ``dtype``: "float32", "float16", "bfloat16",
    for a GGUF also "q8_0"; None keeps the source's (bfloat16 for a quantised GGUF). ``base``: the folder that an
    adapter belongs to, by default the one that its config names. ``max_shard_size``: bytes or "5GB"; for ``meta`` it
    decides how many files of tensor parallelism are written.

    Files grow in TARGET.partial and move to ``target`` at the end; an interrupted conversion, run again, continues.
    ``force`` replaces a model in ``target`` with all that belongs to one: weights and index, config, and, though the
    new source may have none, tokenizer, chat templates, generation config, image processor, as their names tell.
    Files of other names stay. The source is only read.

    Raises LigerError naming the file, key or tensor that is wrong, and for a target that exists while ``force`` is not
    given.
    """
    if "" in (str(source), str(target)):  # of a shell's variable that is not set; as a path it would be "."
        raise CheckpointError("source and target must be paths, found an empty text")
    path, target = Path(source), Path(target)
    for given in (path, target):
        try:
            given.exists(), given.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # too long, with a null byte, a ring of links
            raise CheckpointError(f"{str(given)!r:.200} is no path: {error!s:.100}") from None
    if to not in TARGETS:
        raise CheckpointError(f"to must be one of {', '.join(TARGETS)}, found {to!r}")
    if from_ not in ("auto", *SOURCES):
        raise CheckpointError(f"from must be 'auto' or one of {', '.join(SOURCES)}, found {from_!r}")
    if dtype is not None and (dtype not in KINDS or (dtype == "q8_0" and to != "gguf")):
        raise CheckpointError(f"dtype must be float32, float16, bfloat16, or q8_0 for a GGUF; found {dtype!r}")
    if to == "gguf" and max_shard_size is not None:
        raise CheckpointError("a GGUF is written as one file: leave max_shard_size out")
    kind = recognise(path) if from_ == "auto" or not path.exists() else from_
    if target.resolve() == path.resolve() or (to != "gguf" and path.resolve() in target.resolve().parents):
        raise CheckpointError(f"{target} is the source or lies in it: choose a target outside of {path}")
    inputs = [path]
    if kind == "adapter":
        adapter = read_adapter(path)
        folder = _base(path, adapter.config, base)
        if target.resolve() == folder.resolve():
            raise CheckpointError(f"{target} is the base model: choose another target")
        inputs.append(folder)
        wider = torch.float32 if dtype in ("float32", "q8_0") else None  # so that the sum is not rounded first
        made = merge_adapter(_without_head_copy(_open(folder, recognise(folder), None)).cast(wider), adapter)
        made = _with_tokenizer(made, path)
    else:
        made = _open(path, kind, dtype)
    _check_config(made)
    plan = [[fingerprint(p) for p in inputs], kind, to, dtype]
    _check_apart(target, to, inputs, {name for files in plan[0] for name, *_ in files})

    if to == "gguf":
        made = _complete(_without_head_copy(made))
        kinds = None if dtype is None else KINDS[dtype]
        return write_gguf(made, target, kind=kinds, force=force, plan=plan)
    made = made.cast(None if dtype is None else getattr(torch, dtype))
    if to == "hf":
        return write_hf(made, target, max_shard_size=max_shard_size or "5GB", force=force, plan=plan)
    made = _complete(_without_head_copy(made))
    if to == "chatglm":
        return write_chatglm(made, target, max_shard_size=max_shard_size or "5GB", force=force, plan=plan)
    write = write_meta if to == "meta" else write_mistral
    return write(made, target, max_shard_size=max_shard_size, force=force, plan=plan)


def _check_apart(target: Path, to: str, inputs: list[Path], files: set[str]) -> None:
    """Raise CheckpointError if writing ``target`` would replace one of the source's ``files`` (resolved names)."""
    partial = Path(f"{os.path.abspath(target)}.partial").resolve()
    for given in inputs:
        if partial == given.resolve() or partial in given.resolve().parents:
            raise CheckpointError(f"{target} would be made in {partial}, which is the source: choose another target")
    within = target.iterdir() if target.is_dir() and all(given.is_dir() for given in inputs) else ()
    for file in [target] if to == "gguf" else within:
        if str(file.parent.resolve() / file.name) in files:
            raise CheckpointError(f"{file} is a file of the source: choose another target")


def _open(path: Path, kind: str, dtype: str | None) -> Source:
    if kind == "gguf":
        if path.is_dir():
            files = _ggufs(path)
            if len(files) != 1:
                found = f"{len(files)} GGUF files: give one of them" if files else "no GGUF file"
                raise CheckpointError(f"{path} holds {found}")
            path = files[0]
        plain = {"q8_0": torch.float32}.get(dtype or "", None if dtype is None else getattr(torch, dtype, None))
        return open_gguf(path, dtype=plain)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    if kind in ("hf", "chatglm"):
        _check_loads(path)
    if kind == "chatglm":
        raw = read_config(path)
        config = _family(raw, path).config_class.from_hf(raw).to_hf()
        return from_checkpoint(to_model_names(open_checkpoint(path)), config, companions(path))
    if kind == "hf":
        # fp8 weights are read as numbers; then the config must not call them fp8 any more
        return open_hf(path, {key: v for key, v in read_config(path).items() if key != "quantization_config"})
    if kind == "adapter":
        raise CheckpointError(f"{path} is an adapter, not a model")
    return {"meta": open_meta, "mistral": open_mistral, "litgpt": open_litgpt}[kind](path)


def _check_config(source: Source) -> None:
    """Raise ConfigError naming the source, if no model could be built from what its files say."""
    raw = source.config
    if _in_zoo(raw):
        try:
            _family(raw, source.path).config_class.from_hf(raw)
        except ConfigError as error:
            raise ConfigError(f"{source.path}: {error}") from error


def _in_zoo(raw: dict) -> bool:
    from ligermodels import MODELS

    return isinstance(raw.get("model_type"), str) and raw["model_type"] in MODELS


def _with_tokenizer(made: Source, adapter: Path) -> Source:
    """The tokenizer that an adapter was trained with, if its folder has one, in place of the base's."""
    files = companions(adapter)
    if "tokenizer.json" not in files:
        return made
    parts = (*TOKENIZER_PARTS, f"{TEMPLATE_FOLDER}/")
    return replace(made, files={n: f for n, f in made.files.items() if not n.startswith(parts)} | files)


def _check_loads(folder: Path) -> None:
    """Raise LigerError for a folder that its family would not load: a copy of it would be as broken. Reads headers."""
    raw = read_config(folder)
    if not _in_zoo(raw):
        warnings.warn(
            f"{folder}: model_type {raw.get('model_type')!r} is not in the zoo: its names and shapes are not checked",
            stacklevel=4,
        )
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is opened again below, and they are given there
        _family(raw, folder).from_pretrained(folder, dtype=torch.float32, device="meta")


def _base(folder: Path, config: dict, given: str | Path | None) -> Path:
    base = Path(given if given is not None else config.get("base_model_name_or_path") or "")
    if not str(base) or not base.is_dir() or not (base / CONFIG).exists():
        if given is not None:
            raise CheckpointError(f"{base} is no model folder in Hugging Face layout, which the base must be")
        name = config.get("base_model_name_or_path")
        named = f"names {name!r}, which is no folder here" if name else "names no base model"
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} {named}: give base (--base)")
    return base


def _family(raw: dict, where: Path) -> Any:
    """The model class for a config: only the families know which values an absent key has."""
    from ligermodels import MODELS

    model_type = raw.get("model_type")
    if not _in_zoo(raw):
        raise ConfigError(f"{where}: model_type {model_type!r} is not in the zoo, which has {', '.join(MODELS)}")
    return MODELS[model_type]


def _complete(source: Source) -> Source:
    """The same with every key of the config present; of a vision-language model, the text tower."""
    raw = source.config
    config = _family(raw, source.path).config_class.from_hf(raw).to_hf()
    config = with_dtype(config, next(iter(source.tensors.values())).dtype)
    if raw.get("model_type") != "gemma3":
        return replace(source, config=config)
    old = text_tower(Checkpoint(source.path, {name: name for name in source.tensors})).tensors  # new name → old
    tensors = {name: source.tensors[old[name]] for name in old}
    return replace(source, config=config, tensors=tensors, make=lambda name: source.make(old[name]))


def _without_head_copy(source: Source) -> Source:
    """A config that ties the head beside a file that holds one, too: a copy is dropped, another head unties them."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not says_tied(source.config) or head not in source.tensors or embedding not in source.tensors:
        return source
    if source.tensors[head].shape == source.tensors[embedding].shape and torch.equal(
        source.make(head), source.make(embedding)
    ):
        return replace(source, tensors={name: t for name, t in source.tensors.items() if name != head})
    warnings.warn(f"{source.path}: {head} differs from the embedding, though the config ties them", stacklevel=3)
    return replace(source, config=source.config | {"tie_word_embeddings": False})
