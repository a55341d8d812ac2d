"""Where compiled kernels are kept: one folder per state of the sources.

numba keeps machine code beside each module and looks at that module alone when it decides whether the code is still
good. Kernels here call kernels of other modules and take constants from them, so after a change in one the callers
would go on with the old ones. A folder named after a hash of all these sources rules that out. It holds pickles, so it
must be the user's own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"
KEPT = 4
_IMPORT = re.compile(rb"^(?:    )?from ((?:mirror|reconstruct)[\w.]*) import (.*)", re.MULTILINE)


def use_own_cache() -> None:
    """Point numba at the folder, before any kernel is defined. A folder that the user has set stays."""
    if os.environ.get(VARIABLE):
        return
    folder = _private(Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "flowcheck")
    if folder is None:
        folder = _private(Path(tempfile.gettempdir()) / f"flowcheck-kernels-{os.getuid()}")
    if folder is None:
        return  # numba's own default; it is right as long as nobody edits the sources
    cache = str(folder / f"kernels-{_sources()}")
    if not os.path.exists(cache):
        _forget_old(folder)
    os.environ[VARIABLE] = cache
    numba = sys.modules.get("numba")
    if numba is not None:
        numba.config.CACHE_DIR = cache


def _private(folder: Path) -> Path | None:
    """`folder`, made if need be, if it is ours alone to write; else None."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat(follow_symlinks=False)
    except (OSError, RuntimeError):
        return None
    mine = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022
    return folder if mine and os.access(folder, os.W_OK) else None


def _sources() -> str:
    """Hash of the modules with kernels, and of all that they import from here."""
    root = Path(__file__).resolve().parent.parent
    texts = {path: path.read_bytes() for part in ("mirror", "reconstruct") for path in (root / part).rglob("*.py")}
    found: set[Path] = set()
    ahead = [path for path, text in texts.items() if b"numba" in text or b"mirror.internal" in text]
    while ahead:
        path = ahead.pop()
        if path in found or path not in texts:
            continue
        found.add(path)
        for package, names in _IMPORT.findall(texts[path]):
            folder = root / package.decode().replace(".", "/")
            ahead.append(folder.with_suffix(".py"))
            ahead += [folder / f"{name}.py" for name in re.findall(r"\w+", names.decode())]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(found):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + texts[path] + b"\0")
    return digest.hexdigest()


def _forget_old(folder: Path) -> None:
    """Drop the folders of sources that are long gone."""
    old = sorted(folder.glob("kernels-*"), key=lambda path: path.stat().st_mtime)
    for path in old[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
