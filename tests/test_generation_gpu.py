"""Decoding on a CUDA device: kernels, captured steps of every family, sampling, nothing that waits."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from family_checks import scaled_hf

import ligermodels
from ligermodels import decode
from ligermodels.kernels.decode_attention import append_and_attend, decode_attention, decode_attention_reference
from ligermodels.kernels.gemv import few_rows_linear, few_rows_linear_reference
from ligermodels.kernels.greedy import choose_greedily, choose_greedily_reference

pytestmark = pytest.mark.gpu

BASE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 2048, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0 + i / 32 for i in range(32)],
            "long_factor": [2.0 + i / 8 for i in range(32)]}  # fmt: skip
FAMILIES = {
    "llama": {"model_type": "llama"},
    "mistral, window": {"model_type": "mistral", "sliding_window": 12},
    "qwen2": {"model_type": "qwen2", "head_dim": 32},
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", "sliding_window": 12, "query_pre_attn_scalar": 64, "pad_token_id": 0},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 12, "query_pre_attn_scalar": 64, "num_hidden_layers": 7,
               "pad_token_id": 0},
    "phi3": {"model_type": "phi3", "num_attention_heads": 2, "sliding_window": 12},
    "phi3, longrope": {"model_type": "phi3", "num_attention_heads": 2, "original_max_position_embeddings": 24,
                       "rope_scaling": LONGROPE},
    "glm": {"model_type": "glm", "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}  # fmt: skip


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def model_of(family: str, dtype: torch.dtype = torch.float32):
    config = BASE | FAMILIES[family]
    cls = ligermodels.MODELS[config["model_type"]]
    model = cls(cls.config_class.from_hf(config)).eval()
    generator = torch.Generator().manual_seed(0)
    rest = 0.0 if config["model_type"].startswith("gemma") else 1.0
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + (rest if "norm" in name else 0.0))
    return model.to("cuda", dtype)


def prompts(rows: int = 3, width: int = 9):
    ids = torch.randint(3, 512, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : (row * 4) % width] = 0
    return ids.cuda(), mask.cuda()


def step_by_step(model, ids, monkeypatch, **options):
    """What the model's own forward gives, one eager step after the other."""
    with monkeypatch.context() as patch:
        patch.setattr(decode, "capturable", lambda *_: False)
        return model.generate(ids, **options)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_give_the_tokens_of_eager_ones(family, fused, monkeypatch):
    """fp32, 40 tokens, unequal prompts, beyond the window and LongRoPE's border; one row alone takes other kernels."""
    model = model_of(family)
    if fused and not decode.fusible(model, 3):
        assert family in ("mixtral", "qwen3_moe")
        pytest.skip("its blocks are not fused")
    if not fused:
        monkeypatch.setattr(decode, "fusible", lambda *_: False)
    ids, mask = prompts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that cannot be captured warns
        for rows in (3, 1):
            options = {"attention_mask": mask[:rows], "max_new_tokens": 40, "eos_token_id": []}
            expected = step_by_step(model, ids[:rows], monkeypatch, **options)
            assert torch.equal(model.generate(ids[:rows], **options), expected)
            assert model.kept_decoder.decoder.fused == fused and model.kept_decoder.decoder._graph is not None


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("rows", [1, 16])
def test_fused_logits_in_bf16_are_as_close_to_fp32_as_the_models_own(family, rows):
    model = model_of(family, torch.bfloat16)
    truth = copy.deepcopy(model).float()
    errors = {"own": 0.0, "fused": 0.0}
    with torch.no_grad():
        for ids in prompts(16, 40)[0].split(rows):
            expected = truth(ids).logits[:, -1]
            own = model(ids, logits_to_keep=1).logits[:, -1]
            cache = model.make_cache(rows, 64)
            model(ids[:, :-1], cache=cache)
            sampler = Capture(ids[:, -1])
            decoder = decode.Decoder(model, cache, sampler, fused=True, longest=40, capture=False)
            decoder.begin(None)
            decoder.step()
            for name, logits in (("own", own), ("fused", sampler.logits)):
                errors[name] += (logits.float() - expected).square().sum().item()
    assert errors["fused"] <= 1.25**2 * errors["own"], errors


class Capture:
    """In place of a sampler: feeds one token and keeps the logits."""

    generator = None

    def __init__(self, fed):
        self.fed = fed

    def __call__(self, logits):
        self.logits = logits.clone()


def test_greedy_tokens_equal_transformers():
    config = BASE | FAMILIES["llama"]
    hf = scaled_hf(config)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if "norm" not in name:
                p.mul_(0.4)
    ours = ligermodels.LigerLlama(ligermodels.LlamaConfig.from_hf(config))
    ours.load_state_dict(hf.state_dict())
    hf, ours = hf.cuda(), ours.cuda()
    ids, mask = prompts(4, 16)
    expected = hf.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=48, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(ours.generate(ids, attention_mask=mask, max_new_tokens=48, eos_token_id=[]), expected)
    assert ours.kept_decoder.decoder is not None


# ------------------------------------------------------------------------------------------------------ the host's side


def test_steps_never_wait_for_the_device():
    model = model_of("llama")
    ids, _ = prompts(2)
    options = {"max_new_tokens": 24, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 1}
    model.generate(ids, **options)
    tokens = model.stream(ids, **options, eos_token_id=[2])
    next(tokens)
    next(tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert all(not next(tokens).is_cuda for _ in range(12))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tokens.close()


def test_rows_end_at_their_eos_and_the_loop_with_the_last(monkeypatch):
    model = model_of("llama")
    ids, mask = prompts(4)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=40, eos_token_id=[])[:, ids.shape[1] :]
    eos = [int(free[0, 3]), int(free[1, 9]), int(free[2, 12]), int(free[3, 20])]
    options = {"attention_mask": mask, "max_new_tokens": 40, "eos_token_id": eos, "pad_token_id": 1}
    expected = step_by_step(model, ids, monkeypatch, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert expected.shape[1] <= ids.shape[1] + 21


def test_a_seed_repeats_and_other_options_build_another_graph():
    model = model_of("qwen3")
    ids, mask = prompts(4)
    options = {"attention_mask": mask, "max_new_tokens": 20, "temperature": 1.2, "top_p": 0.95, "eos_token_id": []}
    a, b, c = (model.generate(ids, **options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    kept = model.kept_decoder.decoder
    assert kept is not None
    penal = {**options, "temperature": 0.0, "top_p": None, "repetition_penalty": 1e6, "logprobs": True}
    out, logprobs = model.generate(ids, **penal)
    assert model.kept_decoder.decoder is not kept
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        first = model(ids, attention_mask=mask, position_ids=positions).logits[:, -1].log_softmax(-1)
    assert torch.allclose(logprobs[:, 0], first.gather(1, out[:, 9:10])[:, 0], atol=1e-5)
    assert all(len(set(row.tolist()[9:])) == 20 for row in out)  # with so strong a penalty nothing comes twice


def test_with_a_seed_a_captured_row_says_what_it_says_alone():
    model = model_of("llama")
    ids, _ = prompts(5)
    options = {"max_new_tokens": 20, "temperature": 1.2, "seed": 7, "eos_token_id": []}
    together = model.generate(ids, **options)
    for numbers in ([3], [4, 0]):
        assert torch.equal(model.generate(ids[numbers], **options, row_numbers=numbers), together[numbers])
    assert model.kept_decoder.decoder._graph is not None


def test_a_kept_step_follows_the_parameters():
    """Changed in place, moved, replaced or hooked after it was captured: the tokens are those of the model as it is."""
    model = model_of("llama")
    ids, _ = prompts(2)
    options = {"max_new_tokens": 16, "eos_token_id": []}

    def fresh():
        return copy.deepcopy(model).generate(ids, **options)

    first = model.generate(ids, **options)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.neg_()
    assert torch.equal(model.generate(ids, **options), fresh()) and not torch.equal(fresh(), first)
    model.load_state_dict({k: v.clone().flip(0) for k, v in model.state_dict().items()}, assign=True)
    assert torch.equal(model.generate(ids, **options), fresh())
    calls = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(model.generate(ids, **options), fresh()) and len(calls) >= 16
    handle.remove()
    model.train()
    assert model.kept_decoder.decoder is None


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_second_turn_goes_on_from_the_cache(family):
    model = model_of(family)
    ids, _ = prompts(1, 20)
    cache = model.make_cache(1, 200)
    first = model.generate(ids, max_new_tokens=30, eos_token_id=[], cache=cache)
    longer = torch.cat([first, ids.flip(1)], dim=1)
    cache.rewind(min(cache.length, first.shape[1] - 1))
    again = model.generate(longer, max_new_tokens=30, eos_token_id=[], cache=cache)
    assert torch.equal(again, copy.deepcopy(model).generate(longer, max_new_tokens=30, eos_token_id=[]))


# ------------------------------------------------------------------------------------------------------------- kernels


def close(a, b, dtype):
    error = ((a.float() - b.float()).norm() / b.float().norm()).item()
    assert error <= {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype], error


@pytest.mark.parametrize(
    ("dtype", "rows", "k", "ns"),
    [
        (torch.float32, 1, 576, (576, 192, 192)),
        (torch.float32, 3, 576, (300,)),
        (torch.bfloat16, 1, 2048, (256, 64, 64)),
        (torch.bfloat16, 1, 2304, (300,)),
        (torch.bfloat16, 2, 2304, (256, 64, 60)),
        (torch.bfloat16, 16, 2048, (256, 64, 64)),
        (torch.bfloat16, 64, 2048, (300,)),
        (torch.float16, 16, 576, (576, 192, 192)),
    ],
)
def test_few_rows_linear(dtype, rows, k, ns):
    def values(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    generator = torch.Generator("cuda").manual_seed(0)
    weights, biases = [values(n, k) / k**0.5 for n in ns], [values(n) for n in ns]
    x, norm = values(rows, k), values(k)
    for options in ({}, {"norm_weight": norm, "offset": 1.0}):
        found = few_rows_linear(x, weights, biases, **options)
        close(found, few_rows_linear_reference(x, weights, biases, **options), dtype)
    pair = [weights[0], weights[0].flip(0).contiguous()]
    for gate in ("silu", "gelu_tanh"):
        found = few_rows_linear(x, pair, norm_weight=norm, gate=gate)
        close(found, few_rows_linear_reference(x, pair, norm_weight=norm, gate=gate), dtype)
    residual = values(rows, ns[0])
    for _ in range(3):  # the counters of split sums are left as they were
        found = few_rows_linear(x, weights[:1], residual=residual, out_dtype=torch.float32)
        close(found, few_rows_linear_reference(x, weights[:1], residual=residual, out_dtype=torch.float32), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 5, 700, 2000])
@pytest.mark.parametrize("shape", [(1, 8, 2, 64), (5, 16, 16, 96), (3, 8, 1, 256)], ids=str)
def test_decode_attention(dtype, position, shape):
    B, A, K, D = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(B, 1, n, D, device="cuda", generator=generator).to(dtype) for n in (A, K, K))
    keys, values = (torch.randn(B, 1024, K, D, device="cuda", generator=generator).to(dtype) for _ in "kv")
    at = torch.tensor([position], device="cuda")
    start = torch.arange(B, device="cuda") * (position // (2 * B))
    counters = torch.zeros(B * K, dtype=torch.int32, device="cuda")
    for window, softcap in ((1000, None), (77, 20.0)):
        options = {"scale": D**-0.5, "window": window, "softcap": softcap}
        expected = decode_attention_reference(q, keys, values, at, start, **options)
        for _ in range(2):
            close(decode_attention(q, keys, values, at, start, **options, counters=counters), expected, dtype)
        assert not counters.any()
        angle = torch.rand(2048, D // 4, device="cuda", generator=generator) * 6
        tables, norms = (angle.cos(), angle.sin()), {"q_weight": q[0, 0, 0].float().to(dtype), "k_weight": k[0, 0, 0]}
        found, truth = [], []
        for run, device in ((found, "cuda"), (truth, "cpu")):  # the CPU takes the reference
            given = [t.to(device) for t in (q, k, v, *tables, keys, values, at, start)]
            moved = {name: w.to(device) for name, w in norms.items()}
            run += [append_and_attend(*given, **options, **moved), given[5], given[6]]
        for a, b in zip(found, truth, strict=True):
            close(a.cpu(), b, dtype)


def test_choose_greedily():
    logits = torch.randn(7, 128_256, device="cuda")
    logits[1, 7], logits[2, -1], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 77] = logits[4, 99_999] = 50.0
    eos = torch.tensor([5, int(logits[0].argmax())], device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        states = []
        for choose in (choose_greedily, choose_greedily_reference):
            state = [torch.zeros(7, dtype=torch.long, device="cuda") for _ in "tf"] + [torch.arange(7).cuda() == 5]
            for _ in range(2):
                choose(logits.to(dtype), *state, eos, 3)
            states.append(state)
        assert all(map(torch.equal, *states))
