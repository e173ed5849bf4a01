"""``ligermodels COMMAND``: one function a command. Bad files and arguments are one line on stderr and exit code 1."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ligermodels.errors import LigerError
from ligermodels.terminal import plain_warnings, printable

app = typer.Typer(
    name="ligermodels",
    help="Decoder language models on fused Triton kernels: talk with them, train them, check and convert checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from ligermodels import __version__

        typer.echo(f"ligermodels {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="say which this is, and leave")
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    where: Annotated[
        str, typer.Argument(metavar="REPO|FOLDER", help="a folder, or a repository of the hub: owner/name")
    ],
    batch: Annotated[int, typer.Option(min=1, help="rows, for the memory of training and generation")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="tokens a row")] = 2048,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of the repository")] = None,
    token: Annotated[str | None, typer.Option(help="of the hub; default: the one that `hf auth login` stored")] = None,
) -> None:
    """Family, parameters, dtype, shards and memory of a model, from headers alone: no weights are read or fetched."""
    from ligermodels.inspection import cache_bytes, summarise, training_memory

    s = summarise(where, revision=revision, token=token)
    known = s.config is not None
    rows = [("family", s.model_type + ("" if known else " (not in the zoo: cannot be loaded here)"))]
    if known:
        c = getattr(s.config, "text_config", s.config)
        tied = ", tied" if c.tie_word_embeddings else ""
        rows.append(
            (
                "shape",
                f"{c.num_hidden_layers} layers, hidden {c.hidden_size}, {c.num_attention_heads} heads of {c.head_dim} "
                f"({c.num_key_value_heads} for keys), vocabulary {c.vocab_size}{tied}",
            )
        )
    kinds = ", ".join(f"{count} × {kind}" for kind, count in s.kinds.items())
    rows += [
        ("parameters", f"{s.parameters:,}"),
        ("files", f"{len(s.files)}, {_size(sum(s.files.values()))} of tensors ({kinds})"),
    ]
    if s.quantised:
        rows.append(("quantised", f"{s.quantised}; the parameters are counted as they are stored"))
    rows += [("dtype", str(s.dtype).removeprefix("torch.")), ("to load", _size(s.weights))]
    if known:
        rows.append(("to generate", f"{_size(s.weights + cache_bytes(s, batch, seq))} at batch {batch} × {seq}"))
        fast, block = (_size(training_memory(s, batch, seq, level)) for level in ("fast", "block"))
        rows.append(("to train", f'about {fast} at batch {batch} × {seq} with AdamW; {block} with memory "block"'))
    _say(s.where)
    for name, text in rows:
        _say(f"  {name:12} {text}")


def _say(text: str, err: bool = False) -> None:
    typer.echo(printable(text), err=err)


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


@app.command()
def verify(
    folder: Annotated[str, typer.Argument(metavar="FOLDER")],
    values: Annotated[bool, typer.Option("--values", help="read every weight too, to find NaN and infinity")] = False,
) -> None:
    """Check that a folder loads: every file, name and shape. Lists what is wrong; exit code 1 if anything is."""
    from ligermodels.inspection import findings

    wrong = 0
    for level, text in findings(folder, values=values):
        wrong += level == "wrong"
        _say(f"{level:6} {text}")
    if wrong:
        raise typer.Exit(1)


@app.command(
    add_help_option=False,  # the converter's own parser answers --help
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def convert(context: typer.Context) -> None:
    """Convert another format into a Hugging Face folder, or back: `ligermodels convert --help`."""
    from ligermodels.checkpoints_convert.__main__ import main as convert_main

    raise typer.Exit(convert_main(context.args, _say))


Model = Annotated[str, typer.Argument(metavar="REPO|FOLDER", help="a folder, or a repository of the hub: owner/name")]
Device = Annotated[str | None, typer.Option(help="default: cuda if there is a GPU, else cpu")]
Dtype = Annotated[str | None, typer.Option(help="default: what config.json says; on a CPU float32")]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token; default: as generation_config.json says, else 0")
]
TopK = Annotated[int | None, typer.Option(help="keep the k likeliest tokens")]
TopP = Annotated[float | None, typer.Option(help="keep the likeliest tokens that reach this probability together")]
MinP = Annotated[float | None, typer.Option(help="keep tokens this often as likely as the likeliest")]
Penalty = Annotated[float | None, typer.Option(help="above 1: what was said becomes less likely")]
Seed = Annotated[int | None, typer.Option(help="makes sampling repeatable")]


@app.command()
def chat(
    where: Model,
    system: Annotated[str | None, typer.Option(help="what the model is told before the conversation")] = None,
    image: Annotated[
        list[str] | None, typer.Option(help="a picture the first question is about; may be repeated")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 1024,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="the most tokens of a conversation; default: 4096, or the model's own limit"),
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /reset forgets, /exit or Ctrl-D leaves."""
    from ligermodels.chat import Chat, converse, load, sampling

    model, tokenizer, folder = load(where, dtype=dtype, device=device)
    processor = None
    if image:
        from ligermodels.image_processor import ImageProcessor

        processor = ImageProcessor.from_pretrained(folder)
    options = sampling(model, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                       repetition_penalty=repetition_penalty, seed=seed)  # fmt: skip
    converse(
        Chat(model, tokenizer, system=system, context=context, max_new_tokens=max_new_tokens, images=image,
             processor=processor, **options)
    )  # fmt: skip


@app.command()
def generate(
    where: Model,
    prompts: Annotated[Path, typer.Option(help='JSON Lines of texts, or of objects with "prompt" or "messages"')],
    out: Annotated[Path, typer.Option(help="JSON Lines of the same with completions; what it has is not done again")],
    batch: Annotated[int, typer.Option(min=1, help="prompts at a time")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="a text that ends an answer; may be repeated")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Answer a file of prompts, in batches; run it again to go on where it was interrupted."""
    from ligermodels.batch import generate_file
    from ligermodels.chat import load, sampling

    model, tokenizer, _ = load(where, dtype=dtype, device=device)
    options = sampling(model, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                       repetition_penalty=repetition_penalty, seed=seed)  # fmt: skip
    answered = generate_file(
        model, tokenizer, prompts, out, batch=batch, max_new_tokens=max_new_tokens, stop_strings=stop or None, **options
    )
    with open(out, "rb") as file:
        kept = sum(1 for _ in file) - answered
    others = f"; {kept} {'was' if kept == 1 else 'were'} there already, as first answered" if kept else ""
    _say(f"{answered} prompt{'' if answered == 1 else 's'} answered into {out}{others}")


@app.command(
    add_help_option=False,  # as for convert
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(context: typer.Context) -> None:
    """Fine-tune a model folder, whole or by LoRA, on texts and chats: `ligermodels train --help`."""
    from ligermodels.training.__main__ import main as train_main

    train_main(context.args, "ligermodels train")


def main() -> None:
    """The console script. Errors of the project and of files are one readable line; any other exception is a bug."""
    try:
        with plain_warnings():
            app()
    except (LigerError, OSError) as error:
        _say(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
