"""Do the kernels' tests notice a fault? Each fault below is planted in a copy of kernels/, and a test must fail.

A fault whose text is not found has to follow the kernel that was changed. The imports, which take longer than the
tests, are done once: this file, run as a program, then forks for each fault (see ``serve``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent

# what is wrong: (file, text, what stands there instead, tests that must catch it, which of them)
FAULTS = {
    "softcap's 1 - tanh² dropped": (
        "cross_entropy", "    if SHAPE != 0:\n        g *= slope\n", "\n", "ce", "interpreter and options1",
    ),
    "label smoothing not applied to the loss": (
        "cross_entropy", "nll = (1.0 - smoothing) * w_t * (log_s - (z_t - m)) + smoothing",
        "nll = w_t * (log_s - (z_t - m)) + 0.0", "ce", "interpreter and options1",
    ),
    "z-loss detached": (
        "cross_entropy", "slope_p += zs * 2.0 * z_loss", "slope_p += 0.0", "ce", "interpreter and options1",
    ),
    "ignore_index missing": (
        "cross_entropy", "    valid = t != ignore_index\n", "    valid = t == t\n", "ce", "interpreter and options0",
    ),
    "the head's gradient added up in bf16": (
        "linear_cross_entropy", "dim) if need_weight else (0,), **f32)", "dim) if need_weight else (0,), dtype=dtype)",
        "linear_ce", "chunks_do_not_change",
    ),
    "offset skipped": (
        "rms_norm", "        y = y * (weight.to(tl.float32) + offset)\n", "        y = y * weight.to(tl.float32)\n",
        "norm", "as_exact_as_eager and float32 and 7",
    ),
    "eps of another model": (
        "rms_norm", "row_mean(sum_of_squares, n_cols) + eps", "row_mean(sum_of_squares, n_cols) + 1e-6",
        "norm", "as_exact_as_eager and float32 and 7",
    ),
    "gradient of the residual stream dropped": (
        "rms_norm", "                dx += dtotal.to(tl.float32)\n", "                dx += 0.0\n",
        "norm", "add_rms_norm_and_its_gradients and float32 and one",
    ),
    "gradient of the forked stream dropped": (
        "rms_norm", "_gradients(ctx, dy, dx, *ctx", "_gradients(ctx, dy, None, *ctx",
        "norm", "fork_rms_norm_and_its_gradients and float32 and one",
    ),
    "gradient of the forked stream dropped where the norm is unused": (
        "rms_norm", "return dx, None, None, None, None", "return (None,) * 5",
        "norm", "fork_rms_norm_with_one and one",
    ),
    "partial sum of one program lost": (
        "rms_norm", "sum_rows(partial, weight.dtype) if",
        "sum_rows(partial[: max(1, len(partial) - 1)], weight.dtype) if",
        "norm", "as_exact_as_eager and float32 and 70",
    ),
    "last, partial block of a long row dropped": (
        "rms_norm", "squares = tl.zeros([BLOCK], tl.float32)\n    for start in range(0, n_cols, BLOCK):",
        "squares = tl.zeros([BLOCK], tl.float32)\n    for start in range(0, n_cols // BLOCK * BLOCK, BLOCK):",
        "norm", "as_exact_as_eager and float32 and 33",
    ),
    "offsets of 32 bits": (
        "rms_norm", "rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)\n    cols",
        "rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n    cols",
        "norm", "offsets_beyond",
    ),
    "rotated the other way": (
        "rope", "tl.fma(a, cos, b * -sin)", "tl.fma(a, cos, b * sin)", "rope", "test_rope_and and float32 and 1-1-8-4",
    ),
    "derivative of the sigmoid without its complement": (
        "glu", "slope = sigmoid + value * complement\n", "slope = sigmoid + value\n",
        "glu", "as_exact and float32-1.0-swiglu",
    ),
    "mask of a segment's last rows dropped": (
        "embedding", "mask = (ahead < count)[:, None] &", "mask = (ahead >= 0)[:, None] &",
        "embedding", "as_exact and float32-random",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    """A process that has imported what does not change, but none of ours."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__], env=environment, **pipes) as process:
        yield process
        process.stdin.close()


def serve() -> None:
    """For each line of stdin, [folder, interpret, arguments]: run pytest in a fork, on the package in the folder."""
    import torch
    import torch._dynamo.testing

    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, interpret, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ["TRITON_INTERPRET"] = interpret
            os.chdir(folder)
            sys.path[0] = folder  # in place of tests/
            with open("log", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os._exit(int(pytest.main(arguments)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path, server):
    file, right, wrong, tests, which = FAULTS[fault]
    package = tmp_path / "ligermodels"
    shutil.copytree(ROOT / "kernels", package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "ligermodels" / "errors.py", package)
    (package / "__init__.py").write_text("from ligermodels.errors import LigerError\n")
    kernel = package / "kernels" / f"{file}.py"
    text = kernel.read_text()
    assert text.count(right) == 1, f"{right!r} stands {text.count(right)} times in kernels/{file}.py"
    kernel.write_text(text.replace(right, wrong))
    on_cpu = tests == "linear_ce"  # a fault of code that CPU tensors run, too
    arguments = ["-q", "-x", "--noconftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    arguments += [str(ROOT / "tests" / f"test_kernels_{tests}.py"), "-m", "not gpu" if on_cpu else "interpret"]
    arguments += ["-k", which if on_cpu else f"interpreter and ({which})"]
    print(json.dumps([str(tmp_path), "0" if on_cpu else "1", arguments]), file=server.stdin, flush=True)
    status, log = int(server.stdout.readline()), (tmp_path / "log").read_text()
    noticed = (status == 1 and " failed" in log) or status < 0  # below 0: it crashed
    assert noticed, f"pytest ended with {status}: {log[-1000:]}"


if __name__ == "__main__":
    serve()
