"""What programs say on a terminal: errors and warnings as a line each, and nothing that the terminal would obey."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

from tqdm import tqdm

from ligermodels.errors import LigerError


def printable(text: str, keep: str = "\n") -> str:
    """What a model says or a file holds, for a terminal: control characters, but those to ``keep``, and lone surrogates
    are escaped."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What a person can put right ends in one line on stderr and exit code 1, not in a traceback; a warning is a line.

    Any other exception is a bug, and is shown as one.
    """
    try:
        with warnings.catch_warnings():
            # through tqdm, which moves its bar out of the way
            warnings.showwarning = lambda message, *_: tqdm.write(printable(f"warning: {message}"), file=sys.stderr)
            yield
    except (LigerError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(1)
