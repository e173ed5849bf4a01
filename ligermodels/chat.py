"""A conversation with a model: what was said, and a cache that holds what the model has already read of it.

Each turn renders all messages by the chat template, as templates may depend on all of them. Of the ids only those are
run that are not in the cache yet: usually the last answer's end and the new question.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ligermodels import generation
from ligermodels.base import CausalLM
from ligermodels.errors import LigerError
from ligermodels.terminal import printable
from ligermodels.tokenizer import Tokenizer

HELP = "/reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


class Chat:
    """A conversation. ``answer(text)`` yields the pieces of the model's answer and remembers both.

    ``options`` are those of ``model.stream``: temperature, top_p, seed, … With ``images`` (paths or PIL images) a
    ``processor`` is needed (``ligermodels.ImageProcessor``); the first message then speaks of them. ``context``: the
    most tokens that a conversation may have (None: 4096, or what the model was trained for if less). Raises LigerError
    for a tokenizer without a chat template.
    """

    def __init__(
        self, model: CausalLM, tokenizer: Tokenizer, *, system: str | None = None, context: int | None = None,
        max_new_tokens: int = 1024, images: list[Any] | None = None, processor: Any = None, **options: Any,
    ):  # fmt: skip
        if tokenizer.chat_template is None:
            raise LigerError("this tokenizer has no chat template: the model was not made for conversations")
        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        self.context = min(4096, model.config.max_position_embeddings) if context is None else context
        self._system, self._options = system, options
        self._processor = processor
        self._images = processor(images) if images else None
        ends = generation.stop_ids(model, options.pop("eos_token_id", None))
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
            ends = [*ends, tokenizer.eos_token_id]
        self._ends = ends
        self._cache = model.make_cache(1, self.context)
        self.reset()

    def reset(self) -> None:
        """Forget what was said, but not the system's message."""
        self.messages: list[dict[str, Any]] = [] if self._system is None else [_message("system", self._system)]
        self._cache.rewind(0)
        self._cached: list[int] = []  # the ids of the cache's first positions

    def answer(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces of whole characters, "" for a token that completes none. Closed early, what was
        said so far is remembered.

        Raises LigerError, and forgets ``text``, when the conversation has become longer than its context.
        """
        before = len(self.messages)
        self.messages.append(_message("user", text))
        said = ""
        try:
            ids = self._render()
            room = self.context - len(ids) + 1
            if room < 1:
                raise LigerError(
                    f"the conversation has {len(ids)} tokens, more than its context of {self.context}: /reset it, or "
                    "start with a larger --context"
                )
            decoder = self.tokenizer.stream_decoder()
            for token in self._tokens(ids, min(self.max_new_tokens, room)):
                piece = decoder.put(token)
                said += piece
                yield piece
            piece = decoder.end()
            said += piece
            yield piece
        finally:
            if said:
                self.messages.append(_message("assistant", said))
            else:
                del self.messages[before:]

    def _tokens(self, ids: list[int], new: int) -> Iterator[int]:
        kept = 0
        for old, now in zip(self._cached, ids[:-1], strict=False):  # at least one token has to be run
            if old != now:
                break
            kept += 1
        inputs = {}
        if self._images is not None:
            image_id = self.model.config.image_token_index
            if kept <= max(i for i, token in enumerate(ids) if token == image_id):
                kept = 0  # images are read together with the start of the prompt, and only then
                inputs = self._images.to(self.model.device).arguments
        self._cache.rewind(min(kept, self._cache.length))
        self._cached = list(ids)
        steps = generation.stream(
            self.model, torch.tensor([ids]), max_new_tokens=new, eos_token_id=self._ends, cache=self._cache,
            prompt_inputs=inputs, row_numbers=[len(self.messages)], **self._options,
        )  # fmt: skip
        with contextlib.closing(steps):
            for step in steps:
                token = int(step)
                self._cached.append(token)
                yield token

    def _render(self) -> list[int]:
        """The ids of all messages and of the start of an answer."""
        if self._images is None:
            text = self._template(self.messages)
        else:
            mark, wanted = self._processor.placeholder, len(self._images.tokens)
            try:
                text = self._template(self._with_image_parts())
            except LigerError:  # a template that adds texts and finds a list
                text = ""
            if text.count(mark) != wanted:  # a template that knows no parts, only text
                messages = [dict(message) for message in self.messages]
                first = next(message for message in messages if message["role"] == "user")
                first["content"] = f"{mark}\n" * wanted + first["content"]
                text = self._template(messages)
            text = self._processor.expand(text, self._images)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _template(self, messages: list[dict[str, Any]]) -> str:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def _with_image_parts(self) -> list[dict[str, Any]]:
        """The messages in parts, the images before the first question."""
        messages, images = [], [{"type": "image"}] * len(self._images.tokens)
        for message in self.messages:
            parts = [{"type": "text", "text": message["content"]}]
            if message["role"] == "user":
                parts, images = [*images, *parts], []
            messages.append({**message, "content": parts})
        return messages


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


# --------------------------------------------------------------------------------------------------------- the terminal


def converse(chat: Chat, read: Callable[[str], str] = input) -> None:
    """Talk on the terminal until the end of the input. Ctrl-C stops an answer, not the program."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - arrow keys and history in input()
    say(f"{HELP}\n")
    while True:
        try:
            text = read("> ").strip()
        except EOFError:
            say("\n")
            return
        except KeyboardInterrupt:
            say(f"\n{HELP}\n")
            continue
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            chat.reset()
            say("(forgotten)\n")
        elif text.startswith("/"):
            say(f"unknown command {text.split()[0]}. {HELP}\n")
        elif text:
            try:
                with _stoppable() as stopped, contextlib.closing(chat.answer(text)) as pieces:
                    for piece in pieces:
                        say(piece)
                        if stopped():
                            say(" (stopped)")
                            break
                say("\n")
            except KeyboardInterrupt:  # the second one, while a long prompt was read
                say("\n(stopped)\n")
            except LigerError as error:
                say(f"error: {error}\n")


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Ctrl-C in here only sets what the given function tells; a second one interrupts."""
    pressed = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def say(text: str) -> None:
    """Write at once."""
    clean = printable(text, keep="\n\t")
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(clean.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def load(
    where: str, *, dtype: str | None = None, device: str | None = None, revision: str | None = None,
    token: str | None = None,
) -> tuple[CausalLM, Tokenizer, Path]:  # fmt: skip
    """(model, tokenizer, folder) of a folder or a repository; by default on the GPU if there is one, else in fp32."""
    import ligermodels
    from ligermodels.checkpoints_convert.hub import download

    folder = Path(where) if Path(where).is_dir() else download(where, revision=revision, token=token)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("auto" if device != "cpu" else "float32")  # few CPUs compute in bf16
    tokenizer = Tokenizer.from_pretrained(folder)
    return ligermodels.from_pretrained(folder, dtype=dtype, device=device), tokenizer, folder


def sampling(model: CausalLM, **given: Any) -> dict[str, Any]:
    """Options of ``model.stream``: those given, else what generation_config.json says if it says to sample."""
    own = model.generation_config if model.generation_config.get("do_sample") else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    options = {name: given.get(name) if given.get(name) is not None else own.get(name) for name in names}
    if options["temperature"] is None:
        options["temperature"] = 1.0 if own else 0.0
    if options["temperature"] == 0:
        # those given stay, as generate then says that they have no effect
        options |= {name: given.get(name) for name in ("top_k", "top_p", "min_p")}
    return options
