"""A disk that fails on demand: ext4 on a loop device on the one file of a FUSE file system that this program serves.

    python failing_disk.py FOLDER MEBIBYTES

mounts it at FOLDER/disk and obeys words on stdin, one a line: `ok`; `eio-write`, `eio-read`: every access fails;
`slow SECONDS`: each takes that long. Needs root, /dev/fuse and a loop device; ends, and unmounts, with its stdin.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT, BATCH_FORGET = (
    1, 2, 3, 4, 14, 15, 16, 17, 18, 20, 25, 26, 42,
)  # fmt: skip
MOST_WRITE = 128 << 10
FOPEN_DIRECT_IO = 1
"""No page cache: each access of the loop device reaches this program."""


class OneFile:
    """The file system: a folder with the file `image` (linux/fuse.h)."""

    def __init__(self, folder: Path, size: int) -> None:
        self.mode = "ok"
        self._size = size
        self._data = os.memfd_create("disk")
        os.ftruncate(self._data, size)
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"failing", str(folder).encode(), b"fuse", 0, options) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _attributes(self, node: int) -> bytes:
        mode, size = (0o40755, 0) if node == 1 else (0o100600, self._size)
        return struct.pack("<6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, MOST_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                return  # unmounted
            _, operation, number, node = struct.unpack_from("<IIQQ", request)
            if operation in (FORGET, BATCH_FORGET):
                continue
            failure, answer = 0, b""
            try:
                answer = self._answer(operation, node, request[40:])
            except OSError as error:
                failure = -(error.errno or errno.EIO)
            os.write(self._device, struct.pack("<IiQ", 16 + len(answer), failure, number) + answer)

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:
        if operation == INIT:
            return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 17, 0, 16, 12, MOST_WRITE, 1, 32, 0, *[0] * 8)
        if operation == LOOKUP:
            if body.rstrip(b"\0") != b"image":
                raise OSError(errno.ENOENT, "")
            return struct.pack("<4Q2I", 2, 0, 3600, 3600, 0, 0) + self._attributes(2)
        if operation in (GETATTR, SETATTR):
            return struct.pack("<Q2I", 3600, 0, 0) + self._attributes(node)
        if operation == OPEN:
            return struct.pack("<QIi", 0, FOPEN_DIRECT_IO, 0)
        if operation == STATFS:
            return struct.pack("<5Q4I6I", *[0] * 15)
        if operation in (RELEASE, FSYNC, FLUSH):
            if operation == FSYNC and self.mode == "eio-write":
                raise OSError(errno.EIO, "")
            return b""
        if operation not in (READ, WRITE):
            raise OSError(errno.ENOSYS, "")
        _, offset, size = struct.unpack_from("<QQI", body)
        if self.mode.startswith("slow"):
            time.sleep(float(self.mode.split()[1]))
        if self.mode == ("eio-read" if operation == READ else "eio-write"):
            raise OSError(errno.EIO, "")
        if operation == READ:
            return os.pread(self._data, size, offset)
        return struct.pack("<2I", os.pwrite(self._data, body[40 : 40 + size], offset), 0)


def main(folder: Path, size: int) -> None:
    """Mount, say so, obey, unmount."""
    below, disk = folder / "below", folder / "disk"
    for path in (below, disk):
        path.mkdir()
    files = OneFile(below, size)
    threading.Thread(target=files.serve, daemon=True).start()
    done = ["umount", "-l", str(below)]
    loop = ""
    try:
        loop = run("losetup", "--find", "--show", str(below / "image"))
        run("mkfs.ext4", "-q", "-O", "^has_journal", "-I", "256", "-N", "4096", "-E", "lazy_itable_init=0", loop)
        run("mount", "-o", "errors=continue", loop, str(disk))
        print("mounted", flush=True)
        for line in sys.stdin:
            files.mode = line.strip()
            print("done", flush=True)
        files.mode = "ok"
        run("umount", "-l", str(disk))
    finally:
        if loop:
            run("losetup", "-d", loop)
        subprocess.run(done, check=False)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class FailingDisk:
    """The test's end of it."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.path = path
        self._process = process

    def __call__(self, mode: str) -> None:
        """`ok`, `eio-write`, `eio-read` or `slow SECONDS`, from now on."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(mode + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def forget(self) -> None:
        """Let the next look at every file be one at the disk: drop what the kernel has cached of them."""
        for path in self.path.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def remount(self, options: str) -> None:
        run("mount", "-o", f"remount,{options}", str(self.path))


@contextmanager
def failing_disk(folder: Path, mebibytes: int = 64) -> Iterator[FailingDisk | str]:
    """The disk, or why this machine cannot have one."""
    if os.geteuid() != 0:
        yield "only root can mount a loop device"
        return
    command = [sys.executable, __file__, str(folder), str(mebibytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "mounted\n":
            process.stdin.close()
            yield f"no failing disk here: {process.stderr.read().strip()[-300:]}"
            return
        try:
            yield FailingDisk(process, folder / "disk")
        finally:
            process.stdin.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) << 20)
