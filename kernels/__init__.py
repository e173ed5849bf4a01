"""The maths of the models: one operation a file, each with a plain PyTorch reference and Triton kernels.

CUDA tensors take the Triton kernels, everything else the references; names and semantics follow torch.nn.functional.
"""

from ligermodels.kernels.cross_entropy import cross_entropy
from ligermodels.kernels.embedding import embedding
from ligermodels.kernels.glu import geglu, swiglu, swiglu_packed
from ligermodels.kernels.layer_norm import layer_norm
from ligermodels.kernels.linear_cross_entropy import LossOutput, linear_cross_entropy, linear_logprob
from ligermodels.kernels.moe import moe_mlp, moe_route
from ligermodels.kernels.qk_norm_rope import qk_norm_rope
from ligermodels.kernels.rms_norm import add_rms_norm, fork_rms_norm, rms_norm
from ligermodels.kernels.rope import rope

__all__ = [
    "LossOutput",
    "add_rms_norm",
    "cross_entropy",
    "embedding",
    "fork_rms_norm",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_logprob",
    "moe_mlp",
    "moe_route",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_packed",
]
