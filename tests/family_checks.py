"""What every family must obey, whatever it computes; the test files of the families say with which configs.

``hf`` is transformers' model, ``ours`` is loaded from the folder that transformers wrote, its config.json as published.
"""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.testing

import ligermodels


def scaled_hf(config: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model with weights that show faults: normal·0.25, norms off their rest value, biases not 0."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(**copy.deepcopy(config))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            plus_one = config["model_type"].startswith("gemma") and "vision_tower" not in name
            rest = 1.0 if "norm" in name and name.endswith("weight") and not plus_one else 0.0
            p.copy_(torch.randn(p.shape, generator=generator) * 0.25 + rest)
    return model


def make_pair(config: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """(hf, ours), in fp32, from one folder."""
    hf = scaled_hf(config)
    hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return hf, ligermodels.from_pretrained(folder)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def check_logits_loss_gradients(hf: Any, ours: Any, ids: torch.Tensor) -> None:
    expected = hf(input_ids=ids, labels=ids)
    expected.loss.backward()
    with torch.no_grad():
        error = (ours(ids).logits - expected.logits).abs().max()
    assert error <= 2e-4, error
    loss = ours(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - expected.loss) <= 1e-5
    gradients = {name: p.grad for name, p in hf.named_parameters()}
    own = {name: p.grad for name, p in ours.named_parameters()}
    assert own.keys() == gradients.keys()
    errors = {name: relative(own[name], g) for name, g in gradients.items()}
    assert max(errors.values()) <= 2e-5, errors


def check_generation(hf: Any, ours: Any, ids: torch.Tensor, new: int = 24) -> None:
    """Greedy, with cache; then a batch of unequal prompts, padded on the left."""
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = ids[:, :12]
    assert (
        ours.generate(prompt, max_new_tokens=new, eos_token_id=[]).tolist() == hf.generate(prompt, **options).tolist()
    )
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    expected = hf.generate(prompt, attention_mask=mask, **options).tolist()
    assert ours.generate(prompt, attention_mask=mask, max_new_tokens=new, eos_token_id=[]).tolist() == expected


def check_round_trip(hf: Any, ours: Any, ids: torch.Tensor, folder: Path) -> None:
    """What we save, transformers loads with the same logits, and we with the same bits and the same config."""
    from transformers import AutoModelForCausalLM

    ours.save_pretrained(folder, max_shard_size="100KB")
    again = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, hf(ids).logits)
    reloaded = ligermodels.from_pretrained(folder)
    assert type(reloaded) is type(ours)
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), ours.parameters(), strict=True))
    assert reloaded.config.to_hf() == {**ours.config.to_hf(), "dtype": "float32", "torch_dtype": "float32"}


def check_left_padding(ours: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = ours(ids, attention_mask=mask, position_ids=positions).logits
        assert torch.isfinite(padded).all()
        assert (padded[0, 6:] - ours(ids[:1, 6:]).logits[0]).abs().max() <= 1e-4
        assert (padded[1] - ours(ids[1:]).logits[0]).abs().max() <= 1e-4


def check_cached_chunks(ours: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        cache = ours.make_cache(2, 40)
        parts = [ours(ids[:, a:b], cache=cache).logits for a, b in [(0, 7), (7, 8), (8, 31), (31, 40)]]
        assert (torch.cat(parts, 1) - ours(ids).logits).abs().max() <= 1e-4


def check_packing(ours: Any, ids: torch.Tensor) -> None:
    """Rows of 40 that hold documents of 5, 1, 34 and of 17, 23 tokens: logits, loss and gradients as run apart."""
    bounds = [[0, 5, 6, 40], [0, 17, 40]]
    cu_seqlens = torch.tensor([0, 5, 6, 40, 57, 80], dtype=torch.int32)
    logits = ours(ids, cu_seqlens=cu_seqlens).logits
    total, count = torch.zeros(()), 0
    for row, bs in enumerate(bounds):
        for start, end in pairwise(bs):
            document = ids[row : row + 1, start:end]
            assert (logits[row, start:end] - ours(document).logits[0]).abs().max() <= 1e-4
            total = total + ours(document, labels=document).loss * (end - start - 1)
            count += end - start - 1
    loss = ours(ids, labels=ids, cu_seqlens=cu_seqlens).loss
    assert abs(loss * count - total) <= 1e-3
    parameters = list(ours.parameters())
    expected = torch.autograd.grad(total / count, parameters)
    errors = [relative(a, b) for a, b in zip(torch.autograd.grad(loss, parameters), expected, strict=True)]
    assert max(errors) <= 1e-5, errors


def check_bf16(folder: Path, ids: torch.Tensor) -> None:
    """In bf16 as close to the fp32 truth of the same weights as transformers in bf16."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    truth = copy.deepcopy(hf).float()
    ours = ligermodels.from_pretrained(folder, dtype="bfloat16")
    with torch.no_grad():
        reference = truth(ids).logits
        theirs = (hf(ids).logits - reference).square().mean().sqrt()
        own = (ours(ids).logits - reference).square().mean().sqrt()
    assert own <= 1.25 * theirs


def check_compiles(ours: Any, ids: torch.Tensor) -> None:
    """torch.compile of a training step sees one graph, and no more than two over four lengths."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for length in (7, 8, 9, 31):  # the loss plans batches of at most hidden_size tokens apart from larger ones
        batch = ids[:, :length].contiguous()
        loss = compiled(batch, labels=batch).loss
        loss.backward()
        assert abs(loss - ours(batch, labels=batch).loss) <= 1e-5
    assert counter.frame_count <= 2


def published(*model_types: str) -> dict[str, dict[str, Any]]:
    """The published configs of these families, with their parameter counts."""
    entries = json.loads((Path(__file__).parent / "published_configs.json").read_text())
    return {name: e for name, e in entries.items() if e["config"]["model_type"] in model_types}


def check_parameter_count(model_class: Any, entry: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_hf(entry["config"]))
    assert sum(p.numel() for p in model.parameters()) == entry["parameters"]
