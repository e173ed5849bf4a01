"""Answers to a file of prompts: batched, and resumed where an earlier run stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ligermodels.base import CausalLM
from ligermodels.errors import LigerError
from ligermodels.generation import stop_ids
from ligermodels.tokenizer import Tokenizer


def generate_file(
    model: CausalLM, tokenizer: Tokenizer, prompts: str | Path, out: str | Path, *, batch: int = 16,
    max_new_tokens: int = 256, seed: int | None = None, progress: bool = True, **options: Any,
) -> int:  # fmt: skip
    """Answer every line of ``prompts`` (JSON Lines) into ``out``, and return how many were answered now.

    A line is an object with "prompt" (a text to continue) or "messages" (a conversation, for the chat template), or
    just a text. A line of ``out`` is that object with "index" (from 0), "completion", "tokens" (how many) and "finish"
    ("stop": an end-of-sequence token or a stop string; "length"). Lines come as batches are done, prompts of like
    length together, not in the order of the file. Lines that ``out`` already has are not answered again; half a line
    at its end, of a run that was killed, is. ``options`` are those of ``model.generate``; with a ``seed`` what
    a prompt gets depends on its number in the file, not on what it is batched with. Raises LigerError that names file
    and line for what cannot be read, and if ``out`` belongs to other prompts.
    """
    prompts, out = Path(prompts), Path(out)
    lines = _lines(prompts)
    given = [_parse(line, where) for where, line in lines]
    done = _finished(out, given)
    todo = [(i, _encode(tokenizer, row, lines[i][0])) for i, row in enumerate(given) if i not in done]
    todo.sort(key=lambda item: len(item[1]), reverse=True)  # the longest first: if memory is short it shows at once
    ends = stop_ids(model, options.pop("eos_token_id", None))
    strings = options.get("stop_strings") or []
    strings = [strings] if isinstance(strings, str) else list(strings)
    stops = {"tokenizer": tokenizer} if strings else {}
    with open(out, "a", encoding="utf-8") as file, tqdm(
        total=len(given), initial=len(done), unit="prompt", disable=not progress
    ) as bar:  # fmt: skip
        for start in range(0, len(todo), batch):
            part = todo[start : start + batch]
            ids, mask = tokenizer.pad([ids for _, ids in part])
            answers = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, seed=seed, row_numbers=[i for i, _ in part],
                eos_token_id=ends, **(options | stops),
            )[:, ids.shape[1] :].tolist()  # fmt: skip
            for (index, _), answer in zip(part, answers, strict=True):
                line = given[index] | {"index": index} | _result(tokenizer, answer, ends, strings)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(part))
    return len(todo)


def _lines(path: Path) -> list[tuple[str, str]]:
    """The lines that are not blank, each with its place for people."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LigerError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    return [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _parse(line: str, where: str) -> dict[str, Any]:
    """A line as an object with "prompt" or "messages"."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LigerError(f"{where}: not JSON: {error}") from error
    row = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise LigerError(f'{where}: expected a text, or an object with either "prompt" or "messages", got {line:.80}')
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise LigerError(f'{where}: "prompt" must be a text, got {row["prompt"]!r:.80}')
    return row


def _encode(tokenizer: Tokenizer, row: dict[str, Any], where: str) -> list[int]:
    try:
        if "messages" in row:
            ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True)
        else:
            ids = tokenizer.encode(row["prompt"])
    except LigerError as error:
        raise LigerError(f"{where}: {error}") from error
    if not ids:
        raise LigerError(f"{where}: the prompt has no tokens")
    return ids


def _finished(out: Path, given: list[dict[str, Any]]) -> set[int]:
    """The indices that ``out`` answers already; what an interrupted run left of a line is cut off."""
    if not out.is_file():
        return set()
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(out, "r+b") as file:
            file.truncate(len(whole))
    done = set()
    for n, line in enumerate(whole.decode("utf-8", "replace").split("\n")[:-1]):  # splitlines cuts at U+2028 too
        try:
            row = json.loads(line)
            index = row["index"]
            matches = all(row[key] == value for key, value in given[index].items())
        except (ValueError, KeyError, TypeError, IndexError):
            matches = False
        if not matches:
            raise LigerError(f"{out}, line {n + 1}: not an answer to these prompts; give another --out, or remove it")
        done.add(index)
    return done


def _result(tokenizer: Tokenizer, answer: list[int], ends: list[int], strings: list[str]) -> dict[str, Any]:
    """What is said of an answer, from its ids: without the end-of-sequence token, the stop string and the padding."""
    end = next((i for i, token in enumerate(answer) if token in ends), None)
    ids = answer[:end]
    whole, shown = tokenizer.stream_decoder(skip_special_tokens=False), tokenizer.stream_decoder()
    text = visible = ""  # with special tokens, among which a stop string may be, and without
    lengths = [(0, 0)]  # of both, after each token
    for count, token in enumerate(ids if strings else [], start=1):
        text, visible = text + whole.put(token), visible + shown.put(token)
        lengths.append((len(text), len(visible)))
        found = [at for s in strings if (at := text.find(s)) >= 0]
        if found:  # padding follows
            # tokens wholly before the string
            before = max(n for n, (length, _) in enumerate(lengths) if length <= min(found))
            cut = min(lengths[before][1] + min(found) - lengths[before][0], lengths[before + 1][1])
            return {"completion": visible[:cut], "tokens": count, "finish": "stop"}
    visible = tokenizer.decode(ids, skip_special_tokens=True)
    return {"completion": visible, "tokens": len(ids), "finish": "length" if end is None else "stop"}
