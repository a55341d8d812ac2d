"""What a user is told who waits for kernels to be compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowcheck import kernels
from mirror.kernel_cache import VARIABLE


def test_a_first_start_says_what_it_is_doing_and_later_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    kernels.announce(said.append)
    assert said == ["compiles its kernels, once for this version: this takes a minute or two"]
    (tmp_path / "kernels" / "mirror").mkdir(parents=True)
    (tmp_path / "kernels" / "mirror" / "tcp.feed-1.py311.nbi").touch()
    kernels.announce(said.append)
    assert len(said) == 1
