"""Folders at fsspec URLs (s3://bucket/path, gs://..., sftp://..., file:///mnt/share): the part of `pathlib` that
reading a store needs, so that everything that reads steps reads them wherever they lie.

fsspec comes with torch; what it needs for a cloud (s3fs, gcsfs) is the user's to install. Networks fail for moments,
and a store that walks back over a step which is only out of reach would hand out an older one: every look is tried
again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flowcheck.durable import TEMPORARY
from flowcheck.errors import FlowcheckError, UsageError

PAUSES = (0.2, 1.0, 3.0)
"""Seconds before the second, third and fourth try of one look."""

MAX_NAMES = 1 << 20
"""Entries of one folder that are looked at."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Stat:
    """What is asked of `os.stat_result`."""

    st_size: int
    st_mtime_ns: int = 0


def is_remote(source: str) -> bool:
    """Whether `source` is an fsspec URL and neither a daemon's endpoint nor a folder of this machine."""
    scheme, found, _ = source.partition("://")
    return bool(found) and scheme not in ("tcp", "ipc", "inproc")


def shown(url: str) -> str:
    """`url` as people may see it: without a user name, a password or a query, where secrets are written."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def connect(url: str) -> RemotePath:
    """The folder at `url`. UsageError for a scheme that fsspec does not know or whose package is not installed."""
    try:
        import fsspec
    except ImportError:
        raise UsageError(f"{shown(url)}: remote stores need the package fsspec: pip install fsspec") from None
    try:
        # a listing that was remembered would hide what another machine has just written
        system, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except Exception as error:  # what a cloud's package raises for a bad URL is its own
        raise UsageError(f"{shown(url)}: {error}") from None
    return RemotePath(system, path.rstrip("/"), shown(url).rstrip("/"))


class RemotePath:
    """One place on a remote file system. Failures that last are OSError, like those of a disk."""

    def __init__(self, system: Any, path: str, url: str) -> None:
        self.system = system
        self.path = path
        self._url = url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.system, f"{self.path}/{name}", f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self.system, self.path) == (other.system, other.path)

    def __hash__(self) -> int:
        return hash(self.path)

    def __lt__(self, other: RemotePath) -> bool:
        return self.path < other.path

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.system, self.path.rpartition("/")[0], self._url.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    # reading

    def iterdir(self) -> Iterator[RemotePath]:
        names = persistently(lambda: self.system.ls(self.path, detail=False))
        if len(names) > MAX_NAMES:
            raise OSError(errno.E2BIG, f"{len(names)} entries, at most {MAX_NAMES} are looked at")
        for path in names:
            name = path.rstrip("/").rpartition("/")[2]
            if name and path.rstrip("/") != self.path.rstrip("/"):  # object stores list a folder's own marker
                yield self / name

    def exists(self) -> bool:
        return bool(persistently(lambda: self.system.exists(self.path)))

    def is_dir(self) -> bool:
        return bool(persistently(lambda: self.system.isdir(self.path)))

    def is_file(self) -> bool:
        return bool(persistently(lambda: self.system.isfile(self.path)))

    def stat(self) -> Stat:
        info = persistently(lambda: self.system.info(self.path))
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return Stat(int(info["size"]))

    def read_at(self, start: int, length: int) -> bytes:
        """At most `length` bytes from byte `start` on; fewer at the end of the file."""
        data = persistently(lambda: self.system.cat_file(self.path, start=start, end=start + length))
        return bytes(data[:length])

    # writing: tried once, the uploader has its own patience

    def write(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Put these bytes here, one piece after another; a reader may see a part of them meanwhile."""

        def write() -> None:
            self.system.makedirs(self.parent.path, exist_ok=True)
            with self.system.open(self.path, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                _settle(file)

        _told(write)

    def replace(self, data: bytes) -> None:
        """Put `data` here: readers see the old content or the new one, where a file system renames or copies whole."""
        aside = self.with_name(f"{TEMPORARY}{self.name}")
        aside.write([data])
        _told(lambda: self.system.mv(aside.path, self.path))

    def remove(self) -> None:
        """Remove the file, or the folder with all that is in it, if it is there."""

        def rm() -> None:
            if self.system.exists(self.path):
                self.system.rm(self.path, recursive=True)

        _told(rm)


def _settle(file: Any) -> None:
    """Make what was written to an open file of a mounted file system survive a power cut; objects are whole anyway."""
    try:
        descriptor = file.fileno()
    except (OSError, AttributeError):
        return
    file.flush()
    os.fsync(descriptor)


def persistently(look: Callable[[], Result]) -> Result:
    """The result of `look()`, tried again after failures that may pass. OSError when they do not."""
    for pause in PAUSES:
        try:
            return _told(look)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            raise
        except OSError:
            time.sleep(pause)
    return _told(look)


def _told(act: Callable[[], Result]) -> Result:
    """`act()`; what a cloud's package raises is an OSError with a text, as a disk's error is."""
    try:
        return act()
    except OSError as error:
        if error.strerror:
            raise
        kind: type[OSError] = type(error) if isinstance(error, (FileNotFoundError, PermissionError)) else OSError
        raise kind(error.errno or errno.EIO, " ".join(str(error).split())[:300] or type(error).__name__) from error
    except FlowcheckError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise OSError(errno.EIO, f"{type(error).__name__}: {text}") from error
