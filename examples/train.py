"""A whole training loop on one page: fine-tune a model folder, or train a tiny random Llama, on one text file."""

import argparse
import math
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads: waiting threads sleep, not spin
import torch
from tqdm import tqdm

from ligermodels import LigerError, LigerLlama, LlamaConfig, Tokenizer, from_pretrained
from ligermodels.training.graph import GraphedStep

TINY = dict(vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4)


def windows(tokens, batch, seq, generator):
    """(batch, seq) ids, each row from a random place of the text."""
    return tokens[torch.randint(len(tokens) - seq + 1, (batch, 1), generator=generator) + torch.arange(seq)]


def schedule(step, steps):
    """Share of the peak learning rate: linear warmup over a tenth of the steps, then a cosine down to 0.1."""
    warmup = max(1, steps // 10)
    return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))


def backward(model, micro_batches):
    """Gradients of the mean over all supervised tokens: the same however a batch is cut into micro-batches."""
    total, count = 0.0, sum((ids[:, 1:] != -100).sum() for ids in micro_batches)  # a row's first id is no label
    for ids in micro_batches:
        loss = model(ids, labels=ids, num_items_in_batch=count).loss
        loss.backward()
        total += loss.detach()
    return total


def train(model, tokens, *, steps=40, batch=4, seq=128, accumulation=1, lr=2e-5, seed=0, log_every=5, cuda_graph=False):
    """Run the loop on the device of the model; returns the loss of every step.

    ``cuda_graph``: capture forward, backward and update once and replay them: small models are several times faster.
    """
    device, generator, losses = next(model.parameters()).device, torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True, capturable=cuda_graph)

    def update(ids):
        loss = backward(model, ids.split(batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if cuda_graph:
        update = GraphedStep(model, optimizer, clip=1.0, backward=lambda ids: backward(model, ids.split(batch)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    for step in (bar := tqdm(range(1, steps + 1), unit=" tokens", unit_scale=accumulation * batch * seq)):
        losses.append(update(ids=windows(tokens, accumulation * batch, seq, generator).to(device)))
        scheduler.step()
        if step % log_every == 0 or step == steps:  # reading a loss makes the CPU wait for the GPU: not at every step
            bar.set_postfix(loss=f"{losses[-1].item():.3f}")
    return [loss.item() for loss in losses]


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    cli.add_argument("--text", type=Path, required=True, default=argparse.SUPPRESS, help="a UTF-8 file")
    cli.add_argument("--model", default="runs/smollm2", help="a folder in Hugging Face layout (make demo makes it)")
    cli.add_argument("--tiny", action="store_true", help="instead: a random Llama that reads bytes")
    cli.add_argument("--out", type=Path, default="runs/trained", help="folder for the result")
    cli.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the model")
    cli.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights")
    for name, default in train.__kwdefaults__.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default)}
        cli.add_argument(f"--{name.replace('_', '-')}", default=default, help="as in train()", **kind)
    args = cli.parse_args()
    torch.manual_seed(args.seed)
    try:
        if args.tiny:
            model, tokens = LigerLlama(LlamaConfig(**TINY)), list(args.text.read_bytes())
            model.to(args.device, getattr(torch, args.dtype))
        else:
            model = from_pretrained(args.model, dtype=args.dtype, device=args.device)
            tokens = (tokenizer := Tokenizer.from_pretrained(args.model)).encode(args.text.read_text("utf-8"))
        if (n := len(tokens)) < args.seq:
            cli.error(f"{args.text} has {n} tokens, fewer than --seq {args.seq}: give a longer text or a smaller --seq")
        train(model.train(), torch.tensor(tokens), **{name: getattr(args, name) for name in train.__kwdefaults__})
        model.save_pretrained(args.out)
        if not args.tiny:
            tokenizer.save_pretrained(args.out)
    except (LigerError, OSError, UnicodeDecodeError) as error:
        cli.error(f"{args.text}: not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error))
