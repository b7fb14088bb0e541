"""What every test shares."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path[:0] = [str(Path(__file__).parent / name) for name in ("trl", "docs")]


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    """Tiny models run fastest, and reproducibly, on one thread."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
