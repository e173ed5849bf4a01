"""LigerLlama on a CUDA device: the Triton kernels, the attention backends and the loaders inside a whole model."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from family_checks import scaled_hf
from tiny import TINY

from ligermodels import LigerLlama, LlamaConfig

pytestmark = pytest.mark.gpu

# Wide enough for the fused attention backends (head_dim 64, 512 positions), small enough for a truth in fp32.
MEDIUM = {**TINY, "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 688, "head_dim": 64,
          "num_hidden_layers": 8, "max_position_embeddings": 1024}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(transformers' model on CUDA in fp32, the folder it was saved to)."""
    folder = tmp_path_factory.mktemp("medium")
    hf = scaled_hf(MEDIUM)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if "norm" not in name:
                p.mul_(0.3)
    hf.save_pretrained(folder)
    return hf.cuda(), folder


@pytest.fixture
def ids():
    return torch.randint(0, 1000, (2, 512), generator=torch.Generator().manual_seed(2)).cuda()


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


def test_fp32_logits_loss_and_gradients_equal_transformers(pair, ids):
    hf, folder = pair
    ours = LigerLlama.from_pretrained(folder, device="cuda")
    assert all(p.is_cuda for p in ours.parameters()) and ours.model.rotary_emb.inv_freq.is_cuda
    hf.zero_grad()
    expected = hf(input_ids=ids, labels=ids)
    expected.loss.backward()
    with torch.no_grad():
        assert (ours(ids).logits - expected.logits).abs().max() <= 2e-4
    loss = ours(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - expected.loss) <= 1e-5
    errors = {n: relative(p.grad, dict(hf.named_parameters())[n].grad) for n, p in ours.named_parameters()}
    assert max(errors.values()) <= 1e-4, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_the_truth_as_transformers(pair, ids, dtype):
    hf, folder = pair
    ours = LigerLlama.from_pretrained(folder, dtype=dtype, device="cuda")
    # Not hf.to(dtype): that rounds transformers' rotary frequencies too, in the truth as well.
    theirs = type(hf).from_pretrained(folder, dtype=dtype).cuda()
    truth = copy.deepcopy(theirs).float()
    expected = truth(input_ids=ids, labels=ids)
    expected.loss.backward()
    rms = {}
    gradients = {}
    for name, model in (("ours", ours), ("theirs", theirs)):
        with torch.no_grad():
            rms[name] = (model(ids).logits.float() - expected.logits).square().mean().sqrt().item()
        model.zero_grad()
        model(ids, labels=ids).loss.backward() if name == "ours" else model(input_ids=ids, labels=ids).loss.backward()
        gradients[name] = sum(
            (p.grad.float() - q.grad).square().sum().item()
            for p, q in zip(model.parameters(), truth.parameters(), strict=True)
        )
    assert rms["ours"] <= 1.25 * rms["theirs"]
    assert gradients["ours"] ** 0.5 <= 1.25 * gradients["theirs"] ** 0.5


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_documents_through_flash_equal_separate_runs(pair, ids, rows):
    """bf16 takes torch's flash attention for unequal lengths; the truth is the masked fp32 path."""
    _, folder = pair
    exact = LigerLlama.from_pretrained(folder, device="cuda")
    half = LigerLlama.from_pretrained(folder, dtype="bfloat16", device="cuda")
    truth = copy.deepcopy(half).float()
    bounds = [0, 5, 6, 400, 512, 700, 1024][: 5 if rows == 1 else 7]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    batch = ids[:rows]
    with torch.no_grad():
        packed = exact(batch, cu_seqlens=cu_seqlens).logits.flatten(0, 1)
        for start, end in pairwise(bounds):
            alone = exact(batch.reshape(1, -1)[:, start:end]).logits[0]
            assert (packed[start:end] - alone).abs().max() <= 2e-4
        reference = truth(batch, cu_seqlens=cu_seqlens).logits
        plain = (half(batch).logits.float() - truth(batch).logits).square().mean().sqrt()
        error = (half(batch, cu_seqlens=cu_seqlens).logits.float() - reference).square().mean().sqrt()
    assert error <= 1.5 * plain
    gradients = []
    for model in (half, truth):
        loss = model(batch, labels=batch, cu_seqlens=cu_seqlens).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert max(relative(a, b) for a, b in zip(*gradients, strict=True)) <= 0.1


@pytest.mark.parametrize("level", ["none", "fast", "block"])
def test_a_training_step_can_be_captured_as_a_graph(pair, ids, level):
    """Capture fails at any host synchronisation, so this also proves that there is none."""
    _, folder = pair
    model = LigerLlama.from_pretrained(folder, dtype="bfloat16", device="cuda").train()
    model.set_activation_memory(level)
    static = ids.clone()

    def step():
        loss = model(static, labels=static).loss
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
    static.copy_(ids.flip(1))
    graph.replay()
    captured = loss.clone()
    expected = model(static, labels=static).loss
    assert torch.equal(captured, expected)


def test_compiled_forward_and_backward_equal_eager(pair, ids):
    _, folder = pair
    model = LigerLlama.from_pretrained(folder, device="cuda").train()
    parameters = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (512, 33, 8, 7):
        batch = ids[:, :length].contiguous()
        expected = model(batch, labels=batch).loss
        found = compiled(batch, labels=batch).loss
        assert abs(found - expected) <= 1e-5
        for a, b in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True):
            assert relative(a, b) <= 1e-4


def test_greedy_generation_equals_transformers_with_padding(pair, ids):
    hf, folder = pair
    ours = LigerLlama.from_pretrained(folder, device="cuda")
    prompt = ids[:, :16].clone()
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    options = {"max_new_tokens": 24, "attention_mask": mask}
    expected = hf.generate(prompt, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    assert ours.generate(prompt, eos_token_id=[], **options).tolist() == expected.tolist()


def test_building_on_the_device_puts_everything_there():
    with torch.device("cuda"):
        model = LigerLlama(LlamaConfig.from_hf(TINY))
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cuda"}


def test_loading_to_the_gpu_never_holds_the_weights_on_the_host(tmp_path):
    """The staging buffer is all that the host sees: device memory grows by the weights, host memory does not."""
    import resource

    config = LlamaConfig.from_hf({**MEDIUM, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192})
    with torch.device("cuda"):
        model = LigerLlama(config).to(torch.bfloat16)
    size = sum(p.numel() * 2 for p in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, device_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, torch.cuda.memory_allocated()
    segments = torch.cuda.memory_stats()["segment.large_pool.allocated"]
    LigerLlama.from_pretrained(tmp_path, device="cuda")
    # One piece for all parameters above 1 MiB, and no need of another.
    assert torch.cuda.memory_stats()["segment.large_pool.allocated"] == segments + 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 0.2 * size
    assert torch.cuda.max_memory_allocated() - device_before < 1.1 * size + 64e6
