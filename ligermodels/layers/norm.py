"""RMSNorm as a module: the weight under its Hugging Face name, the arithmetic in the fused kernel."""

import torch
from torch import nn

from ligermodels.kernels import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), in the Llama order of rounding.

    ``norm(x)`` gives the normalised x. ``norm(x, residual)`` first adds the two in one pass and gives
    ``(normalised sum, sum)``: the residual stream then costs no pass of its own. Shapes (..., hidden_size).
    """

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
