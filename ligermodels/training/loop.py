"""The training loop: accumulate, clip, step, log, evaluate, save, and stop when told to."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import sys
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ligermodels.base import CausalLM
from ligermodels.config import check_type
from ligermodels.errors import LigerError
from ligermodels.terminal import plain_warnings, printable
from ligermodels.training.checkpoint import Checkpoints, StopSignal, random_state, set_random_state
from ligermodels.training.data import Batch, Loader, differences
from ligermodels.training.log import Log, plot, read_log
from ligermodels.training.optimizer import AdamW
from ligermodels.training.schedule import SCHEDULES, schedule


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Settings:
    """What a run is made of. ``add_arguments`` makes options of a command line of it."""

    steps: int = _option(1000, "updates of the weights")
    batch: int = _option(4, "rows a micro-batch")
    seq: int = _option(2048, "tokens a row")
    accumulation: int = _option(1, "micro-batches an update")
    lr: float = _option(2e-5, "peak learning rate")
    schedule: str = _option("cosine", "of the learning rate", choices=SCHEDULES)
    warmup: int | None = _option(None, "updates until the peak (default: a tenth, at most 100)", type=int)
    decay: int | None = _option(None, "updates of the fall at the end of wsd (default: a fifth)", type=int)
    final: float = _option(0.1, "share of the peak at the end")
    weight_decay: float = _option(0.0, "of matrices, by AdamW")
    clip: float = _option(1.0, "largest norm of the gradient")
    master: bool = _option(True, "fp32 master weights where the model is in half precision")
    seed: int = _option(0, "of the order of the data and of all that is random")
    eval_every: int = _option(100, "updates between evaluations, if there is evaluation data")
    save_every: int = _option(200, "updates between checkpoints; 0: only when it is stopped")
    keep: int = _option(2, "checkpoints to keep")
    log_every: int = _option(10, "updates between readings of the loss (each waits for the GPU)")

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            check_type(name, getattr(self, name), hint)
        for name in ("steps", "batch", "seq", "accumulation", "eval_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise LigerError(f"{name} must be at least 1, found {getattr(self, name)}")
        good = 0 < self.lr < math.inf and self.clip > 0 and 0 <= self.weight_decay < math.inf
        if not good or self.save_every < 0:
            raise LigerError("lr and clip must be above 0, weight_decay and save_every not below")
        if abs(self.seed) >= 2**62:
            raise LigerError(f"seed must be a whole number of at most 62 bits, found {self.seed}")
        self.share(0)

    def share(self, update: int) -> float:
        """Share of the peak learning rate at this update, counted from 0."""
        warmup = min(100, self.steps // 10) if self.warmup is None else self.warmup
        return schedule(update, self.steps, kind=self.schedule, warmup=warmup, decay=self.decay, final=self.final)


# May be other than before when a run is resumed: they do not touch the curve.
_FREE = ("eval_every", "save_every", "keep", "log_every")


class Interrupted(LigerError):
    """SIGINT or SIGTERM came; the run was saved and can be resumed."""


def train(
    model: CausalLM,
    data: Loader,
    settings: Settings,
    out: str | Path,
    *,
    write: Callable[[Path], None] | None = None,
    evaluation: Sequence[Batch] = (),
    resume: bool = False,
    other_data: bool = False,
    made: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
) -> list[float]:
    """Train the parameters of ``model`` that require a gradient; returns the loss of every step.

    Into the folder ``out`` go log.csv, loss.svg, checkpoints, and at the end ``final/``, which ``write(folder)`` fills
    (by default with ``model.save_pretrained``). With ``resume`` the newest checkpoint there is continued exactly, where
    there is one: model, data and settings must be made as they were, and what ``made`` says (plain data by name) be the
    same. ``other_data``: the data may have changed.

    Raises LigerError where ``out`` holds a run that is not to be resumed, is finished, or was made otherwise; for
    ``other_data`` without ``resume``; when a loss is not finite; when the data ends; Interrupted after SIGINT or
    SIGTERM.
    """
    write = write or model.save_pretrained
    checkpoints = Checkpoints(out, keep=settings.keep)
    optimizer = AdamW(model, master=settings.master, weight_decay=settings.weight_decay)
    torch.manual_seed(settings.seed)
    known = dict(made or {}) | _known_by(model)  # what the user gave is said first
    first = _restore(checkpoints, optimizer, data, settings, known, resume, other_data)

    def save(step: int) -> Path:
        state = {"settings": dataclasses.asdict(settings), "model": known, "random": random_state()}
        return checkpoints.save(step, state | {"optimizer": optimizer.state_dict(), "data": data.state_dict()}, write)

    model.train()
    with Log(out, model, first, settings.steps, tensorboard=tensorboard) as log, StopSignal() as stop:
        for step in range(first + 1, settings.steps + 1):
            batches = _next(data, settings.accumulation, step)
            loss = backward(model, batches)
            lr = settings.lr * settings.share(step - 1)
            norm = optimizer.step(lr, settings.clip)
            log.add(step, loss, norm, lr, batches)

            signal = stop.received  # read once: it may come at any moment
            last = step == settings.steps
            evaluates = bool(evaluation) and (last or step % settings.eval_every == 0)
            saves = not last and (signal or (settings.save_every and step % settings.save_every == 0))
            if last or evaluates or saves or step % settings.log_every == 0:
                # before a checkpoint: none is ever made of weights that are not finite
                log.flush((lambda: evaluate(model, evaluation)) if evaluates else None)
            if saves:
                path = save(step)
                log.restart_clock()
            if signal and not last:
                raise Interrupted(f"{signal.name}: stopped after step {step}, resume from {path}")
        checkpoints.finish(write)
    plot(out)
    return log.losses


def backward(model: CausalLM, batches: Sequence[Batch]) -> torch.Tensor:
    """Gradients and loss () of the mean over all supervised tokens, however these are cut into micro-batches."""
    total, count = torch.zeros((), device=model.device), sum(b.supervised for b in batches)
    for batch in batches:
        loss = _share(model, batch, count)
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(model: CausalLM, batches: Sequence[Batch]) -> float:
    """Mean loss over all supervised tokens of the batches."""
    training = model.training
    model.eval()
    total, count = torch.zeros((), device=model.device), sum(b.supervised for b in batches)
    for batch in batches:
        # one position's logits, as all of them would be (tokens, vocabulary)
        total += _share(model, batch, count, logits_to_keep=1)
    model.train(training)
    return total.item()


def _share(model: CausalLM, batch: Batch, count: int, *, logits_to_keep: int = 0) -> torch.Tensor:
    """What a batch adds, (), to the mean loss over ``count`` supervised tokens.

    The routers' auxiliary loss, of models that ask for it, leaves padding out and is added with the batch's share of
    the tokens: the more batches, the less of each. In full it would grow with their number.
    """
    routes = getattr(model.config, "output_router_logits", False)
    ids, labels, bounds, mask, *_ = batch.to(model.device)
    out = model(
        ids, labels=labels, attention_mask=mask if routes else None, cu_seqlens=bounds, num_items_in_batch=count,
        logits_to_keep=logits_to_keep,
    )  # fmt: skip
    if out.aux_loss is None:
        return out.loss
    return out.loss - model.config.router_aux_loss_coef * (1 - batch.supervised / count) * out.aux_loss


def _next(data: Loader, count: int, step: int) -> list[Batch]:
    batches = list(itertools.islice(data, count))  # at the end of the data there may be fewer
    if not batches:
        raise LigerError(f"the data ended at step {step}: a Loader with epochs=None starts over")
    return batches


def _known_by(model: CausalLM) -> dict[str, Any]:
    """What tells a model from others of the same trained parameters: its config, and a checksum of frozen weights."""
    checksum = 0
    for p in (p.detach() for p in model.parameters() if not p.requires_grad):
        start = (p.to_local() if hasattr(p, "to_local") else p).flatten()[:256]
        checksum = zlib.crc32(start.cpu().view(torch.uint8).numpy().tobytes(), checksum)
    return {**model.config.to_hf(), "frozen weights": f"{checksum:08x}"}


def _restore(
    checkpoints: Checkpoints,
    optimizer: AdamW,
    data: Loader,
    settings: Settings,
    known: Mapping[str, Any],
    resume: bool,
    other_data: bool,
) -> int:
    """Put everything to where the newest checkpoint was; returns its step, or 0 for a new run."""
    if other_data and not resume:
        raise LigerError("other_data (--other-data) is for a run that goes on: give resume (--resume) too")
    final, log = checkpoints.folder / "final", checkpoints.folder / "log.csv"
    finished = f"{checkpoints.folder} holds a finished run, its result is {final}: give another folder for a new one"
    if not resume and (checkpoints.latest() or (log.exists() and read_log(log))):  # without a step it is no run
        already = f"{checkpoints.folder} holds a run already: resume it (--resume), or give another folder"
        raise LigerError(finished if final.exists() else already)
    if checkpoints.latest() is None:
        if final.exists():
            raise LigerError(finished)
        return 0
    state = checkpoints.load()
    before, now = (
        {k: v for k, v in x.items() if k not in _FREE} for x in (state["settings"], dataclasses.asdict(settings))
    )
    if listed := differences(before, now):
        raise LigerError(f"{checkpoints.folder} holds a run with other settings: {listed}")
    if listed := differences(state.get("model", {}), known):  # before the optimizer, which only sees shapes
        raise LigerError(f"{checkpoints.folder} holds a run of a model made otherwise: {listed}")
    optimizer.load_state_dict(state["optimizer"])
    data.load_state_dict(state["data"], other_data=other_data)
    if final.exists():  # last, as what differs is said first
        raise LigerError(finished)
    set_random_state(state["random"])
    return state["step"]


def add_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """An option for every setting; ``settings_of(parser.parse_args())`` gives them back."""
    for f in dataclasses.fields(Settings):
        options = dict(f.metadata, default=defaults.get(f.name, f.default))
        if options["default"] is not None:
            options["help"] += f" (default: {options['default']})"
        if f.type == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options.setdefault("type", type(f.default))
        parser.add_argument(f"--{f.name.replace('_', '-')}", **options)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """--device and --dtype; ``dtype_of(parser.parse_args())`` gives the latter."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    # On many CPUs bf16 products are emulated: a step of SmolLM2-135M took 140 s in place of 8.
    what = "of the model (default: bfloat16 on a GPU, float32 on the CPU)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=what)


def dtype_of(arguments: argparse.Namespace) -> str:
    """The dtype that was given, else the one that the device is fast with."""
    return arguments.dtype or ("float32" if str(arguments.device).startswith("cpu") else "bfloat16")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that were given by the options of ``add_arguments``."""
    return Settings(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Settings)})


def steps_of(epochs: float, rows: Callable[[int], Loader], accumulation: int) -> tuple[int, int | None]:
    """How many updates so many passes over the data are, and for how many passes the data must be read (None: on and
    on). ``rows(n)`` gives n of them: how many batches they make is known once they are packed."""
    if not 0 < epochs < math.inf:
        raise LigerError(f"epochs must be above 0, found {epochs:g}")
    passes, one = math.ceil(epochs), sum(1 for _ in rows(1))
    many = one > 100  # a part of a batch more than the passes does not matter then, as it does with little data
    batches = passes * one if many or passes == 1 else sum(1 for _ in rows(passes))
    return math.ceil(epochs / passes * batches / accumulation), None if many else passes


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """For scripts: what a person can put right ends in one line on stderr, not in a traceback; a warning is a line."""
    try:
        with plain_warnings():
            yield
    except Interrupted as error:
        print(error, file=sys.stderr)
        sys.exit(130)
    except (LigerError, OSError) as error:
        sys.exit(printable(f"error: {error}"))
