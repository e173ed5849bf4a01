"""LoRA beside PEFT: the same function, the same gradients, the same files; and what makes it cheap."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from family_checks import relative
from tiny import TINY
from torch.utils._python_dispatch import TorchDispatchMode

import ligermodels
from ligermodels import LigerError, LigerLlama, LlamaConfig
from ligermodels.kernels import linear_cross_entropy
from ligermodels.layers.memory import LEVELS
from ligermodels.training import lora
from ligermodels.training.lora import add_lora, load_adapter, lora_modules, merge_lora, save_adapter, unmerge_lora

TARGETS = ["q_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]


@pytest.fixture
def model(tiny_folder):
    return LigerLlama.from_pretrained(tiny_folder).train()


def randomise(model, seed=0):
    """B is 0 at the start, which hides faults."""
    generator = torch.Generator().manual_seed(seed)
    for module in lora_modules(model).values():
        for part in (module.lora_A, module.lora_B):
            part.weight.data.copy_(0.1 * torch.randn(part.weight.shape, generator=generator))


def peft_model(tiny_folder, **config):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(tiny_folder)
    peft = get_peft_model(hf, LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, **config))
    generator = torch.Generator().manual_seed(0)
    for name, p in peft.named_parameters():
        if "lora_" in name:
            p.data.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return peft


# ----------------------------------------------------------------------------------------------------------- arithmetic


def test_at_the_start_it_is_the_model_as_it_was(model, ids):
    with torch.no_grad():
        before = model(ids).logits
        add_lora(model, targets=TARGETS)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("rslora", [False, True])
def test_logits_loss_and_gradients_equal_peft(model, tiny_folder, tmp_path, ids, rslora):
    peft = peft_model(tiny_folder, r=4, lora_alpha=6, use_rslora=rslora)
    peft.save_pretrained(tmp_path)
    load_adapter(model, tmp_path)
    with torch.no_grad():
        assert (model(ids).logits - peft(ids).logits).abs().max() <= 2e-4
    expected = peft(input_ids=ids, labels=ids).loss
    loss = model(ids, labels=ids).loss
    assert abs(loss - expected) <= 1e-5
    expected.backward()
    loss.backward()
    theirs = {n.removeprefix("base_model.model."): p.grad for n, p in peft.named_parameters() if p.requires_grad}
    ours = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert {n.replace(".default", "") for n in theirs} == ours.keys()
    errors = {n: relative(ours[n.replace(".default", "")], g) for n, g in theirs.items()}
    assert max(errors.values()) <= 2e-5, errors


def test_the_head_with_soft_caps_and_sums_equals_the_merged_loss(ids):
    """Also over several slices of the tokens, which is how the logits are never whole."""
    torch.manual_seed(0)
    base = torch.nn.Linear(64, 97, bias=False)
    head = lora.LoraLinear(base, 4, 8)
    torch.nn.init.normal_(head.lora_B.weight, std=0.1)
    x, target = torch.randn(2, 40, 64), ids.masked_fill(ids % 5 == 0, -100)
    for reduction in ("mean", "sum"):
        for softcap in (None, 3.0):
            expected = linear_cross_entropy(x, head.merged().weight, target, reduction=reduction, softcap=softcap)
            for size in (lora.LOGITS, 97 * 7):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(lora, "LOGITS", size)
                    found = head.cross_entropy(x, target, reduction=reduction, softcap=softcap)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_dropout_acts_on_the_addition_alone_and_only_in_training():
    torch.manual_seed(0)
    module = lora.LoraLinear(torch.nn.Linear(8, 8), 2, 4, dropout=0.5)
    torch.nn.init.normal_(module.lora_B.weight)
    x = torch.randn(2000, 8)
    plain = torch.nn.functional.linear(x, module.weight, module.bias)
    low = module.eval()(x) - plain
    dropped = module.train()(x) - plain
    assert not torch.allclose(dropped, low)
    mean = torch.stack([module(x) - plain for _ in range(200)]).mean(0)
    assert relative(mean, low) < 0.15  # what is left is scaled up by 1 / (1 - p)


TEXT = [kind for kind, cls in ligermodels.MODELS.items() if not cls.text_prefix]  # the others are made of these


@pytest.mark.parametrize("kind", TEXT)
def test_every_family_hears_its_adapters(kind, ids):
    """No family may read the weight of a Linear past its module: merged and unmerged are one function."""
    cls = ligermodels.MODELS[kind]
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, head_dim=32)
    model = cls(cls.config_class(vocab_size=97, num_key_value_heads=2, pad_token_id=None, **sizes)).eval()
    with torch.no_grad():
        plain = model(ids).logits
        names = add_lora(model, rank=2, targets=r".*(layers\.\d+\..*|lm_head)")
        for name in names:
            randomise(model)
            for other in set(names) - {name}:
                torch.nn.init.zeros_(model.get_submodule(other).lora_B.weight)
            assert not torch.allclose(model(ids).logits, plain, rtol=0, atol=1e-6), f"{name} is not heard"
        randomise(model)
        adapted = model(ids)
        loss = model(ids, labels=ids).loss
        generated = model.generate(ids[:, :7], max_new_tokens=6, eos_token_id=[])
        merge_lora(model)
        assert not lora_modules(model)
        torch.testing.assert_close(model(ids).logits, adapted.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids, labels=ids).loss, loss, rtol=1e-5, atol=1e-5)
        assert torch.equal(model.generate(ids[:, :7], max_new_tokens=6, eos_token_id=[]), generated)


# ---------------------------------------------------------------------------------------------------------------- files


def test_peft_loads_what_is_saved(model, tiny_folder, tmp_path, ids):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    add_lora(model, rank=4, alpha=6, targets=TARGETS)
    randomise(model)
    save_adapter(model, tmp_path, base=str(tiny_folder))
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_folder), tmp_path).eval()
    with torch.no_grad():
        assert (model.eval()(ids).logits - peft(ids).logits).abs().max() <= 2e-4
        merged = peft.merge_and_unload()
        merge_lora(model)
        assert relative(model.lm_head.weight, merged.lm_head.weight) <= 1e-6


def test_saved_and_loaded_is_bit_equal(model, tiny_folder, tmp_path):
    add_lora(model, rank=3, alpha=7, targets=TARGETS, dropout=0.25, rslora=True, dtype="bfloat16")
    randomise(model)
    save_adapter(model, tmp_path)
    again = LigerLlama.from_pretrained(tiny_folder)
    assert load_adapter(again, tmp_path) == list(lora_modules(model))
    for name, module in lora_modules(model).items():
        other = lora_modules(again)[name]
        assert (other.rank, other.alpha, other.dropout, other.rslora) == (3, 7, 0.25, True)
        assert torch.equal(other.lora_A.weight, module.lora_A.weight) and other.lora_A.weight.dtype == torch.bfloat16
        assert torch.equal(other.lora_B.weight, module.lora_B.weight)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }


def test_an_adapter_of_another_model_is_refused_and_changes_nothing(model, tiny_folder, tmp_path):
    wide = LigerLlama(LlamaConfig.from_hf({**TINY, "intermediate_size": 128}))
    add_lora(wide, targets=["up_proj"])
    save_adapter(wide, tmp_path)
    with pytest.raises(LigerError, match=r"the adapter has \(128, 64\) for model.layers.0.mlp.up_proj, which is"):
        load_adapter(model, tmp_path)
    assert not lora_modules(model) and all(p.requires_grad for p in model.parameters())


def test_what_only_peft_can_do_is_refused(model, tmp_path):
    add_lora(model, targets=["q_proj"])
    save_adapter(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    merge_lora(model)
    with pytest.raises(LigerError, match="use_dora"):
        load_adapter(model, tmp_path)


# -------------------------------------------------------------------------------------------------------------- merging


def test_a_merged_model_saves_and_transformers_loads_it(model, tmp_path, ids):
    from transformers import AutoModelForCausalLM

    add_lora(model, targets=TARGETS)
    randomise(model)
    with torch.no_grad():
        expected = model.eval()(ids).logits
    with pytest.raises(LigerError, match="Merge adapters"):
        model.save_pretrained(tmp_path)
    merge_lora(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, expected, rtol=0, atol=2e-4
        )


def test_unmerging_restores_every_bit(model, ids):
    add_lora(model, targets=TARGETS)
    randomise(model)
    before = {n: p.clone() for n, p in model.named_parameters()}
    kept = merge_lora(model, keep=True)
    assert set(dict(model.named_parameters())) == {n for n in before if "lora_" not in n}
    unmerge_lora(model, kept)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert before.keys() == dict(model.named_parameters()).keys()
    kept = merge_lora(model, keep=True)
    model.double()
    with pytest.raises(LigerError, match=r"was torch.float32 on cpu when it was merged and is torch.float64"):
        unmerge_lora(model, kept)


def test_a_tied_head_is_untied_when_it_is_merged(tmp_path, ids):
    torch.manual_seed(0)
    model = LigerLlama(LlamaConfig.from_hf({**TINY, "tie_word_embeddings": True})).eval()
    embedding = model.model.embed_tokens.weight
    add_lora(model, targets=["lm_head"])
    randomise(model)
    assert model.lm_head.weight is embedding and not embedding.requires_grad
    with torch.no_grad():
        expected = model(ids).logits
    kept = merge_lora(model, keep=True)
    assert model.model.embed_tokens.weight is embedding and model.lm_head.weight is not embedding
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(LigerLlama.from_pretrained(tmp_path)(ids).logits, expected, rtol=0, atol=1e-5)
    unmerge_lora(model, kept)
    assert model.lm_head.weight is embedding and model.config.tie_word_embeddings


# -------------------------------------------------------------------------------------------------------- what it costs


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def test_the_logits_are_never_whole(model, ids, monkeypatch):
    monkeypatch.setattr(lora, "LOGITS", 97 * 8)
    add_lora(model, targets=["lm_head"])
    hidden = torch.randn(1, 400, 64)
    with Largest() as seen:
        model.loss(hidden, torch.randint(0, 97, (1, 400))).backward()
    assert seen.elements == 400 * 64 > 97 * 64  # the hidden states; the logits would be 400 · 97
    assert model.lm_head.weight.grad is None and model.lm_head.lora_B.weight.grad is not None


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("targets", ["all-linear", TARGETS])
def test_whatever_is_recomputed_gradients_are_those_of_the_adapters_alone(model, ids, targets, dropout):
    add_lora(model, targets=targets, dropout=dropout)
    randomise(model)
    adapters = {n for n, _ in model.named_parameters() if "lora_" in n}
    found = {}
    for level in LEVELS:
        torch.manual_seed(0)
        model.zero_grad()
        model.set_activation_memory(level)
        model(ids, labels=ids).loss.backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == adapters
        found[level] = {n: p.grad.clone() for n, p in model.named_parameters() if n in adapters}
    for level in LEVELS[1:]:
        for name, gradient in found["none"].items():
            torch.testing.assert_close(found[level][name], gradient, rtol=1e-5, atol=1e-7, msg=f"{level} {name}")


def test_a_linear_that_is_no_target_keeps_no_activation(model, ids):
    """The input of a frozen Linear is not saved: backward does not need it."""
    saved = {}

    def count(t):
        saved[t.untyped_storage().data_ptr()] = t.numel()
        return t

    sizes = {}
    for name, targets in {"one": ["layers.0.self_attn.q_proj"], "all": "all-linear"}.items():
        other = copy.deepcopy(model)
        other.set_activation_memory("none")
        add_lora(other, targets=targets)
        weights = {p.untyped_storage().data_ptr() for p in other.parameters()}
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            loss = other(ids, labels=ids).loss
        sizes[name] = sum(n for address, n in saved.items() if address not in weights)
        del loss
    assert sizes["one"] < sizes["all"] - 4 * ids.numel() * (112 + 128)  # no MLP product, no attention output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bf16_base_takes_adapters_of_either_dtype(model, ids, dtype):
    model.to(torch.bfloat16)
    add_lora(model, targets=TARGETS, dtype=dtype)
    randomise(model)
    loss = model(ids, labels=ids).loss
    loss.backward()
    for module in lora_modules(model).values():
        assert module.lora_A.weight.grad.dtype == module.lora_A.weight.dtype == getattr(torch, dtype)
        assert module.lora_A.weight.grad.abs().sum() > 0
    merge_lora(model)
    assert model.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert abs(model(ids, labels=ids).loss - loss) < 0.02 * loss


# -------------------------------------------------------------------------------------------------------------- targets


def test_all_linear_leaves_the_head_out(model):
    names = add_lora(model)
    assert len(names) == 4 * 7 and "lm_head" not in names
    assert add_lora(LigerLlama(model.config), targets=r".*layers\.[01]\.mlp\..*") == [
        f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["q_proj", "qproj"]}, "LoRA target qproj is no Linear of this model; it has down_proj, gate_proj"),
        ({"targets": "(("}, "not a regular expression"),
        ({"targets": []}, "none given"),
        ({"targets": ["embed_tokens"]}, "embed_tokens is no Linear"),
        ({"rank": 0}, "rank must be"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"alpha": 0}, "alpha must be"),
        ({"alpha": float("nan")}, "alpha must be"),
        ({"targets": None}, "targets must be"),
    ],
)
def test_wrong_arguments_are_named_and_change_nothing(model, options, message):
    with pytest.raises(LigerError, match=message):
        add_lora(model, **options)
    assert not lora_modules(model) and all(p.requires_grad for p in model.parameters())


def test_one_lora_at_a_time(model, tmp_path):
    with pytest.raises(LigerError, match="add_lora or load_adapter first"):
        save_adapter(model, tmp_path)
    add_lora(model)
    with pytest.raises(LigerError, match="merge it first"):
        add_lora(model)
