"""A whole training loop on one page: fine-tune a model folder, or train a tiny random Llama, on one text file.

python examples/train.py --tiny --text examples/data/lamp_at_corrin.txt --steps 200 --lr 3e-3
"""

import argparse
import math
from pathlib import Path

import torch
from tqdm import tqdm

import ligermodels

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
    total, count = 0.0, sum((ids[:, 1:] != -100).sum() for ids in micro_batches)  # a row's first id is nobody's label
    for ids in micro_batches:
        loss = model(ids, labels=ids, num_items_in_batch=count).loss
        loss.backward()
        total += loss.detach()
    return total


def train(model, tokens, *, steps=40, batch=4, seq=128, accumulation=1, lr=1e-4, seed=0, log_every=5):
    """Run the loop on the device of the model; returns the loss of every step."""
    device, generator, losses = next(model.parameters()).device, torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    for step in (bar := tqdm(range(1, steps + 1), unit="step")):
        losses.append(backward(model, [windows(tokens, batch, seq, generator).to(device) for _ in range(accumulation)]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % log_every == 0 or step == steps:  # reading a loss makes the CPU wait for the GPU: not at every step
            loss, speed = losses[-1].item(), step * accumulation * batch * seq / bar.format_dict["elapsed"]
            bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:,.0f}")
    return [loss.item() for loss in losses]


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "--model", default="runs/smollm2", help="a folder in Hugging Face layout (make demo makes this one)"
    )
    cli.add_argument("--tiny", action="store_true", help="instead: a random Llama that reads bytes")
    cli.add_argument("--text", type=Path, required=True, help="a UTF-8 file")
    cli.add_argument("--out", type=Path, default="runs/trained")
    cli.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    cli.add_argument("--dtype", default="float32", type=lambda name: getattr(torch, name))
    numbers = dict(steps=40, batch=4, seq=128, accumulation=1, lr=1e-4, seed=0)
    for name, default in numbers.items():
        cli.add_argument(f"--{name}", type=type(default), default=default)
    args = cli.parse_args()
    torch.manual_seed(args.seed)
    if args.tiny:
        model = ligermodels.LigerLlama(ligermodels.LlamaConfig(**TINY)).to(args.device, args.dtype)
        tokens = list(args.text.read_bytes())
    else:
        model = ligermodels.from_pretrained(args.model, dtype=args.dtype, device=args.device)
        tokenizer = ligermodels.Tokenizer.from_pretrained(args.model)
        tokens = tokenizer.encode(args.text.read_text("utf-8"))
        tokenizer.save_pretrained(args.out)
    train(model.train(), torch.tensor(tokens), **{name: getattr(args, name) for name in numbers})
    model.save_pretrained(args.out)
