"""``python -m ligermodels.checkpoints_convert SOURCE TARGET --to hf|meta|mistral|gguf|chatglm``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from ligermodels.checkpoints_convert.convert import SOURCES, TARGETS, convert
from ligermodels.checkpoints_convert.to_gguf import KINDS
from ligermodels.errors import LigerError

_ABOUT = """\
Convert a model from one layout to another. What SOURCE is is seen from what it holds:
  hf        a folder of Hugging Face layout      chatglm  the same with the names of ChatGLM's own code
  meta      params.json, consolidated.00.pth …   mistral  params.json, consolidated.safetensors
  gguf      one file of llama.cpp, any quantisation
  litgpt    lit_model.pth, model_config.yaml     adapter  a LoRA adapter of PEFT, merged into its base
An interrupted conversion continues when it is run again; nothing is overwritten without --force."""


def _print(text: str, *, err: bool = False) -> None:
    print(text, file=sys.stderr if err else sys.stdout)


def main(arguments: list[str] | None = None, say: Callable[..., None] = _print) -> int:
    """Convert as the command line says; return the exit code (1 after an error, 130 after Ctrl-C; both are told)."""
    parser = argparse.ArgumentParser(
        prog="ligermodels convert", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", help="the file or folder to read")
    parser.add_argument("target", metavar="TARGET", help="the folder (for gguf: the file) to write")
    parser.add_argument("--to", choices=TARGETS, default="hf", help="the layout to write (default: hf)")
    parser.add_argument("--from", dest="from_", choices=("auto", *SOURCES), default="auto", help="instead of looking")
    parser.add_argument("--dtype", choices=tuple(KINDS), help="default: the source's; q8_0 only to gguf")
    parser.add_argument("--max-shard-size", metavar="SIZE", help='such as "5GB"; meta: files of tensor parallelism')
    parser.add_argument("--base", metavar="FOLDER", help="the model that an adapter is for, if it names none here")
    parser.add_argument("--force", action="store_true", help="replace a model that TARGET holds, and its tokenizer")
    options = vars(parser.parse_args(arguments))
    try:
        written = convert(options.pop("source"), options.pop("target"), **options)
    except LigerError as error:
        say(f"error: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here", err=True)
        return 130
    say(f"wrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
