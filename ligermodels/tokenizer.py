"""Text to token ids and back, and chat messages to a prompt.

The bytes are read from a folder in Hugging Face layout: ``tokenizer.json`` (the whole encoder, run by the tokenizers
library), ``tokenizer_config.json`` (special tokens, chat template) and, when present, ``chat_template.jinja``.
"""

from __future__ import annotations

import json
import operator
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch

from ligermodels.checkpoints_convert.companions import (
    TEMPLATE_FOLDER,
    TOKENIZER_PARTS,
    chat_templates,
    companions,
    remove_stale,
)
from ligermodels.checkpoints_convert.files import read_text
from ligermodels.errors import LigerError

__all__ = ["StreamDecoder", "Tokenizer"]

_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Tokenizer:
    """The tokenizer of a checkpoint. Build it with :meth:`from_pretrained` or :meth:`from_hub`.

    It follows transformers' fast tokenizers: whether ids such as ``<s>`` are put around a text is decided by
    tokenizer.json's post-processor alone, and ``add_bos_token``/``add_eos_token`` in tokenizer_config.json are ignored.

    Attributes: ``bos_token``, ``eos_token``, ``pad_token``, ``unk_token`` (str or None), ``…_token_id`` of the first
    three (int or None), ``special_tokens`` (name → text), ``chat_template`` (the default template or None; may be
    assigned), ``vocab_size`` (number of tokens, added ones included; the model's vocabulary may be larger).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        clean_up_spaces: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.backend = backend
        self._saved_tokens = _added_tokens(backend)
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self._saved_templates = dict(self.chat_templates) if folder is not None else {}
        self._clean_up = clean_up_spaces
        self._folder = folder
        self._compiled: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies and for worker processes: compiled templates cannot be pickled, and are made anew."""
        return {**vars(self), "_compiled": {}}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of ``folder``. Raises LigerError when a file is missing or broken, naming it."""
        if not isinstance(folder, (str, Path)):
            raise LigerError(f"folder: expected a path, got {folder!r}")
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise LigerError(_missing(folder))
        content = read_text(path)
        try:
            backend = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises plain Exception
            hint = "; it is a Git LFS pointer: fetch the file itself" if content.startswith("version https://") else ""
            raise LigerError(
                f"{path}: not a tokenizer.json that tokenizers {tokenizers.__version__} reads{hint}: {error}"
            ) from error
        # Some files carry the truncation or padding of their training run; a text must stay whole.
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # written before transformers 4.34: the map completes the config
            config = {**config, **_read_json(folder / "special_tokens_map.json")}
        special = _named_special_tokens(config, folder)
        _add_missing_tokens(backend, config, special, folder / "tokenizer_config.json")
        # transformers 5 leaves BPE alone: there the clean-up would eat spaces that belong to the text.
        clean_up = bool(config.get("clean_up_tokenization_spaces")) and type(backend.model).__name__ != "BPE"
        return cls(
            backend,
            special_tokens={name: token.content for name, token in special.items()},
            chat_templates=chat_templates({**companions(folder), "tokenizer_config.json": config}, folder),
            clean_up_spaces=clean_up,
            folder=folder,
        )

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        *,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Tokenizer:
        """Download the tokenizer's files of a hub repository (no weights) and read them. Raises HubError."""
        from ligermodels.checkpoints_convert.hub import download

        return cls.from_pretrained(
            download(
                repo_id,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                weights=False,
            )
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files this tokenizer was read from into ``folder``, byte for byte.

        With tokens added since (``tokenizer.backend.add_tokens``), tokenizer.json is written anew. When a chat template
        was assigned since, all are written as .jinja files, which win over the config's. Files of a tokenizer (known by
        their names) that another left in ``folder`` are removed: they would override or contradict what is saved.
        Raises LigerError if ``folder`` cannot be written, or the files it was read from are gone.
        """
        folder = Path(folder)
        try:
            self._save(folder)
        except OSError as error:
            raise LigerError(f"{folder}: the tokenizer could not be saved: {error}") from error

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self._folder is None:
            remove_stale(folder, (), TOKENIZER_PARTS)
            self.backend.save(str(folder / "tokenizer.json"))
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
        else:
            self._copy_files(folder)
            if _added_tokens(self.backend) != self._saved_tokens:
                self.backend.save(str(folder / "tokenizer.json"))
        if self.chat_templates != self._saved_templates:
            for name, source in self.chat_templates.items():
                path = folder / ("chat_template.jinja" if name == "default" else f"{TEMPLATE_FOLDER}/{name}.jinja")
                path.parent.mkdir(exist_ok=True)
                path.write_text(source, encoding="utf-8", newline="")

    def _copy_files(self, folder: Path) -> None:
        source = self._folder
        if not (source / "tokenizer.json").is_file():
            raise LigerError(
                f"{source}: the tokenizer's files are no longer there, so they cannot be copied to {folder}"
            )
        if folder.resolve() == source.resolve():
            return
        files = companions(source, TOKENIZER_PARTS)
        remove_stale(folder, files, TOKENIZER_PARTS)
        for name, path in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)

    def __repr__(self) -> str:
        return f"Tokenizer({str(self._folder)!r}, vocab_size={self.vocab_size}, special_tokens={self.special_tokens})"

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (``len(tokenizer)`` in transformers)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id(self.pad_token)

    @property
    def chat_template(self) -> str | None:
        """The default chat template (Jinja source), or None."""
        return self.chat_templates.get("default")

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        if not isinstance(template, str):
            raise LigerError(f"chat_template: expected Jinja source as a str, got {type(template).__name__}")
        self.chat_templates["default"] = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``. With ``add_special_tokens``, tokenizer.json's post-processor adds its own (such as <s>)."""
        return self.encoding(text, add_special_tokens).ids

    def encoding(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """As ``encode``, with the place of each token in ``text`` (``offsets``)."""
        if not isinstance(text, str):
            raise LigerError(f"text: expected a str, got {type(text).__name__}")
        try:
            return self.backend.encode(text, add_special_tokens=bool(add_special_tokens))
        except TypeError as error:
            raise LigerError(f"text: holds half a surrogate pair, which no UTF-8 can express: {text!r:.80}") from error

    def decode(self, ids: Iterable[int] | torch.Tensor, skip_special_tokens: bool = False) -> str:
        """Text of ``ids`` (a list, or a 1-D tensor). Ids beyond the vocabulary give nothing, as in transformers.

        Spaces are kept as the tokenizer's decoder gives them; only when tokenizer_config.json sets
        ``clean_up_tokenization_spaces`` and the model is not BPE, the space before punctuation is dropped.
        """
        if hasattr(ids, "tolist"):  # a tensor or an array
            ids = ids.tolist()
        if not isinstance(ids, Iterable):
            raise LigerError(f"ids: expected a flat list of token ids, got {ids!r}")
        ids = list(ids)
        bad = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**32), None)
        if bad is not None:
            hint = "; -100 marks ignored labels, take them out first" if bad == -100 else ""
            raise LigerError(f"ids: expected a flat list of token ids, found {bad!r}{hint}")
        text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if self._clean_up:
            for spaced in _CLEAN_UP:
                text = text.replace(spaced, spaced.strip())
        return text

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder that takes one id at a time and never gives half a character."""
        return StreamDecoder(self, skip_special_tokens)

    def pad(self, sequences: Sequence[Sequence[int]], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
        """Lists of ids → (input_ids, attention_mask), both int64 (B, longest); the mask is 1 on tokens, 0 on padding.

        ``side="left"`` is what generation needs; "right" is usual in training. Without a pad token the eos token fills
        the gaps, else id 0: the mask tells them apart.
        """
        if side not in ("left", "right"):
            raise LigerError(f'side: expected "left" or "right", got {side!r}')
        try:
            sequences = [list(map(operator.index, ids)) for ids in sequences]
        except TypeError as error:
            raise LigerError("sequences: expected a list of lists of token ids") from error
        if not all(0 <= i < 2**63 for ids in sequences for i in ids):
            raise LigerError("sequences: found a negative number or one beyond 64 bits among the token ids")
        if not sequences or any(len(ids) == 0 for ids in sequences):
            raise LigerError("sequences: expected at least one list of ids, and none of them empty")
        fill = next((i for i in (self.pad_token_id, self.eos_token_id) if i is not None), 0)
        width = max(len(ids) for ids in sequences)
        input_ids = torch.full((len(sequences), width), fill, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(sequences):
            place = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
            input_ids[row, place] = torch.as_tensor(ids, dtype=torch.long)
            attention_mask[row, place] = 1
        return input_ids, attention_mask

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int] | str:
        """Lay out a conversation as the model was trained on it: token ids, or the text with ``tokenize=False``.

        messages: ``[{"role": "user", "content": "…"}, …]``, plain data. Keys whose value is None are left out.
        add_generation_prompt: end with the header of an assistant's answer, for the model to continue.
        variables: further names the template may read, such as ``{"tools": […]}`` (JSON schemas) or
            ``{"enable_thinking": False}``.
        The template writes the special tokens itself, so none are added by the encoding.
        Raises LigerError when there is no template, or with the template's own message when it refuses.
        """
        # Imported here, as jinja2 is: most programs that load a tokenizer have no conversation to lay out.
        from ligermodels.chat_template import plain_data, plain_messages

        variables = dict(variables or {})
        reserved = {"messages", "add_generation_prompt"} & variables.keys()
        if reserved:
            raise LigerError(f"variables: {', '.join(sorted(reserved))} is an argument of its own")
        tools = variables.get("tools") or []
        if not isinstance(tools, (list, tuple)) or any(not isinstance(tool, Mapping) for tool in tools):
            raise LigerError('variables["tools"]: expected a list of JSON schemas (dicts), not functions')
        text = self._render(
            {
                **self.special_tokens,
                "tools": None,
                "documents": None,
                **plain_data(variables, "variables"),
                "messages": plain_messages(messages),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _render(self, context: dict[str, Any]) -> str:
        name = "tool_use" if context["tools"] is not None and "tool_use" in self.chat_templates else "default"
        source = self.chat_templates.get(name)
        if source is None:
            had = f" (it has only {', '.join(sorted(self.chat_templates))})" if self.chat_templates else ""
            raise LigerError(
                f"{self._folder}: this tokenizer has no default chat template{had}; it may belong to a base model. "
                "Use encode, or assign tokenizer.chat_template"
            )
        from ligermodels.chat_template import compile_template

        try:
            if source not in self._compiled:
                self._compiled[source] = compile_template(source)
            return self._compiled[source].render(context)
        except Exception as error:  # the template is a program of the checkpoint's author: it can fail in any way
            raise LigerError(f"chat template: {error}") from error

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


class StreamDecoder:
    """Text of a growing list of ids, piece by piece: ``put(id)`` after each token, ``end()`` once at the end.

    The pieces put together are the text of all ids. A piece is "" while the last character is incomplete: one
    character can take several tokens, and until the last of them the decoder shows it as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # a short window: ids already given as text, then ids still held back
        self._given = 0

    def put(self, token_id: int) -> str:
        """Take the next id; return the text that has become certain, often "" or a word."""
        self._ids.append(int(token_id))
        return self._take(hold_incomplete=True)

    def end(self) -> str:
        """Return what is still held back (an incomplete character comes as U+FFFD) and start anew."""
        text = self._take(hold_incomplete=False)
        self._ids, self._given = [], 0
        return text

    def _take(self, *, hold_incomplete: bool) -> str:
        # Decoded together with the ids before them, since decoders treat the start of a text differently (they drop
        # its leading space). What those ids give alone is then cut off.
        before = self._decode(self._ids[: self._given])
        now = self._decode(self._ids)
        if len(now) <= len(before) or (hold_incomplete and now.endswith("\ufffd")):
            return ""
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder; if this is the name of a hub repository, use Tokenizer.from_hub"
    others = [n for n in ("tokenizer.model", "vocab.json", "tekken.json", "spiece.model") if (folder / n).is_file()]
    if not others:
        return f"{folder}: there is no tokenizer.json in this folder"
    return (
        f"{folder}: found {others[0]} but no tokenizer.json, the only form read here. Take a revision that has one, "
        "or convert once with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``, or {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise LigerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LigerError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _token(value: Any, where: str) -> tokenizers.AddedToken:
    """A special token is spelt "</s>" or {"content": "</s>", "lstrip": false, …}."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {k: bool(value[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in value}
        return tokenizers.AddedToken(value["content"], **flags)
    raise LigerError(f'{where}: expected a string or an object with "content", got {value!r}')


def _named_special_tokens(config: dict[str, Any], folder: Path) -> dict[str, tokenizers.AddedToken]:
    """Every key such as ``eos_token`` that holds a token."""
    where = folder / "tokenizer_config.json"
    return {
        key: _token(value, f"{where}: {key}")
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, (str, dict))
    }


def _added_tokens(backend: tokenizers.Tokenizer) -> dict[int, str]:
    return {index: token.content for index, token in backend.get_added_tokens_decoder().items()}


def _add_missing_tokens(
    backend: tokenizers.Tokenizer,
    config: dict[str, Any],
    special: dict[str, tokenizers.AddedToken],
    where: Path,
) -> None:
    """Add to the encoder the tokens that tokenizer_config.json declares and tokenizer.json does not."""
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict) or not all(index.isdecimal() for index in declared):
        raise LigerError(f"{where}: added_tokens_decoder: expected an object of ids and tokens, got {declared!r:.80}")
    tokens = [_token(declared[index], f"{where}: added_tokens_decoder[{index}]") for index in sorted(declared, key=int)]
    name = "extra_special_tokens" if config.get("extra_special_tokens") else "additional_special_tokens"
    extra = config.get(name) or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    if not isinstance(extra, list):
        raise LigerError(f"{where}: {name}: expected a list or an object of tokens, got {extra!r:.80}")
    for token in (*special.values(), *(_token(value, f"{where}: {name}") for value in extra)):
        token.special = True
        tokens.append(token)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = {token.content: token for token in reversed(tokens) if token.content and token.content not in known}
    backend.add_tokens(list(reversed(missing.values())))
