"""Qwen 2 and 2.5: 0.5B to 72B, base, Instruct, Coder, Math, and whatever else says ``"model_type": "qwen2"``.

What differs from Llama (Yang et al. 2024): biases on the projections of q, k and v and on no other, whatever the
config says. The code also knows a sliding window in the upper layers, but every published file leaves it off: the key
``sliding_window`` alone means nothing. Up to 3B the head is tied to the embedding.

Shapes: see llama.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.config import check_windows
from ligermodels.llama import LigerLlama, LlamaBlock, LlamaConfig
from ligermodels.mistral import MistralAttention


@dataclass
class Qwen2Config(LlamaConfig):
    """config.json of a Qwen 2 or 2.5; keys and defaults as in Hugging Face's Qwen2Config.

    A layer slides if ``use_sliding_window`` and ``sliding_window`` are set and it is not among the first
    ``max_window_layers``; ``layer_types``, where a file has it, says it layer by layer instead.
    """

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    attention_bias: ClassVar[bool] = True  # no key of this family; of o_proj see below
    mlp_bias: ClassVar[bool] = False

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_windows(self, self.sliding_window if self.use_sliding_window else None)

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, itself included; None for all."""
        if self.layer_types is None:
            slides = layer >= self.max_window_layers
        else:
            slides = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if self.use_sliding_window and slides else None


class Qwen2Attention(MistralAttention):
    """Mistral's (a window, where this layer has one), with biases on q, k and v."""

    def __init__(self, config: Qwen2Config, layer: int):
        super().__init__(config, layer)
        self.o_proj.bias = None


class Qwen2Block(LlamaBlock):
    attention_class = Qwen2Attention


class LigerQwen2(LigerLlama):
    """A Qwen 2 or 2.5 with its language-model head; wired as Llama. See ``LigerLlama`` for ``forward``."""

    config_class = Qwen2Config
    block_class = Qwen2Block
