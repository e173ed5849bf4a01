"""``ligermodels chat`` and ``ligermodels generate``: conversations on a warm cache, a terminal, files of prompts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time

import pytest
import torch
from tiny_chat import write_tiny_chat_model
from tiny_llava import write_tiny_llava
from typer.testing import CliRunner

from ligermodels import LigerError, LigerLlama, Tokenizer, batch
from ligermodels.batch import generate_file
from ligermodels.chat import Chat, converse, load, sampling
from ligermodels.cli import app
from ligermodels.image_processor import ImageProcessor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    return write_tiny_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    """Tokens 97 to 122 are the letters: the head is made to prefer them, so that answers are text."""
    model = LigerLlama.from_pretrained(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() > 1 else 1)
        letters = [Tokenizer.from_pretrained(folder).encode(c)[0] for c in "abcdefghijklmnopqrstuvwxyz "]
        keep = torch.zeros(264, 1)
        keep[letters] = 1
        model.lm_head.weight.mul_(keep)
    return model


def chat_of(model, tokenizer, **options):
    return Chat(model, tokenizer, **{"context": 300, "max_new_tokens": 12, "eos_token_id": [], **options})


# -------------------------------------------------------------------------------------------------------- conversations


def test_each_answer_is_that_of_the_whole_conversation_but_only_the_new_part_is_run(model, tokenizer):
    chat = chat_of(model, tokenizer, system="be brief")
    fed = []
    handle = model.model.embed_tokens.register_forward_hook(lambda m, args, out: fed.append(args[0].shape[1]))
    for question in ("hello", "and now?", "äöü €"):
        fed.clear()
        said = "".join(chat.answer(question))
        prompts = [n for n in fed if n > 1]
        whole = tokenizer.apply_chat_template(chat.messages[:-1], add_generation_prompt=True)
        assert len(prompts) == 1 and (prompts[0] == len(whole) if len(chat.messages) == 3 else prompts[0] < 60)
        expected = model.generate(torch.tensor([whole]), max_new_tokens=12, eos_token_id=[])[0, len(whole) :]
        assert said == tokenizer.decode(expected, skip_special_tokens=True) and said.strip()
    handle.remove()
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 3]


def test_an_answer_that_is_stopped_is_remembered_as_far_as_it_went(model, tokenizer):
    chat = chat_of(model, tokenizer)
    pieces = chat.answer("hello")
    said = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": said}]
    whole = tokenizer.apply_chat_template(
        [*chat.messages, {"role": "user", "content": "go on"}], add_generation_prompt=True
    )
    expected = model.generate(torch.tensor([whole]), max_new_tokens=12, eos_token_id=[])[0, len(whole) :]
    assert "".join(chat.answer("go on")) == tokenizer.decode(expected, skip_special_tokens=True)


def test_reset_forgets_all_but_the_system_message(model, tokenizer):
    chat = chat_of(model, tokenizer, system="be brief")
    first = "".join(chat.answer("hello"))
    "".join(chat.answer("what?"))
    chat.reset()
    assert [m["role"] for m in chat.messages] == ["system"]
    assert "".join(chat.answer("hello")) == first


def test_a_conversation_that_outgrows_its_context_says_so_and_forgets_the_question(model, tokenizer):
    chat = chat_of(model, tokenizer, context=80)
    "".join(chat.answer("hello"))
    before = list(chat.messages)
    with pytest.raises(LigerError, match="context of 80"):
        "".join(chat.answer("x" * 80))
    assert chat.messages == before
    "".join(chat.answer("x"))  # there is room for a short one still, and the answer is cut to what is left
    with pytest.raises(LigerError, match="no chat template"):
        Chat(model, Tokenizer(tokenizer.backend))


def test_sampling_takes_what_is_given_then_generation_config_if_that_samples():
    class Model:
        generation_config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 3}  # noqa: RUF012

    options = sampling(Model, top_p=0.5, seed=7)
    assert (options["temperature"], options["top_p"], options["top_k"], options["seed"]) == (0.6, 0.5, None, 7)
    assert sampling(Model, temperature=0.0)["top_p"] is None
    assert sampling(Model, temperature=0.0, top_p=0.5)["top_p"] == 0.5  # generate says that it has no effect
    Model.generation_config = {"temperature": 0.6, "top_p": 0.9}
    assert sampling(Model)["temperature"] == 0 and sampling(Model)["top_p"] is None


def test_control_characters_of_an_answer_do_not_reach_the_terminal(model, tokenizer, capsys):
    class Evil:
        def answer(self, text):
            yield from ("a\x1b[2J", "b\n", "")

    lines = iter(["hi", "/nonsense"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    converse(Evil(), read)
    out = capsys.readouterr().out
    assert "a\\x1b[2Jb\n" in out and "\x1b" not in out and "unknown command /nonsense" in out


# ----------------------------------------------------------------------------------------------------------- a terminal


class Terminal:
    """A program on a pseudo-terminal: ``type`` into it, ``wait_for`` a text on its screen."""

    # Forked by a process of its own: this one has threads, and what they hold at a fork is held in the child for ever.
    # A shell's background jobs ignore SIGINT, and so would their children.
    SPAWN = """import os, pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"""

    def __init__(self, *arguments):
        command = [sys.executable, "-c", self.SPAWN, sys.executable, "-m", "ligermodels", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
        )  # fmt: skip
        self.screen = ""

    def type(self, text):
        self.process.stdin.write(text.encode())

    def wait_for(self, pattern, seconds=60):
        """Everything up to and with the match, which is then taken off the screen."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.screen)):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} within {seconds} s on the screen: {self.screen[-500:]!r}"
            new = self.process.stdout.read(65536).decode(errors="replace")
            assert new, f"ended without {pattern!r}: {self.screen[-800:]!r}"
            self.screen += new
        text, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return text

    def interrupt(self, pattern):
        """Ctrl-C until the pattern shows: between Python's prompt and its first look at the keyboard one is held back
        until the next key."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for(pattern, seconds=3)
        raise AssertionError(f"no {pattern!r} after Ctrl-C")

    def exit_code(self):
        try:
            self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        return self.process.returncode


@pytest.fixture(scope="module")
def endless(folder, tokenizer, tmp_path_factory):
    """A model that says nothing but a: every embedding and the head's row of that letter are ones."""
    model = LigerLlama.from_pretrained(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_() if p.dim() > 1 else p.fill_(1)
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight[tokenizer.encode("a")[0]] = 1
    folder = tmp_path_factory.mktemp("endless")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a pseudo-terminal")
def test_a_conversation_on_a_terminal(endless):
    """Ctrl-C at the prompt, in the middle of an answer of ten thousand tokens, and what follows; then Ctrl-D."""
    terminal = Terminal("chat", endless, "--max-new-tokens", 10_000, "--context", 20_000, "--system", "x")
    terminal.wait_for("/reset starts anew")
    terminal.wait_for("> ")
    terminal.interrupt("Ctrl-C stops an answer")
    terminal.wait_for("> ")
    for _ in range(2):
        terminal.type("tell me\r")
        terminal.wait_for("tell me\r?\n")
        terminal.wait_for("a{20}")
        terminal.type("\x03")
        rest = terminal.wait_for(r"\(stopped\)")
        assert set(rest.removesuffix(" (stopped)")) <= set("a^C") and len(rest) < 5000
        terminal.wait_for("> ")
    terminal.type("/reset\r")
    terminal.wait_for(r"\(forgotten\)\r?\n> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_wrong_arguments_end_in_one_line(folder, tmp_path):
    result = CliRunner().invoke(app, ["chat", str(folder), "--temperature", "-1"], input="hello\n")
    assert "temperature" in result.output and "Traceback" not in result.output
    result = CliRunner().invoke(app, ["chat", str(folder), "--image", "x.png"])
    assert isinstance(result.exception, LigerError) and "reads no images" in str(result.exception)


PARTS_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}{{
'<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("template", [None, PARTS_TEMPLATE], ids=["text", "parts"])
def test_an_image_is_read_once_and_remembered(tmp_path, template):
    image_module = pytest.importorskip("PIL.Image")
    torch.manual_seed(1)
    folder = write_tiny_llava(tmp_path)
    if template:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    model, tokenizer, _ = load(str(folder), dtype="float32", device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5 if p.dim() > 1 else 1)  # else all tokens are about as likely
    processor = ImageProcessor.from_pretrained(folder)
    picture = image_module.radial_gradient("L").resize((40, 30)).convert("RGB")

    def chat(messages=()):
        found = Chat(model, tokenizer, images=[picture], processor=processor, max_new_tokens=6)
        found.messages = list(messages)
        return found

    warm = chat()
    first = "".join(warm.answer("what is it?"))
    heard = list(warm.messages)
    again = "".join(warm.answer("and now?"))  # the image is in the cache by now
    assert again == "".join(chat(heard).answer("and now?")) != first
    warm.reset()
    assert "".join(warm.answer("what is it?")) == first
    blank = Chat(model, tokenizer, images=[picture.point(lambda _: 0)], processor=processor, max_new_tokens=6)
    assert "".join(blank.answer("what is it?")) != first  # it is the image that is answered about


# -------------------------------------------------------------------------------------------------------------- a file


@pytest.fixture
def prompts(tmp_path):
    rows = [
        "once upon",
        {"prompt": "the sea is", "id": 7, "title": "a\u2028b\x85c"},
        {"messages": [{"role": "user", "content": "hi"}]},
        "x",
        "yz",
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def answers(path):
    return {row["index"]: row for row in map(json.loads, path.read_text().split("\n")[:-1])}


def test_a_file_of_prompts_is_answered_and_resumed_where_it_was_cut(model, tokenizer, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    options = {"max_new_tokens": 9, "progress": False, "eos_token_id": []}
    assert generate_file(model, tokenizer, prompts, out, batch=2, **options) == 5
    found = answers(out)
    assert found[1]["id"] == 7 and found[3]["prompt"] == "x" and found[2]["messages"]
    for row in found.values():
        ids = tokenizer.encode(row["prompt"]) if "prompt" in row else None
        ids = ids or tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True)
        expected = model.generate(torch.tensor([ids]), max_new_tokens=9, eos_token_id=[])[0, len(ids) :]
        assert row["completion"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert (row["tokens"], row["finish"]) == (9, "length")
    assert generate_file(model, tokenizer, prompts, out, **options) == 0
    lines = out.read_text().split("\n")
    out.write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])  # killed in the middle of a line
    assert generate_file(model, tokenizer, prompts, out, batch=2, **options) == 3
    assert answers(out) == found
    prompts.write_text('"another"\n"file"\n')
    with pytest.raises(LigerError, match=r"out.jsonl, line 1: not an answer to these prompts"):
        generate_file(model, tokenizer, prompts, out, **options)


def test_completions_end_before_the_eos_and_the_stop_string(model, tokenizer, prompts, tmp_path):
    options = {"max_new_tokens": 9, "progress": False}
    free = tmp_path / "free.jsonl"
    generate_file(model, tokenizer, prompts, free, eos_token_id=[], **options)
    text = answers(free)[0]["completion"]
    eos = tokenizer.encode(text[4])[0]
    first = text.index(text[4])
    generate_file(model, tokenizer, prompts, tmp_path / "eos.jsonl", eos_token_id=eos, **options)
    row = answers(tmp_path / "eos.jsonl")[0]
    assert (row["completion"], row["tokens"], row["finish"]) == (text[:first], first, "stop")
    stop = text[3:5]
    first = text.index(stop)
    generate_file(model, tokenizer, prompts, tmp_path / "stop.jsonl", eos_token_id=[], stop_strings=stop, **options)
    row = answers(tmp_path / "stop.jsonl")[0]
    assert (row["completion"], row["tokens"], row["finish"]) == (text[:first], first + 2, "stop")


def test_a_completion_ends_before_a_stop_string_with_a_special_token(tokenizer):
    answer = tokenizer.encode("ab<|im_end|>cd")
    for stop, completion, tokens in (("<|im_end|>", "ab", 3), (">c", "ab", 4), ("b<", "a", 3), ("c", "ab", 4)):
        expected = {"completion": completion, "tokens": tokens, "finish": "stop"}
        assert batch._result(tokenizer, answer, [], [stop]) == expected
    assert batch._result(tokenizer, answer, [], ["bc"])["finish"] == "length"


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "line 2: not JSON"),
        ("1" * 5000, "line 2: not JSON"),
        ("[1]", "line 2: expected a text"),
        ('{"prompt": 1}', "must be a text"),
        ('""', "no tok"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(model, tokenizer, tmp_path, line, match):
    path = tmp_path / "p.jsonl"
    path.write_text('"good"\n' + line)
    with pytest.raises(LigerError, match=match):
        generate_file(model, tokenizer, path, tmp_path / "out.jsonl")
    path.write_text('\n"good"\n\n' + line)  # blank lines count too
    with pytest.raises(LigerError, match=match.replace("line 2", "line 4")):
        generate_file(model, tokenizer, path, tmp_path / "out.jsonl")
    with pytest.raises(LigerError, match="cannot be read"):
        generate_file(model, tokenizer, tmp_path / "absent.jsonl", tmp_path / "out.jsonl")


def test_the_command_answers_a_file_the_same_in_batches_of_any_size(folder, prompts, tmp_path):
    outputs = []
    for name, size in (("a.jsonl", 2), ("b.jsonl", 5), ("c.jsonl", 1)):
        arguments = ["generate", folder, "--prompts", prompts, "--out", tmp_path / name, "--max-new-tokens", 5]
        arguments += ["--batch", size]
        arguments += ["--temperature", 0.8, "--seed", 3, "--stop", "zz"]
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == 0 and "5 prompts answered" in result.output and "already" not in result.output
        outputs.append(answers(tmp_path / name))
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert "0 prompts answered" in result.output and "5 were there already" in result.output
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0]) == 5
