"""What every row-wise kernel needs beside its launch: the right device, the row view, a grid that fits the GPU."""

from __future__ import annotations

import contextlib
import functools

import torch

from ligermodels.errors import LigerError

_NOTHING = contextlib.nullcontext()


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.get_device())
    return _NOTHING


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The (rows, D) view of a (..., D) tensor; a copy only where no strides can express the view."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def in_vectors(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy where its strides or address would change how wide the kernel's loads are.

    For kernels with reductions: with loads of another width they would add in another order, and the result would not
    have the bits that a contiguous tensor gives.
    """
    if tensor.shape[-1] % 16:  # contiguous rows of odd length are read element by element
        return tensor.contiguous()
    *outer, inner = tensor.stride()
    if inner == 1 and tensor.data_ptr() % 16 == 0 and not any(stride % 16 for stride in outer):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a persistent grid has to fill (two in the interpreter: more than one row range)."""
    return _multiprocessors(device.index) if device.type == "cuda" else 2


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def is_hopper(index: int) -> bool:
    """Whether the CUDA device of this index is of compute capability 9.0, for which the kernels by TMA are measured."""
    return torch.cuda.get_device_capability(index) == (9, 0)


def cdiv(n: int, by: int) -> int:
    """n / by rounded up; triton.cdiv costs five microseconds on the host."""
    return -(-n // by)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def no_second_derivative(ctx, *grads):
    """Registered as the backward of backward operators: a silent wrong answer would be worse."""
    raise LigerError(
        "the fused kernels have no second derivative; use the *_reference function of the operation "
        "where create_graph=True is needed"
    )
