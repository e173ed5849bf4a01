"""A training step leaves nothing behind: no tensor waits for Python's collector of reference cycles."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny import TINY

import ligermodels
from ligermodels.layers.memory import LEVELS


def live_tensors() -> int:
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3", "qwen3", "glm4"])
def test_after_a_step_only_parameters_are_left(kind, level):
    cls = ligermodels.MODELS[kind]
    config = TINY | {"model_type": kind, "pad_token_id": 0}
    if kind == "gemma3_text":
        config["hidden_act"] = "gelu_pytorch_tanh"
    model = cls(cls.config_class.from_hf(config)).train()
    model.set_activation_memory(level)
    ids = torch.randint(0, model.config.vocab_size, (2, 16))

    def step() -> weakref.ref:
        loss = model(ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        return weakref.ref(loss)

    step()
    gc.collect()
    before = live_tensors()
    gc.disable()
    try:
        assert step()() is None
        assert live_tensors() == before
    finally:
        gc.enable()
