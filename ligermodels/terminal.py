"""What programs say on a terminal: a warning is a line, and nothing is said that the terminal would obey."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

from tqdm import tqdm


def printable(text: str, keep: str = "\n") -> str:
    """What a model says or a file holds, for a terminal: control characters, but those to ``keep``, and lone surrogates
    are escaped."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """A warning is a line on stderr, without the place in the code that gave it."""
    with warnings.catch_warnings():
        # through tqdm, which moves its bar out of the way
        warnings.showwarning = lambda message, *_: tqdm.write(printable(f"warning: {message}"), file=sys.stderr)
        yield
