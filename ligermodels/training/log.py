"""What a run tells: a progress bar, OUT/log.csv (a line a step), TensorBoard if wanted, a plot of the loss at the end.

Losses stay on the device until ``flush``, so that the CPU does not wait for the GPU at every step.
"""

from __future__ import annotations

import csv
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ligermodels.errors import LigerError
from ligermodels.training.data import Batch

FIELDS = ("step", "loss", "eval_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "memory_gib")
# Dense bf16 FLOP/s by the makers' data sheets; the first name that is part of the device's is taken.
PEAK = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "H800": 989e12,
    "B200": 2250e12, "B300": 2250e12, "A100": 312e12, "A800": 312e12, "A40": 150e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "RTX 3090": 71e12, "RTX 4090": 165e12, "RTX 5090": 210e12,
}  # fmt: skip


class Log:
    """``with Log(out, model, start, steps) as log:`` then ``add`` after each step and ``flush`` now and then.

    start: the step that is resumed from; lines of log.csv after it, which a killed run left, are removed.
    """

    def __init__(self, folder: str | Path, model: nn.Module, start: int, steps: int, *, tensorboard: bool = False):
        self.folder, self.steps = Path(folder), steps
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "log.csv"
        self.rows = [row for row in read_log(self.path) if row["step"] <= start] if self.path.exists() else []
        self.tokens = int(self.rows[-1]["tokens"]) if self.rows else 0
        self.device = next(model.parameters()).device
        self.per_token, self.per_square = flops(model)
        self.peak = peak_flops(self.device)
        self.tensorboard = _summary_writer(self.folder / "tensorboard", start) if tensorboard else None
        self._waiting: list[tuple[int, torch.Tensor, torch.Tensor, float, int, int]] = []
        self._start = start

    def __enter__(self) -> Log:
        partial = self.path.with_suffix(".partial")
        with open(partial, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([FIELDS, *map(_texts, self.rows)])
        os.replace(partial, self.path)
        self._file = open(self.path, "a", newline="", encoding="utf-8")
        self._bar = tqdm(total=self.steps, initial=self._start, unit="step", dynamic_ncols=True)
        self.restart_clock()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._bar.close()
        self._file.close()
        if self.tensorboard is not None:
            self.tensorboard.close()

    @property
    def losses(self) -> list[float]:
        """Of every step since the run began, also of those before it was resumed."""
        return [row["loss"] for row in self.rows]

    def restart_clock(self) -> None:
        """What happened since the last flush (an evaluation, a save) is not the speed of training."""
        self._since = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, norm: torch.Tensor, lr: float, batches: Sequence[Batch]) -> None:
        """One step: loss () and gradient norm () on the device. Waits for nothing."""
        tokens, squares = (sum(getattr(b, name) for b in batches) for name in ("tokens", "squares"))
        self._waiting.append((step, loss.detach(), norm.detach(), lr, tokens, squares))
        self._bar.update()

    def flush(self, evaluate: Callable[[], float] | None = None) -> None:
        """Read the losses since the last flush and write them, with the evaluation loss at the last step if asked.

        Raises LigerError at the first loss that is not finite.
        """
        if not self._waiting:
            return
        values = torch.stack([t.float() for _, loss, norm, *_ in self._waiting for t in (loss, norm)]).tolist()
        seconds = max(time.perf_counter() - self._since, 1e-9)  # the device has finished: its results are here
        tokens, squares = (sum(row[i] for row in self._waiting) for i in (4, 5))
        done = self.per_token * tokens + self.per_square * squares
        speed = {
            "tokens_per_s": tokens / seconds,
            "mfu": done / seconds / self.peak if self.peak else None,
            "memory_gib": memory_gib(self.device),
        }
        new = []
        for (step, _, _, lr, count, _), loss, norm in zip(self._waiting, values[::2], values[1::2], strict=True):
            self.tokens += count
            row = {"step": step, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": self.tokens, "eval_loss": None}
            new.append(row | speed)
        self._waiting = []
        bad = next((row for row in new if not math.isfinite(row["loss"] + row["grad_norm"])), None)
        if evaluate is not None and bad is None:
            new[-1]["eval_loss"] = evaluate()
        self.rows += new
        csv.writer(self._file).writerows(map(_texts, new))
        self._file.flush()
        for row in new:
            self._to_tensorboard(row)
        mfu = f", MFU {speed['mfu']:.1%}" if speed["mfu"] is not None else ""
        self._bar.set_postfix_str(
            f"loss {new[-1]['loss']:.4f}, {speed['tokens_per_s']:,.0f} tok/s{mfu}, {speed['memory_gib']:.2f} GiB"
        )
        if bad is not None:
            raise LigerError(
                f"step {bad['step']}: the loss is {bad['loss']}, the norm of its gradient {bad['grad_norm']}. Resume "
                "from the checkpoint before with a lower lr or a longer warmup, and look at the data of that step"
            )
        if new[-1]["eval_loss"] is not None:
            tqdm.write(f"step {new[-1]['step']}: evaluation loss {new[-1]['eval_loss']:.4f}", file=sys.stderr)
        self.restart_clock()

    def _to_tensorboard(self, row: dict[str, Any]) -> None:
        if self.tensorboard is not None:
            for name in FIELDS[1:]:
                if row[name] is not None:
                    self.tensorboard.add_scalar(name, row[name], row["step"])


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a log.csv as numbers (None where empty); a last line that was cut off is left out."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values() and row.keys() == set(FIELDS)]
    as_number = {f: int if f in ("step", "tokens") else float for f in FIELDS}
    return [{f: as_number[f](row[f]) if row[f] else None for f in FIELDS} for row in rows]


def plot(folder: str | Path) -> Path | None:
    """Draw the losses of FOLDER/log.csv to FOLDER/loss.svg; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows = read_log(Path(folder) / "log.csv")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot([r["step"] for r in rows], [r["loss"] for r in rows], color="#0072B2", linewidth=1, label="training")
    evaluated = [r for r in rows if r["eval_loss"] is not None]
    if evaluated:
        steps, losses = zip(*((r["step"], r["eval_loss"]) for r in evaluated), strict=True)
        axis.plot(steps, losses, color="#D55E00", marker="o", markersize=4, label="evaluation")
        axis.legend(frameon=False)
    axis.set(xlabel="step", ylabel="loss (nats a token)")
    axis.grid(True, alpha=0.3)
    path = Path(folder) / "loss.svg"
    figure.savefig(path)
    return path


def flops(model: nn.Module) -> tuple[float, float]:
    """(FLOPs a token, FLOPs a squared document length) of forward and backward, without what is computed twice.

    A matmul weight costs 2 FLOPs a token forward, 2 for the gradient of its input, and 2 for its own if it trains.
    Causal attention costs half of its full square of scores. Windows and experts are counted as if all took part.
    """
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    per_token = sum((6 if w.requires_grad else 4) * w.numel() for w in matrices)
    c = model.config
    return per_token, 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim


def peak_flops(device: torch.device) -> float | None:
    """What the device could do in dense bf16; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)


def memory_gib(device: torch.device) -> float:
    """The most memory that tensors took so far on a GPU; on the CPU the most that the process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _summary_writer(folder: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LigerError("TensorBoard logs need the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=start + 1)


def _texts(row: Mapping[str, Any]) -> list[str]:
    return ["" if row[f] is None else repr(row[f]) for f in FIELDS]  # repr keeps every bit of a float
