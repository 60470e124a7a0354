"""The handed models, generated once per run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def logit_models(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small models of cases/logits."""
    folder = tmp_path_factory.mktemp("logit-models")
    subprocess.run([sys.executable, shared / "cases/logits/make_models.py", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def tiny_models(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small files of cases/make_tiny_gguf.py."""
    folder = tmp_path_factory.mktemp("tiny-models")
    subprocess.run([sys.executable, shared / "cases/make_tiny_gguf.py", folder], check=True, capture_output=True)
    return folder
