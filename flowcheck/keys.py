"""Keys of the control protocol, in files: ZeroMQ's CURVE (rfc.zeromq.org/spec/26), one key pair each.

    DIR/server.secret           the daemon's pair:  flowcheck daemon --keys DIR
    DIR/authorized/NAME.public  a client that may connect: its public key and its rights
    DIR/clients/NAME.secret     what that client gets: its pair and the daemon's public key;  FLOWCHECK_KEY=NAME.secret

Every file is TOML with strings alone. A secret that others can read, and a file or folder that decides who may connect
and that others can change, is refused: there is no telling what it is worth.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from flowcheck.durable import remove, write_failure
from flowcheck.errors import BadConfig, FlowcheckError, NoPermission, UsageError

READ, WRITE = RIGHTS = ("read", "write")
SERVER_FILE, AUTHORIZED, CLIENTS = "server.secret", "authorized", "clients"
PUBLIC, SECRET = ".public", ".secret"
KEY, SERVER_KEY = "FLOWCHECK_KEY", "FLOWCHECK_SERVER_KEY"
MAX_FILE = 4096
_OTHERS_READ, _OTHERS_WRITE = 0o077, 0o022
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_Z85 = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")

_SERVER_TEXT = "# flowcheck: the daemon's key. Keep it secret, and on the checkpoint nodes.\n"
_CLIENT_TEXT = "# flowcheck: the key of {name}, who may {rights}. Keep it secret; FLOWCHECK_KEY names this file.\n"
_PUBLIC_TEXT = "# flowcheck: {name} may connect. Remove this file to shut that client out.\n"


@dataclass(frozen=True, slots=True)
class Pair:
    """A key pair, Z85 text of 40 characters each (rfc.zeromq.org/spec/32)."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class ClientKey:
    """What a client needs: its own pair, and the public key by which it knows the daemon."""

    pair: Pair
    server: bytes


@dataclass(frozen=True, slots=True)
class Client:
    """One whom the daemon knows. `rights`: "read" (status, restore, compare) or "write" (all that, attach, repair)."""

    name: str
    rights: str


def generate(folder: Path, clients: Mapping[str, str]) -> list[Path]:
    """Make the folder and the daemon's pair where they are missing, and a pair for every client (name -> rights).

    Returns the new files. Raises UsageError for a name that is none or is taken, NoPermission for a folder that others
    can change. Nothing that exists is overwritten.
    """
    _need_curve()
    for name in clients:
        check_name(name)
    try:
        for path in (folder, folder / AUTHORIZED, folder / CLIENTS):
            if not path.is_dir():
                path.mkdir(mode=0o700, parents=path == folder)
            _check_folder(path)
        for name in clients:
            for path in (folder / AUTHORIZED / f"{name}{PUBLIC}", folder / CLIENTS / f"{name}{SECRET}"):
                if path.exists():
                    raise UsageError(f"{path} is there already: choose another name, or remove it first")
        made = []
        if not (folder / SERVER_FILE).exists():
            made.append(_write_pair(folder / SERVER_FILE, _new_pair(), _SERVER_TEXT))
        server = read_server(folder)
        for name, rights in clients.items():
            pair = _new_pair()
            secret = folder / CLIENTS / f"{name}{SECRET}"
            made.append(_write_pair(secret, pair, _CLIENT_TEXT.format(name=name, rights=rights), server.public))
            public = folder / AUTHORIZED / f"{name}{PUBLIC}"
            fields = {"public": pair.public.decode(), "rights": rights}
            made.append(_write(public, _PUBLIC_TEXT.format(name=name), fields))
    except OSError as error:
        raise write_failure("the keys", folder, error) from None
    return made


def check_name(name: str) -> str:
    """`name` if it can be a client's, else UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"client {name[:80]!r}: use 1 to 64 of A-Z a-z 0-9 . _ - and no leading dot")
    return name


def purpose(path: Path) -> str:
    """What a file that `generate` made is for, in a few words."""
    if path.name == SERVER_FILE:
        return f"the daemon's: flowcheck daemon --keys {path.parent}"
    if path.suffix == PUBLIC:
        return f"lets {path.stem} in: remove it to shut {path.stem} out"
    return f"for {path.stem}: give it this file, and set {KEY} to it"


def read_server(folder: Path) -> Pair:
    """The daemon's pair. Raises BadConfig or NoPermission."""
    _need_curve()
    _check_folder(folder)
    path = folder / SERVER_FILE
    return _pair(path, _read(path, _OTHERS_READ))


def list_clients(folder: Path) -> list[tuple[str, ...]]:
    """(name, what tells whether it has changed) of every file in the folder of authorized clients, sorted.

    Raises BadConfig or NoPermission.
    """
    _check_folder(folder)
    found = []
    try:
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):  # removed meanwhile
                if entry.name.endswith(PUBLIC):
                    now = entry.stat()
                    times = f"{now.st_mtime_ns} {now.st_ctime_ns}"
                    found.append((entry.name, f"{times} {now.st_ino} {now.st_size} {now.st_mode} {now.st_uid}"))
    except OSError as error:
        raise _failure(f"cannot read who may connect from {folder}", error) from None
    return sorted(found)


def read_client(path: Path) -> tuple[bytes, Client]:
    """(public key, client) of a file in the folder of authorized clients. Raises BadConfig or NoPermission."""
    fields = _read(path, _OTHERS_WRITE)
    rights = fields.get("rights")
    if rights not in RIGHTS:
        raise BadConfig(f'{path}: rights: {rights!r} is neither "read" nor "write"')
    if not _NAME.fullmatch(path.stem):
        raise BadConfig(f"{path}: the file's name is no client's name: use A-Z a-z 0-9 . _ -")
    return _key(path, fields, "public"), Client(path.stem, rights)


def client_key() -> ClientKey | None:
    """The key of this process: FLOWCHECK_KEY names its file; None without it.

    FLOWCHECK_SERVER_KEY, the daemon's public key or a file with it, wins over the one in that file.
    Raises BadConfig or NoPermission.
    """
    name = os.environ.get(KEY)
    if not name:
        return None
    _need_curve()
    path = Path(name)
    fields = _read(path, _OTHERS_READ)
    pair = _pair(path, fields)
    given = os.environ.get(SERVER_KEY)
    if given and _Z85.fullmatch(given):
        return ClientKey(pair, given.encode())
    if given:
        return ClientKey(pair, _key(Path(given), _read(Path(given), _OTHERS_WRITE), "public"))
    if "server" not in fields:
        raise BadConfig(f"{path}: server: the daemon's public key is missing: set {SERVER_KEY} to it")
    return ClientKey(pair, _key(path, fields, "server"))


def _need_curve() -> None:
    if not zmq.has("curve"):
        raise FlowcheckError("this pyzmq was built without CURVE, so keys cannot be used: install pyzmq's own wheel")


def _new_pair() -> Pair:
    return Pair(*zmq.curve_keypair())


def _pair(path: Path, fields: dict[str, str]) -> Pair:
    pair = Pair(_key(path, fields, "public"), _key(path, fields, "secret"))
    if zmq.curve_public(pair.secret) != pair.public:
        raise BadConfig(f"{path}: public: this is not the public key of that secret: make a new file")
    return pair


def _key(path: Path, fields: dict[str, str], name: str) -> bytes:
    text = fields.get(name, "")
    if not _Z85.fullmatch(text):
        raise BadConfig(f"{path}: {name}: expected a key of 40 characters: make a new file with flowcheck keygen")
    return text.encode()


def _read(path: Path, forbidden: int) -> dict[str, str]:
    """The strings of a key file. What is checked is what is read: one open file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise BadConfig(f"{path}: not a file: give the key file itself")
            _check_owner(path, found, forbidden, "others can read it" if forbidden & 0o4 else "others can change it")
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise _failure(f"cannot read the key {path}", error) from None
    if len(data) > MAX_FILE:
        raise BadConfig(f"{path}: larger than {MAX_FILE} bytes: this is no key file")
    try:
        fields = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise BadConfig(f"{path}: not a key file (TOML): make one with flowcheck keygen") from None
    for name, value in fields.items():
        if not isinstance(value, str):
            raise BadConfig(f"{path}: {name[:80]}: expected a string")
    return fields


def _check_folder(folder: Path) -> None:
    """Others than root and this user must not be able to add files."""
    try:
        found = os.stat(folder)
    except OSError as error:
        raise _failure(f"cannot use the folder of keys {folder}", error) from None
    if not stat.S_ISDIR(found.st_mode):
        raise BadConfig(f"{folder} is not a folder of keys: make one with flowcheck keygen")
    _check_owner(folder, found, _OTHERS_WRITE, "others can change it")


def _check_owner(path: Path, found: os.stat_result, forbidden: int, why: str) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise NoPermission(f"{path} belongs to another user (uid {found.st_uid}): chown it to uid {os.geteuid()}")
    if found.st_mode & forbidden:
        mode = stat.S_IMODE(found.st_mode)
        raise NoPermission(f"{path} has mode {mode:04o}, {why}: chmod {mode & ~forbidden:04o} {path}")


def _write_pair(path: Path, pair: Pair, comment: str, server: bytes | None = None) -> Path:
    fields = {"public": pair.public.decode(), "secret": pair.secret.decode()}
    if server is not None:
        fields["server"] = server.decode()
    return _write(path, comment, fields)


def _write(path: Path, comment: str, fields: dict[str, str]) -> Path:
    text = comment + "".join(f'{name} = "{value}"\n' for name, value in fields.items())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        remove(path)
        raise
    return path


def _failure(what: str, error: OSError) -> FlowcheckError:
    kind = NoPermission if isinstance(error, PermissionError) else BadConfig
    what_to_do = "run as its owner" if kind is NoPermission else "make one with flowcheck keygen"
    return kind(f"{what}: {error.strerror}: {what_to_do}")
