"""``python -m ligermodels.checkpoints_convert FILE.gguf FOLDER``: convert a GGUF into a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys

import torch

from ligermodels.checkpoints_convert.from_gguf import convert_gguf
from ligermodels.errors import LigerError


def main(arguments: list[str] | None = None) -> int:
    """Convert as the command line says; return the exit code (1 after an error, which is printed)."""
    parser = argparse.ArgumentParser(
        prog="python -m ligermodels.checkpoints_convert",
        description="Convert a GGUF file (Llama family, Gemma 3) into a folder in Hugging Face layout.",
    )
    parser.add_argument("file", metavar="FILE.gguf", help="the GGUF to read")
    parser.add_argument("folder", metavar="FOLDER", help="the folder to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--force", action="store_true", help="replace a model that FOLDER already holds")
    options = parser.parse_args(arguments)
    try:
        folder = convert_gguf(options.file, options.folder, dtype=getattr(torch, options.dtype), force=options.force)
    except LigerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
