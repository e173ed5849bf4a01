"""A folder with a tiny random LLaVA, its tokenizer and its image processor, like a repository on the hub."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_chat import write_tiny_chat_model

from ligermodels import LigerLlava, LlavaConfig

IMAGE = 258  # the id of <image>
VISION = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "image_size": 28, "patch_size": 14}  # fmt: skip


def write_tiny_llava(folder: Path) -> Path:
    """Write it to ``folder`` and return that. An image has four tokens."""
    write_tiny_chat_model(folder)
    text = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    image = {"id": IMAGE, "content": "<image>", "special": True}
    tokenizer["added_tokens"].append(image | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
    config = {"model_type": "llava", "image_token_index": IMAGE, "text_config": text, "vision_config": VISION}
    LigerLlava(LlavaConfig.from_hf(config)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": 28}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
