"""What goes beside the weights: tokenizer, chat templates, generation config, image processor.

Which files of a folder these are is told by their names alone, as every program that loads the folder tells it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from ligermodels.checkpoints_convert.files import TOKENIZER_FILES, read_json, read_text
from ligermodels.errors import CheckpointError

__all__ = ["TEMPLATE_FOLDER", "TOKENIZER_PARTS", "chat_templates", "companions", "content", "remove_stale"]

TEMPLATE_FOLDER = "additional_chat_templates"  # NAME.jinja beside the default template, chat_template.jinja
TOKENIZER_PARTS = (
    *TOKENIZER_FILES, "added_tokens.json", "vocab.json", "merges.txt", "tekken.json", "tokenizer.model.v3",
    "tokenization_chatglm.py",
)  # fmt: skip
_COMPANIONS = (*TOKENIZER_PARTS, "generation_config.json", "preprocessor_config.json", "processor_config.json")
_MAX_SIZE = 100_000_000  # bytes of a tokenizer.json; the largest published ones have 35 MB


def companions(folder: Path, names: Collection[str] = _COMPANIONS) -> dict[str, Path]:
    """Those of ``names`` that ``folder`` has, and its named chat templates (additional_chat_templates/NAME.jinja)."""
    templates = (f"{TEMPLATE_FOLDER}/{path.name}" for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")))
    return {name: folder / name for name in (*names, *templates) if (folder / name).is_file()}


def remove_stale(folder: Path, keep: Collection[str], names: Collection[str] = _COMPANIONS) -> None:
    """Delete the companions of ``folder`` that are not in ``keep``; they would speak for another model's weights.

    Raises CheckpointError where the folder of templates is a link: what it leads to is not this folder's.
    """
    refuse_link(folder)
    for name, path in companions(folder, names).items():
        if name not in keep:
            path.unlink()
    templates = folder / TEMPLATE_FOLDER
    if templates.is_dir() and not any(templates.iterdir()):
        templates.rmdir()


def refuse_link(folder: Path) -> None:
    """Raise CheckpointError if templates written to ``folder`` would go to where a link leads."""
    if (folder / TEMPLATE_FOLDER).is_symlink():
        raise CheckpointError(f"{folder / TEMPLATE_FOLDER} is a link, to templates of another folder: remove it first")


def content(files: Mapping[str, Path | dict], name: str) -> dict:
    """The JSON object that ``files`` (name → path, or content) has under ``name``; {} where it has none."""
    found = files.get(name, {})
    return found if isinstance(found, dict) else read_json(found, limit=_MAX_SIZE)


def chat_templates(files: Mapping[str, Path | dict], where: Path) -> dict[str, str]:
    """Name → Jinja source of a tokenizer's ``files`` (name → path, or content of a JSON file) in the folder ``where``.

    The template of no other name is "default". Files of Jinja win over tokenizer_config.json, as in transformers, and
    that over chat_template.json, where multimodal models may keep theirs. Raises CheckpointError.
    """
    templates = {}
    for name, path in files.items():
        if name == "chat_template.jinja":
            templates["default"] = read_text(path)
        elif name.startswith(TEMPLATE_FOLDER + "/"):
            templates[PurePosixPath(name).stem] = read_text(path)
    if templates:
        return templates
    value = content(files, "tokenizer_config.json").get("chat_template")
    if value is None:
        value = content(files, "chat_template.json").get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    config = where / "tokenizer_config.json"
    for entry in value if isinstance(value, list) else [value]:
        pair = [entry.get(key) for key in ("name", "template")] if isinstance(entry, dict) else [None]
        if not all(isinstance(part, str) for part in pair):
            raise CheckpointError(f'{config}: chat_template: expected a string or a list of {{"name", "template"}}')
        templates[pair[0]] = pair[1]
    for name in templates:
        if not is_template_name(name):
            raise CheckpointError(f"{config}: chat_template: {name!r} is not a plain name")
    return templates


def is_template_name(name: str) -> bool:
    """Whether a template of this name can be a file of its own in the folder of templates."""
    return bool(name) and PurePosixPath(name).name == name and not {"\0", "\\"} & set(name)
