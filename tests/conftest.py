"""Fixtures that many tests share."""

from __future__ import annotations

import pytest
import torch
from family_checks import scaled_hf
from tiny import TINY

torch.set_num_threads(1)  # tiny tensors: threads only cost, and pytest-xdist runs several workers


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder that transformers wrote, of the tiny Llama."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    scaled_hf(TINY).save_pretrained(folder)
    return folder


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
