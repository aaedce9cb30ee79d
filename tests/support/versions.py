"""What installed libraries cannot do, so that a test that needs it is skipped by name."""

from __future__ import annotations

import pytest
import torch

from blockwalk.models.gguf_folder import READS_TOKENIZERS
from blockwalk.system.versions import is_older

has_cuda_libraries = torch.version.cuda is not None
"""Whether this torch was built for CUDA: it says so where a run begins, and takes 300 MB more."""


def needs_gguf() -> None:
    """Skip a test, or a module that calls it, where GGUF files cannot be read."""
    pytest.importorskip("gguf", reason="needs the gguf package")
    if is_older("transformers", READS_TOKENIZERS):
        pytest.skip(
            f"GGUF files need transformers {READS_TOKENIZERS} or newer", allow_module_level=True
        )
