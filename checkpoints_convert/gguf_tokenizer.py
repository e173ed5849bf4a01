"""A GGUF's tokenizer ↔ tokenizer.json and tokenizer_config.json.

A GGUF holds no tokenizer.json, only its raw material: tokens and their kinds, merges (``gpt2``: BPE on bytes) or scores
(``llama``: SentencePiece's BPE), special ids, and, for ``gpt2``, the name of the rule by which a text is first cut.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.checkpoints_convert.companions import chat_templates, content, is_template_name
from ligermodels.checkpoints_convert.gguf_config import need
from ligermodels.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["generation_config_of", "tokenizer_config_of", "tokenizer_metadata", "tokenizer_of"]

# How a byte-level vocabulary expects its text to be cut, by tokenizer.ggml.pre (the patterns are part of the models).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_WHOLE_WORDS = (*_LLAMA3, "tekken")  # a word of the vocabulary is taken whole, whether or not merges lead to it
_SPLITS: dict[str, str | None] = {name: _WORDS % "{1,3}" for name in (*_LLAMA3, "dbrx", "glm4", "chatglm-bpe")}
_SPLITS |= {"qwen2": _WORDS % "", "tekken": _TEKKEN}
_SPLITS |= {"gpt-2": None, "gpt2": None, "smollm": None}  # None: GPT-2's rule, built in

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_NO_TOKENIZER = ("none", "no_vocab")
_TEMPLATE = "tokenizer.chat_template"  # the default one; .NAME: others, which tokenizer.chat_templates lists


# ------------------------------------------------------------------------------------------- GGUF → Hugging Face files


def generation_config_of(path: Path, config: dict, metadata: dict) -> dict:
    """Ids to stop at: the end of the text, and of a turn or message where the file names other tokens for these."""
    named = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    for key, stop in named.items():
        if stop is not None and (type(stop) is not int or not 0 <= stop < config["vocab_size"]):
            rows = config["vocab_size"]
            raise CheckpointError(f"{path}: tokenizer.ggml.{key}_token_id is {stop}, not in a vocabulary of {rows}")
    stops = list(dict.fromkeys(stop for stop in named.values() if stop is not None))
    values = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": config["pad_token_id"],
    }
    return {name: value for name, value in values.items() if value is not None}


def tokenizer_config_of(path: Path, config: dict, metadata: dict) -> dict:
    """tokenizer_config.json, with the chat template; a list of them where there are named ones."""
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # "what tokenizer.json says"
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
        "bos_token": _token(path, metadata, "bos_token_id"),
        "eos_token": _token(path, metadata, "eos_token_id"),
        "unk_token": _token(path, metadata, "unknown_token_id"),
        "pad_token": _token(path, metadata, "padding_token_id"),
        "chat_template": _read_templates(path, metadata),
    }
    return {name: value for name, value in values.items() if value is not None}


def _read_templates(path: Path, metadata: dict) -> str | list[dict[str, str]] | None:
    found = {"default": metadata[_TEMPLATE]} if _TEMPLATE in metadata else {}
    found |= {key.removeprefix(f"{_TEMPLATE}."): metadata[key] for key in metadata if key.startswith(f"{_TEMPLATE}.")}
    for name, template in found.items():
        if not isinstance(template, str):
            raise CheckpointError(f"{path}: the chat template {name!r} must be a text, found {type(template).__name__}")
        if not is_template_name(name):
            raise CheckpointError(f"{path}: {_TEMPLATE}.{name} names a template {name!r}, which is no plain name")
    listed = metadata.get(f"{_TEMPLATE}s")
    lost = sorted({str(name) for name in listed} - found.keys()) if isinstance(listed, list) else []
    if lost:
        warnings.warn(f"{path}: {_TEMPLATE}s lists {', '.join(lost)}, but the file has no such template", stacklevel=2)
    if found.keys() <= {"default"}:
        return found.get("default")
    return [{"name": name, "template": template} for name, template in found.items()]


def tokenizer_of(path: Path, metadata: dict) -> dict | None:
    """tokenizer.json as a dict; None for a file that says that it has no tokenizer.

    Raises CheckpointError for a kind or a splitting rule that is not known here, and lists that do not fit together.
    """
    from tokenizers import AddedToken, processors

    kind = need(path, metadata, "tokenizer.ggml.model")
    if kind in _NO_TOKENIZER:
        return None
    tokens = _list(path, metadata, "tokenizer.ggml.tokens", str)
    kinds = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = _list(path, metadata, "tokenizer.ggml.token_type", int, len(tokens))
    # Rows of the embedding beyond the tokenizer's last token have made-up names; they are no tokens.
    end = len(tokens)
    while end and kinds[end - 1] == _UNUSED and tokens[end - 1] == f"[PAD{end - 1}]":
        end -= 1
    vocab = {token: number for number, token in enumerate(tokens[:end])}
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{path}: unknown tokenizer.ggml.model {kind!r}: 'gpt2' and 'llama' can be converted")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(path, metadata, vocab)
        else:
            tokenizer = _sentencepiece(path, metadata, vocab, kinds)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions for merges that do not fit the vocabulary
        raise CheckpointError(f"{path} holds an inconsistent tokenizer: {error}") from error

    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_kind in zip(tokens[:end], kinds[:end], strict=True)
            if token_kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    around = {which: _token(path, metadata, f"{which}_token_id") for which in ("bos", "eos") if _adds(metadata, which)}
    around = {which: token for which, token in around.items() if token in vocab}
    if around:
        template = [*([around["bos"]] if "bos" in around else []), "$A", *([around["eos"]] if "eos" in around else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            pair=template + [part.replace("$A", "$B") for part in template],
            special_tokens=[(token, vocab[token]) for token in around.values()],
        )
    return json.loads(tokenizer.to_str())


def _list(path: Path, metadata: dict, key: str, kind: type, length: int | None = None) -> list:
    values = need(path, metadata, key, list)
    if not all(isinstance(value, kind) for value in values) or length not in (None, len(values)):
        many = "" if length is None else f"{length} "
        raise CheckpointError(f"{path}: {key} must list {many}values of type {kind.__name__}, found {len(values)}")
    return values


def _adds(metadata: dict, which: str) -> bool:
    """Whether bos (eos) is put around a text. Old files do not say, and then llama.cpp's rule holds."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    default = which == "bos" and (sentencepiece or metadata.get("tokenizer.ggml.pre") in _LLAMA3)
    return metadata.get(f"tokenizer.ggml.add_{which}_token", default)


def _token(path: Path, metadata: dict, key: str) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{key}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if number is None or tokens is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.{key} is {number}, but there are {len(tokens)} tokens")
    return tokens[number]


def _byte_level(path: Path, metadata: dict, vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = need(path, metadata, "tokenizer.ggml.pre")
    if rule not in _SPLITS:
        raise CheckpointError(f"{path}: unknown tokenizer.ggml.pre {rule!r}: known are {', '.join(_SPLITS)}")
    merges = [tuple(merge.split(" ")) for merge in _list(path, metadata, "tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule in _WHOLE_WORDS))
    pattern = _SPLITS[rule]
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if rule == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rule == "qwen2":  # llama.cpp leaves this step out; Qwen's own tokenizer has it
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, metadata: dict, vocab: dict[str, int], kinds: list[int]) -> Tokenizer:
    """SentencePiece's BPE joins the neighbours whose union scores best: as merges, every split by falling score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list(path, metadata, "tokenizer.ggml.scores", float, len(kinds))
    merges = [
        (-scores[number], number, vocab[token[:cut]], token[:cut], token[cut:])
        for token, number in vocab.items()
        if kinds[number] == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    model = models.BPE(
        vocab=vocab,
        merges=pairs,
        unk_token=_token(path, metadata, "unknown_token_id") or ("<unk>" if "<unk>" in vocab else None),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    # Llama 2's own tokenizer.json: a space before each stretch of text, also after a special token.
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


# ------------------------------------------------------------------------------------------- Hugging Face files → GGUF


def tokenizer_metadata(files: Mapping[str, Path | dict], config: dict, where: Path) -> dict[str, Any]:
    """GGUF keys → values of the tokenizer in ``files`` (name → path or content), padded to the config's vocabulary.

    Without a tokenizer.json the keys say "none", and a warning does. Raises CheckpointError for a tokenizer that
    llama.cpp has no rule for, and one with more tokens than the model has rows.
    """
    if "tokenizer.json" not in files:
        warnings.warn(f"{where} has no tokenizer.json: the GGUF will hold no tokenizer", stacklevel=2)
        return {"tokenizer.ggml.model": "none"} | _ids(config, _stops(None, config, files, where))
    said = content(files, "tokenizer_config.json")
    raw = content(files, "tokenizer.json")
    try:
        return _tokenizer_metadata(raw, said, files, config, where)
    except CheckpointError:
        raise
    except Exception as error:  # a file that is JSON, but not what a tokenizer.json looks like
        raise CheckpointError(f"{where}: tokenizer.json is broken: {type(error).__name__}: {error}") from error


def _tokenizer_metadata(raw: dict, said: dict, files: Mapping, config: dict, where: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer

    model, rows = raw["model"], config["vocab_size"]
    if model.get("type", "BPE") != "BPE":
        raise CheckpointError(
            f"{where}: tokenizer.json is of type {model['type']!r}: only BPE can be written to a GGUF"
        )
    byte_level = any(step["type"] == "ByteLevel" for step in _steps(raw.get("pre_tokenizer")))
    if not byte_level and not model.get("byte_fallback"):
        raise CheckpointError(f"{where}: tokenizer.json is a BPE neither on bytes nor with byte_fallback")
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [_UNUSED] * rows

    def place(token: str, number: int, kind: int) -> None:
        if not 0 <= number < rows:
            raise CheckpointError(f"{where}: token {token!r} has the id {number}, but the model has {rows} rows")
        if kinds[number] != _UNUSED and tokens[number] != token:
            raise CheckpointError(f"{where}: tokenizer.json gives the id {number} to {tokens[number]!r} and {token!r}")
        tokens[number], kinds[number] = token, kind

    for token, number in model["vocab"].items():
        is_byte = not byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        place(token, number, _BYTE if is_byte else _NORMAL)
    for added in raw.get("added_tokens") or []:
        place(added["content"], added["id"], _CONTROL if added["special"] else _USER_DEFINED)
    ids = {token: number for number, token in enumerate(tokens)}
    special = {name: ids.get(_text(said.get(f"{name}_token"))) for name in ("bos", "eos", "unk", "pad")}
    if special["unk"] is None and model.get("unk_token"):
        special["unk"] = ids.get(model["unk_token"])
    if special["unk"] is not None and not byte_level:
        kinds[special["unk"]] = _UNKNOWN
    stops = _stops(special["eos"], config, files, where)
    bos = special["bos"] if special["bos"] is not None else config.get("bos_token_id")

    out: dict[str, Any] = {"tokenizer.ggml.model": "gpt2" if byte_level else "llama"}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    out["tokenizer.ggml.pre"] = _rule(raw, config["model_type"], where) if byte_level else "default"
    out["tokenizer.ggml.tokens"], out["tokenizer.ggml.token_type"] = tokens, kinds
    if byte_level:
        odd = next((merge for merge in merges if len(merge) != 2 or " " in "".join(merge)), None)
        if odd is not None:
            raise CheckpointError(f"{where}: the merge {odd} of tokenizer.json cannot be said in a GGUF: it has spaces")
        out["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    else:
        out["tokenizer.ggml.scores"] = _scores(tokens, kinds, merges, where)
        out["tokenizer.ggml.add_space_prefix"] = _prepends(raw)
    given = {"bos_token_id": bos, "unk_token_id": special["unk"]}
    if special["pad"] is not None:
        given["pad_token_id"] = special["pad"]
    out |= _ids(config | given, stops)
    backend = Tokenizer.from_str(json.dumps(raw))
    backend.no_truncation()
    plain, whole = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    before, after = whole[:at], whole[at + len(plain) :]
    out["tokenizer.ggml.add_bos_token"] = bool(before) and before == [bos]
    out["tokenizer.ggml.add_eos_token"] = bool(after) and after == stops[:1]
    if before not in ([], [bos]) or after not in ([], stops[:1]):
        warnings.warn(
            f"{where}: the tokenizer puts {[tokens[i] for i in before]} before a text and {[tokens[i] for i in after]} "
            "after it; a GGUF can say no more than bos and eos",
            stacklevel=4,
        )
    return out | _templates(chat_templates(files, where))


def _stops(eos: int | None, config: dict, files: Mapping, where: Path) -> list[int]:
    """The ids to stop at: the tokenizer's eos, then the config's, then those of generation_config.json."""
    found = [eos, config.get("eos_token_id"), content(files, "generation_config.json").get("eos_token_id")]
    flat = [stop for part in found for stop in (part if isinstance(part, list) else [part])]
    stops = [s for s in dict.fromkeys(flat) if type(s) is int and 0 <= s < config["vocab_size"]]
    if len(stops) > 3:
        warnings.warn(f"{where} stops at {stops}; a GGUF has keys for three, the others are left out", stacklevel=4)
    return stops[:3]


def _ids(config: dict, stops: list[int]) -> dict[str, int]:
    ids = dict(zip(("eos", "eot", "eom"), stops, strict=False))
    named = {"bos": "bos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
    ids |= {theirs: config[ours] for theirs, ours in named.items() if type(config.get(ours)) is int}
    return {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number >= 0}


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _steps(pre_tokenizer: dict | None) -> list[dict]:
    if pre_tokenizer is None:
        return []
    return pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _rule(raw: dict, family: str, where: Path) -> str:
    """The name llama.cpp has for the way in which this byte-level tokenizer first cuts a text."""
    found: list[Any] = []
    for step in _steps(raw["pre_tokenizer"]):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
            found.append(step["pattern"].get("Regex"))
        elif step["type"] == "ByteLevel":
            found += ["bytes by words" if step.get("use_regex", True) else "bytes"]
        elif step["type"] == "Digits" and step["individual_digits"]:
            found.append("digits")
        else:
            found.append(step)
    whole = bool(raw["model"].get("ignore_merges"))
    threes = {"glm": "chatglm-bpe", "glm4": "glm4"}.get(family, "dbrx")
    known = [
        (["bytes by words"], False, "gpt-2"),
        (["digits", "bytes by words"], False, "smollm"),
        ([_WORDS % "{1,3}", "bytes"], True, "llama-bpe"),
        ([_WORDS % "{1,3}", "bytes"], False, threes),
        ([_WORDS % "", "bytes"], False, "qwen2"),
        ([_TEKKEN, "bytes"], True, "tekken"),
    ]
    for steps, takes_whole, name in known:
        if found == steps and whole == takes_whole:
            return name
    raise CheckpointError(
        f"{where}: tokenizer.json cuts text as {str(found)[:300]} (ignore_merges {whole}), a rule whose name in "
        f"llama.cpp is not known here; known are {', '.join(name for *_, name in known)}"
    )


def _scores(tokens: list[str], kinds: list[int], merges: list[tuple[str, ...]], where: Path) -> list[float]:
    """SentencePiece's scores, whose order is that of the merges: all ways to make a piece stand together there."""
    rank: dict[str, int] = {}
    last = ""
    for index, pair in enumerate(merges):
        piece = "".join(pair)
        if piece in rank and piece != last:
            raise CheckpointError(
                f"{where}: the merges of tokenizer.json are not SentencePiece's: {piece!r} comes twice"
            )
        rank.setdefault(piece, index)
        last = piece
    first = len(merges)
    return [
        -float(rank.get(token, first + number)) if kind == _NORMAL else 0.0
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    ]


def _prepends(raw: dict) -> bool:
    """Whether a space is put before a text."""
    normalizer = raw.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") == "Prepend" for step in steps):
        return True
    return any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in _steps(raw.get("pre_tokenizer"))
    )


def _templates(templates: Mapping[str, str]) -> dict[str, Any]:
    """Names stay as they are; llama.cpp's own converter makes every sign but letters and digits an underscore."""
    others = sorted(templates.keys() - {"default"})
    out: dict[str, Any] = {f"{_TEMPLATE}.{name}": templates[name] for name in others}
    out |= {f"{_TEMPLATE}s": others} if others else {}
    return out | ({_TEMPLATE: templates["default"]} if "default" in templates else {})
