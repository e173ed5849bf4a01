"""``ligermodels COMMAND``: one function a command. Bad files and arguments are one line on stderr and exit code 1."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ligermodels.errors import LigerError

app = typer.Typer(
    name="ligermodels",
    help="Decoder language models on fused Triton kernels: look at, check and convert their checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Where = Annotated[str, typer.Argument(metavar="REPO|FOLDER", help="a folder, or a repository of the hub: owner/name")]


@app.command()
def inspect(where: Where) -> None:
    """Family, parameters, dtype, shards and memory of a model, from headers alone."""
    raise LigerError(f"cannot inspect {where} yet")


@app.command()
def verify(folder: Annotated[str, typer.Argument(metavar="FOLDER")]) -> None:
    """Check that a folder would load: every file, name and shape. Lists what is wrong; exit 1 if anything is."""
    raise LigerError(f"cannot verify {folder} yet")


@app.command(
    add_help_option=False,  # the converter's own parser answers --help
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def convert(context: typer.Context) -> None:
    """Convert another format into a Hugging Face folder, or back: `ligermodels convert --help`."""
    from ligermodels.checkpoints_convert.__main__ import main as convert_main

    raise typer.Exit(convert_main(context.args))


def main() -> None:
    """The console script. Errors of the project are one readable line; any other exception is a bug."""
    try:
        app()
    except LigerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
