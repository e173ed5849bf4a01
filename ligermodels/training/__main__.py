"""Fine-tune a model folder, whole or by LoRA, on texts and chats; of a chat only the assistant's words are learnt.

    ligermodels train --model runs/smollm2 --data chats.jsonl --out runs/tuned --epochs 2 --lora 16
    python examples/finetune.py --model runs/smollm2 --data book.txt --out runs/tuned --steps 200 --resume

A line of a .jsonl file is {"messages": [{"role": "user", "content": "..."}, ...]} or {"text": "..."}. The result is in
OUT/final: a model folder, or with --lora an adapter in PEFT's layout (--merge: a model folder then too). --resume goes
on from the newest checkpoint in OUT, if there is one, as if nothing had happened.
"""

import argparse
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # before torch loads: waiting threads sleep, not spin
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

from ligermodels import Tokenizer, from_pretrained
from ligermodels.base import CausalLM
from ligermodels.checkpoints_convert.hub import download
from ligermodels.errors import LigerError
from ligermodels.layers.memory import LEVELS
from ligermodels.training import loop
from ligermodels.training.checkpoint import Checkpoints
from ligermodels.training.data import Encoder, Loader, open_files
from ligermodels.training.lora import add_lora, load_adapter, lora_modules, merge_lora, save_adapter


def arguments(given: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    cli = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", required=True, help="a folder in Hugging Face layout, or a hub repository: owner/name")
    cli.add_argument("--data", nargs="+", required=True, help=".jsonl or text files, or folders of such")
    cli.add_argument("--eval-data", nargs="+", help="the same, for an evaluation loss")
    cli.add_argument("--eval-batches", type=int, default=50, help="at most so many of it")
    cli.add_argument("--out", type=Path, required=True, help="folder for checkpoints, log.csv, loss.svg, final/")
    cli.add_argument("--resume", action="store_true", help="go on with the run in OUT")
    cli.add_argument("--other-data", action="store_true", help="with --resume: also where the data has changed")
    cli.add_argument("--epochs", type=float, help="passes over the data, instead of --steps")
    cli.add_argument("--turns", choices=("all", "last"), default="all", help="which answers of a chat are learnt")
    cli.add_argument("--strict", action="store_true", help="stop at the first broken record, instead of leaving it out")
    cli.add_argument("--lora", type=int, metavar="RANK", help="train a low-rank adapter instead of the whole model")
    cli.add_argument("--lora-alpha", type=float, help="default: twice the rank")
    cli.add_argument("--lora-dropout", type=float, default=0.0)
    cli.add_argument("--lora-targets", nargs="+", default="all-linear", help="such as q_proj v_proj lm_head")
    cli.add_argument("--merge", action="store_true", help="with --lora: also write the merged model, to OUT/merged")
    loop.add_device_arguments(cli)
    cli.add_argument("--activation-memory", default="fast", help=f"{', '.join(LEVELS)}; but for none also +offload")
    cli.add_argument("--fit-gib", type=float, help="instead: plan the fastest mix of levels within so much GPU memory")
    cli.add_argument("--tensorboard", action="store_true", help="also write TensorBoard's files, to OUT/tensorboard")
    loop.add_arguments(cli)
    return cli.parse_args(given)


def finetune(args: argparse.Namespace) -> None:
    if args.merge and args.lora is None:
        raise LigerError("--merge is for adapters: give --lora too")
    torch.manual_seed(args.seed)
    folder = args.model if Path(args.model).exists() else download(args.model)
    tokenizer = Tokenizer.from_pretrained(folder)
    model = from_pretrained(folder, dtype=loop.dtype_of(args), device=args.device)
    model.set_activation_memory(args.activation_memory)

    def write(folder: Path) -> None:
        if lora_modules(model):
            save_adapter(model, folder, base=args.model)
        else:
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    if args.merge and args.resume and (args.out / "final").exists() and not (args.out / "merged").exists():
        load_adapter(model, args.out / "final")  # it was killed before it was merged, or is to be merged after all
    else:
        run(args, model, tokenizer, write)
    if args.merge:
        merge_lora(model)
        Checkpoints(args.out).finish(write, "merged")


def run(args: argparse.Namespace, model: CausalLM, tokenizer: Tokenizer, write: Callable[[Path], None]) -> None:
    def rows(paths: list[str], **options) -> Loader:
        pad = tokenizer.pad_token_id or 0
        options = dict(batch=args.batch, seq=args.seq, pad_id=pad, strict=args.strict, seed=args.seed, **options)
        return Loader(open_files(paths), Encoder(tokenizer, turns=args.turns), **options)

    passes = None  # the data starts over for ever
    if args.epochs is not None:
        args.steps, passes = loop.steps_of(args.epochs, lambda n: rows(args.data, epochs=n), args.accumulation)
    settings = loop.settings_of(args)
    data = rows(args.data, epochs=passes)
    evaluation = []
    if args.eval_data:
        evaluation = list(itertools.islice(rows(args.eval_data, epochs=1, shuffle=False), args.eval_batches))

    if args.lora is not None:
        add_lora(model, rank=args.lora, alpha=args.lora_alpha, targets=args.lora_targets, dropout=args.lora_dropout)
    if args.fit_gib is not None:
        masters = loop.dtype_of(args) == "bfloat16" and args.master and args.lora is None  # adapters are fp32
        state = {"state_bytes": 16.0} if masters else {}
        model.fit_memory(args.fit_gib, args.batch, args.seq, accumulation=args.accumulation, **state)

    made = {name: getattr(args, name) for name in ("lora", "lora_alpha", "lora_dropout", "lora_targets", "turns")}
    loop.train(
        model, data, settings, args.out, write=write, evaluation=evaluation, resume=args.resume,
        other_data=args.other_data, made=made, tensorboard=args.tensorboard,
    )  # fmt: skip
    if data.skipped or data.cut:
        print(f"{data.skipped} broken records were left out, {data.cut} chats were cut to --seq {args.seq} tokens")


def main(given: Sequence[str] | None = None, prog: str | None = None) -> None:
    with loop.plain_errors():
        finetune(arguments(given, prog))


if __name__ == "__main__":
    main()
