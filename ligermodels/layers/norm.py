"""RMSNorm as a module: the weight under its Hugging Face name, the arithmetic in the fused kernel."""

import torch
from torch import nn

from ligermodels.kernels import add_rms_norm, fork_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019).

    ``offset`` is added to the weight (Gemma: 1, its weights are stored around 0); ``casting`` says where it rounds, see
    ``ligermodels.kernels.rms_norm``.

    ``norm(x)`` gives the normalised x. ``norm(x, residual)`` first adds the two in one pass and gives
    ``(normalised sum, sum)``: the residual stream then costs no pass of its own. ``norm(x, fork=True)`` gives
    ``(normalised x, x)``: with that x as the residual, its two gradients cost no pass of their own either. Shapes
    (..., hidden_size).
    """

    def __init__(self, hidden_size: int, eps: float, *, offset: float = 0.0, casting: str = "llama"):
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - offset))
        self.eps, self.offset, self.casting = eps, offset, casting

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, fork: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is not None:
            return add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset, casting=self.casting)
        norm = fork_rms_norm if fork else rms_norm
        return norm(x, self.weight, self.eps, offset=self.offset, casting=self.casting)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
