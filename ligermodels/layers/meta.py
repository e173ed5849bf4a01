"""Building a model without weights: shapes and names alone, on the meta device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_FILLS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)  # what torch's modules begin with


class _NoFill(TorchFunctionMode):
    """Leaves meta tensors as they are where random numbers would fill them."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Modules made in here have parameters on the meta device.

    ``torch.device("meta")`` alone does that too, but there torch goes the whole way of filling what has no values: that
    is half the time of building a model, and the first ``normal_`` imports torch._dynamo, which takes seconds. (So does
    the first product of such a tensor and a number: parameters are made by ``torch.empty`` and ``nn.init``.)
    """
    with torch.device("meta"), _NoFill():
        yield
