from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded captures and their ground truth; tests that need it skip without it."""
    path = Path(os.environ.get("FLOWCHECK_SHARED", ROOT.parent / "shared"))
    if not (path / "captures").is_dir():
        pytest.skip(f"no captures at {path}: set FLOWCHECK_SHARED to the folder that holds captures/")
    return path
