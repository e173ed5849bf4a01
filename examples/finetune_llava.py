"""Fine-tune a LLaVA, LLaVA-NeXT or Gemma 3 folder on questions about images.

    python examples/finetune_llava.py --model runs/llava --data photos.jsonl --train projector --lr 1e-3
    python examples/finetune_llava.py --model runs/llava --data photos.jsonl --train lora

A line of the .jsonl file is {"image": "cat.jpg", "question": "What is this?", "answer": "A cat."}; paths count from the
file's folder. Only the answers are learnt.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads: waiting threads sleep, not spin
import torch
from tqdm import tqdm

from ligermodels import LigerError, Tokenizer, from_pretrained
from ligermodels.image_processor import ImageProcessor
from ligermodels.training.loop import add_device_arguments, dtype_of
from ligermodels.training.lora import add_lora, lora_modules, merge_lora


def choose(model, what, rank=16):
    """Freeze what does not train; the tower then keeps nothing for the backward pass."""
    if what == "projector":  # the first stage of LLaVA: teach it to speak the text model's language
        model.requires_grad_(False).multi_modal_projector.requires_grad_(True)
    elif what == "lora":  # the projector, and a low-rank addition to the text model
        add_lora(model.language_model, rank=rank)
        model.vision_tower.requires_grad_(False)
    elif what == "text":  # the second stage of LLaVA: all but the tower
        model.vision_tower.requires_grad_(False)
    return [p for p in model.parameters() if p.requires_grad]


def encode(records, tokenizer, processor, prompt, folder):
    """One batch: ids, mask and labels (rows, length), padded on the right, and what the model needs of the images."""
    images = processor([folder / record["image"] for record in records])
    prompts = [prompt.format(image=processor.placeholder, question=record["question"]) for record in records]
    rows = [tokenizer.encode(text) for text in processor.expand(prompts, images)]
    answers = [[*tokenizer.encode(r["answer"], add_special_tokens=False), tokenizer.eos_token_id] for r in records]
    ids, mask = tokenizer.pad([row + answer for row, answer in zip(rows, answers, strict=True)], side="right")
    labels = ids.masked_fill(mask == 0, -100)
    for number, row in enumerate(rows):
        labels[number, : len(row)] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **images.arguments}


def train(model, batches, parameters, *, lr):
    """One pass over the batches on the device of the model; returns the loss of every step."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0), []
    for batch in (bar := tqdm(batches)):
        on_device = {name: x if name == "image_sizes" else x.to(model.device) for name, x in batch.items()}
        loss = model(**on_device).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", required=True, help="a folder in Hugging Face layout")
    cli.add_argument("--data", type=Path, required=True, help="a .jsonl file, see above")
    cli.add_argument("--out", type=Path, default="runs/llava-tuned", help="folder for the result")
    what = "the projector; it and LoRA on the text model (default); it and the whole text model; all of it"
    cli.add_argument("--train", choices=("projector", "lora", "text", "all"), default="lora", help=what)
    cli.add_argument("--prompt", default="USER: {image}\n{question} ASSISTANT: ", help="as the model was trained")
    cli.add_argument("--batch", type=int, default=4, help="rows a step")
    cli.add_argument("--epochs", type=int, default=1)
    cli.add_argument("--lr", type=float, default=2e-4)
    add_device_arguments(cli)
    args = cli.parse_args()
    try:
        torch.manual_seed(0)
        model = from_pretrained(args.model, dtype=dtype_of(args), device=args.device).train()
        tokenizer, processor = Tokenizer.from_pretrained(args.model), ImageProcessor.from_pretrained(args.model)
        records = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()] * args.epochs
        batches = [
            encode(records[i : i + args.batch], tokenizer, processor, args.prompt, args.data.parent)
            for i in range(0, len(records), args.batch)
        ]
        train(model, batches, choose(model, args.train), lr=args.lr)
        if lora_modules(model):
            merge_lora(model.language_model)
        for part in (model, tokenizer, processor):
            part.save_pretrained(args.out)
    except (LigerError, OSError) as error:
        cli.error(str(error))
