"""Train a Llama from scratch on texts: its tokenizer first (or take one), then the model.

    python examples/pretrain.py --data examples/data --out runs/small --steps 300
    python examples/pretrain.py --data corpus/ --config config.json --tokenizer folder --out runs/big --schedule wsd

Texts fill the rows to the last token, one after the other; none sees another. The result, OUT/final, is a folder that
ligermodels and transformers load. --resume goes on from the newest checkpoint in OUT as if nothing had happened.
"""

import argparse
import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads: waiting threads sleep, not spin
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from ligermodels import MODELS, LigerError, Tokenizer
from ligermodels.checkpoints_convert.hf import read_config
from ligermodels.layers.memory import LEVELS
from ligermodels.training import loop
from ligermodels.training.checkpoint import Checkpoints
from ligermodels.training.data import Encoder, Files, Loader, open_files

SMALL = dict(
    model_type="llama", hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip
END = "<|endoftext|>"


def train_tokenizer(source: Files, vocab_size: int, most: int = 2000) -> Tokenizer:
    """A byte-level BPE tokenizer, which can write any text, from at most so many records of the data."""
    if vocab_size < 257:
        raise LigerError(f"--vocab must be at least 257, a token for every byte and {END}, found {vocab_size}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )

    def texts() -> Iterator[str]:
        for i in range(0, len(source), max(1, len(source) // most)):
            with contextlib.suppress(LigerError):  # what is broken the Loader reports
                record = source[i]
                if record and isinstance(text := record.data.get("text"), str):
                    yield text

    backend.train_from_iterator(texts(), trainer)
    return Tokenizer(backend, special_tokens={"bos_token": END, "eos_token": END, "pad_token": END})


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--data", nargs="+", required=True, help='text or .jsonl files ("text"), or folders of such')
    cli.add_argument("--eval-data", nargs="+", help="the same, for an evaluation loss")
    cli.add_argument("--eval-batches", type=int, default=50, help="at most so many of it")
    cli.add_argument("--out", type=Path, required=True, help="folder for checkpoints, log.csv, loss.svg, final/")
    cli.add_argument("--resume", action="store_true", help="go on with the run in OUT")
    cli.add_argument("--other-data", action="store_true", help="with --resume: also where the data has changed")
    cli.add_argument("--config", help="config.json of the model (default: a Llama of 6 layers, 256 wide)")
    cli.add_argument("--tokenizer", help="folder of a tokenizer (default: one is trained on the data)")
    cli.add_argument("--vocab", type=int, default=4096, help="size of the vocabulary that is trained")
    cli.add_argument("--strict", action="store_true", help="stop at the first broken record, instead of leaving it out")
    loop.add_device_arguments(cli)
    cli.add_argument("--activation-memory", default="fast", help=f"{', '.join(LEVELS)}; but for none also +offload")
    cli.add_argument("--tensorboard", action="store_true", help="also write TensorBoard's files, to OUT/tensorboard")
    loop.add_arguments(cli, lr=1e-3, weight_decay=0.1, seq=512, batch=8)
    return cli.parse_args()


def main() -> None:
    args = arguments()
    settings = loop.settings_of(args)
    torch.manual_seed(args.seed)
    source = open_files(args.data)
    known = args.tokenizer or (args.resume and Checkpoints(args.out).latest())  # a checkpoint has its tokenizer
    tokenizer = Tokenizer.from_pretrained(known) if known else train_tokenizer(source, args.vocab)
    config = read_config(args.config) if args.config else SMALL
    if config.get("model_type") not in MODELS:
        raise LigerError(f"{args.config}: model_type {config.get('model_type')!r} is not one of {', '.join(MODELS)}")
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = {"vocab_size": tokenizer.vocab_size, **config, **ends}
    if config["vocab_size"] < tokenizer.vocab_size:
        raise LigerError(f"vocab_size {config['vocab_size']} is below the tokenizer's {tokenizer.vocab_size}")
    cls = MODELS[config["model_type"]]
    model = cls(cls.config_class.from_hf(config)).to(args.device, getattr(torch, loop.dtype_of(args)))
    model.set_activation_memory(args.activation_memory)

    options = {"batch": args.batch, "seq": args.seq, "packing": "concat", "strict": args.strict}
    data = Loader(source, Encoder(tokenizer), seed=args.seed, **options)
    evaluation = []
    if args.eval_data:
        rows = Loader(open_files(args.eval_data), Encoder(tokenizer), epochs=1, shuffle=False, **options)
        evaluation = list(itertools.islice(rows, args.eval_batches))

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    loop.train(
        model, data, settings, args.out, write=write, evaluation=evaluation, resume=args.resume,
        other_data=args.other_data, made={"vocab": args.vocab}, tensorboard=args.tensorboard,
    )  # fmt: skip
    if data.skipped:
        print(f"{data.skipped} broken records were left out")


if __name__ == "__main__":
    with loop.plain_errors():
        main()
