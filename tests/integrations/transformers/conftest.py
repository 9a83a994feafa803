"""What tests of transformers share: no progress bars, and models in folders."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

from tests.support import pretrained
from tests.support.pretrained import silent as silent


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in fp32."""
    return pretrained.saved(tmp_path_factory.mktemp("llama"), pretrained.llama())
