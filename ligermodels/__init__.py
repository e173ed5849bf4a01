"""Decoder language models written natively on fused Triton kernels; Hugging Face checkpoints in and out.

>>> from ligermodels import LigerLlama
>>> model = LigerLlama.from_hub("meta-llama/Meta-Llama-3-8B")
"""

from __future__ import annotations

from pathlib import Path

import torch

from ligermodels.base import CausalLM, CausalLMOutput
from ligermodels.checkpoints_convert.hf import read_config
from ligermodels.checkpoints_convert.hub import download
from ligermodels.errors import CheckpointError, ConfigError, HubError, LigerError
from ligermodels.gemma import GemmaConfig, LigerGemma
from ligermodels.gemma2 import Gemma2Config, LigerGemma2
from ligermodels.gemma3 import Gemma3Config, LigerGemma3
from ligermodels.gemma3_multimodal import Gemma3MultimodalConfig, LigerGemma3Multimodal
from ligermodels.glm import GlmConfig, LigerGlm
from ligermodels.glm4 import Glm4Config, LigerGlm4
from ligermodels.llama import LigerLlama, LlamaConfig
from ligermodels.llava import LigerLlava, LlavaConfig
from ligermodels.llava_next import LigerLlavaNext, LlavaNextConfig
from ligermodels.mistral import LigerMistral, MistralConfig
from ligermodels.mixtral import LigerMixtral, MixtralConfig
from ligermodels.phi3 import LigerPhi3, Phi3Config
from ligermodels.qwen2 import LigerQwen2, Qwen2Config
from ligermodels.qwen3 import LigerQwen3, Qwen3Config
from ligermodels.qwen3_moe import LigerQwen3Moe, Qwen3MoeConfig
from ligermodels.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "CausalLMOutput",
    "CheckpointError",
    "ConfigError",
    "Gemma2Config",
    "Gemma3Config",
    "Gemma3MultimodalConfig",
    "GemmaConfig",
    "Glm4Config",
    "GlmConfig",
    "HubError",
    "LigerError",
    "LigerGemma",
    "LigerGemma2",
    "LigerGemma3",
    "LigerGemma3Multimodal",
    "LigerGlm",
    "LigerGlm4",
    "LigerLlama",
    "LigerLlava",
    "LigerLlavaNext",
    "LigerMistral",
    "LigerMixtral",
    "LigerPhi3",
    "LigerQwen2",
    "LigerQwen3",
    "LigerQwen3Moe",
    "LlamaConfig",
    "LlavaConfig",
    "LlavaNextConfig",
    "MistralConfig",
    "MixtralConfig",
    "Phi3Config",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "Tokenizer",
    "from_hub",
    "from_pretrained",
]

MODELS: dict[str, type[CausalLM]] = {
    "llama": LigerLlama,
    "mistral": LigerMistral,
    "mixtral": LigerMixtral,
    "gemma": LigerGemma,
    "gemma2": LigerGemma2,
    "gemma3_text": LigerGemma3,
    "gemma3": LigerGemma3,
    "phi3": LigerPhi3,
    "glm": LigerGlm,
    "chatglm": LigerGlm,
    "glm4": LigerGlm4,
    "qwen2": LigerQwen2,
    "qwen3": LigerQwen3,
    "llava": LigerLlava,
    "llava_next": LigerLlavaNext,
    "qwen3_moe": LigerQwen3Moe,
}


def from_pretrained(
    folder: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
) -> CausalLM:
    """The model in a folder of Hugging Face layout; its class is chosen by config.json's model_type.

    Raises ConfigError for a model_type that is not in the zoo; otherwise as the class's own ``from_pretrained``.
    """
    model_type = read_config(folder).get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise ConfigError(f"{folder}: model_type {model_type!r} is not in the zoo, which has {', '.join(MODELS)}")
    return MODELS[model_type].from_pretrained(folder, dtype=dtype, device=device)


def from_hub(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
) -> CausalLM:
    """Download ``repo_id`` and load it with the class that its config.json asks for; see ``from_pretrained``."""
    folder = download(repo_id, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only)
    return from_pretrained(folder, dtype=dtype, device=device)
