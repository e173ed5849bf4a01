"""generate and stream: stopping, padding, sampling limits, errors; then against transformers."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ligermodels import Tokenizer, decode, generation
from ligermodels.errors import LigerError
from ligermodels.generation import generate, stream
from ligermodels.layers.cache import SLACK, KVCache

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
        ({"min_p": 0.3}, (0.4, 0.3, 0.15, 0, 0)),
        ({"min_p": 0.0}, P),
        ({"min_p": 1.0}, (1, 0, 0, 0, 0)),
        ({"min_p": 0.3, "temperature": 0.5}, (0.16, 0.09, 0, 0, 0)),
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


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01, "repetition_penalty": 1.2}])
def test_with_a_seed_a_row_says_what_it_says_alone(options):
    """Whatever else is in the batch: also with prompts of other lengths, rows that end, rows in another order."""
    prompts = [[1, 2, 3], [5], [1, 2, 3], [4, 4, 6, 1], [2, 7]]
    options = {"max_new_tokens": 12, "temperature": 1.5, "seed": 3, "eos_token_id": [0], "pad_token_id": 0, **options}

    def said(numbers, **more):
        ids, mask = left_padded([prompts[n] for n in numbers])
        out = generate(Fake(hashed), ids, attention_mask=mask, **options | more)[:, ids.shape[1] :].tolist()
        return [row[: row.index(0)] if 0 in row else row for row in out]

    together = said(range(5))
    assert together[0] != together[2]  # the same prompt in another row
    for numbers in ([3], [4, 1, 2, 0], [2, 3]):
        assert said(numbers, row_numbers=numbers) == [together[n] for n in numbers]
    assert said(range(5), seed=4) != together


def test_the_rows_generators_are_split_mix_64():
    """The first numbers of seed 1234567, published as a check of implementations (rosettacode.org)."""
    state = torch.tensor([1234567]) + generation._STRIDE * torch.arange(1, 5)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [x % 2**64 for x in generation._split_mix(state).tolist()] == expected


def test_of_a_large_vocabulary_every_part_is_drawn_as_often_as_it_is_likely():
    p = torch.zeros(1000)
    p[[0, 255, 256, 511, 700, 999]] = torch.tensor([0.1, 0.2, 0.1, 0.2, 0.1, 0.3])
    assert_frequencies(draws(Constant(p.log())), p.tolist())


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
        *(("min_p", x) for x in (-0.1, 1.1, math.nan, True, "0.5")),
        *(("repetition_penalty", x) for x in (0, -1, math.inf, True, "1")),
        *(("max_new_tokens", x) for x in (-1, 1.5, None, True)),
        *(("eos_token_id", x) for x in ("2", 1.0, [1, "2"], True)),
        *(("pad_token_id", x) for x in (-1, V, 1.0)),
        *(("seed", x) for x in ("a", 1.5, 2**70, True)),
        *(("row_numbers", x) for x in (0, [0, 1], [-1], ["0"], [])),
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


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_that_of_transformers(pair, penalty):
    hf, ours = pair
    ids, mask = left_padded([p for p in PROMPTS if 0 not in p])
    out = ours.generate(ids, attention_mask=mask, max_new_tokens=24, eos_token_id=[], repetition_penalty=penalty)
    for row, prompt in zip(out, PROMPTS, strict=True):  # one by one: transformers also counts the padding as said
        prompt = torch.tensor([prompt])
        expected = hf.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, eos_token_id=None,
            pad_token_id=0, repetition_penalty=penalty,
        )  # fmt: skip
        assert torch.equal(row[ids.shape[1] :], expected[0, prompt.shape[1] :])


def test_log_probabilities_are_those_of_one_forward(pair):
    _, ours = pair
    ids, mask = left_padded(PROMPTS)
    free = ours.generate(ids, attention_mask=mask, max_new_tokens=12, eos_token_id=[])
    for options in ({}, {"temperature": 0.7, "top_k": 5, "seed": 1, "repetition_penalty": 1.2}):
        out, logprobs = ours.generate(
            ids, attention_mask=mask, max_new_tokens=12, eos_token_id=[int(free[1, -4])], logprobs=True, **options
        )
        assert logprobs.shape == (4, out.shape[1] - ids.shape[1]) and logprobs.dtype == torch.float32
        for row, prompt in enumerate(PROMPTS):
            answer = out[row, ids.shape[1] :].tolist()
            ended = answer.index(int(free[1, -4])) + 1 if int(free[1, -4]) in answer else len(answer)
            whole = torch.tensor([prompt + answer[:ended]])
            with torch.no_grad():
                expected = ours(whole).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            expected = expected.gather(1, whole[0, len(prompt) :, None])[:, 0]
            assert torch.allclose(logprobs[row, :ended], expected, atol=1e-4)
            assert not logprobs[row, ended:].any()


def test_a_stream_of_log_probabilities_yields_pairs(pair):
    _, ours = pair
    prompt = torch.tensor([PROMPTS[0]])
    out, logprobs = ours.generate(prompt, max_new_tokens=5, eos_token_id=[], logprobs=True)
    pairs = list(ours.stream(prompt, max_new_tokens=5, eos_token_id=[], logprobs=True))
    assert torch.equal(torch.stack([token for token, _ in pairs], 1), out[:, 3:])
    assert torch.equal(torch.stack([logprob for _, logprob in pairs], 1), logprobs)


# ------------------------------------------------------------------------------------------------------- the cache


def test_a_second_turn_on_a_warm_cache_runs_only_what_is_new(pair):
    _, ours = pair
    cache = ours.make_cache(1, 60)
    prompt = torch.tensor([PROMPTS[2]])
    first = ours.generate(prompt, max_new_tokens=10, eos_token_id=[], cache=cache)
    assert cache.length == first.shape[1] - 1  # the last token was never fed
    second = torch.cat([first, torch.tensor([[4, 5, 6]])], dim=1)
    lengths = []
    handle = ours.model.embed_tokens.register_forward_hook(lambda m, args, out: lengths.append(args[0].shape[1]))
    again = ours.generate(second, max_new_tokens=10, eos_token_id=[], cache=cache)
    handle.remove()
    assert lengths == [4] + [1] * 9
    assert torch.equal(again, ours.generate(second, max_new_tokens=10, eos_token_id=[]))
    other = torch.cat([prompt, torch.tensor([[9]])], dim=1)  # another continuation of the same prompt
    assert cache.rewind(prompt.shape[1]) == prompt.shape[1]
    assert torch.equal(
        ours.generate(other, max_new_tokens=10, eos_token_id=[], cache=cache),
        ours.generate(other, max_new_tokens=10, eos_token_id=[]),
    )


def test_a_cache_that_does_not_fit_is_an_error_at_the_call(pair):
    _, ours = pair
    prompt = torch.tensor([PROMPTS[0]])
    for cache, match in (
        ("cache", "make_cache"), (ours.make_cache(2, 9), "2 rows"), (ours.make_cache(1, 6), "need 7"),
    ):  # fmt: skip
        with pytest.raises(LigerError, match=match):
            ours.stream(prompt, max_new_tokens=5, cache=cache)
    cache = ours.make_cache(1, 9)
    ours(prompt, cache=cache)
    with pytest.raises(LigerError, match="rewind"):
        ours.stream(prompt, max_new_tokens=5, cache=cache)


def test_a_ring_holds_the_window_and_takes_the_last_positions_back():
    cache = KVCache(2, 1, 1000, 1, 2, dtype=torch.float32, device="cpu", windows=[None, 8])
    assert [k.shape[1] for k in cache.keys] == [1000, 8 + SLACK]
    history = torch.randn(1, 200, 1, 2)
    with torch.no_grad():
        for start, end in ((0, 5), (5, 6), (6, 60), (60, 61), (61, 100)):
            for layer, reach in ((0, start), (1, min(start, 7))):
                keys, values = cache.append(layer, history[:, start:end], -history[:, start:end])
                assert torch.equal(keys, history[:, start - reach : end]) and torch.equal(values, -keys)
            cache.advance(end - start)
        assert cache.rewind(100 - SLACK) == 100 - SLACK
        keys, _ = cache.append(1, history[:, :1], history[:, :1])
        assert torch.equal(keys[:, :-1], history[:, 100 - SLACK - 7 : 100 - SLACK])
    assert cache.rewind(cache.length - 3) == 0  # further back the ring has been written over
    with pytest.raises(LigerError, match="cannot be cut"):
        cache.rewind(1)


# ------------------------------------------------------------------------------------------------------- stop strings


def test_a_row_ends_with_the_token_that_completes_a_stop_string(tmp_path):
    from tiny_chat import write_tiny_chat_model

    tokenizer = Tokenizer.from_pretrained(write_tiny_chat_model(tmp_path))
    a, b, c, newline = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc\n")
    answers = {0: [a, newline, b, newline, newline, c, c], 1: [c, a, b, c, c, c, c]}
    model = Fake(None, vocab_size=264)
    model.logits = lambda ids: nn.functional.one_hot(torch.tensor(answers[ids[0]][len(ids) - 1]), 264).float()
    out = generate(
        model, torch.tensor([[0], [1]]), max_new_tokens=7, pad_token_id=9, tokenizer=tokenizer,
        stop_strings=["\n\n", "bc"],
    )  # fmt: skip
    assert out[:, 1:].tolist() == [[a, newline, b, newline, newline], [c, a, b, c, 9]]
    assert len(model.fed) == 5
    for options in ({"stop_strings": "x"}, {"stop_strings": [""], "tokenizer": tokenizer}, {"stop_strings": [1]}):
        with pytest.raises(LigerError, match="stop_strings"):
            generate(model, PROMPT, max_new_tokens=2, **options)


# ------------------------------------------------------------------------------------------------------- every family

STRETCH = [1.0 + i / 8 for i in range(8)]
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama, scaled rope": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1},
    "gemma": {"model_type": "gemma", **GELU},
    "gemma2": {"model_type": "gemma2", "sliding_window": 9, "query_pre_attn_scalar": 16, **GELU},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 7,
               **GELU},
    "phi3": {"model_type": "phi3", "sliding_window": 9, "partial_rotary_factor": 0.75},
    "phi3, longrope": {"model_type": "phi3", "original_max_position_embeddings": 16, "max_position_embeddings": 128,
                       "head_dim": None,
                       "rope_scaling": {"type": "longrope", "short_factor": STRETCH, "long_factor": STRETCH[::-1]}},
    "glm": {"model_type": "glm", "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": False},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                  "norm_topk_prob": True},
}  # fmt: skip


@pytest.fixture(params=FAMILIES, ids=str)
def family(request, tmp_path_factory):
    """(transformers' model, ours) of a tiny config that has this family's peculiarities."""
    from family_checks import make_pair
    from tiny import TINY

    config = {**TINY, **FAMILIES[request.param]}
    config = {key: value for key, value in config.items() if key != "head_dim" or value is not None}
    return make_pair(config, tmp_path_factory.mktemp("family"))


@pytest.mark.filterwarnings("ignore:.*max_position_embeddings")
def test_64_greedy_tokens_of_unequal_prompts_equal_transformers_and_a_device_step(family, monkeypatch):
    """Beyond every window. The step that a GPU would capture runs here too, fused and not."""
    hf, ours = family
    ids, mask = left_padded(PROMPTS)
    new = 64
    out = ours.generate(ids, attention_mask=mask, max_new_tokens=new, eos_token_id=[])
    longrope = ours.config.rope["rope_type"] == "longrope"
    # transformers keeps the short factors' keys beyond LongRoPE's border, unless it keeps none
    expected = hf.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0,
        use_cache=not longrope,
    )  # fmt: skip
    assert out.tolist() == expected.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(decode, "capturable", lambda *_: False)
        assert torch.equal(ours.generate(ids, attention_mask=mask, max_new_tokens=24, eos_token_id=[]), out[:, :31])
    if longrope:
        return  # its border is crossed by what calls the step: tests/test_generation_gpu.py
    assert decode.fusible(ours, 4) == (ours.config.model_type not in ("mixtral", "qwen3_moe"))
    for fused in {False, decode.fusible(ours, 4)}:
        assert torch.equal(device_steps(ours, ids, mask, 24, fused), out[:, : ids.shape[1] + 24])


@torch.no_grad()
def device_steps(model, ids, mask, new, fused):
    """Greedy tokens by the step that is captured on a GPU, here without a graph."""
    settings = generation.Settings(0.0, 0, 1.0, 0.0, 1.0, False)
    sampler = generation.Sampler(len(ids), model.config.vocab_size, ids.device, settings, [], 0)
    cache = model.make_cache(len(ids), ids.shape[1] + new)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    sampler(model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits[:, -1])
    decoder = decode.Decoder(model, cache, sampler, fused=fused, longest=ids.shape[1] + 1, capture=False)
    decoder.begin(ids.shape[1] - mask.sum(1))
    tokens = [sampler.token.clone()]
    for _ in range(new - 1):
        decoder.step()
        tokens.append(sampler.token.clone())
    return torch.cat([ids, torch.stack(tokens, 1)], 1)


def test_what_is_not_plain_is_not_fused(pair):
    """LoRA, a subclass, a mixture of dtypes: the model's own forward is captured instead."""
    model = copy.deepcopy(pair[1])
    assert decode.fusible(model, 1) and not decode.fusible(model, 65)
    for change in (
        lambda m: setattr(m.model.layers[1].mlp, "up_proj", type("Wrapped", (nn.Linear,), {})(64, 112)),
        lambda m: m.model.layers[0].input_layernorm.half(),
        lambda m: setattr(m.model.layers[2], "__class__", type("Block", (type(m.model.layers[2]),), {})),
        lambda m: m.half(),
    ):
        changed = copy.deepcopy(model)
        change(changed)
        assert not decode.fusible(changed, 2)


def test_copies_and_pickles_of_a_model_leave_the_kept_step_behind(pair):
    model = copy.deepcopy(pair[1])
    model.kept_decoder.decoder = lambda: "cannot be pickled"
    assert copy.deepcopy(model).kept_decoder.decoder is None
    assert pickle.loads(pickle.dumps(model)).kept_decoder.decoder is None
    model.train()
    assert model.kept_decoder.decoder is None


BY_HAND = {
    "scale": lambda m: setattr(m.model.layers[1].self_attn, "scale", 3.0),
    "window": lambda m: setattr(m.model.layers[1].self_attn, "window", 2),
    "softcap": lambda m: setattr(m.model.layers[1].self_attn, "softcap", 0.01),
    "eps": lambda m: setattr(m.model.layers[0].input_layernorm, "eps", 9.0),
    "config": lambda m: setattr(m.config, "final_logit_softcapping", 1e-3),
    "frequencies": lambda m: m.model.rotary_emb.inv_freq.mul_(7),
    "frequencies' factor": lambda m: setattr(m.model.rotary_emb, "scaling", 2.0),
}


@pytest.mark.parametrize("change", BY_HAND.values(), ids=BY_HAND)
def test_a_kept_step_follows_what_is_changed_by_hand(change):
    """With the weights alone it would go on as it was made. Unchanged it is kept, also after the weights moved."""
    from families import tiny_model

    torch.manual_seed(0)
    model = tiny_model("gemma2", sliding_window=9, query_pre_attn_scalar=16).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    options = {"max_new_tokens": 12, "eos_token_id": [], "logprobs": True}
    before = model.generate(PROMPT, **options)
    kept = model.kept_decoder.decoder
    assert kept is not None and kept.fused
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    moved = model.generate(PROMPT, **options)
    assert model.kept_decoder.decoder is kept and not torch.equal(moved[1], before[1])
    change(model)
    changed, fresh = (m.generate(PROMPT, **options) for m in (model, copy.deepcopy(model)))
    assert model.kept_decoder.decoder is not kept
    assert all(map(torch.equal, changed, fresh)) and not torch.equal(changed[1], moved[1])


# ------------------------------------------------------------------------------------------ who works on which cache


def test_streams_of_one_model_do_not_meet(pair):
    """A second call while a stream is under way, then two streams in turns: each gives what it gives alone."""
    model = pair[1]
    ids, other = torch.tensor([PROMPTS[0] + [1]]), torch.tensor([PROMPTS[2][:4]])
    options = {"max_new_tokens": 12, "eos_token_id": []}
    alone = [model.generate(x, **options)[:, 4:] for x in (ids, other)]
    tokens = model.stream(ids, **options)
    first = next(tokens)
    assert torch.equal(model.generate(other, **options)[:, 4:], alone[1])
    assert torch.equal(torch.stack([first, *tokens], 1), alone[0])
    both = zip(*zip(model.stream(ids, **options), model.stream(other, **options), strict=True), strict=True)
    assert all(torch.equal(torch.stack(t, 1), expected) for t, expected in zip(both, alone, strict=True))


def test_a_lent_cache_stays_the_callers(pair):
    model = pair[1]
    ids, options = torch.tensor([PROMPTS[2]]), {"max_new_tokens": 8, "eos_token_id": []}
    cache = model.make_cache(1, 40)
    said = model.generate(ids, cache=cache, **options)
    kept = [t.clone() for t in (*cache.keys, *cache.values)]
    model.generate(ids.flip(1), **options)
    assert cache.length == 14 and all(map(torch.equal, kept, (*cache.keys, *cache.values)))
    assert torch.equal(model.generate(said, cache=cache, **options), model.generate(said, **options))


def test_rings_of_a_shorter_window_are_refused():
    """They have forgotten what this model would still see."""
    from families import tiny_model

    ids = torch.arange(3, 33)[None]
    model, longer = (tiny_model("mistral", sliding_window=w).eval() for w in (4, None))
    for call in (longer, lambda ids, cache: longer.stream(ids, max_new_tokens=4, cache=cache)):
        with pytest.raises(LigerError, match="window of 4 positions, this model sees all"):
            call(ids, cache=model.make_cache(1, 60))
    options = {"max_new_tokens": 9, "eos_token_id": []}
    assert torch.equal(model.generate(ids, cache=longer.make_cache(1, 60), **options), model.generate(ids, **options))


def test_a_cache_of_another_dtype_serves(pair):
    model, ids = copy.deepcopy(pair[1]), torch.tensor([PROMPTS[2]])
    cache = model.double().make_cache(1, 40)
    options = {"max_new_tokens": 9, "eos_token_id": []}
    assert torch.equal(model.float().generate(ids, cache=cache, **options), model.generate(ids, **options))


def test_a_special_token_may_be_a_stop_string_and_parts_the_text(tmp_path):
    from tiny_chat import write_tiny_chat_model

    tokenizer = Tokenizer.from_pretrained(write_tiny_chat_model(tmp_path))
    answer = tokenizer.encode("ab<|im_end|>cd")
    model = Fake(None, vocab_size=264)
    model.logits = lambda ids: nn.functional.one_hot(torch.tensor(answer[len(ids) - 1]), 264).float()
    for stop, tokens in (("bc", 5), ("<|im_end|>", 3), (">c", 4), ("b<", 3)):
        options = {"max_new_tokens": 5, "tokenizer": tokenizer, "stop_strings": stop, "eos_token_id": []}
        assert generate(model, torch.tensor([[0]]), **options)[0, 1:].tolist() == answer[:tokens]


@pytest.mark.parametrize("stop", [5, "", ["a", ""], ["a", 3], {"a"}])
def test_stop_strings_that_are_none_are_named(stop):
    with pytest.raises(LigerError, match="stop_strings: expected a text or a list of them"):
        generate(Fake(hashed), PROMPT, max_new_tokens=2, stop_strings=stop)


@pytest.mark.parametrize("length", [1.0, True, -1, 3])
def test_a_cache_is_cut_to_a_number_of_positions_that_it_has(length):
    cache = KVCache(1, 1, 8, 1, 2, dtype=torch.float32, device="cpu")
    cache.advance(2)
    with pytest.raises(LigerError, match="a cache of 2 positions cannot be cut to"):
        cache.rewind(length)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_warm_cache_is_left_where_the_prompt_is_turned_by_other_frequencies(kind):
    """Cut back from beyond the border to below it; and over it while more slots than positions are filled."""
    from families import tiny_model

    factors = {"longrope": {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]},
               "dynamic": {"factor": 4.0}}[kind]  # fmt: skip
    lengths = {"longrope": {"original_max_position_embeddings": 16}, "dynamic": {"max_position_embeddings": 16}}[kind]
    family = {"longrope": "phi3", "dynamic": "llama"}[kind]
    model = tiny_model(family, **lengths, rope_scaling={"type": kind, **factors}).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(1 if "norm" in name else 20)
    options = {"max_new_tokens": 8, "eos_token_id": []}
    ids = torch.randint(3, 97, (2, 26), generator=torch.Generator().manual_seed(0))
    cache = model.make_cache(2, 60)
    for length, kept in ((12, 5), (14, 9), (20, 19), (24, 3), (26, 20)):
        part = ids[:, :length]
        assert torch.equal(model.generate(part, cache=cache, **options), model.generate(part, **options))
        cache.rewind(min(kept, cache.length))
    mask = torch.ones_like(ids)
    mask[:, :9] = 0
    cache = model.make_cache(2, 60)
    for length in (20, 22, 26):  # 11, 13 and 17 tokens
        part = {"attention_mask": mask[:, :length], **options, "max_new_tokens": 2}
        assert torch.equal(
            model.generate(ids[:, :length], cache=cache, **part), model.generate(ids[:, :length], **part)
        )
        cache.rewind(length - 1)
