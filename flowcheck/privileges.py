"""Giving up root: what only root can do is done first, then the process becomes an ordinary user for good.

Linux keeps users, groups and capabilities per thread; the C library's calls, which Python's are, change all threads
at once (nptl(7)). That it worked is looked up in every thread, not believed.
"""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flowcheck.errors import FlowcheckError, NoPermission, UsageError

PR_SET_NO_NEW_PRIVS = 38
_MAX_ID = (1 << 32) - 2


@dataclass(frozen=True, slots=True)
class Account:
    """Whom to become."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str


def account(text: str) -> Account:
    """The account that `NAME`, `UID` or `UID:GID` means. Raises UsageError, NoPermission unless this is root."""
    user, colon, group = text.partition(":")
    try:
        found = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except (KeyError, OverflowError):
        found = None
    uid = int(user) if user.isdecimal() else -1 if found is None else found.pw_uid
    if colon:
        gid = _group(group, text)
        groups: tuple[int, ...] = (gid,)
    elif found is not None:
        gid = found.pw_gid
        groups = tuple(os.getgrouplist(found.pw_name, gid))
    else:
        raise UsageError(f"--user {text}: there is no such user: give NAME, UID or UID:GID")
    if not 0 < uid <= _MAX_ID:
        raise UsageError(f"--user {text}: give an ordinary user: NAME, UID or UID:GID")
    if 0 in (gid, *groups):
        raise UsageError(f"--user {text}: it is in root's group: give another, as in {user}:GID")
    if os.geteuid() != 0:
        raise NoPermission(f"--user {text}: only root can become another user: leave it out, or start as root")
    return Account(uid, gid, groups, text)


def _group(group: str, text: str) -> int:
    try:
        gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        gid = -1
    if not 0 <= gid <= _MAX_ID:
        raise UsageError(f"--user {text}: there is no group {group!r}")
    return gid


@contextmanager
def acting_as(who: Account | None) -> Iterator[None]:
    """Open and make files with the rights of an account that this root process will become; None: as it is."""
    if who is None:
        yield
        return
    groups = os.getgroups()
    _switch(who)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def _switch(who: Account) -> None:
    try:
        os.setgroups(who.groups)
        os.setegid(who.gid)
        os.seteuid(who.uid)
    except OSError as error:
        raise NoPermission(f"cannot become user {who.name}: {error.strerror}; start as the machine's root") from None


def make_folder(folder: Path, who: Account | None) -> None:
    """Make a folder, and its parents, that is the account's alone: as root only where the account itself may not.

    Raises NoPermission if it cannot be made, or the account may not write to it.
    """
    if who is None:
        return
    with acting_as(who), suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            path.mkdir(mode=0o700)
            hand_over(path, who)
    except OSError as error:
        raise NoPermission(f"cannot make {folder} for user {who.name}: {error.strerror}") from None
    with acting_as(who):
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise NoPermission(f"user {who.name} may not write to {folder}: chown -R it, and open the folders above it")


def hand_over(path: Path, who: Account | None) -> None:
    """Give one file that root made to the account, be the name a link or not."""
    if who is not None:
        os.chown(path, who.uid, who.gid, follow_symlinks=False)


def drop(who: Account | None) -> None:
    """Become the account, for good and in every thread. None: nothing.

    Raises NoPermission where the system does not allow it or the account cannot read this installation, FlowcheckError
    if root could be had again.
    """
    if who is None:
        return
    try:
        os.setgroups(who.groups)
        os.setresgid(who.gid, who.gid, who.gid)
        os.setresuid(who.uid, who.uid, who.uid)
    except OSError as error:
        raise NoPermission(f"cannot become user {who.name}: {error.strerror}; start as the machine's root") from None
    # A program with the set-user-ID bit would be a way back.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise FlowcheckError(f"cannot give up new privileges: {os.strerror(ctypes.get_errno())}")
    _prove(who)
    for path in (Path(__file__).parent, Path(sys.prefix)):  # modules are also loaded later
        if not os.access(path, os.R_OK | os.X_OK):
            raise NoPermission(f"user {who.name} cannot read {path}: install flowcheck where that user can read it")


def _prove(who: Account) -> None:
    for task in Path("/proc/self/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
        found = {name: [int(text) for text in fields[name].split()] for name in ("Uid", "Gid", "Groups")}
        kept = [name for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(fields.get(name, "0"), 16)]
        same = found["Uid"] == [who.uid] * 4 and found["Gid"] == [who.gid] * 4
        if not same or set(found["Groups"]) - {who.gid, *who.groups} or kept:
            raise FlowcheckError(f"thread {task.name} is not user {who.name} alone: {found} {kept}; not going on")
    ways: list[Callable[[], None]] = [
        lambda: os.setuid(0), lambda: os.seteuid(0), lambda: os.setresuid(0, 0, 0),
        lambda: os.setgid(0), lambda: os.setresgid(0, 0, 0), lambda: os.setgroups([0]),
    ]  # fmt: skip
    for way in ways:
        try:
            way()
        except PermissionError:
            continue
        raise FlowcheckError(f"user {who.name} can become root again: not going on")
