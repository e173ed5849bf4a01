"""Training data: text files, JSON Lines and data sets, as packed rows of tokens in an order that can be resumed.

    source   where records are: ``open_files([...])``, a list of dicts, a Hugging Face ``datasets`` object
    encode   record -> ``Document`` (ids, labels): ``Encoder(tokenizer)``; of a chat only the answers are learnt
    Loader   documents in a shuffled order, packed into ``Batch``es of rows; ``state_dict()`` says where it stands

Files are never read whole: an index of line starts (8 bytes a line) gives random access, so every epoch has its own
order. Documents packed in a row do not see each other: ``Batch.cu_seqlens`` tells the model their bounds.
"""

from __future__ import annotations

import array
import bisect
import collections
import functools
import itertools
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ligermodels.errors import LigerError
from ligermodels.tokenizer import Tokenizer

IGNORED = -100  # a label that is not learnt
PIECE = 1 << 18  # bytes of a text file that are read, and encoded, at once
REPORTED = 10  # broken records that are described; further ones are only counted
SAMPLES = 32  # records of a source without files that it is known by


class Record(NamedTuple):
    """One entry of a source. ``where`` names it for people: file and line."""

    where: str
    data: Mapping[str, Any]


class Document(NamedTuple):
    """Token ids and their labels, of equal length; ``labels[i]`` is ids[i], or -100 where it is not to be learnt.

    ``whole``: too long for a row it is cut at its end (a chat), not continued in another row (a text).
    """

    ids: Sequence[int]
    labels: Sequence[int]
    whole: bool = False


class Batch(NamedTuple):
    """input_ids, labels (B, S) int64; cu_seqlens int32, the bounds of the documents over the B·S positions; mask (B, S)
    bool, False on the padding behind a row's last document.

    ``supervised`` labels are learnt (the first of a document is nobody's label), ``tokens`` are not padding, and
    ``squares`` is the sum of the documents' squared lengths, which the cost of attention is proportional to.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    mask: torch.Tensor
    supervised: int
    tokens: int
    squares: int

    def to(self, device: torch.device | str) -> Batch:
        """With its tensors on ``device``; nothing waits for the copies."""
        if torch.device(device).type == "cpu":
            return self
        moved = (t.pin_memory().to(device, non_blocking=True) for t in self[:4])  # else the copy would wait
        return Batch(*moved, *self[4:])


# ------------------------------------------------------------------------------------------------------------- sources


class JsonLines:
    """The records of a JSON Lines file by number; a blank line is None. Raises LigerError, with file and line."""

    def __init__(self, path: str | Path):
        self.path, self.starts, self.checksum = Path(path), array.array("Q", [0]), 0
        with _open(self.path) as file:
            for line in file:
                self.starts.append(self.starts[-1] + len(line))
                self.checksum = zlib.crc32(line, self.checksum)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Record | None:
        where = f"{self.path}, line {index + 1}"
        line = _read(self.path, self.starts[index], self.starts[index + 1], where)
        if not line.strip():
            return None
        try:
            data = json.loads(line.rstrip(), object_pairs_hook=_each_key_once)  # else its end is "line 2" in errors
        except (ValueError, RecursionError) as error:  # ValueError alone: a number of thousands of digits
            raise LigerError(f"{where}: not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise LigerError(f"{where}: expected a JSON object, found {type(data).__name__}")
        return Record(where, data)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a file. Of two values under one key Python would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in collections.Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r} comes twice in one object")
    return found


class Piece(dict):
    """{"text"} that may be a part of a longer text. Attributes, as a user's records have any keys."""

    starts = ends = True  # whether the whole text starts, and ends, with it


class TextFile:
    """A text file as records {"text"}: pieces of about 256 KiB that end with a line; a small file is one piece.

    A piece says whether the file ends with it, so that only there an end-of-sequence token follows.
    """

    def __init__(self, path: str | Path):
        self.path, self.starts, self.lines = Path(path), array.array("Q", [0]), array.array("Q", [1])
        self.checksum = 0
        with _open(self.path) as file:
            while piece := file.read(PIECE):
                piece += file.readline(PIECE)  # to the end of the line, if it is not a very long one
                while (following := file.peek(1)[:1]) and following[0] & 0xC0 == 0x80:  # never inside a character
                    piece += file.read(1)
                self.starts.append(self.starts[-1] + len(piece))
                self.lines.append(self.lines[-1] + piece.count(b"\n"))
                self.checksum = zlib.crc32(piece, self.checksum)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Record:
        where = f"{self.path}, from line {self.lines[index]}"
        text = _read(self.path, self.starts[index], self.starts[index + 1], where)
        piece = Piece(text=text)
        piece.starts, piece.ends = index == 0, index == len(self) - 1
        return Record(where, piece)


class Files:
    """Several files one after the other."""

    def __init__(self, parts: Sequence[JsonLines | TextFile]):
        self.parts, self.ends = parts, list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Record | None:
        part = bisect.bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]

    def contents(self) -> list[str]:
        """What each file holds, in short: equal for files of equal bytes, whatever their names and dates."""
        return [f"{part.starts[-1]} bytes with checksum {part.checksum:08x}" for part in self.parts]


def open_files(paths: Iterable[str | Path]) -> Files:
    """A source from .jsonl (or .ndjson) files of {"text"} or {"messages"}, text files, and folders of such.

    Raises LigerError for a path that is missing, or of a kind that is read by other programs (.parquet, .gz, .json).
    """
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".ndjson", ".txt", ".md"))
        if path.is_dir() and not inside:
            raise LigerError(f"{path}: no .jsonl, .ndjson, .txt or .md file in this folder")
        found += inside if path.is_dir() else [path]
    for path in found:
        if path.suffix in (".json", ".parquet", ".arrow", ".gz", ".zst", ".zip", ".csv"):
            raise LigerError(
                f"{path}: {path.suffix} files are not read here: expected JSON Lines (.jsonl) or text. From Python, "
                "datasets.load_dataset(...) reads them, and a Loader takes its result"
            )
    return Files([(JsonLines if p.suffix in (".jsonl", ".ndjson") else TextFile)(p) for p in found])


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise LigerError(f"{path}: cannot be read: {error.strerror}") from error


def _read(path: Path, start: int, end: int, where: str) -> str:
    with open(path, "rb") as file:  # a file that vanishes during a run is no broken record: OSError ends the run
        file.seek(start)
        content = file.read(end - start)
    if len(content) < end - start:
        raise OSError(f"{path}: became shorter since it was opened")
    try:
        return content.decode("utf-8" if start else "utf-8-sig")  # some programs mark the start of a file
    except UnicodeDecodeError as error:
        raise LigerError(f"{where}: not UTF-8: {error.reason} at byte {start + error.start} of the file") from error


# ------------------------------------------------------------------------------------------------------------ encoding


class Encoder:
    """Record -> Document. Call it with a record's data; raises LigerError for one that is of no use.

    {"text": str}        all of it is learnt, and an end-of-sequence token after it.
    {"messages": [...]}  a chat (with "tools", if the template knows them): see ``encode_chat``.
    """

    def __init__(self, tokenizer: Tokenizer, *, turns: str = "all"):
        if turns not in ("all", "last"):
            raise LigerError(f'turns must be "all" or "last", found {turns!r}')
        self.tokenizer, self.turns = tokenizer, turns

    def __call__(self, data: Mapping[str, Any]) -> Document:
        if "messages" in data:
            variables = {"tools": data["tools"]} if data.get("tools") else None
            return encode_chat(self.tokenizer, data["messages"], turns=self.turns, variables=variables)
        text = data.get("text")
        if not isinstance(text, str):
            kind = f" of type {type(text).__name__}" if "text" in data else ""
            raise LigerError(f'expected "text" (a string) or "messages" (a list), found {", ".join(data)}{kind}')
        ids = self.tokenizer.encode(text, add_special_tokens=getattr(data, "starts", True))
        end = self.tokenizer.eos_token_id
        if ids and end is not None and getattr(data, "ends", True) and ids[-1] != end:
            ids.append(end)
        return Document(ids, ids)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    turns: str = "all",
    variables: Mapping[str, Any] | None = None,
) -> Document:
    """A conversation in the model's own layout; labels only on what the assistant says and the token that ends it.

    The template is asked what it writes up to each answer (as for generating it) and up to the answer's end; the
    difference is what the model is to say. This needs no marks in the template, but one that writes a conversation's
    start the same whatever follows. Where it does not (Qwen3 drops the thoughts of earlier turns), a LigerError says
    so; then give ``turns="last"``, which learns the last answer alone, and one record an answer.
    """
    whole = tokenizer.apply_chat_template(messages, tokenize=False, variables=variables)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise LigerError("messages: nothing to learn from, no message has the role assistant")
    spans = []
    for i in answers if turns == "all" else answers[-1:]:
        if i == 0:
            raise LigerError("messages: the first message is the assistant's, so there is nothing that it answers")
        before = tokenizer.apply_chat_template(
            messages[:i], add_generation_prompt=True, tokenize=False, variables=variables
        )
        after = whole
        if i + 1 < len(messages):
            after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, variables=variables)
        if not (whole.startswith(after) and after.startswith(before)):
            raise LigerError(
                f"messages: the chat template writes the start of this conversation differently once message {i + 2} "
                'follows, so what the assistant says cannot be told apart; use turns="last" and one record an answer'
            )
        spans.append((len(before), len(after.rstrip())))  # the line end after an answer's last token is layout
    encoding = tokenizer.encoding(whole, add_special_tokens=False)
    labels, end, spans = [], 0, iter(spans)
    first, last = next(spans)
    for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        start = min(start, end)  # some tokenizers leave a token's leading space out of its offsets
        end = max(end, stop)
        while start >= last and (span := next(spans, None)):
            first, last = span
        labels.append(token if first <= start < last else IGNORED)
    return Document(encoding.ids, labels, whole=True)


# ------------------------------------------------------------------------------------------------------------- loading


class Loader:
    """Iterator of ``Batch``es of ``batch`` rows of ``seq`` tokens.

    source: what ``open_files`` gives; or anything with a length whose items are dicts (a list, a datasets.Dataset); or
        an iterable of dicts (a datasets.IterableDataset), which is read in its own order.
    encode: a record's data -> Document, such as ``Encoder(tokenizer)``.
    packing: "fit" keeps documents whole where they fit a row (best fit among the next ``window`` documents; the rest of
        a row is padding); "concat" fills rows to the last token and continues a cut document in the next row.
    epochs: passes over the source; None for ever. After the last, the rows that are left come as a smaller batch.
    shuffle: a new order each epoch, drawn from ``seed`` and the epoch's number.
    strict: the first broken record ends it with its LigerError. Otherwise it is reported (``warnings``), counted in
        ``skipped`` and left out. Chats cut to a row's length are counted in ``cut``. Both only in the first epoch.
    """

    def __init__(
        self,
        source: Any,
        encode: Callable[[Mapping[str, Any]], Document],
        *,
        batch: int,
        seq: int,
        packing: str = "fit",
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        strict: bool = False,
        window: int = 256,
        pad_id: int = 0,
    ):
        if packing not in ("fit", "concat"):
            raise LigerError(f'packing must be "fit" or "concat", found {packing!r}')
        numbers = {"batch": (batch, 1), "seq": (seq, 2), "window": (window, 1), "seed": (seed, -(2**62)),
                   "pad_id": (pad_id, 0), "epochs": (1 if epochs is None else epochs, 1)}  # fmt: skip
        for name, (value, least) in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62:
                raise LigerError(f"{name} must be a whole number of at least {least}, found {value!r}")
        self.indexed = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        if shuffle and not self.indexed:
            raise LigerError("a stream has no length to shuffle: give shuffle=False, and let the stream shuffle itself")
        if self.indexed and len(source) == 0:
            raise LigerError("the data is empty: no line and no record in it")
        self.source, self.encode, self.batch, self.seq = source, encode, batch, seq
        self.packing, self.shuffle, self.seed, self.epochs = packing, shuffle, seed, epochs
        self.strict, self.window, self.pad_id = strict, window if packing == "fit" else 1, pad_id
        self.epoch = self.position = self.skipped = self.cut = 0
        self._found = False  # a usable document in this epoch
        self._pool: collections.deque[Document] = collections.deque()  # of at most seq tokens each, if packing is "fit"
        self._order: Iterator[Any] | None = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        rows = [row for _ in range(self.batch) if (row := self._row())]
        if not rows:
            raise StopIteration
        return self._collate(rows)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in plain data and tensors: the next record, and the documents read but not yet in a row."""
        pool = [(torch.tensor(d.ids), torch.tensor(d.labels), d.whole) for d in self._pool]
        names = ("epoch", "position", "skipped", "cut")
        state = {name: getattr(self, name) for name in names} | {"found": self._found, "pool": pool}
        return state | {"data": self._known_by, "made": self._made()}

    def _made(self) -> dict[str, Any]:
        """What decides which documents come in which order."""
        return {name: getattr(self, name) for name in ("seq", "packing", "shuffle", "seed", "window")}

    @functools.cached_property
    def _known_by(self) -> dict[str, Any]:
        """What tells the data from other data: contents of files, or some records of a list; nothing of a stream."""
        if isinstance(self.source, Files):
            return {f"file {n}": held for n, held in enumerate(self.source.contents(), start=1)}
        if not self.indexed:
            return {}
        count = len(self.source)
        some = sorted({i * (count - 1) // (SAMPLES - 1) for i in range(SAMPLES)})
        return {"records": count} | {f"record {i}": _checksum(self.source, i) for i in some}

    def load_state_dict(self, state: Mapping[str, Any], *, other_data: bool = False) -> None:
        """Go on from there; the source and the arguments must be those of the loader that gave the state.

        Raises LigerError where the data is not the same: of files every byte counts, of a list or data set its length
        and the text and numbers of 32 records all over it; ``other_data`` goes on all the same, as many records into
        the pass as before. Also where the documents would come in another order or be cut otherwise. ``batch`` and
        ``epochs`` may be others.
        """
        names = ("epoch", "position", "skipped", "cut", "found", "pool", "data", "made")
        if not isinstance(state, Mapping) or (missing := [name for name in names if name not in state]):
            raise LigerError("not the state of a Loader" + (f": no {missing[0]}" if isinstance(state, Mapping) else ""))
        if listed := differences(state["made"], self._made()):
            raise LigerError(f"the data was read otherwise, its position means nothing: {listed}")
        before, now = state["data"], self._known_by
        if before.get("records") != now.get("records"):  # other records were looked at
            before, now = ({"records": x["records"]} if "records" in x else {} for x in (before, now))
        if not other_data and (listed := differences(before, now)):
            raise LigerError(
                f"the data is not what it was: {listed}. Give what the run was started with, or other_data=True "
                "(--other-data) to go on with this"
            )
        for name in ("epoch", "position", "skipped", "cut"):
            setattr(self, name, state[name])
        self._found, self._order = state["found"], None
        self._pool = collections.deque(Document(i.tolist(), labels.tolist(), w) for i, labels, w in state["pool"])

    # ---- documents

    def _records(self) -> Iterator[Any]:
        """Callables that give the records of this epoch from ``position`` on (reading may fail, record by record)."""
        if self.indexed:
            order = range(len(self.source))
            if self.shuffle:
                generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
                order = torch.randperm(len(self.source), generator=generator).tolist()
            return ((i, lambda i=i: self.source[i]) for i in order[self.position :])
        skip = getattr(self.source, "skip", None)
        rest = skip(self.position) if skip else itertools.islice(self.source, self.position, None)
        return ((i, lambda data=data: data) for i, data in enumerate(rest, self.position))

    def _read(self) -> bool:
        """Put the next usable document into the pool; False if there is none left."""
        while self.epochs is None or self.epoch < self.epochs:
            if self._order is None:
                self._order = self._records()
            index, get = next(self._order, (None, None))
            if get is None:
                if not self._found:
                    raise LigerError(
                        f"no usable document in the data: {self.position} records, {self.skipped} of them broken"
                    )
                if self.packing == "fit" and self._pool:
                    return False  # else the best fit would choose among several passes, and some documents more often
                self.epoch, self.position, self._found, self._order = self.epoch + 1, 0, False, None
                continue
            self.position += 1
            where = ""  # a source that cannot read a record says where it is
            try:
                record = get()
                if record is None:
                    continue
                where, record = record if isinstance(record, Record) else (f"record {index}", record)
                if not isinstance(record, Mapping):
                    raise LigerError(f"expected a dict, found {type(record).__name__}")
                documents = self._fitting(self.encode(record))
            except LigerError as error:
                message = f"{where}: {error}" if where else str(error)
                if self.strict:
                    raise LigerError(message) from error
                if self.epoch > 0:
                    continue
                self.skipped += 1
                if self.skipped <= REPORTED:
                    more = "; further ones are only counted" if self.skipped == REPORTED else ""
                    warnings.warn(f"left out: {message}{more}", stacklevel=2)
                continue
            self._pool.extend(documents)
            self._found = True
            return True
        return False

    def _fitting(self, document: Document) -> list[Document]:
        """The document in pieces that fit a row. Raises LigerError if there is nothing to learn from it.

        A piece starts with the last token of the one before, so that every token but the first is predicted once.
        """
        ids, labels, whole = document = Document(*document)
        if len(ids) != len(labels):
            raise LigerError(f"a document of {len(ids)} ids has {len(labels)} labels")
        pieces = [document]
        if whole and len(ids) > self.seq:
            pieces = [Document(ids[: self.seq], labels[: self.seq], whole)]
        elif self.packing == "fit" and len(ids) > self.seq:
            starts = range(0, len(ids) - 1, self.seq - 1)
            pieces = [Document(ids[i : i + self.seq], labels[i : i + self.seq]) for i in starts]
        pieces = [piece for piece in pieces if any(label != IGNORED for label in piece.labels[1:])]
        if not pieces:
            hint = f": no answer begins within the first {self.seq} tokens" if len(ids) > self.seq else ""
            raise LigerError(f"nothing to learn from in {len(ids)} tokens{hint}")
        self.cut += self.epoch == 0 and whole and len(ids) > self.seq
        return pieces

    # ---- rows

    def _row(self) -> list[Document]:
        """The documents of the next row; empty at the end of the data."""
        space, row = self.seq, []
        while space > 0:
            while len(self._pool) < self.window and self._read():
                pass
            if not self._pool:
                break
            if self.packing == "fit":
                best = 0  # the oldest opens the row, so that none waits for ever; then the longest that fits
                if row:
                    fitting = [(len(d.ids), -i) for i, d in enumerate(self._pool) if len(d.ids) <= space]
                    if not fitting:
                        break
                    best = -max(fitting)[1]
                document = self._pool[best]
                del self._pool[best]
            else:
                document = self._pool.popleft()
                if len(document.ids) > space:
                    rest = document.ids[space - 1 :], document.labels[space - 1 :]
                    self._pool.appendleft(Document(*rest))
                    document = Document(document.ids[:space], document.labels[:space])
            row.append(document)
            space -= len(document.ids)
        return row

    def _collate(self, rows: list[list[Document]]) -> Batch:
        input_ids = torch.full((len(rows), self.seq), self.pad_id)
        labels, bounds = torch.full_like(input_ids, IGNORED), [0]
        mask = torch.zeros_like(input_ids, dtype=torch.bool)
        supervised = tokens = squares = 0
        for number, row in enumerate(rows):
            at = 0
            for ids, of, _ in row:
                input_ids[number, at : at + len(ids)] = torch.tensor(ids)
                labels[number, at : at + len(ids)] = torch.tensor(of)
                labels[number, at] = IGNORED  # the first token follows nothing
                at += len(ids)
                bounds.append(number * self.seq + at)
                squares += len(ids) ** 2
            tokens += at
            mask[number, :at] = True
            if at < self.seq:
                bounds.append((number + 1) * self.seq)  # padding is a document of its own
        supervised = int((labels != IGNORED).sum())
        return Batch(input_ids, labels, torch.tensor(bounds, dtype=torch.int32), mask, supervised, tokens, squares)


def _checksum(source: Any, index: int) -> str:
    """Of the text and the numbers in a record; of what else it may hold, its type."""
    try:
        data = json.dumps(
            source[index], sort_keys=True, default=lambda x: x.tolist() if hasattr(x, "tolist") else type(x).__name__
        )
    except (LigerError, TypeError, ValueError) as error:  # one that cannot be read, or has keys of several types
        data = type(error).__name__
    return f"{zlib.crc32(data.encode()):08x}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is not as it was, for people; empty if all is."""
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    listed = [f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}" for name in changed[:3]]
    return ", ".join(listed) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
