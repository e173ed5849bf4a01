"""Training data: what is read, what is learnt of it, how it is packed, and that it goes on where it stood."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from tiny_chat import CHAT_TEMPLATE, write_tiny_chat_model

from ligermodels import LigerError, LigerLlama, LlamaConfig, Tokenizer
from ligermodels.training import data
from ligermodels.training.data import IGNORED, Document, Encoder, JsonLines, Loader, TextFile, encode_chat, open_files

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Été?"},
    {"role": "assistant", "content": " Summer…"},
    {"role": "user", "content": "北京?"},
    {"role": "assistant", "content": "Beijing."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_pretrained(write_tiny_chat_model(tmp_path_factory.mktemp("model")))


def numbers(record):
    """An encoder of {"ids": [...]}; everything is learnt."""
    return Document(record["ids"], record["ids"])


def documents(*lengths, start=1):
    count = itertools.count(start)
    return [{"ids": list(itertools.islice(count, n))} for n in lengths]


def loader(source, **options):
    options = {"batch": 2, "seq": 8, "shuffle": False, "epochs": 1, "window": 4, **options}
    return Loader(source, options.pop("encode", numbers), **options)


def learnt(batches):
    """(what is before, what is to be predicted) of every supervised position, as the model shifts them."""
    pairs = []
    for ids, labels, bounds, *_ in batches:
        ids, labels = ids.flatten().tolist(), labels.flatten().tolist()
        for a, b in itertools.pairwise(bounds.tolist()):
            pairs += [(ids[i - 1], labels[i]) for i in range(a + 1, b) if labels[i] != IGNORED]
    return pairs


# ---------------------------------------------------------------------------------------------------------------- files


def test_json_lines_are_read_by_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "é"}\r\n\n{"text": "two"}'.encode())
    lines = JsonLines(path)
    assert [lines[i] and lines[i].data for i in range(len(lines))] == [{"text": "é"}, None, {"text": "two"}]
    assert lines[2].where == f"{path}, line 3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "line 2: not valid JSON"),
        (b'{"cut"', r"line 2: not valid JSON: Expecting ':' delimiter: line 1 column 7 \(char 6\)"),
        (b"[1, 2]", "line 2: expected a JSON object, found list"),
        (b'{"text": "\xff"}', "line 2: not UTF-8: invalid start byte at byte 27"),
        (b'{"body": "x"}', 'line 2: expected "text" .a string. or "messages" .a list., found body'),
        (b'{"text": 7}', "found text of type int"),
        (b'{"text": ""}', "line 2: nothing to learn from in 0 tokens"),
        (b'{"text": "a", "text": "b"}', "line 2: not valid JSON: the key 'text' comes twice"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "line 2: not valid JSON: Exceeds the limit"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "y"}]}', "surrogate"),
        (b'{"tools": 5, "messages": [{"role": "user", "content": "?"}]}', "tools.*expected a list"),
        (b'{"messages": "hi"}', "line 2: messages: expected a list"),
        (
            b'{"messages": [{"role": "user", "content": "?"}]}',
            "line 2: messages: nothing to learn from, no message has",
        ),
    ],
)
def test_a_broken_line_is_reported_and_counted_or_ends_it(line, message, tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "fine"}\n')
    options = {"encode": Encoder(tokenizer), "seq": 16}
    with pytest.warns(UserWarning, match=message) as warned:
        rows = loader(open_files([path]), **options)
        batch = next(rows)
    assert len(warned) == 1 and str(path) in str(warned[0].message)
    assert rows.skipped == 1 and batch.tokens == 2 * 5  # both others: four letters and an end
    with pytest.raises(LigerError, match=message):
        next(loader(open_files([path]), strict=True, **options))


def test_many_broken_lines_are_counted_but_not_all_described(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("{\n" * 50 + '{"text": "good"}\n')
    rows = loader(open_files([tmp_path / "a.jsonl"]), encode=Encoder(tokenizer))
    with pytest.warns(UserWarning) as warned:
        next(rows)
    assert len(warned) == data.REPORTED and rows.skipped == 50


def test_data_without_a_usable_line_ends_with_an_error(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("{\n{\n\n")
    with pytest.warns(UserWarning), pytest.raises(LigerError, match="no usable document in the data: 3 records, 2 of"):
        next(loader(open_files([tmp_path / "a.jsonl"]), encode=Encoder(tokenizer), epochs=None))


def test_a_text_file_is_read_in_pieces_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 32)
    text = "".join(f"line {i} é\n" for i in range(20)) + "ü" * 200 + "\nlast"
    (tmp_path / "a.txt").write_text(text, "utf-8")
    pieces = [TextFile(tmp_path / "a.txt")[i] for i in range(len(TextFile(tmp_path / "a.txt")))]
    assert "".join(p.data["text"] for p in pieces) == text and len(pieces) > 8
    assert all(p.data["text"].endswith("\n") for p in pieces[:3])
    assert [p.data.starts for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p.data.ends for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[1].where.endswith(f"from line {1 + pieces[0].data['text'].count(chr(10))}")


def test_a_text_is_one_document_whose_end_is_learnt(tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text("ab")
    (tmp_path / "a.txt").write_text("cd\n")
    (tmp_path / "c.jsonl").write_text('{"text": "e"}\n')
    batch = next(loader(open_files([tmp_path]), encode=Encoder(tokenizer), batch=1, seq=12, window=1))
    end = tokenizer.eos_token_id
    assert tokenizer.decode(batch.input_ids[0, :9]) == "cd\n<|im_end|>ab<|im_end|>e<|im_end|>"
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 9, 12]
    assert batch.labels[0].tolist().count(end) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.jsonl", "absent.jsonl: cannot be read: No such file"),
        ("a.parquet", "parquet files are not read here: expected JSON Lines"),
        ("a.json", "json files are not read here"),
        ("empty", "empty: no .jsonl, .ndjson, .txt or .md file in this folder"),
        ("empty.txt", "the data is empty"),
    ],
)
def test_paths_that_cannot_be_read_are_named(name, message, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(LigerError, match=message):
        loader(open_files([tmp_path / name]))


def test_a_file_that_vanishes_ends_the_run(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 9)
    rows = loader(open_files([path]), encode=Encoder(tokenizer), batch=1, window=1)
    next(rows)
    path.write_text('{"text"')
    with pytest.raises(OSError, match="became shorter"):
        next(rows)


# ---------------------------------------------------------------------------------------------------------------- chats


def spoken(tokenizer, document):
    return tokenizer.decode([label for label in document.labels if label != IGNORED])


MARKED = CHAT_TEMPLATE.replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}",
)
BARE = (  # of the kind of Llama 2's: nothing that add_generation_prompt would add
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '<|im_end|>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED, BARE])
def test_only_what_the_assistant_says_is_learnt(tokenizer, template):
    tokenizer = Tokenizer.from_pretrained(tokenizer._folder)
    tokenizer.chat_template = template
    document = encode_chat(tokenizer, CHAT)
    assert list(document.ids) == tokenizer.apply_chat_template(CHAT)
    assert all(label in (IGNORED, i) for label, i in zip(document.labels, document.ids, strict=True))
    space = " " if template is BARE else ""
    assert spoken(tokenizer, document) == f"{space} Summer…<|im_end|>{space}Beijing.<|im_end|>"
    last = encode_chat(tokenizer, CHAT, turns="last")
    assert spoken(tokenizer, last) == f"{space}Beijing.<|im_end|>" and last.ids == document.ids


def test_labels_equal_those_of_a_template_with_marks_in_transformers(tokenizer):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_pretrained(tokenizer._folder)
    hf = AutoTokenizer.from_pretrained(tokenizer._folder)
    tokenizer.chat_template = hf.chat_template = MARKED
    expected = hf.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    document = encode_chat(tokenizer, CHAT)
    assert list(document.ids) == expected["input_ids"]
    assert [int(label != IGNORED) for label in document.labels] == expected["assistant_masks"]


def test_offsets_without_leading_spaces_do_not_move_the_border(tokenizer):
    """Some tokenizers trim the spaces off their offsets: that before an answer then seems to be inside of it."""
    from tokenizers import processors

    plain, trimmed = (Tokenizer.from_pretrained(tokenizer._folder) for _ in range(2))
    trimmed.backend.post_processor = processors.ByteLevel(trim_offsets=True)
    plain.chat_template = trimmed.chat_template = CHAT_TEMPLATE.replace("\n", " ")
    assert trimmed.backend.encode("a b").offsets[1] == (2, 2)
    assert encode_chat(trimmed, CHAT).labels == encode_chat(plain, CHAT).labels
    assert spoken(trimmed, encode_chat(trimmed, CHAT)) == " Summer…<|im_end|>Beijing.<|im_end|>"


def test_a_template_that_rewrites_the_past_is_refused_unless_the_last_answer_is_enough(tokenizer):
    tokenizer = Tokenizer.from_pretrained(tokenizer._folder)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("m['content']", "(m['content'] if loop.last else m['content'][-1])")
    with pytest.raises(LigerError, match=r'once message 4 follows.*use turns="last"'):
        encode_chat(tokenizer, CHAT)
    chat = [{**m, "content": m["content"][-1]} for m in CHAT[:-1]] + CHAT[-1:]
    assert spoken(tokenizer, encode_chat(tokenizer, chat, turns="last")) == "Beijing.<|im_end|>"


def test_a_chat_that_is_too_long_is_cut_and_counted_not_continued(tokenizer):
    chats = [{"messages": CHAT}, {"messages": CHAT[1:3]}]
    whole = encode_chat(tokenizer, CHAT)
    rows = loader(chats, encode=Encoder(tokenizer), batch=4, seq=len(whole.ids) - 3)
    batch = next(rows)
    assert rows.cut == 1 and len(batch.input_ids) == 2
    assert batch.input_ids[0].tolist() == list(whole.ids[:-3])
    with pytest.warns(UserWarning, match="record 0: nothing to learn from in .* no answer begins within the first 9"):
        rows = loader([*chats[:1], {"text": "x"}], encode=Encoder(tokenizer), seq=9)
        next(rows)


# -------------------------------------------------------------------------------------------------------------- packing


def test_fit_keeps_documents_whole_and_fills_rows_with_what_fits_best():
    batch = next(loader(documents(5, 2, 4, 3, 1 + 1)))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 12, 13, 14], [6, 7, 8, 9, 10, 11, 15, 16]]
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 10, 14, 16]
    assert batch.cu_seqlens.dtype == torch.int32
    assert (batch.tokens, batch.supervised, batch.squares) == (16, 16 - 5, 25 + 9 + 4 + 16 + 4)


def test_padding_is_a_document_of_its_own_that_is_not_learnt():
    batch = next(loader(documents(5, 6), pad_id=99))
    assert batch.input_ids[0].tolist() == [1, 2, 3, 4, 5, 99, 99, 99]
    assert batch.labels[0].tolist() == [IGNORED, 2, 3, 4, 5, IGNORED, IGNORED, IGNORED]
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 14, 16] and batch.tokens == 11
    assert batch.mask.tolist() == [[True] * 5 + [False] * 3, [True] * 6 + [False] * 2]


@pytest.mark.parametrize("packing", ["fit", "concat"])
def test_every_token_but_the_first_of_a_document_is_predicted_exactly_once(packing):
    source = documents(5, 2, 30, 9, 3, 8, 17, 2)
    pairs = learnt(loader(source, packing=packing, batch=3))
    assert sorted(pairs) == [(i - 1, i) for d in source for i in d["ids"][1:]]


def test_concat_fills_every_row_to_the_last_token():
    batches = list(loader(documents(5, 2, 30, 9, 3), packing="concat"))
    full = [batch.tokens == batch.input_ids.numel() for batch in batches]
    assert all(full[:-1]) and sum(b.supervised for b in batches) == 49 - 5


def test_a_packed_row_is_learnt_as_its_documents_apart():
    torch.manual_seed(0)
    model = LigerLlama(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                   num_attention_heads=4))  # fmt: skip
    source = documents(5, 2, 12, 9, 3)
    batches = list(loader(source, seq=16))
    count = sum(b.supervised for b in batches)
    for b in batches:
        model(b.input_ids, labels=b.labels, cu_seqlens=b.cu_seqlens, num_items_in_batch=count).loss.backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for document in source:
        ids = torch.tensor([document["ids"]])
        model(ids, labels=ids, num_items_in_batch=count).loss.backward()
    for p, expected in zip(model.parameters(), packed, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------------------------------------------- order, resumption


@pytest.mark.parametrize("packing", ["fit", "concat"])
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_a_loader_goes_on_where_another_one_stood(packing, steps):
    def make():
        return loader(documents(*([5, 2, 30, 9, 3, 8] * 4)), packing=packing, shuffle=True, epochs=None, seed=3)

    first = make()
    for _ in range(steps):
        next(first)
    state, second = first.state_dict(), make()
    expected = [next(first) for _ in range(12)]  # beyond the end of an epoch
    second.load_state_dict(state)
    for batch, again in zip(expected, second, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(batch[:4], again[:4], strict=True)) and batch[4:] == again[4:]


def test_the_order_is_of_seed_and_epoch_and_misses_nothing():
    def epochs(seed):
        rows = loader(documents(*[2] * 50), seq=2, batch=50, shuffle=True, epochs=2, seed=seed)
        return [batch.input_ids[:, 0].tolist() for batch in rows]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(1, 101, 2)) and first != second
    assert epochs(0) == [first, second] and epochs(1)[0] != first


def test_a_record_may_have_any_other_keys_and_a_text_file_a_mark_at_its_start(tmp_path, tokenizer):
    """Only a piece of a text file is said to go on: "ends" in a user's record is the user's."""
    (tmp_path / "a.jsonl").write_text('{"text": "one", "starts": false, "ends": 0}\n')
    (tmp_path / "b.txt").write_bytes("\ufeffone".encode())
    for name in ("a.jsonl", "b.txt"):
        batch = next(loader(open_files([tmp_path / name]), encode=Encoder(tokenizer), seq=8))
        assert tokenizer.decode(batch.input_ids[0, : batch.tokens]) == "one<|im_end|>"


def test_every_id_has_a_label():
    with pytest.raises(LigerError, match="3 ids has 2 labels"):
        next(loader([{}], encode=lambda _: Document([1, 2, 3], [1, 2]), strict=True))


@pytest.mark.parametrize(
    "change", [{"seq": 8}, {"packing": "concat"}, {"shuffle": False}, {"seed": 1}, {"window": 2}], ids=str
)
def test_a_position_means_nothing_to_a_loader_made_otherwise(change):
    texts, options = documents(*[5] * 20), {"seq": 16, "shuffle": True, "seed": 0}
    rows = loader(texts, **options)
    next(rows)
    with pytest.raises(LigerError, match=f"{next(iter(change))} was .* and is"):
        loader(texts, **options | change).load_state_dict(rows.state_dict())
    with pytest.raises(LigerError, match="not the state of a Loader"):
        loader(texts).load_state_dict({})


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_files_that_were_changed_are_not_taken_for_the_same(suffix, tmp_path, tokenizer):
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]

    def rows():
        return loader(open_files(paths), encode=Encoder(tokenizer))

    for path in paths:
        path.write_text('{"text": "one"}\n' * 100)
    state = rows().state_dict()
    for path in paths:
        path.rename(path.with_stem("moved " + path.stem))  # other names and dates are no other data
    paths = [path.with_stem("moved " + path.stem) for path in paths]
    rows().load_state_dict(state)
    text = paths[1].read_text()
    paths[1].write_text(text[:800] + text[800:].replace("one", "two", 1))  # as many bytes, lines and records
    with pytest.raises(LigerError, match=r"the data is not what it was: file 2 was 1600 bytes with .*--other-data"):
        rows().load_state_dict(state)
    rows().load_state_dict(state, other_data=True)


@pytest.mark.parametrize("packing", ["fit", "concat"])
def test_every_pass_over_little_data_has_each_document_once(packing):
    rows = loader(documents(2, 3, 8, 5, 4, 7), packing=packing, window=256, epochs=None, shuffle=True, batch=1)
    seen = []
    for _ in range(40):
        seen += [target for _, target in learnt([next(rows)])]
    one = sorted(target for _, target in learnt(loader(documents(2, 3, 8, 5, 4, 7), seq=29, batch=1)))
    for start in range(0, len(seen) - len(one), len(one)):
        assert sorted(seen[start : start + len(one)]) == one


def test_broken_records_are_counted_once_however_often_they_are_met(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{\n')
    rows = loader(open_files([tmp_path / "a.jsonl"]), encode=Encoder(tokenizer), epochs=5)
    with pytest.warns(UserWarning, match="left out"):
        assert sum(batch.tokens for batch in rows) == 5 * 5
    assert rows.skipped == 1


def test_other_data_is_not_taken_for_the_same():
    first = loader(documents(*[3] * 50), window=2, seq=8, batch=1)
    next(first)
    state = first.state_dict()
    with pytest.raises(LigerError, match=r"not what it was: records was 50 and is 51\. Give"):
        loader(documents(*[3] * 51), window=2).load_state_dict(state)
    for index in (0, 49):  # as many records
        other = documents(*[3] * 50)
        other[index] = {"ids": [900, 901, 902]}
        with pytest.raises(LigerError, match=rf"not what it was: record {index} was \w{{8}} and is \w{{8}}\. Give"):
            loader(other, window=2).load_state_dict(state)
    second = loader(other, window=2, batch=1)
    second.load_state_dict(state, other_data=True)
    assert torch.equal(next(second).input_ids, next(first).input_ids)  # what was read already, then the new data
    assert any(900 in batch.input_ids for batch in second)


def test_a_record_is_known_by_what_it_holds_and_not_by_how(tmp_path):
    class Thing:
        pass

    def record(x, thing):
        return {"b": 1, "a": {"text": x}, "array": torch.tensor([1, 2]), "thing": thing, "none": None}

    def swapped(data):
        return dict(reversed(data.items()))

    state = loader([record("x", Thing()), {1: "mixed", "keys": 2}]).state_dict()
    loader([swapped(record("x", Thing())), {1: "mixed", "keys": 2}]).load_state_dict(state)
    with pytest.raises(LigerError, match="record 0 was"):
        loader([record("y", Thing()), {1: "mixed", "keys": 2}]).load_state_dict(state)


class Stream:
    """Like datasets.IterableDataset: no length, but it can skip."""

    def __init__(self, records, skipped=0):
        self.records, self.skipped = records, skipped

    def __iter__(self):
        return iter(self.records[self.skipped :])

    def skip(self, n):
        return Stream(self.records, self.skipped + n)


class Plain:
    """An iterable and no more."""

    def __init__(self, records):
        self.records = records

    def __iter__(self):
        return iter(self.records)


@pytest.mark.parametrize("make", [Stream, Plain])
def test_a_stream_is_read_in_its_own_order_and_resumed_by_skipping(make):
    source = documents(5, 2, 7, 4, 3, 8, 6)

    def rows():
        return loader(make(source), epochs=2, batch=1)

    every = rows()
    assert sorted(learnt(rows())) == sorted(2 * [(i - 1, i) for d in source for i in d["ids"][1:]])
    for _ in range(3):
        next(every)
    again = rows()
    again.load_state_dict(every.state_dict())
    assert [b.input_ids.tolist() for b in every] == [b.input_ids.tolist() for b in again]
    with pytest.raises(LigerError, match="a stream has no length to shuffle"):
        loader(Stream(source), shuffle=True)


def test_a_list_of_chats_needs_no_file(tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = next(loader([{"messages": CHAT}], encode=Encoder(tokenizer), seq=128))
    assert batch.supervised == len([x for x in encode_chat(tokenizer, CHAT).labels if x != IGNORED])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "best"}, "packing must be"),
        ({"seq": 1}, "seq must be a whole number of at least 2, found 1"),
        ({"batch": 0}, "batch must be"),
        ({"batch": 1.5}, "batch must be"),
        ({"window": 0}, "window must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"seed": 2**70}, "seed must be"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(LigerError, match=message):
        loader(documents(3), **options)
