"""generate and stream: stopping, padding, sampling limits, errors; then against transformers."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ligermodels.errors import LigerError
from ligermodels.generation import generate, stream

V = 8


class Cache:
    def __init__(self, batch, length):
        self.length, self.room = 0, length
        self.ids = torch.zeros(batch, 0, dtype=torch.long)


class Fake(nn.Module):
    """A model whose logits are a function of the real tokens so far: it checks mask, positions and cache on the way."""

    def __init__(self, logits, vocab_size=V, generation_config=None, **config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.logits = logits  # list of real token ids -> (V,) tensor
        self.config = SimpleNamespace(vocab_size=vocab_size, **{"eos_token_id": None, "pad_token_id": None, **config})
        self.generation_config = generation_config or {}
        self.fed = []  # tokens of each call

    def make_cache(self, batch_size, max_length):
        return Cache(batch_size, max_length)

    def forward(self, input_ids, *, attention_mask, position_ids, cache, logits_to_keep):
        assert not self.training and not torch.is_grad_enabled() and logits_to_keep == 1
        self.fed.append(input_ids)
        cache.ids = torch.cat([cache.ids, input_ids], dim=1)
        cache.length += input_ids.shape[1]
        assert cache.length <= cache.room
        mask = torch.ones_like(cache.ids) if attention_mask is None else attention_mask
        assert mask.shape == cache.ids.shape
        assert (position_ids is None) == (attention_mask is None)
        if position_ids is not None:
            assert torch.equal(position_ids, (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :])
        rows = [self.logits(ids[keep.bool()].tolist()) for ids, keep in zip(cache.ids, mask, strict=True)]
        return SimpleNamespace(logits=torch.stack(rows)[:, None])


def script(*tokens):
    """After a prompt of any length, continue with these tokens: row r follows tokens[its first id]."""

    def logits(ids, start={}):  # noqa: B006 - the memory of where each prompt ended
        length = start.setdefault(ids[0], len(ids))
        return nn.functional.one_hot(torch.tensor(tokens[ids[0]][len(ids) - length]), V).float()

    return logits


def hashed(ids):
    """Deterministic logits that depend on every token and its place."""
    seed = sum((i + 1) * 31 * token for i, token in enumerate(ids)) + 1000 * len(ids)
    return torch.randn(V, generator=torch.Generator().manual_seed(seed))


class Constant(Fake):
    """The same logits (V,) for every row at every step."""

    def __init__(self, row):
        super().__init__(None, vocab_size=len(row))
        self.row = row

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.row.expand(len(input_ids), 1, -1))


def constant(*probabilities):
    return Constant(torch.tensor(probabilities, dtype=torch.float64).log().float())


PROMPT = torch.tensor([[1, 2, 3]])


# ------------------------------------------------------------------------------------------------------- stopping


def test_greedy_takes_the_likeliest_and_returns_the_prompt_too():
    out = generate(Fake(hashed), PROMPT, max_new_tokens=5)
    ids = PROMPT[0].tolist()
    for _ in range(5):
        ids.append(int(hashed(ids).argmax()))
    assert out.tolist() == [ids] and out.dtype == torch.int64


def test_each_row_ends_at_its_own_eos_then_gives_pad_and_the_loop_ends_with_the_last():
    model = Fake(script([5, 7, 1, 1, 1, 1, 1, 1], [4, 5, 6, 5, 7, 2, 2, 2]), eos_token_id=7, pad_token_id=0)
    out = generate(model, torch.tensor([[0, 3], [1, 3]]), max_new_tokens=8)
    assert out.tolist() == [[0, 3, 5, 7, 0, 0, 0], [1, 3, 4, 5, 6, 5, 7]]
    assert len(model.fed) == 5


@pytest.mark.parametrize("eos", [[6, 7], (7, 6), [5, 6, 7]])
def test_any_of_several_eos_ids_stops(eos):
    out = generate(Fake(script([4, 6, 1, 1])), torch.tensor([[0]]), max_new_tokens=4, eos_token_id=eos)
    assert out.tolist() == [[0, 4, 6]]


@pytest.mark.parametrize(
    ("argument", "generation_config", "config", "stops_at"),
    [
        (None, {}, 6, 6),
        (None, {"eos_token_id": [5]}, 6, 5),
        (None, {"eos_token_id": None}, 6, 6),
        (4, {"eos_token_id": [5]}, 6, 4),
        ([], {"eos_token_id": [5]}, 6, 3),
        (None, {}, None, 3),
    ],
)
def test_eos_comes_from_the_argument_then_generation_config_then_config(argument, generation_config, config, stops_at):
    model = Fake(script([4, 5, 6, 3]), eos_token_id=config, generation_config=generation_config)
    out = generate(model, torch.tensor([[0]]), max_new_tokens=4, eos_token_id=argument)
    assert out[0, -1] == stops_at


@pytest.mark.parametrize(
    ("argument", "config", "pad"), [(None, None, 7), (None, 2, 2), (3, 2, 3), (7, 2, 7), (None, -1, 7), (None, V, 7)]
)
def test_pad_comes_from_the_argument_then_config_then_the_first_eos(argument, config, pad):
    model = Fake(script([7, 1, 1], [4, 4, 4]), eos_token_id=[7, 6], pad_token_id=config)
    out = generate(model, torch.tensor([[0], [1]]), max_new_tokens=3, pad_token_id=argument)
    assert out.tolist() == [[0, 7, pad, pad], [1, 4, 4, 4]]
    assert int(max(ids.max() for ids in model.fed)) < V


def test_an_eos_inside_the_prompt_does_not_stop():
    out = generate(Fake(script([4, 5]), eos_token_id=3), torch.tensor([[0, 3, 3]]), max_new_tokens=2)
    assert out.tolist() == [[0, 3, 3, 4, 5]]


@pytest.mark.parametrize("new", [0, 1])
def test_few_new_tokens(new):
    model = Fake(hashed)
    out = generate(model, PROMPT, max_new_tokens=new)
    assert out.shape == (1, 3 + new) and len(model.fed) == new
    out[0, 0] = 0
    assert PROMPT[0, 0] == 1


def test_stream_yields_what_generate_returns_and_only_on_demand():
    model = Fake(hashed)
    prompt = torch.tensor([[1, 2], [3, 4]])
    tokens = stream(model, prompt, max_new_tokens=4)
    assert model.fed == []
    first = next(tokens)
    assert first.shape == (2,) and len(model.fed) == 1
    rest = torch.stack([first, *tokens], dim=1)
    assert torch.equal(rest, generate(model, prompt, max_new_tokens=4)[:, 2:])


# ------------------------------------------------------------------------------------------------------- batches


def test_unequal_prompts_padded_on_the_left_give_what_each_alone_gives():
    prompts = [[1], [2, 3, 4, 5], [6, 7, 1]]
    alone = [generate(Fake(hashed), torch.tensor([p]), max_new_tokens=6)[0, len(p) :] for p in prompts]
    ids = torch.tensor([[0] * (4 - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (4 - len(p)) + [1] * len(p) for p in prompts])
    for order in ([0, 1, 2], [2, 0, 1]):
        for dtype in (torch.int64, torch.bool, torch.float32):
            out = generate(Fake(hashed), ids[order], attention_mask=mask[order].to(dtype), max_new_tokens=6)
            assert torch.equal(out[:, 4:], torch.stack([alone[i] for i in order]))
            assert torch.equal(out[:, :4], ids[order])


def test_without_padding_neither_mask_nor_positions_are_passed_so_that_attention_may_be_plainly_causal():
    seen = []
    model = Fake(hashed)
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    generate(model, PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=2)
    assert [call["attention_mask"] for call in seen] == [call["position_ids"] for call in seen] == [None, None]


# ------------------------------------------------------------------------------------------------------- sampling


def draws(model, count=20_000, **options):
    """The next token, ``count`` times, as counts per id."""
    prompt = torch.zeros(count, 1, dtype=torch.long)
    out = generate(model, prompt, max_new_tokens=1, **{"temperature": 1.0, "seed": 7, **options})
    return out[:, -1].bincount(minlength=model.config.vocab_size)


def assert_frequencies(counts, probabilities):
    p = torch.tensor(probabilities, dtype=torch.float64)
    p, n = p / p.sum(), counts.sum()
    sigma = (n * p * (1 - p)).sqrt()
    assert (counts[p == 0] == 0).all()
    assert ((counts - n * p).abs() <= 4 * sigma).all(), (counts, n * p, sigma)


P = (0.4, 0.3, 0.15, 0.1, 0.05)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, [p**2 for p in P]),
        ({"temperature": 2}, [p**0.5 for p in P]),
        ({"top_k": 2}, (0.4, 0.3, 0, 0, 0)),
        ({"top_k": 0}, P),
        ({"top_k": 100}, P),
        ({"top_p": 0.6}, (0.4, 0.3, 0, 0, 0)),
        ({"top_p": 0.71}, (0.4, 0.3, 0.15, 0, 0)),
        ({"top_p": 1.0}, P),
        ({"top_k": 4, "top_p": 0.85}, (0.4, 0.3, 0.15, 0, 0)),  # of the four kept, three hold 0.85/0.95
        ({"temperature": 0.5, "top_p": 0.6}, (0.16, 0.09, 0, 0, 0)),  # 0.16/0.285 < 0.6 after the temperature
    ],
)
def test_20000_draws_lie_within_four_sigma(options, expected):
    assert_frequencies(draws(constant(*P), **options), expected)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 1e-6}, {"temperature": 1e-300}, {"top_k": 1}, {"top_p": 0}, {"top_p": 1e-9}],
)
def test_limits_that_mean_the_likeliest_token(options):
    assert draws(constant(0.2, 0.3, 0.35, 0.15), count=200, **options).tolist() == [0, 0, 200, 0]


def test_of_equal_scores_top_p_zero_takes_the_one_that_greedy_takes():
    for options in ({"temperature": 0}, {"top_p": 0}):
        assert draws(constant(0.1, 0.3, 0.3, 0.3), count=200, **options).tolist() == [0, 200, 0, 0]


def test_forbidden_tokens_are_never_drawn():
    counts = draws(constant(0.5, 0, 0.5, 0), top_k=4, top_p=0.999)
    assert_frequencies(counts, (0.5, 0, 0.5, 0))


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.6, "temperature": 0.7}])
def test_what_may_be_drawn_is_what_transformers_keeps(options):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for seed in range(20):
        logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2
        scores = TemperatureLogitsWarper(options.get("temperature", 1.0))(None, logits[None])
        if "top_k" in options:
            scores = TopKLogitsWarper(options["top_k"])(None, scores)
        if "top_p" in options:
            scores = TopPLogitsWarper(options["top_p"])(None, scores)
        assert_frequencies(
            draws(Fake(lambda ids, row=logits: row), count=4000, **options), scores[0].softmax(-1).tolist()
        )


def test_a_seed_repeats_and_leaves_the_global_generator_alone():
    prompt = torch.zeros(4, 1, dtype=torch.long)
    before = torch.get_rng_state()
    a, b, c = (generate(Fake(hashed), prompt, max_new_tokens=9, temperature=1.5, seed=s) for s in (3, 3, 4))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_torch_manual_seed_rules():
    def run():
        torch.manual_seed(5)
        return generate(Fake(hashed), PROMPT, max_new_tokens=9, temperature=1.5)

    assert torch.equal(run(), run())


# ------------------------------------------------------------------------------------------ the model's state


def test_training_flags_come_back_whether_the_stream_ends_breaks_or_fails():
    model = Fake(hashed)
    model.part = nn.Dropout()
    model.train()
    model.part.eval()  # frozen by its owner: it must stay so

    def flags():
        return model.training, model.part.training

    generate(model, PROMPT, max_new_tokens=2)
    assert flags() == (True, False)
    tokens = stream(model, PROMPT, max_new_tokens=2)
    next(tokens)
    assert flags() == (False, False) and torch.is_grad_enabled()
    tokens.close()
    assert flags() == (True, False)
    model.logits = lambda ids: torch.full((V,), math.nan)
    with pytest.raises(LigerError):
        generate(model, PROMPT, max_new_tokens=2)
    assert flags() == (True, False)


def test_the_ids_may_go_into_a_training_step():
    out = generate(Fake(hashed), PROMPT, max_new_tokens=2)
    embedding = nn.Embedding(V, 2)
    embedding(out).sum().backward()
    assert embedding.weight.grad is not None


def test_inputs_are_not_changed():
    ids, mask = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 1]])
    generate(Fake(hashed), ids, attention_mask=mask, max_new_tokens=3)
    assert ids.tolist() == [[0, 1, 2]] and mask.tolist() == [[0, 1, 1]]


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", x) for x in (-1, -1e-9, math.nan, math.inf, "1", True, None)),
        *(("top_k", x) for x in (-1, 2.0, True, "5")),
        *(("top_p", x) for x in (-0.1, 1.1, math.nan, True, "0.5")),
        *(("max_new_tokens", x) for x in (-1, 1.5, None, True)),
        *(("eos_token_id", x) for x in ("2", 1.0, [1, "2"], True)),
        *(("pad_token_id", x) for x in (-1, V, 1.0)),
        *(("seed", x) for x in ("a", 1.5, 2**70)),
        *(("attention_mask", x) for x in ([[1, 1, 1]], torch.ones(1, 2), torch.ones(3), torch.tensor([[0, 0, 0]]))),
        ("attention_mask", torch.tensor([[1, 2, 1]])),
        ("attention_mask", torch.tensor([[0.0, -1e9, 0.0]])),
    ],
)
def test_a_bad_argument_is_named_at_the_call(name, value):
    options = {"max_new_tokens": 2, name: value}
    for function in (stream, generate):
        with pytest.raises(LigerError, match=name):
            function(Fake(hashed), PROMPT, **options)


def test_numpy_integers_and_ids_that_no_token_has_are_taken():
    numpy = pytest.importorskip("numpy")
    options = {"max_new_tokens": numpy.int64(2), "eos_token_id": [numpy.int64(3), -1, 10**30], "top_k": numpy.int32(1)}
    plain = {"max_new_tokens": 2, "eos_token_id": 3, "top_k": 1}
    assert torch.equal(generate(Fake(hashed), PROMPT, **options), generate(Fake(hashed), PROMPT, **plain))


@pytest.mark.parametrize(
    "ids",
    [
        [[1, 2]],
        torch.tensor([1, 2]),
        torch.zeros(1, 0, dtype=torch.long),
        torch.zeros(0, 2, dtype=torch.long),
        torch.tensor([[1.0]]),
        torch.tensor([[True]]),
        torch.tensor([[1, V]]),
        torch.tensor([[-1, 1]]),
    ],
)
def test_a_bad_prompt_is_named(ids):
    with pytest.raises(LigerError, match="input_ids"):
        generate(Fake(hashed), ids, max_new_tokens=2)
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.numel():
        with pytest.raises(LigerError, match="input_ids"):
            generate(Fake(hashed), ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)


@pytest.mark.parametrize("mask", [[1, 1, 0], [0, 1, 0], [1, 0, 1]])
def test_padding_on_the_right_is_refused_with_what_to_do(mask):
    with pytest.raises(LigerError, match=r"attention_mask.*left"):
        generate(Fake(hashed), PROMPT, attention_mask=torch.tensor([mask]), max_new_tokens=2)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_unusable_logits_are_an_error(value, temperature):
    def logits(ids):
        row = torch.full((V,), value) if value == -math.inf else hashed(ids)
        return row.index_fill(0, torch.tensor(3), value) if ids[0] == 2 else hashed(ids)

    with pytest.raises(LigerError, match=r"logits.*row\(s\) \[1\]"):
        generate(Fake(logits), torch.tensor([[1], [2]]), max_new_tokens=2, temperature=temperature)


def test_unusable_logits_of_a_row_that_has_ended_do_not_matter():
    def logits(ids):
        return script_row(ids) if ids[0] == 1 or len(ids) == 1 else torch.full((V,), math.nan)

    script_row = script([7, 0, 0], [4, 5, 7])
    out = generate(Fake(logits, eos_token_id=7, pad_token_id=0), torch.tensor([[0], [1]]), max_new_tokens=3)
    assert out.tolist() == [[0, 7, 0, 0], [1, 4, 5, 7]]


# ------------------------------------------------------------------------------------------------------- a real family


@pytest.fixture(scope="module")
def pair():
    """(transformers' tiny Llama, ours with the same weights)."""
    from family_checks import scaled_hf
    from tiny import TINY

    from ligermodels import LigerLlama, LlamaConfig

    hf = scaled_hf(TINY)
    ours = LigerLlama(LlamaConfig.from_hf(TINY))
    ours.load_state_dict(hf.state_dict())
    return hf, ours


PROMPTS = [[5, 17, 90], [3], [44, 8, 61, 13, 29, 70, 7], [9, 9]]


def left_padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def test_a_batch_of_unequal_prompts_equals_transformers_and_each_prompt_alone(pair):
    hf, ours = pair
    ids, mask = left_padded(PROMPTS)
    out = ours.generate(ids, attention_mask=mask, max_new_tokens=24, eos_token_id=[])
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(out, hf.generate(ids, attention_mask=mask, **options))
    for prompt, row in zip(PROMPTS, out, strict=True):
        prompt = torch.tensor([prompt])
        alone = ours.generate(prompt, max_new_tokens=24, eos_token_id=[])
        assert torch.equal(alone, hf.generate(prompt, attention_mask=torch.ones_like(prompt), **options))
        assert torch.equal(row[-24:], alone[0, -24:])
    steps = ours.stream(ids, attention_mask=mask, max_new_tokens=24, eos_token_id=[])
    assert torch.equal(out[:, -24:], torch.stack(list(steps), dim=1))


def test_several_eos_ids_end_the_rows_as_in_transformers(pair):
    hf, ours = pair
    ids, mask = left_padded(PROMPTS)
    free = ours.generate(ids, attention_mask=mask, max_new_tokens=24, eos_token_id=[])[:, ids.shape[1] :]
    eos = [int(free[0, 3]), int(free[2, 9])]  # so that rows end at different steps
    out = ours.generate(ids, attention_mask=mask, max_new_tokens=24, eos_token_id=eos, pad_token_id=1)
    expected = hf.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=eos, pad_token_id=1
    )
    assert torch.equal(out, expected)
    assert (out[:, -1] == 1).any()


def test_sampling_from_a_model_repeats_with_its_seed(pair):
    _, ours = pair
    ids, mask = left_padded(PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": 12, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    a, b, c = (ours.generate(ids, **options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.gpu
def test_a_step_waits_for_the_device_once(pair):
    """All host syncs of a step but the stopping check are errors here."""
    model = copy.deepcopy(pair[1]).to("cuda")
    ids = torch.tensor([PROMPTS[2]], device="cuda")
    tokens = stream(model, ids, max_new_tokens=8, temperature=0.8, top_k=20, top_p=0.9, seed=1, eos_token_id=[2])
    next(tokens)
    waits = []
    original = torch.Tensor.tolist
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")

    def allowed(tensor):
        torch.cuda.set_sync_debug_mode("default")
        waits.append(tensor)
        try:
            return original(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", allowed)
            for _ in range(3):
                next(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 3
