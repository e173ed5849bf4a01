"""Every family on a CUDA device: tiny training runs beside transformers, long rows, packing, generation."""

from __future__ import annotations

import copy

import pytest
import torch
from family_checks import scaled_hf

import ligermodels

pytestmark = pytest.mark.gpu

BASE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 2048, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FAMILIES = {
    "llama": {"model_type": "llama"},
    "mistral, window": {"model_type": "mistral", "sliding_window": 96},
    "qwen2": {"model_type": "qwen2", "head_dim": 32},
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", "sliding_window": 96, "query_pre_attn_scalar": 64, "pad_token_id": 0},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 96, "query_pre_attn_scalar": 64, "num_hidden_layers": 7,
               "pad_token_id": 0},
    "phi3": {"model_type": "phi3", "num_attention_heads": 2, "head_dim": 64},
    "glm": {"model_type": "glm", "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True},
}  # fmt: skip


@pytest.fixture(params=FAMILIES, ids=str)
def load(request, tmp_path):
    """load("ours" | "hf", dtype): the same tiny model on the device; a skip where the zoo lacks the family."""
    config = BASE | FAMILIES[request.param]
    if config["model_type"] not in ligermodels.MODELS:
        pytest.skip(f"{config['model_type']} is not in the zoo")
    hf = scaled_hf(config)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if "norm" not in name:
                p.mul_(0.4)
    hf.save_pretrained(tmp_path)

    def load(whose, dtype=torch.float32):
        if whose == "ours":
            return ligermodels.from_pretrained(tmp_path, dtype=dtype, device="cuda")
        # eager: transformers 5.17, on the lent machine, runs Gemma 2 through sdpa, which drops the soft cap
        return type(hf).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").cuda()

    return load


def batches(steps=20, length=256):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 512, (2, length), generator=generator).cuda() for _ in range(steps)]


def losses(model, data):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    out = []
    for ids in data:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.detach())
    return torch.stack(out)


def test_twenty_steps_give_transformers_losses(load):
    """fp32: the same curve. bf16: no further from the fp32 curve than transformers in bf16, give or take noise."""
    data = batches()
    truth = losses(load("hf"), data)
    assert (losses(load("ours"), data) - truth).abs().max() <= 2e-3
    theirs = (losses(load("hf", torch.bfloat16), data) - truth).abs().max()
    own = (losses(load("ours", torch.bfloat16), data) - truth).abs().max()
    assert own <= 1.5 * theirs + 0.02


def test_long_rows_equal_transformers(load):
    """2,048 positions: the backends for windows, soft caps and padding, which short rows do not take."""
    hf, ours = load("hf"), load("ours")
    ids = batches(1, 2048)[0]
    mask = torch.ones_like(ids)
    mask[0, :300] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        assert (ours(ids).logits - hf(ids).logits).abs().max() <= 5e-4
        found = ours(ids, attention_mask=mask, position_ids=positions).logits
        expected = hf(ids, attention_mask=mask, position_ids=positions).logits
    assert (found - expected)[mask.bool()].abs().max() <= 5e-4


@pytest.mark.parametrize("packed", [False, True])
def test_bf16_gradients_of_long_rows_are_close_to_the_truth(load, packed):
    """bf16 takes flash attention and FlexAttention; the truth is the same weights in fp32."""
    half = load("ours", torch.bfloat16)
    truth = copy.deepcopy(half).float()
    ids = batches(1, 2048)[0][:1]
    options = {"cu_seqlens": torch.tensor([0, 700, 701, 2048], dtype=torch.int32, device="cuda")} if packed else {}
    gradients = []
    for model in (half, truth):
        model.train()
        gradients.append(torch.autograd.grad(model(ids, labels=ids, **options).loss, list(model.parameters())))
    a, b = (torch.cat([g.float().flatten() for g in gs]) for gs in gradients)
    assert (a - b).norm() / b.norm() <= 0.05


def test_greedy_generation_with_padding_equals_transformers(load):
    hf, ours = load("hf"), load("ours")
    prompt = batches(1, 16)[0]
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    options = {"max_new_tokens": 24, "attention_mask": mask}
    expected = hf.generate(prompt, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    assert ours.generate(prompt, eos_token_id=[], **options).tolist() == expected.tolist()
