"""Linux namespaces by libc: no `unshare`, no `ip netns`, nothing that has a name and could stay behind."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from flowcheck.errors import FlowcheckError, NoPermission

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1

# Switches that systems use to keep ordinary users from user namespaces, and the value that allows them.
_SWITCHES = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("user/max_user_namespaces", "0", "10000"),
    ("user/max_net_namespaces", "0", "10000"),
)

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _call("unshare", ctypes.c_int(flags))


def enter_network(namespace: int) -> None:
    """Move the calling thread into the network namespace that the descriptor `namespace` holds."""
    _call("setns", ctypes.c_int(namespace), ctypes.c_int(CLONE_NEWNET))


def current_network() -> int:
    """A descriptor of the caller's network namespace, which lives as long as it or a process in it."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_network() -> int:
    """Make a network namespace and return its descriptor; the caller stays where it is."""
    here = current_network()
    try:
        unshare(CLONE_NEWNET)
        return current_network()
    finally:
        enter_network(here)
        os.close(here)


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel to send this process a signal when the thread that forked it ends."""
    _call("prctl", ctypes.c_int(PR_SET_PDEATHSIG), ctypes.c_ulong(signal_number), ctypes.c_ulong(0))


def isolate() -> None:
    """Put this process into new network, mount and IPC namespaces, and its next child into a PID namespace.

    Root needs no user namespace, and without one keeps its rights on files of other users. Everyone else, and
    a root without CAP_SYS_ADMIN (a container), becomes root of a new user namespace.
    Raises NoPermission where the system forbids it, FlowcheckError for another failure.
    """
    flags = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID
    uid, gid = os.geteuid(), os.getegid()
    # Read now: inside a new user namespace the switches show that one's own values.
    advice = _advice()
    try:
        try:
            unshare(flags)
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
            unshare(CLONE_NEWUSER)
            # The kernel lets an ordinary user map only itself, and its group only once setgroups is given up.
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                Path("/proc/self", name).write_text(text)
            unshare(flags)
        # Mounts made inside must not travel to the host.
        _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EUSERS):
            message = f"user {uid} may not make namespaces ({error.strerror}): {advice}"
            raise NoPermission(message) from None
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            message = f"this kernel lacks namespaces that the lab needs ({error.strerror}): use another"
            raise FlowcheckError(message) from None
        raise FlowcheckError(f"the lab could not make its namespaces: {error}") from None


def _advice() -> str:
    for name, forbids, allows in _SWITCHES:
        with suppress(OSError):
            if Path("/proc/sys", name).read_text().strip() == forbids:
                return f"run as root, or let an administrator set sysctl {name.replace('/', '.')}={allows}"
    return "run as root; in a container, allow user namespaces in its seccomp profile or run it privileged"


def mount_proc() -> None:
    """Show the new PID namespace in /proc where the system allows it.

    A container that hides parts of /proc forbids a new mount; its old /proc still serves, with outer ids.
    """
    with suppress(OSError):
        _call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC), None)


def mount_over(source: str, target: str) -> None:
    """Show the file `source` in place of `target` in this mount namespace. Raises OSError."""
    _call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(MS_BIND), None)
