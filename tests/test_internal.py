"""Functions for kernels alone, and the name of the folder of what was compiled."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
from numba import njit

import mirror
from mirror import reorder
from mirror.internal import internal


@internal()
def _less(a: int, b: int) -> int:
    return a - b


@njit
def _uses(numbers: np.ndarray, bits: np.ndarray) -> tuple[int, int, int, int]:
    return _less(numbers[0], 7), _less(0, numbers[0]), _less(1, 2), _less(np.int64(bits[0]), 1)


def test_one_compilation_serves_literals_and_all_widths():
    least = np.array([-(1 << 31)], np.int32)
    assert _uses(least, np.array([255], np.uint8)) == (-(1 << 31) - 7, 1 << 31, -1, 254)
    assert len(_less._kernel.signatures) == 1


def test_python_cannot_call_what_has_no_wrapper():
    with pytest.raises(TypeError, match="not callable"):
        reorder.emit(None, 0, 0, 0, 0, 0, 0)


def test_what_kernels_import_is_in_the_name_of_their_folder(tmp_path):
    for package in ("mirror", "reconstruct"):
        shutil.copytree(Path(mirror.__file__).parent.parent / package, tmp_path / package)
    spec = importlib.util.spec_from_file_location("kernel_cache_copy", tmp_path / "mirror/kernel_cache.py")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    names = {copy._sources()}
    for changed in ("mirror/spans.py", "mirror/reorder.py", "reconstruct/gloo/state.py", "reconstruct/landing.py"):
        (tmp_path / changed).write_text((tmp_path / changed).read_text() + "\n# changed\n")
        names.add(copy._sources())
    assert len(names) == 5
    (tmp_path / "reconstruct/steps.py").write_text("")  # no kernel has anything from there
    assert copy._sources() in names
