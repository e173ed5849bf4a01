"""LigerMixtral and LigerQwen3Moe against transformers: the same folder, the same numbers."""

from __future__ import annotations

import copy

import family_checks as check
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ligermodels import CheckpointError, ConfigError, LigerError, LigerMixtral, LigerQwen3Moe, from_pretrained
from ligermodels.checkpoints_convert.hf import open_checkpoint
from ligermodels.checkpoints_convert.rewrites import stacked_experts
from ligermodels.layers.memory import LEVELS
from ligermodels.layers.moe import Routing, load_balancing_loss
from ligermodels.training.data import Document, Loader
from ligermodels.training.loop import backward, evaluate

SMALL = {k: v for k, v in TINY.items() if k not in ("attention_bias", "mlp_bias")} | {"num_hidden_layers": 2}
MIXTRAL = SMALL | {
    "model_type": "mixtral", "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02, "output_router_logits": False, "sliding_window": None,
}  # fmt: skip
QWEN = SMALL | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.02, "output_router_logits": False, "mlp_only_layers": [],
    "attention_bias": False,
}  # fmt: skip
ASK = {"output_router_logits": True}
VARIANTS = {
    "mixtral": MIXTRAL,
    "mixtral, auxiliary loss": MIXTRAL | ASK,
    "mixtral, all experts, window, tied": MIXTRAL
    | {"num_experts_per_tok": 4, "sliding_window": 8, "tie_word_embeddings": True},
    "qwen3": QWEN,
    "qwen3, auxiliary loss": QWEN | ASK | {"norm_topk_prob": False},
    "qwen3, plain layers": QWEN | ASK | {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    "qwen3, no sparse layer": QWEN | {"mlp_only_layers": [0, 1]},
    "qwen3, window, biases": QWEN | {"use_sliding_window": True, "sliding_window": 8, "attention_bias": True},
}
CLASSES = {"mixtral": LigerMixtral, "qwen3_moe": LigerQwen3Moe}
ONE_OF_EACH = pytest.mark.parametrize("config", [MIXTRAL, QWEN], ids=list(CLASSES))


@pytest.fixture(params=VARIANTS, ids=str)
def pair(request, tmp_path):
    return check.make_pair(VARIANTS[request.param], tmp_path)


@pytest.fixture(params=["mixtral", "qwen3"], ids=str)
def ours(request, tmp_path):
    return check.make_pair(VARIANTS[request.param], tmp_path)[1]


def loss_and_gradients(model, ids, **options):
    out = model(ids, labels=ids, **options)
    return out.loss, torch.autograd.grad(out.loss, list(model.parameters()))


def test_logits_loss_and_all_gradients_equal_transformers(pair, ids):
    check.check_logits_loss_gradients(*pair, ids)


def test_generation_with_cache_and_padding_equals_transformers(pair, ids):
    for model in pair:  # transformers cannot: its auxiliary loss of a cached step fails on the mask
        model.config.output_router_logits = False
    check.check_generation(*pair, ids)


def test_what_we_save_transformers_loads(pair, ids, tmp_path):
    check.check_round_trip(*pair, ids, tmp_path / "saved")


def test_left_padding_leaves_the_real_positions_alone(ours, ids):
    check.check_left_padding(ours, ids)


def test_cached_chunks_equal_one_pass(ours, ids):
    check.check_cached_chunks(ours, ids)


def test_packed_documents_equal_separate_runs(ours, ids):
    check.check_packing(ours, ids)


def test_bf16_is_as_close_to_the_truth_as_transformers_bf16(ours, ids, tmp_path):
    check.check_bf16(tmp_path, ids)


@pytest.mark.parametrize("name", check.published(*CLASSES))
def test_published_checkpoints_have_their_parameter_count(name):
    entry = check.published(*CLASSES)[name]
    check.check_parameter_count(CLASSES[entry["config"]["model_type"]], entry)


@pytest.mark.parametrize("kind", CLASSES)
def test_keys_that_a_file_lacks_have_transformers_defaults(kind):
    from transformers import AutoConfig

    expected = AutoConfig.for_model(kind).to_dict()
    expected["num_experts"] = expected["num_local_experts"]
    ours = CLASSES[kind].config_class.from_hf({"model_type": kind}).to_hf()
    derived = {"architectures", "head_dim", "sliding_window", "rope_scaling", "torch_dtype"}
    shared = (ours.keys() & expected.keys()) - derived
    assert len(shared) >= 20
    assert {k: ours[k] for k in shared} == {k: expected[k] for k in shared}


# ------------------------------------------------------------------------------------------------------------- files


@ONE_OF_EACH
def test_stacked_tensors_of_transformers_5_load_too(config, ids, tmp_path):
    hf, ours = check.make_pair(config, tmp_path / "published")
    hf.save_pretrained(tmp_path / "stacked", save_original_format=False)  # its config.json says num_local_experts
    names = load_file(tmp_path / "stacked" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    again = from_pretrained(tmp_path / "stacked")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


@ONE_OF_EACH
def test_experts_are_read_straight_into_their_place_from_many_shards(config, tmp_path):
    hf, ours = check.make_pair(config, tmp_path / "one")
    hf.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    experts = ours.model.layers[0].mlp.experts
    info = stacked_experts(open_checkpoint(tmp_path / "many")).tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert info.shape == experts.gate_up_proj.shape
    assert [part.shape for part in info.parts] == [experts.gate_up_proj[0].chunk(2)[0].shape] * 2 * info.shape[0]
    assert len({part.file for part in info.parts}) > 1
    again = from_pretrained(tmp_path / "many")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    half = from_pretrained(tmp_path / "many", dtype="bfloat16")
    assert torch.equal(half.model.layers[0].mlp.experts.down_proj, experts.down_proj.bfloat16())


@ONE_OF_EACH
def test_experts_that_do_not_fit_are_named(config, tmp_path):
    _, ours = check.make_pair(config, tmp_path)
    names = [n for n in load_file(tmp_path / "model.safetensors") if "layers.1" in n and "experts" in n]
    down = next(n for n in names if ".experts.2." in n and ("w2" in n or "down" in n))
    last = [n for n in names if f".experts.{len(ours.model.layers[0].mlp.gate.weight) - 1}." in n]
    for change, message in [
        (lambda t: t.pop(down), "layers.1 1 tensors are missing, the first is down of expert 2"),
        (lambda t: t.update({down: t[down][:-1].clone()}), rf"{down} is \[63, .*\[64, "),
        (lambda t: [t.pop(n) for n in last], "other shape: model.layers.1.mlp.experts.gate_up_proj"),
    ]:
        _, ours = check.make_pair(config, tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            from_pretrained(tmp_path)


# --------------------------------------------------------------------------------------------------- auxiliary loss


@ONE_OF_EACH
def test_auxiliary_loss_leaves_padding_out_and_reaches_the_routers(config, ids, tmp_path):
    hf, ours = check.make_pair(config | ASK, tmp_path)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    labels = ids.clone()
    labels[0, :7] = -100  # the first token after the padding would be predicted from padding
    expected = hf(input_ids=ids, attention_mask=mask, labels=labels)
    expected.loss.backward()
    out = ours(ids, attention_mask=mask, labels=labels)
    assert abs(out.aux_loss - expected.aux_loss) <= 1e-5
    assert abs(out.loss - expected.loss) <= 1e-5
    out.loss.backward()
    for theirs, own in zip(hf.model.layers, ours.model.layers, strict=True):
        assert check.relative(own.mlp.gate.weight.grad, theirs.mlp.gate.weight.grad) <= 2e-5
    assert abs(ours(ids).aux_loss - out.aux_loss) > 1e-3  # with the padding it is another number
    with torch.no_grad():
        cache = ours.make_cache(2, 40)
        ours(ids[:, :30], attention_mask=mask[:, :30], cache=cache)
        tail = ours(ids[:, 30:], attention_mask=mask, cache=cache)
    assert tail.aux_loss.isfinite() and tail.logits.shape[1] == 10


@ONE_OF_EACH
def test_auxiliary_loss_of_packed_rows_leaves_padding_out_as_transformers_does(config, ids, tmp_path):
    """Documents of 20 and 11 tokens: a row each with a mask there, one row with 9 of padding here."""
    hf, ours = check.make_pair(config | ASK, tmp_path)
    mask = (torch.arange(20) < torch.tensor([[20], [11]])).long()
    rows = ids[:, :20] * mask
    labels = rows.masked_fill(mask == 0, -100)
    labels[0, :8] = -100  # a prompt, which is no padding
    expected = hf(input_ids=rows, attention_mask=mask, labels=labels)
    packed, kept = rows.view(1, 40), mask.view(1, 40)
    for bounds in ([0, 20, 31, 40], [0, 20, 40]):  # padding as a document of its own, or at the end of one
        out = ours(packed, labels=labels.view(1, 40), attention_mask=kept, cu_seqlens=torch.tensor(bounds))
        assert abs(out.aux_loss - expected.aux_loss) <= 1e-5 and abs(out.loss - expected.loss) <= 1e-5
    assert abs(ours(packed, cu_seqlens=torch.tensor([0, 20, 31, 40])).aux_loss - out.aux_loss) > 1e-3
    with pytest.raises(LigerError, match="padding before a token of the same document"):
        ours(packed, attention_mask=kept.flip(1), cu_seqlens=torch.tensor([0, 20, 40]))


@ONE_OF_EACH
def test_training_weighs_the_auxiliary_loss_alike_however_a_batch_is_cut_and_padded(config):
    cls = CLASSES[config["model_type"]]
    model = cls(cls.config_class.from_hf(config | ASK | {"router_aux_loss_coef": 1.0})).train()
    source = [{"ids": list(range(3 + i, 13 + i))} for i in range(4)]

    def loss_of(batch, seq):
        model.zero_grad()
        data = Loader(source, lambda r: Document(r["ids"], r["ids"]), batch=batch, seq=seq, shuffle=False, epochs=1)
        batches = list(data)
        loss = backward(model, batches)
        assert evaluate(model, batches) == pytest.approx(loss.item(), rel=1e-5)
        return loss.item()

    plain = sum(model(torch.tensor([r["ids"]]), labels=torch.tensor([r["ids"]])).loss.item() for r in source) / 4
    assert loss_of(1, 10) == pytest.approx(plain, rel=1e-5)  # four micro-batches
    assert loss_of(1, 19) == pytest.approx(plain, rel=1e-5)  # the same, and padding
    assert loss_of(4, 10) == pytest.approx(loss_of(4, 19), rel=1e-5)


@ONE_OF_EACH
def test_auxiliary_loss_comes_only_when_asked_for(config, ids, tmp_path):
    _, ours = check.make_pair(config, tmp_path)
    plain = ours(ids, labels=ids)
    assert plain.aux_loss is None
    ours.config.output_router_logits = True
    asked = ours(ids, labels=ids)
    assert torch.allclose(asked.loss, plain.loss + 0.02 * asked.aux_loss, atol=1e-6)
    assert ours(ids).loss is None and torch.allclose(ours(ids).aux_loss, asked.aux_loss)


@ONE_OF_EACH
def test_nothing_but_padding_is_a_zero_loss_with_zero_gradients(config, ids):
    cls = CLASSES[config["model_type"]]
    model = cls(cls.config_class.from_hf(config | {"output_router_logits": True})).train()
    with pytest.warns(UserWarning, match="no label is supervised"):
        out = model(ids, attention_mask=torch.zeros_like(ids), labels=torch.full_like(ids, -100))
    out.loss.backward()
    assert out.loss == 0 and out.aux_loss == 0
    assert all(not p.grad.any() for p in model.parameters())


def test_equally_busy_experts_have_the_least_auxiliary_loss():
    even = Routing(torch.zeros(8, 4), torch.arange(16, dtype=torch.int32).remainder(4).view(8, 2))
    assert load_balancing_loss([even, even]) == 2
    uneven = Routing(torch.tensor([[9.0, 9.0, 0.0, 0.0]]).expand(8, 4), even.experts * 0 + torch.arange(2))
    assert load_balancing_loss([uneven]) > 3.9


# ---------------------------------------------------------------------------------------------------------- behaviour


def test_the_number_of_an_expert_does_not_matter(ours, ids):
    with torch.no_grad():
        expected = ours(ids).logits
        for layer in ours.model.layers:
            order = torch.randperm(len(layer.mlp.gate.weight), generator=torch.Generator().manual_seed(3))
            for weight in layer.mlp.parameters():
                weight.copy_(weight[order].clone())
        assert (ours(ids).logits - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("level", LEVELS)
def test_activation_memory_levels_give_the_same_gradients(ours, ids, level):
    ours.config.output_router_logits = True
    loss, expected = loss_and_gradients(ours, ids)
    ours.set_activation_memory(level)
    again, found = loss_and_gradients(ours, ids)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_router_noise_is_transformers(ids, tmp_path):
    config = MIXTRAL | {"router_jitter_noise": 0.3}
    hf, ours = check.make_pair(config, tmp_path)
    for level in ("fast", "block"):
        ours.set_activation_memory(level)
        losses, gradients = [], []
        for model in (hf, ours):
            model.train()
            torch.manual_seed(5)
            loss = model(input_ids=ids, labels=ids).loss
            weights = [model.model.layers[0].mlp.gate.weight, model.model.layers[0].mlp.experts.down_proj]
            losses.append(loss.detach())
            gradients.append(torch.autograd.grad(loss, weights))
        assert abs(losses[0] - losses[1]) <= 1e-5
        assert all(check.relative(a, b) <= 2e-5 for a, b in zip(*gradients, strict=True))
    assert abs(ours.eval()(ids, labels=ids).loss - losses[1]) > 1e-3


class Wrapped(torch.nn.Module):
    """A Linear with something trainable beside it, as LoRA does it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.base(x) * self.scale


def test_frozen_experts_and_wrapped_projections_train(ours, ids):
    expected = ours(ids, labels=ids).loss
    ours.requires_grad_(False)
    for layer in ours.model.layers:
        layer.self_attn.q_proj, layer.mlp.gate = Wrapped(layer.self_attn.q_proj), Wrapped(layer.mlp.gate)
    loss = ours(ids, labels=ids).loss
    assert torch.equal(loss, expected)
    loss.backward()
    got = {name for name, p in ours.named_parameters() if p.grad is not None}
    assert got == {name for name, _ in ours.named_parameters() if name.endswith(".scale")}
    assert all(p.grad.abs() > 0 for name, p in ours.named_parameters() if name in got)


def test_a_compiled_model_gives_the_same_loss(ours, ids):
    torch._dynamo.reset()
    loss = torch.compile(ours, backend="aot_eager")(ids, labels=ids).loss
    assert abs(loss - ours(ids, labels=ids).loss) <= 1e-5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok.*num_local_experts 4, found 5"),
        (MIXTRAL | {"num_experts_per_tok": 0}, "num_experts_per_tok.*found 0"),
        (MIXTRAL | {"sliding_window": 0}, "sliding_window.*0"),
        (MIXTRAL | {"router_jitter_noise": 1.0}, "router_jitter_noise.*1.0"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act 'gelu'.*mixtral"),
        (MIXTRAL | {"output_router_logits": 1}, "output_router_logits must be bool"),
        (QWEN | {"num_experts_per_tok": 9}, "num_experts_per_tok.*num_experts 8, found 9"),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step.*0"),
        (QWEN | {"moe_intermediate_size": 0}, "moe_intermediate_size.*0"),
        (QWEN | {"num_experts": -1}, "num_experts.*-1"),
        (QWEN | {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of int"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        CLASSES[config["model_type"]].config_class.from_hf(config)


def test_a_new_model_has_all_weights_drawn():
    torch.manual_seed(0)
    model = LigerMixtral(LigerMixtral.config_class.from_hf(copy.deepcopy(MIXTRAL) | {"initializer_range": 0.05}))
    for name, p in model.named_parameters():
        assert "norm" in name or 0.04 < p.std() < 0.06, name


# -------------------------------------------------------------------------------------------------- on a CUDA device

WIDE = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}  # fmt: skip
LARGER = {
    "mixtral": MIXTRAL | ASK | WIDE | {"intermediate_size": 256, "num_local_experts": 8},
    "qwen3_moe": QWEN | ASK | WIDE | {"moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 4},
}


@pytest.fixture(params=LARGER, ids=str)
def load(request, tmp_path):
    """load("ours" | "hf", dtype): the same model on the device, its logits of a size that trained models have."""
    hf = check.scaled_hf(LARGER[request.param])
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if "norm" not in name:
                p.mul_(0.4)
    hf.save_pretrained(tmp_path)

    def load(whose, dtype=torch.float32):
        if whose == "ours":
            return from_pretrained(tmp_path, dtype=dtype, device="cuda")
        return type(hf).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").cuda()

    return load


@pytest.fixture
def many_ids():
    return torch.randint(3, 512, (2, 512), generator=torch.Generator().manual_seed(0)).cuda()


@pytest.mark.gpu
def test_on_cuda_fp32_equals_transformers(load, many_ids):
    hf, ours = load("hf"), load("ours")
    expected = hf(input_ids=many_ids, labels=many_ids)
    out = ours(many_ids, labels=many_ids, logits_to_keep=512)
    assert (out.logits - expected.logits).abs().max() <= 5e-4
    assert abs(out.loss - expected.loss) <= 1e-5 and abs(out.aux_loss - expected.aux_loss) <= 1e-5
    expected.loss.backward()
    out.loss.backward()
    gradients = {name: p.grad for name, p in hf.named_parameters()}
    errors = {name: check.relative(p.grad, gradients[name]) for name, p in ours.named_parameters()}
    assert max(errors.values()) <= 1e-4, errors
    for model in (hf, ours):
        model.config.output_router_logits = False
    prompt = many_ids[:, :16]
    options = {"max_new_tokens": 24}
    expected = hf.generate(prompt, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    assert ours.generate(prompt, eos_token_id=[], **options).tolist() == expected.tolist()


@pytest.mark.gpu
def test_on_cuda_bf16_is_as_close_to_the_truth_as_transformers(load, many_ids):
    hf, ours = load("hf", torch.bfloat16), load("ours", torch.bfloat16)
    truth = copy.deepcopy(hf).float()
    with torch.no_grad():
        reference = truth(many_ids).logits
        theirs, own = ((model(many_ids).logits - reference).square().mean().sqrt() for model in (hf, ours))
    assert own <= 1.25 * theirs


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["fast", "mlp", "block"])
def test_on_cuda_a_step_repeats_its_bits_and_waits_for_nothing(load, many_ids, level):
    ours = load("ours", torch.bfloat16)
    ours.set_activation_memory(level)
    loss, gradients = loss_and_gradients(ours, many_ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again, found = loss_and_gradients(ours, many_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


@pytest.mark.gpu
def test_on_cuda_a_step_can_be_captured(load, many_ids):
    ours = load("ours", torch.bfloat16)
    static = many_ids.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss_and_gradients(ours, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradients = loss_and_gradients(ours, static)
    static.copy_(many_ids.flip(1))  # other tokens, other experts
    graph.replay()
    expected_loss, expected = loss_and_gradients(ours, static)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
