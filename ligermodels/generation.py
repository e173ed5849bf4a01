"""Turning logits into tokens: sampling, stopping, batches of unequal prompts.

A step is ``model.forward → choose → yield``. Everything stays on the model's device but one small flag a step, which
tells the host whether every row has ended and whether the logits were usable.

Symbols: B rows, S prompt length (padding included), V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import LigerError

__all__ = ["generate", "stream"]


class _Sampling(NamedTuple):
    """How a token is chosen; the values are checked and None is resolved."""

    temperature: float  # 0: greedy
    top_k: int  # 0: all
    top_p: float  # 1: all
    generator: torch.Generator | None  # None: torch's global one


def generate(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    prompt_inputs: Mapping[str, Any] | None = None,
) -> Tensor:
    """Continue every prompt: (B, S) → LongTensor (B, S + new) on the model's device, prompt included.

    The arguments and errors are those of :func:`stream`. ``new`` is the number of steps until all rows have ended, at
    most ``max_new_tokens``; a row that ended earlier is filled up with the pad id after its end-of-sequence token.
    """
    steps = stream(
        model,
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        seed=seed,
        prompt_inputs=prompt_inputs,
    )
    prompt = input_ids.to(_device(model), torch.long)
    return torch.cat([prompt, *(token[:, None] for token in steps)], dim=1)


def stream(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    prompt_inputs: Mapping[str, Any] | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every row, one LongTensor (B,) a step, until all rows have ended.

    input_ids: (B, S) int64 or int32. Unequal prompts are padded on the LEFT; ``attention_mask`` (B, S) marks what to
    keep with 1 and the padding with 0. The tokens are those that each prompt alone would give. (But for LongRoPE once
    the longest row is beyond the length it was trained for: the long factors then hold for all rows, as in
    transformers. All tokens so far are run again at that step, for the cached keys were turned by the short ones.)
    temperature: 0 takes the likeliest token (greedy); above 0 samples from softmax(logits / temperature).
    top_k: keep the k likeliest tokens (and ties with the last of them); None or 0 keeps all.
    top_p: in [0, 1]; keep the smallest set of likeliest tokens whose probabilities reach top_p (nucleus sampling,
        Holtzman et al. 2020). One token always stays, so 0 is the likeliest one; None or 1 keeps all.
        The order is temperature, top_k, top_p.
    eos_token_id: any of these ids ends its row. Left out: ``model.generation_config``, else ``model.config``. ``[]``
        never stops. A row that has ended yields the pad id.
    pad_token_id: left out: generation config, config, else the first eos id.
    seed: makes sampling repeatable and leaves torch's global generator untouched; None draws from the global one.
    prompt_inputs: what the model's forward takes beside the ids of a prompt (its images), by argument name.

    The arguments are checked at the call, before the first step. The model is in eval mode while the iterator is in
    use; its training flags are restored when it is exhausted, closed or dropped.
    Raises LigerError that names the argument; also when a step's logits are NaN, +inf, or −inf for all tokens.
    """
    device, vocab_size = _device(model), int(model.config.vocab_size)
    _check_whole_number("max_new_tokens", max_new_tokens)
    _check_real("temperature", temperature, low=0.0, high=math.inf, hint="0 means greedy")
    if top_k is not None:
        _check_whole_number("top_k", top_k, hint="; 0 or None keeps all tokens")
    if top_p is not None:
        _check_real("top_p", top_p, low=0.0, high=1.0, hint="1 or None keeps all tokens")
    if temperature == 0 and (top_k or top_p is not None):
        warnings.warn("temperature is 0, which is greedy: top_k and top_p have no effect", stacklevel=3)
    eos_ids = _eos_ids(model, eos_token_id)
    pad_id = _pad_id(model, pad_token_id, eos_ids, vocab_size)
    input_ids, attention_mask = _check_prompt(input_ids, attention_mask, vocab_size, device)
    sampling = _Sampling(
        temperature=float(temperature),
        top_k=int(top_k or 0),
        top_p=1.0 if top_p is None else float(top_p),
        generator=None if seed is None else _seeded(seed, device),
    )
    return _steps(model, input_ids, attention_mask, int(max_new_tokens), sampling, eos_ids, pad_id, prompt_inputs or {})


# no_grad, not inference_mode: the ids must stay usable in a training step, where embedding saves them for backward.
# torch applies it around each resumption of the generator, so the caller's own grad mode holds between two tokens.
@torch.no_grad()
def _steps(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    sampling: _Sampling,
    eos_ids: list[int],
    pad_id: int,
    prompt_inputs: Mapping[str, Any],
) -> Iterator[Tensor]:
    if max_new_tokens == 0:
        return
    B, S = input_ids.shape
    device = input_ids.device
    eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    unusable = torch.zeros_like(ended)
    length = S + max_new_tokens - 1  # the last token is never fed back
    if attention_mask is None:
        mask = positions = None  # no padding: the model counts on from its cache and may take its plain causal path
    else:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        mask = torch.cat([attention_mask, attention_mask.new_ones(B, max_new_tokens - 1)], dim=1)

    border = _rope_border(model)
    longest = S if border is None or mask is None else int(attention_mask.sum(-1).max())  # positions of the longest row
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        cache = model.make_cache(B, length)
        tokens = input_ids
        given = [input_ids]
        for step in range(max_new_tokens):
            if step > 0 and longest + step - 1 == border:  # the cached keys were turned by the frequencies below it
                cache.length = 0
                tokens = torch.cat(given, dim=1)
                if mask is not None:
                    positions = (mask[:, : S + step].cumsum(-1) - 1).clamp(min=0)
            out = model(
                tokens,
                attention_mask=None if mask is None else mask[:, : S + step],
                position_ids=positions,
                cache=cache,
                logits_to_keep=1,
                **(prompt_inputs if cache.length == 0 else {}),
            )
            chosen, usable = _choose(out.logits[:, -1].float(), sampling)
            unusable = unusable | ~(usable | ended)
            chosen = chosen.masked_fill(ended, pad_id)
            ended = ended | (chosen[:, None] == eos).any(-1)  # torch.isin sorts long lists, and waits for that
            # The only wait for the device in a step. Both flags only ever accumulate, so this may be read less often.
            all_ended, any_unusable = torch.stack([ended.all(), unusable.any()]).tolist()
            if any_unusable:
                rows = unusable.nonzero().flatten().tolist()
                raise LigerError(
                    f"logits: NaN, +inf, or -inf for every token, in row(s) {rows} at new token {step}. "
                    "The weights or the dtype are at fault (float16 overflows on many models: try bfloat16 or float32)."
                )
            yield chosen
            if all_ended:
                return
            tokens = chosen[:, None]
            given.append(tokens)
            if positions is not None:
                positions = positions[:, -1:] + 1
    finally:
        for module in training:
            module.training = True


def _choose(logits: Tensor, sampling: _Sampling) -> tuple[Tensor, Tensor]:
    """logits (B, V) fp32 → token ids (B,) int64 and whether each row's logits were usable (B,) bool. No host sync."""
    best = logits.amax(-1, keepdim=True)  # NaN when any is NaN, −inf when all are
    usable = best.isfinite().squeeze(-1)
    if sampling.temperature == 0:
        return logits.argmax(-1), usable
    # Measured from the best one, so that a tiny temperature gives 0 and −inf, never inf − inf.
    scores = (logits - best) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if sampling.top_p < 1:
        # Stable and descending, so that of equal scores the first stays, as argmax has it.
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        tail = ordered.softmax(-1).flip(-1).cumsum(-1).flip(-1)  # probability of this token and all less likely ones
        drop = tail <= 1 - sampling.top_p
        drop[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter_(-1, index, drop), -math.inf)
    # argmax(p / Exp(1) noise) draws from p, as torch.multinomial does, but multinomial waits for the device.
    p = scores.softmax(-1)
    noise = torch.empty_like(p).exponential_(generator=sampling.generator).clamp_(min=torch.finfo(p.dtype).tiny)
    return (p / noise).argmax(-1), usable


def _rope_border(model: Any) -> int | None:
    """The length up to which LongRoPE turns by its short factors, and beyond which by its long ones; None: no such."""
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    rope = getattr(rotary, "rope", {})
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


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


def _eos_ids(model: Any, given: int | list[int] | None) -> list[int]:
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


def _seeded(seed: int, device: torch.device) -> torch.Generator:
    try:
        return torch.Generator(device=device).manual_seed(seed)
    except (TypeError, RuntimeError, ValueError, OverflowError) as error:
        raise LigerError(f"seed: expected a whole number of at most 64 bits, got {seed!r}") from error
