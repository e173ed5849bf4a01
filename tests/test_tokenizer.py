"""Tokenizer: against transformers' AutoTokenizer on tokenizers built here."""

import copy
import json
import pickle

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from ligermodels.errors import LigerError
from ligermodels.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, isn't it?",
    "Grüße aus Köln! 你好，世界 🙂 x = 1 + 2",
    "[INST] [/INST]",
]
TEXTS = ["", " ", "hello", "  the fox \n\n isn't here .", "<s>the</s> fox<pad>", "Köln 你好 🙂🤷🏽‍♀️", "\u0000a\ufffdb"]
CHAT = [
    {"role": "system", "content": "Be brief & <kind>. "},
    {"role": "user", "content": " Hi there\n"},
    {"role": "assistant", "content": "Grüße 🙂"},
    {"role": "user", "content": "Why?"},
]

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{{- "Year: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MISTRAL = """{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == "user" %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- else %}
        {% generation %}{{- " " + message["content"] | trim + eos_token }}{% endgeneration %}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
 {{ ns.index }} {{ messages | tojson }}
"""
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{% set role = 'user' %}"
    "{% elif message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
TEMPLATES = {"llama2": LLAMA2, "llama3": LLAMA3, "chatml": CHATML, "mistral": MISTRAL, "gemma": GEMMA}


def byte_level():
    """As Llama 3, Qwen, SmolLM2: byte-level BPE."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=specials, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback():
    """As Llama 2 and Gemma: ▁ for spaces, bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", *"thequickbrownfxjmpsvlazydg'?!.[INST]/", "th", "the", "▁the"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    return backend


def unigram():
    """The rare kind that is not BPE, where clean_up_tokenization_spaces has an effect."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        "<pad>",
        "▁",
        "▁the",
        "▁fox",
        "▁isn",
        "'t",
        "▁.",
        "▁!",
        "▁here",
        *"thelofxisnr.!?",
    ]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(dict.fromkeys(pieces))], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


BACKENDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "unigram": unigram}


def with_bos(backend, eos=False):
    ids = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    single = "<s> $A </s>" if eos else "<s> $A"
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return backend


def write(folder, backend, **config):
    """A tokenizer folder in HF layout."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **config}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **{k: v for k, v in config.items() if v is not None}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def both(folder):
    from transformers import AutoTokenizer

    return Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("bos", [None, "bos", "bos+eos"])
def test_encode_and_decode_equal_transformers(tmp_path, kind, bos):
    backend = BACKENDS[kind]()
    if bos:
        with_bos(backend, eos=bos == "bos+eos")
    ours, hf = both(write(tmp_path, backend))
    assert ours.vocab_size == len(ours) == len(hf)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == hf.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"clean_up_tokenization_spaces": True},
        {
            "unk_token": {
                "__type": "AddedToken",
                "content": "<unk>",
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
                "normalized": False,
            }
        },
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": True}, "eos_token": None},
        {"pad_token": "<new pad>", "image_token": "<image>"},
        {"additional_special_tokens": ["<a>", "fox"]},
        {"extra_special_tokens": {"boi_token": "<boi>"}},
        {"eos_token": "the"},
        {"added_tokens_decoder": {"9999": {"content": "<late>", "lstrip": True, "special": False}}},
        {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}, "3": {"content": "<b>", "special": True}}},
    ],
    ids=lambda config: "+".join(config),
)
@pytest.mark.parametrize("kind", BACKENDS)
def test_tokenizer_config_has_the_effect_it_has_in_transformers(tmp_path, kind, config):
    ours, hf = both(write(tmp_path, with_bos(BACKENDS[kind]()), **config))
    assert len(ours) == len(hf)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(hf, name), name
    for text in [*TEXTS, "the<new pad> x<image> <late> <a>fox isn't<boi> the the."]:
        ids = ours.encode(text)
        assert ids == hf.encode(text)
        assert ours.decode(ids) == hf.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == hf.decode(ids, skip_special_tokens=True)


def test_tokenizer_json_rules_where_transformers_rebuilds_a_llama_tokenizer(tmp_path):
    """For tokenizer_class LlamaTokenizer, transformers 5 drops the file's normalizer and with it real spaces.

    We keep the file, which has the pieces that sentencepiece and Meta's code give.
    """
    ours, hf = both(write(tmp_path, with_bos(byte_fallback()), tokenizer_class="LlamaTokenizer", unk_token="<unk>"))
    assert ours.encode("the fox") == hf.encode("the fox")
    pieces = [ours.backend.id_to_token(i) for i in ours.encode(" the</s>the")]
    assert pieces == ["<s>", "▁", "▁the", "</s>", "▁the"]
    assert hf.convert_ids_to_tokens(hf.encode(" the</s>the")) == ["<s>", "▁the", "</s>", "the"]


def test_special_tokens_map_completes_an_old_config(tmp_path):
    folder = write(tmp_path, byte_level(), bos_token=None, eos_token=None, pad_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    ours, hf = both(folder)
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (hf.bos_token, hf.eos_token, hf.pad_token)
    assert (ours.bos_token, ours.eos_token, ours.pad_token, ours.pad_token_id) == ("<s>", "</s>", None, None)


def test_truncation_and_padding_left_in_the_file_do_nothing(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    ours, hf = both(write(tmp_path, backend))
    text = "the quick brown fox"
    assert ours.encode(text) == hf.encode(text)
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_templates_render_as_in_transformers(tmp_path, template, prompt):
    ours, hf = both(write(tmp_path, with_bos(byte_level()), chat_template=TEMPLATES[template]))
    for messages in (CHAT, CHAT[1:], CHAT[:2], [{**CHAT[1], "name": None}]):
        text = ours.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert text == hf.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        ids = ours.apply_chat_template(messages, add_generation_prompt=prompt)
        assert ids == hf.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        assert ids == ours.encode(text, add_special_tokens=False)


def test_chat_template_variables(tmp_path):
    ours, hf = both(write(tmp_path, byte_level(), chat_template=LLAMA3))
    variables = {"tools": [{"name": "f", "about": "a < b & 你好"}], "date_string": "1999", "bos_token": "!"}
    text = ours.apply_chat_template(CHAT, tokenize=False, variables=variables)
    assert text == hf.apply_chat_template(CHAT, tokenize=False, **variables)
    assert text.startswith('!Year: 1999\n{\n    "name": "f",\n    "about": "a < b & 你好"\n}')


def test_messages_are_not_changed(tmp_path):
    ours = Tokenizer.from_pretrained(write(tmp_path, byte_level(), chat_template=CHATML))
    messages = [{"role": "user", "content": "Hi", "tool_calls": None}]
    ours.apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "Hi", "tool_calls": None}]


def test_where_the_template_comes_from(tmp_path):
    def rendered(**config):
        return Tokenizer.from_pretrained(write(tmp_path, byte_level(), **config))

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = rendered(chat_template=named)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, variables={"tools": [{}]}) == "with tools"
    (tmp_path / "chat_template.jinja").write_text("from the file\n")
    assert rendered(chat_template="from the config").apply_chat_template(CHAT, tokenize=False) == "from the file"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[0]['content'] + messages }}", "chat template"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        (None, "no default chat template"),
    ],
)
def test_a_template_that_fails_says_why(tmp_path, template, message):
    ours = Tokenizer.from_pretrained(write(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(LigerError, match=message):
        ours.apply_chat_template(CHAT)


@pytest.mark.parametrize("messages", [[], "Hi", {"role": "user", "content": "Hi"}, ["Hi"], [{"content": "Hi"}], None])
def test_bad_messages(tmp_path, messages):
    ours = Tokenizer.from_pretrained(write(tmp_path, byte_level(), chat_template=CHATML))
    with pytest.raises(LigerError, match="messages"):
        ours.apply_chat_template(messages)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_gives_the_whole_text_and_no_broken_character(tmp_path, kind, skip):
    ours = Tokenizer.from_pretrained(write(tmp_path, with_bos(BACKENDS[kind](), eos=True)))
    for text in ["  the fox 你好 🤷🏽‍♀️ isn't</s>  the <pad> fox!", "the", "🙂", ""]:
        ids = ours.encode(text)
        decoder = ours.stream_decoder(skip_special_tokens=skip)
        pieces = [decoder.put(i) for i in ids]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + decoder.end() == ours.decode(ids, skip_special_tokens=skip)


def test_a_stream_that_stops_within_a_character_shows_it_at_the_end(tmp_path):
    ours = Tokenizer.from_pretrained(write(tmp_path, byte_level()))
    ids = ours.encode("a🙂")[:-1]
    decoder = ours.stream_decoder()
    assert [decoder.put(i) for i in ids] == ["a"] + [""] * (len(ids) - 1)
    assert decoder.end() == "\ufffd"
    assert decoder.put(ids[0]) == "a"


def test_pad(tmp_path):
    ours = Tokenizer.from_pretrained(write(tmp_path, byte_level()))
    pad = ours.pad_token_id
    ids, mask = ours.pad([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [pad, pad, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    ids, mask = ours.pad([[5, 6, 7], [8]], side="right")
    assert ids.tolist() == [[5, 6, 7], [8, pad, pad]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert ids.dtype == mask.dtype == torch.int64
    for bad in ([], [[1], []], None, [1, 2], ["ab"], [[1.5]], [[-5]], [[10**30]]):
        with pytest.raises(LigerError, match="sequences"):
            ours.pad(bad)
    with pytest.raises(LigerError, match="side"):
        ours.pad([[1]], side="top")


def test_save_writes_the_same_bytes_and_transformers_reads_them(tmp_path):
    source = write(tmp_path / "a", with_bos(byte_level()), chat_template=CHATML)
    (source / "special_tokens_map.json").write_text("{}")
    (source / "model.safetensors").write_text("not a tokenizer's file")
    saved = write(tmp_path / "b", byte_fallback())
    for name in (
        "chat_template.jinja",
        "chat_template.json",
        "added_tokens.json",
        "tokenizer.model",
        "merges.txt",
        "additional_chat_templates/rag.jinja",
    ):
        (saved / name).parent.mkdir(exist_ok=True)
        (saved / name).write_text("left over from another model")
    Tokenizer.from_pretrained(source).save_pretrained(saved)
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in saved.iterdir() if path.is_file()} == names
    assert not (saved / "additional_chat_templates").exists()
    assert all((saved / name).read_bytes() == (source / name).read_bytes() for name in names)
    ours, hf = both(saved)
    assert ours.apply_chat_template(CHAT) == hf.apply_chat_template(CHAT)["input_ids"]


def test_an_assigned_template_is_saved(tmp_path):
    ours = Tokenizer.from_pretrained(write(tmp_path / "a", byte_level()))
    ours.chat_template = CHATML
    ours.save_pretrained(tmp_path / "b")
    again, hf = both(tmp_path / "b")
    assert again.chat_template == hf.chat_template == CHATML
    assert not (tmp_path / "a" / "chat_template.jinja").exists()


def test_added_tokens_are_saved(tmp_path):
    ours = Tokenizer.from_pretrained(write(tmp_path / "a", byte_level()))
    before = (tmp_path / "a" / "tokenizer.json").read_bytes()
    ours.backend.add_special_tokens(["<think>"])
    ours.backend.add_tokens(["lighthouse"])
    ours.save_pretrained(tmp_path / "b")
    again, hf = both(tmp_path / "b")
    assert len(again) == len(ours) == len(hf)
    text = "a <think> lighthouse"
    assert again.encode(text) == ours.encode(text) == hf.encode(text)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == before


def test_a_tokenizer_built_in_memory_saves_all_its_templates(tmp_path):
    templates = {"default": CHATML, "tool_use": MISTRAL}
    write(tmp_path, byte_level(), chat_template="left over")
    Tokenizer(byte_level(), special_tokens={"eos_token": "</s>"}, chat_templates=templates).save_pretrained(tmp_path)
    again = Tokenizer.from_pretrained(tmp_path)
    assert again.chat_templates == templates and again.special_tokens == {"eos_token": "</s>"}


def test_copies_and_pickles_work_also_after_a_template_was_used(tmp_path):
    ours = Tokenizer.from_pretrained(write(tmp_path, byte_level(), chat_template=CHATML))
    expected = ours.apply_chat_template(CHAT)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert again.apply_chat_template(CHAT) == expected


def test_bad_folders_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LigerError, match="could not be saved"):
        Tokenizer(byte_level()).save_pretrained(tmp_path / "file")
    with pytest.raises(LigerError, match="None"):
        Tokenizer.from_pretrained(None)
    with pytest.raises(LigerError, match="nowhere: no such folder"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(LigerError, match=r"no tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(LigerError, match=r"tokenizer\.model.*AutoTokenizer"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs\noid sha256:0")
    with pytest.raises(LigerError, match=r"tokenizer\.json.*LFS"):
        Tokenizer.from_pretrained(tmp_path)
    write(tmp_path, byte_level())
    for content, message in (
        ("{", "JSON"),
        ("[]", "object"),
        ('{"eos_token": {"id": 3}}', "eos_token"),
        ('{"added_tokens_decoder": {"x": "<s>"}}', "added_tokens_decoder"),
        ('{"added_tokens_decoder": 3}', "added_tokens_decoder"),
        ('{"extra_special_tokens": "<image>"}', "extra_special_tokens"),
        ('{"chat_template": [{"name": "../up", "template": ""}]}', "plain name"),
        (b"\xff", "UTF-8"),
    ):
        path = tmp_path / "tokenizer_config.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(LigerError, match=rf"tokenizer_config\.json.*{message}"):
            Tokenizer.from_pretrained(tmp_path)


def test_bad_text_and_ids(tmp_path):
    ours = Tokenizer.from_pretrained(write(tmp_path, byte_level()))
    for text in (None, b"bytes", ["the"], "\ud800"):
        with pytest.raises(LigerError, match="text"):
            ours.encode(text)
    for ids in ([-100], [[1, 2]], [1.0], torch.tensor([[1]]), None, 5):
        with pytest.raises(LigerError, match="ids"):
            ours.decode(ids)
    assert ours.decode(torch.tensor(ours.encode("the fox"))) == "the fox"


def test_from_hub_hands_its_arguments_to_the_download(tmp_path, monkeypatch):
    hub = pytest.importorskip("ligermodels.checkpoints_convert.hub")
    calls = []
    monkeypatch.setattr(hub, "download", lambda *args, **kwargs: calls.append((args, kwargs)) or tmp_path)
    write(tmp_path, byte_level())
    assert Tokenizer.from_hub("some/name", revision="v1", local_files_only=True).eos_token == "</s>"
    expected = {"revision": "v1", "token": None, "cache_dir": None, "local_files_only": True, "weights": False}
    assert calls == [(("some/name",), expected)]
