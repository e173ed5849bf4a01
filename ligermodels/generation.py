"""Turning logits into tokens: sampling, stopping, batches of unequal prompts.

The prompt goes through the model, then one token a row at a time. What chooses a token (``Sampler``) stays on the
model's device and waits for nothing; the host reads the tokens a few steps later, from a copy that is made meanwhile,
and decides from them when to stop. On a GPU a step is a captured graph where that is possible: see decode.py.

Symbols: B rows, S prompt length (padding included), V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels import decode
from ligermodels.errors import LigerError
from ligermodels.kernels.greedy import choose_greedily
from ligermodels.layers.cache import KVCache

__all__ = ["Sampler", "generate", "stream"]

_AHEAD = 4  # steps that a GPU may be ahead of the host
_STRIDE = 0x9E3779B97F4A7C15 - 2**64  # of SplitMix64, as int64
_FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_BLOCK = 256  # tokens that are drawn from at once


class Settings(NamedTuple):
    """How a token is chosen; the values are checked and None is resolved."""

    temperature: float  # 0: greedy
    top_k: int  # 0: all
    top_p: float  # 1: all
    min_p: float  # 0: all
    repetition_penalty: float  # 1: none
    logprobs: bool


class _Request(NamedTuple):
    """The checked arguments of one call."""

    model: Any
    input_ids: Tensor  # (B, S)
    attention_mask: Tensor | None  # (B, S), None when nothing is padded
    max_new_tokens: int
    settings: Settings
    seed: int | None
    row_numbers: list[int]
    eos_ids: list[int]
    pad_id: int
    stop: _StopStrings | None
    cache: KVCache | None
    prompt_inputs: Mapping[str, Any]


def generate(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
    row_numbers: Sequence[int] | None = None,
    logprobs: bool = False,
    cache: KVCache | None = None,
    prompt_inputs: Mapping[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Continue every prompt: (B, S) → LongTensor (B, S + new) on the model's device, prompt included.

    The arguments and errors are those of :func:`stream`. ``new`` is the number of steps until all rows have ended, at
    most ``max_new_tokens``; a row that ended earlier is filled up with the pad id after its end-of-sequence token.
    With ``logprobs`` a pair: the ids, and the (B, new) fp32 log-probabilities of the new ones.
    """
    steps = stream(
        model,
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        seed=seed,
        row_numbers=row_numbers,
        logprobs=logprobs,
        cache=cache,
        prompt_inputs=prompt_inputs,
    )
    device = _device(model)
    prompt = input_ids.to(device, torch.long)
    columns = list(steps)
    tokens = [column[0] if logprobs else column for column in columns]
    new = torch.stack(tokens, dim=1) if tokens else prompt.new_empty(len(prompt), 0)
    ids = torch.cat([prompt, new.to(device)], dim=1)
    if not logprobs:
        return ids
    given = [column[1] for column in columns]
    return ids, torch.stack(given, dim=1).to(device) if given else torch.empty(len(prompt), 0, device=device)


def stream(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
    row_numbers: Sequence[int] | None = None,
    logprobs: bool = False,
    cache: KVCache | None = None,
    prompt_inputs: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Yield the next token of every row, one LongTensor (B,) a step, on the CPU, until all rows have ended.

    input_ids: (B, S) int64 or int32. Unequal prompts are padded on the LEFT; ``attention_mask`` (B, S) marks what to
    keep with 1 and the padding with 0. The tokens are those that each prompt alone would give. (But for LongRoPE once
    the longest row is beyond the length it was trained for: the long factors then hold for all rows, as in
    transformers. All tokens so far are run again at that step, for the cached keys were turned by the short ones.)
    temperature: 0 takes the likeliest token (greedy); above 0 samples from softmax(logits / temperature).
    top_k: keep the k likeliest tokens (and ties with the last of them); None or 0 keeps all.
    top_p: in [0, 1]; keep the smallest set of likeliest tokens whose probabilities reach top_p (nucleus sampling,
        Holtzman et al. 2020). One token always stays, so 0 is the likeliest one; None or 1 keeps all.
    min_p: in [0, 1]; keep tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024); None or 0: all.
    repetition_penalty: above 0; logits of tokens that the row already holds, prompt included, are divided by it where
        positive and multiplied where negative (Keskar et al. 2019); None or 1 does nothing. Also when greedy.
        The order is repetition_penalty, temperature, top_k, top_p, min_p.
    eos_token_id: any of these ids ends its row. Left out: ``model.generation_config``, else ``model.config``. ``[]``
        never stops. A row that has ended yields the pad id.
    pad_token_id: left out: generation config, config, else the first eos id.
    stop_strings: a row also ends with the token whose text completes one of these; needs ``tokenizer``. Special tokens
        have their text here, such as "<|im_end|>".
    seed: makes sampling repeatable and leaves torch's global generator untouched; None draws a seed from that. Every
        row has random numbers of its own, decided by the seed, the row's number and the step. So row i gives what it
        gives alone with ``row_numbers=[i]``, whatever else is in the batch, as far as its logits are the same: matrix
        products of other sizes may round otherwise, in half precision above all.
    row_numbers: of the rows, B whole numbers; left out 0, 1, …, B − 1. Rows of one number and prompt say the same.
    logprobs: yield pairs (tokens, their log-probabilities (B,) fp32) instead: those of the model, before temperature
        and the rest; 0 for the padding of rows that have ended.
    cache: of ``make_cache(B, …)``, with room for S + max_new_tokens − 1 positions. It may hold the first positions of
        the prompt already: the caller vouches that its ``cache.length`` positions are the first of ``input_ids``, and
        only the rest is run. What it holds afterwards can be cut back with ``cache.rewind``.
    prompt_inputs: what the model's forward takes beside the ids of the prompt (its images), by argument name; of the
        part that is not in ``cache`` yet.

    The arguments are checked at the call, before the first step. The model is in eval mode while the iterator is in
    use; its training flags are restored when it is exhausted, closed or dropped. On a GPU up to four steps are run
    beyond the one that is yielded, and a model keeps its last captured step and cache for the next call, until
    ``model.train()``.
    Raises LigerError that names the argument; also when a step's logits are NaN, +inf, or −inf for all tokens.
    """
    device, vocab_size = _device(model), int(model.config.vocab_size)
    _check_whole_number("max_new_tokens", max_new_tokens)
    _check_real("temperature", temperature, low=0.0, high=math.inf, hint="0 means greedy")
    if top_k is not None:
        _check_whole_number("top_k", top_k, hint="; 0 or None keeps all tokens")
    if top_p is not None:
        _check_real("top_p", top_p, low=0.0, high=1.0, hint="1 or None keeps all tokens")
    if min_p is not None:
        _check_real("min_p", min_p, low=0.0, high=1.0, hint="0 or None keeps all tokens")
    if repetition_penalty is not None:
        _check_real("repetition_penalty", repetition_penalty, low=0.0, high=math.inf, hint="1 or None is no penalty")
        if repetition_penalty == 0:
            raise LigerError("repetition_penalty: expected a finite number above 0, got 0")
    if temperature == 0 and (top_k or top_p is not None or min_p):
        warnings.warn("temperature is 0, which is greedy: top_k, top_p and min_p have no effect", stacklevel=3)
    eos_ids = stop_ids(model, eos_token_id)
    pad_id = _pad_id(model, pad_token_id, eos_ids, vocab_size)
    if seed is not None and not (_is_id(seed) and -(2**63) <= seed < 2**64):
        raise LigerError(f"seed: expected a whole number of at most 64 bits, got {seed!r}")
    input_ids, attention_mask = _check_prompt(input_ids, attention_mask, vocab_size, device)
    numbers = range(len(input_ids)) if row_numbers is None else row_numbers
    listed = isinstance(numbers, Sequence) and len(numbers) == len(input_ids)
    if not listed or not all(_is_id(n) and 0 <= n < 2**63 for n in numbers):
        raise LigerError(
            f"row_numbers: expected {len(input_ids)} whole numbers ≥ 0, one for each row, got {row_numbers!r}"
        )
    if cache is not None:
        _check_given_cache(model, cache, *input_ids.shape, int(max_new_tokens))
    settings = Settings(
        temperature=float(temperature),
        top_k=int(top_k or 0),
        top_p=1.0 if top_p is None else float(top_p),
        min_p=float(min_p or 0),
        repetition_penalty=1.0 if repetition_penalty is None else float(repetition_penalty),
        logprobs=bool(logprobs),
    )
    stop = None if stop_strings is None or stop_strings == [] else _StopStrings(stop_strings, tokenizer, len(input_ids))
    return _steps(
        _Request(model, input_ids, attention_mask, int(max_new_tokens), settings, seed, list(numbers), eos_ids, pad_id,
                 stop, cache, prompt_inputs or {})
    )  # fmt: skip


# no_grad, not inference_mode: the ids must stay usable in a training step, where embedding saves them for backward.
# torch applies it around each resumption of the generator, so the caller's own grad mode holds between two tokens.
@torch.no_grad()
def _steps(request: _Request) -> Iterator[Any]:
    """Deliver what the device computes, a few steps behind it, and decide when to stop."""
    model, eos, new = request.model, set(request.eos_ids), request.max_new_tokens
    training = [module for module in model.modules() if module.training]
    model.eval()
    device_steps, enqueued = _device_steps(request), 0
    try:
        ended = [False] * len(request.input_ids)
        reports: deque[_Report] = deque()
        for step in range(new):
            # The first token is waited for; then the device gains its lead, one step with every token.
            lead = min(step, _AHEAD) if request.input_ids.is_cuda else 0
            while len(reports) <= lead and enqueued < new:
                sampler = next(device_steps)
                reports.append(_Report(sampler))
                enqueued += 1
            tokens, logprobs = reports.popleft().read()
            chosen = tokens.tolist()
            unusable = [row for row, token in enumerate(chosen) if token < 0 and not ended[row]]
            if unusable:
                raise LigerError(
                    f"logits: NaN, +inf, or -inf for every token, in row(s) {unusable} at new token {step}. "
                    "The weights or the dtype are at fault (float16 overflows on many models: try bfloat16 or float32)."
                )
            for row, token in enumerate(chosen):
                if ended[row]:  # the device learns of a stop string a few steps late
                    tokens[row] = request.pad_id
                    logprobs[row] = 0
                elif token in eos:
                    ended[row] = True
                elif request.stop is not None and request.stop.completed(row, token):
                    ended[row] = True
                    sampler.ended[row] = True
            yield (tokens, logprobs) if request.settings.logprobs else tokens
            if all(ended):
                return
    finally:
        device_steps.close()
        for module in training:
            module.training = True


def _device_steps(request: _Request) -> Iterator[Sampler]:
    """Enqueue one step after the other on the device; after each, the sampler holds its tokens. No waiting."""
    model, ids, mask, new = request.model, request.input_ids, request.attention_mask, request.max_new_tokens
    B, S = ids.shape
    length = S + new - 1  # the last token is never fed back
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    border, by_length = (None, False) if rotary is None else (rotary.border, rotary.depends_on_length)
    longest = int(mask.sum(-1).max()) if mask is not None and by_length else S  # positions of the longest row
    cache = request.cache
    if cache is not None and by_length:
        trained = model.config.max_position_embeddings if border is None else border
        sides = cache.turned_for > trained, longest > trained
        if sides[0] != sides[1] or (border is None and sides[1] and cache.turned_for != longest):
            cache.rewind(0)  # the cached keys were turned by other frequencies than this prompt's
    text_model = getattr(model, "language_model", model)  # what reads images is done with them after the prompt
    sampler = Sampler(B, model.config.vocab_size, ids.device, request.settings, request.eos_ids, request.pad_id)
    decoder, lent = None, cache is not None
    if new > 1:
        decoder = decode.decoder_for(text_model, cache, B, length, longest + 1, sampler, new - 1, lent=lent)
    if decoder is not None:
        sampler = decoder.sampler
    if cache is None and decoder is not None:
        cache = decoder.cache
        cache.rewind(0)
    elif cache is None:
        cache = model.make_cache(B, length)
    sampler.reset(ids, mask, request.seed, request.row_numbers)
    start = positions = None  # no padding: the model counts on from its cache and may take its plain causal path
    if mask is not None:
        start = S - mask.sum(-1)
        mask = torch.cat([mask, mask.new_ones(B, new - 1)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def run(tokens: Tensor, **prompt_inputs: Any) -> None:
        past, end = cache.length, cache.length + tokens.shape[1]
        out = model(
            tokens,
            attention_mask=None if mask is None else mask[:, :end],
            position_ids=None if positions is None else positions[:, past:end],
            cache=cache,
            logits_to_keep=1,
            **prompt_inputs,
        )
        sampler(out.logits[:, -1])

    try:
        run(ids[:, cache.length :], **request.prompt_inputs)
        yield sampler
        if decoder is not None:
            decoder.begin(start)
        fed = [ids]
        for step in range(1, new):
            if border is not None:
                fed.append(sampler.fed[:, None].clone())
            if border is not None and longest + step - 1 == border:
                cache.rewind(0)
                run(torch.cat(fed, dim=1), **request.prompt_inputs)
                left = new - step - 1
                decoder = decode.decoder_for(text_model, cache, B, length, longest + step + 1, sampler, left, lent=lent)
                if decoder is not None:
                    decoder.begin(start)
            elif decoder is not None:
                decoder.step()
            else:
                run(sampler.fed[:, None])
            yield sampler
    except Exception:  # what failed is not for the next call; GeneratorExit is no Exception
        decoder = None
        raise
    finally:
        if decoder is not None:
            text_model.kept_decoder.decoder = decoder


class Sampler:
    """Chooses the next token of every row from its logits, on the device and without waiting for it.

    Its state is tensors that keep their place, so that a captured step can go on from it:
    ``token`` (B,) what was chosen last, the pad id in rows that have ended, −1 where the logits were unusable; ``fed``
    the same without −1; ``ended`` (B,); ``random`` (B,) int64, the state of every row's generator; ``logprob`` (B,)
    fp32 and ``seen`` (B, V), None where nobody asks for them.
    """

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device, settings: Settings, eos_ids: list[int], pad_id: int
    ):
        self.key = (settings, tuple(eos_ids), pad_id, vocab_size)  # what a captured step has built in
        self._settings, self._pad_id = settings, pad_id
        self._eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)
        self.fed = torch.zeros_like(self.token)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self._counters = torch.zeros(rows, dtype=torch.int32, device=device)
        self.logprob = torch.zeros(rows, device=device) if settings.logprobs else None
        self.seen = None
        if settings.repetition_penalty != 1:
            self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.random = torch.zeros_like(self.token)

    def reset(self, input_ids: Tensor, attention_mask: Tensor | None, seed: int | None, row_numbers: list[int]) -> None:
        """Start anew behind these prompts (B, S), padded on the left; without a seed one is drawn from torch's.

        Row n's generator starts at the n-th number of the one that the seed starts.
        """
        self.ended.zero_()
        if self.seen is not None:
            real = input_ids if attention_mask is None else input_ids.where(attention_mask != 0, input_ids[:, -1:])
            self.seen.zero_().scatter_(1, real, True)
        if self._settings.temperature > 0:
            seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else int(seed)
            numbers = torch.tensor(row_numbers, device="cpu")
            self.random.copy_(_split_mix((numbers + 1) * _STRIDE + (seed + 2**63) % 2**64 - 2**63))

    def __call__(self, logits: Tensor) -> None:
        """logits (B, V): choose, and remember."""
        if self._settings.temperature == 0 and self.seen is None and self.logprob is None:
            choose_greedily(logits, self.token, self.fed, self.ended, self._eos, self._pad_id, self._counters)
            return
        logits = logits.float()
        adjusted = logits
        if self.seen is not None:
            penalty = self._settings.repetition_penalty
            adjusted = torch.where(self.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self._settings.temperature > 0:
            self.random.add_(_STRIDE)
        chosen, usable = _choose(adjusted, self._settings, _split_mix(self.random))
        if self.logprob is not None:
            given = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
            self.logprob.copy_(given.masked_fill(self.ended, 0))
        chosen = chosen.masked_fill(~usable, -1).masked_fill(self.ended, self._pad_id)
        self.token.copy_(chosen)
        self.fed.copy_(chosen.clamp(min=0))
        self.ended.logical_or_((chosen[:, None] == self._eos).any(-1))  # torch.isin sorts long lists, and waits
        if self.seen is not None:
            self.seen.scatter_(1, self.fed[:, None], True)

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """The state, for ``restore``: capturing a step runs it once."""
        tensors = self.token, self.fed, self.ended, self.random, self.logprob, self.seen
        return [(t, t.clone()) for t in tensors if t is not None]

    def restore(self, snapshot: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, value in snapshot:
            tensor.copy_(value)


class _Report:
    """The tokens of one step on their way to the host: the copy is enqueued now and waited for when it is read."""

    def __init__(self, sampler: Sampler):
        self._copies = [None if t is None else _copy_to_host(t) for t in (sampler.token, sampler.logprob)]
        self._arrived = None
        if sampler.token.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(sampler.token.device))

    def read(self) -> tuple[Tensor, Tensor]:
        """Tokens (B,) int64 and log-probabilities (B,) fp32, which are 0 when not asked for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, logprobs = self._copies
        return tokens, torch.zeros(len(tokens)) if logprobs is None else logprobs


def _copy_to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _StopStrings:
    """Watches the text of every row for strings that end it."""

    def __init__(self, stop: str | list[str], tokenizer: Any, rows: int):
        self._strings = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, (list, tuple)) else [None]
        if not all(isinstance(s, str) and s for s in self._strings):
            raise LigerError(f"stop_strings: expected a text or a list of them, none empty, got {stop!r}")
        if not hasattr(tokenizer, "stream_decoder"):
            raise LigerError("stop_strings: needs tokenizer=, to know the text of the tokens")
        # With special tokens: such a token may be the string that is waited for, and parts the text on its two sides.
        self._decoders = [tokenizer.stream_decoder(skip_special_tokens=False) for _ in range(rows)]
        self._tails = [""] * rows  # the end of each text, one character less than the longest string
        self._keep = max(map(len, self._strings)) - 1

    def completed(self, row: int, token: int) -> bool:
        """Take the row's next token; whether a string now stands in its text."""
        text = self._tails[row] + self._decoders[row].put(token)
        self._tails[row] = text[max(0, len(text) - self._keep) :]
        return any(s in text for s in self._strings)


def _choose(logits: Tensor, settings: Settings, random: Tensor) -> tuple[Tensor, Tensor]:
    """logits (B, V) fp32, random bits (B,) int64 → token ids (B,) int64 and whether each row's logits were usable (B,)
    bool. No host sync."""
    best = logits.amax(-1, keepdim=True)  # NaN when any is NaN, −inf when all are
    usable = best.isfinite().squeeze(-1)
    if settings.temperature == 0:
        return logits.argmax(-1), usable
    # Measured from the best one, so that a tiny temperature gives 0 and −inf, never inf − inf.
    scores = (logits - best) / max(settings.temperature, torch.finfo(torch.float32).tiny)
    scores = scores.masked_fill(~usable[:, None], 0)  # any token will do
    if 0 < settings.top_k < scores.shape[-1]:
        kth = scores.topk(settings.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if settings.top_p < 1:
        # Stable and descending, so that of equal scores the first stays, as argmax has it.
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        tail = ordered.softmax(-1).flip(-1).cumsum(-1).flip(-1)  # probability of this token and all less likely ones
        drop = tail <= 1 - settings.top_p
        drop[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter_(-1, index, drop), -math.inf)
    if settings.min_p > 0:
        scores = scores.masked_fill(scores < math.log(settings.min_p), -math.inf)  # the best one's score is 0
    return _draw(scores.softmax(-1), random), usable


def _draw(p: Tensor, random: Tensor) -> Tensor:
    """p (B, V) fp32, each row a distribution, random bits (B,) int64 → token ids (B,): the token in whose share of the
    row's sum the random number, as a part of that sum, falls.

    In units of 2⁻⁴⁰, as sums of whole numbers are exact in any order: a row's token depends on no other row, and one of
    probability 0 is never drawn. The sums are of blocks first, then within one: a scan along a long row is slow.
    """
    shares = torch.nn.functional.pad((p * 2.0**40).long(), (0, -p.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    ends = shares.sum(-1).cumsum(-1)  # (B, V / block)
    point = (_shifted(random, 20).double() * 2.0**-44)[:, None].mul(ends[:, -1:]).long()  # below the sum
    block = torch.searchsorted(ends, point, right=True)
    inside = shares.take_along_dim(block[..., None], dim=1)[:, 0]  # (B, block)
    point = point - (ends.gather(1, block) - inside.sum(-1, keepdim=True))
    return (block * _BLOCK + torch.searchsorted(inside.cumsum(-1), point, right=True))[:, 0]


def _split_mix(state: Tensor) -> Tensor:
    """64 random bits from the state of each generator, int64: SplitMix64 (Steele, Lea and Flood 2014).

    Its next state is ``state + _STRIDE``. Bits depend on the state alone, so every row and step has its own.
    """
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        state = (state ^ _shifted(state, shift)) * factor
    return state ^ _shifted(state, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left; torch repeats the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's integers too


def _check_whole_number(name: str, value: object, hint: str = "") -> None:
    if not _is_id(value) or value < 0:
        raise LigerError(f"{name}: expected a whole number ≥ 0, got {value!r}{hint}")


def _check_real(name: str, value: object, *, low: float, high: float, hint: str) -> None:
    ok = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not ok:
        wanted = f"a finite number ≥ {low:g}" if math.isinf(high) else f"a number from {low:g} to {high:g}"
        raise LigerError(f"{name}: expected {wanted} ({hint}), got {value!r}")


def _check_prompt(
    input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Ids as int64 (B, S) and the mask as int64 (B, S), or None when nothing is padded. Waits for the device once."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise LigerError(f"input_ids: expected an int64 or int32 tensor, got {got}; from a list: torch.tensor([ids])")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise LigerError(
            f"input_ids: expected shape (batch, tokens) with at least one of each, got {tuple(input_ids.shape)}"
        )
    input_ids = input_ids.to(device, torch.long)
    if attention_mask is None:
        low, high = torch.stack([input_ids.min(), input_ids.max()]).tolist()
        _check_ids(low, high, vocab_size)
        return input_ids, None
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise LigerError(f"attention_mask: expected the shape of input_ids, {tuple(input_ids.shape)}, got {got}")
    given = attention_mask.to(device)
    mask = (given != 0).long()
    low, high, not_binary, right_padded, empty, padded = torch.stack(
        [
            input_ids.min(),
            input_ids.max(),
            ((given != 0) & (given != 1)).any(),
            (mask[:, 1:] < mask[:, :-1]).any(),
            (mask.sum(-1) == 0).any(),
            (mask == 0).any(),
        ]
    ).tolist()
    _check_ids(low, high, vocab_size)
    if not_binary:
        raise LigerError("attention_mask: expected 1 (keep) and 0 (padding) only")
    if empty:
        raise LigerError("attention_mask: a row is all padding, so there is no prompt to continue")
    if right_padded:
        raise LigerError(
            "attention_mask: found padding after a token. New tokens are appended on the right, so pad prompts on the "
            "left (Tokenizer.pad does)"
        )
    return input_ids, mask if padded else None


def _check_ids(low: int, high: int, vocab_size: int) -> None:
    if low < 0 or high >= vocab_size:
        raise LigerError(
            f"input_ids: token id {low if low < 0 else high} is outside the model's vocabulary (0 to {vocab_size - 1})"
        )


def _default(model: Any, key: str) -> Any:
    """generation_config.json wins over config.json; null counts as absent."""
    value = (getattr(model, "generation_config", None) or {}).get(key)
    return value if value is not None else getattr(model.config, key, None)


def stop_ids(model: Any, given: int | list[int] | None) -> list[int]:
    """The ids that end a row: those given, else of generation_config.json, else of config.json."""
    value = given if given is not None else _default(model, "eos_token_id")
    ids = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(map(_is_id, ids)):
        raise LigerError(f"eos_token_id: expected a token id or a list of them, got {value!r}")
    return [int(i) for i in ids if 0 <= i < model.config.vocab_size]  # no other is ever generated


def _pad_id(model: Any, given: int | None, eos_ids: list[int], vocab_size: int) -> int:
    if given is not None:
        if not _is_id(given) or not 0 <= given < vocab_size:
            raise LigerError(f"pad_token_id: expected a token id from 0 to {vocab_size - 1}, got {given!r}")
        return int(given)
    # Published configs hold -1, or an id that the embedding has no row for; ended rows are fed the pad id, so skip it.
    for value in (_default(model, "pad_token_id"), *eos_ids):
        if isinstance(value, int) and 0 <= value < vocab_size:
            return value
    return 0  # no usable eos id: no row ever ends


def _check_given_cache(model: Any, cache: KVCache, rows: int, length: int, new: int) -> None:
    if not isinstance(cache, KVCache):
        raise LigerError(f"cache: must come from make_cache, got {type(cache).__name__}")
    model.check_cache(cache)
    if cache.batch_size != rows:
        raise LigerError(f"cache: was made for {cache.batch_size} rows, input_ids has {rows}")
    if cache.length >= length:
        raise LigerError(
            f"cache: holds {cache.length} positions, but input_ids only {length} tokens; at least the last one has to "
            "be run: cut the cache with rewind"
        )
    if length + new - 1 > cache.max_length:
        raise LigerError(
            f"cache: holds at most {cache.max_length} positions; a prompt of {length} and {new} new tokens need "
            f"{length + new - 1}"
        )
