"""Chat templates: a checkpoint's own program, in Jinja, that lays out a conversation as text; run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ligermodels.errors import LigerError


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a conversation in plain JSON types. Raises LigerError for anything else."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise LigerError('messages: expected a list such as [{"role": "user", "content": "Hello"}], not empty')
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise LigerError(f'messages: each one is a dict with "role" and "content", got {message!r}')
    plain = plain_data([dict(message) for message in messages], "messages")
    # Clients send "content": null beside tool calls; templates would print it as the word None.
    return [{key: value for key, value in message.items() if value is not None} for message in plain]


def plain_data(value: Any, name: str) -> Any:
    """A copy in plain JSON types, so that a template gets no method to call; images and the like become a mark.

    Raises LigerError, naming the argument ``name``, for what has no such copy.
    """
    try:
        return json.loads(json.dumps(value, default=lambda other: f"<{type(other).__name__}>"))
    except (TypeError, ValueError, RecursionError) as error:
        raise LigerError(f"{name}: expected plain data (dicts, lists, strings, numbers): {error}") from error


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for loss masks; the text is unchanged."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Any) -> str:
        return caller()


def compile_template(source: str) -> jinja2.Template:
    """A template as published ones expect it: a sandbox, trimmed blocks, break/continue and three helpers.

    Raises jinja2.TemplateError for what is no template.
    """

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # Jinja's own escapes <, > and & for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)
