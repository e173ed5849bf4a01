"""The token embedding as a module: nn.Embedding's parameters, the fused operation's arithmetic."""

import torch
from torch import nn

from ligermodels.kernels import embedding


class Embedding(nn.Embedding):
    """Rows of ``weight`` (V, H) by id. Its gradient is summed in fp32, in a fixed order: the same bits in every run."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return embedding(input_ids, self.weight, self.padding_idx)
