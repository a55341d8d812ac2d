"""Key files: what is made, what is refused and why, and the commands that make and use them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import zmq
from secured import folder

from flowcheck import client, keys
from flowcheck.access import Access
from flowcheck.cli import main
from flowcheck.errors import BadConfig, NoPermission, UsageError

__all__ = ["folder"]


# Key files


def test_what_is_made_is_private_and_never_overwritten(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is there already"):
        keys.generate(folder, {"another": "read", "trainer": "read"})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    keys.generate(folder, {"another": "read"})
    pair = keys.read_server(folder)
    assert before[folder / "server.secret"] == (folder / "server.secret").read_bytes()
    public, who = keys.read_client(folder / "authorized" / "another.public")
    assert who == keys.Client("another", "read")
    os.environ["FLOWCHECK_KEY"] = str(folder / "clients" / "another.secret")
    try:
        mine = keys.client_key()
    finally:
        del os.environ["FLOWCHECK_KEY"]
    assert mine is not None and mine.server == pair.public and mine.pair.public == public
    secrets = [path.read_text() for path in folder.rglob("*.secret")]
    assert len({re.findall(r'secret = "(.*)"', text)[0] for text in secrets}) == len(secrets) == 4
    for path in folder.rglob("*.public"):
        assert "secret" not in path.read_text()


@pytest.mark.parametrize("name", ["", ".hidden", "../out", "a/b", "a\0b", "x" * 65, "a b", "-\n", "ä"])
def test_client_names_that_are_no_file_names(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="client"):
        keys.generate(folder, {name: "read"})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
@pytest.mark.parametrize("which", ["server.secret", "clients/trainer.secret"])
def test_a_secret_that_others_can_read_is_refused(
    folder: Path, which: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / which
    path.chmod(mode)
    monkeypatch.setenv("FLOWCHECK_KEY", str(path))
    with pytest.raises(NoPermission, match=f"mode {mode:04o}, others can read it: chmod 0600") as error:
        keys.read_server(folder) if which == "server.secret" else keys.client_key()
    assert str(path) in str(error.value)
    path.chmod(0o400)
    keys.read_server(folder)
    if which != "server.secret":
        keys.client_key()


@pytest.mark.parametrize("which", ["", "authorized"])
def test_a_folder_that_others_can_change_decides_nothing(folder: Path, which: str) -> None:
    (folder / which).chmod(0o770)
    with pytest.raises(NoPermission, match="mode 0770, others can change it: chmod 0750"):
        Access(folder)
    with pytest.raises(NoPermission, match="others can change it"):
        keys.generate(folder, {"another": "read"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_refused(folder: Path) -> None:
    os.chown(folder / "server.secret", 12345, 12345)
    with pytest.raises(NoPermission, match="belongs to another user"):
        Access(folder)
    os.chown(folder / "server.secret", 0, 0)
    os.chown(folder / "authorized", 12345, 12345)
    with pytest.raises(NoPermission, match="authorized belongs to another user"):
        Access(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "public: expected a key"),
        ("public = 'short'\n", "public: expected a key"),
        ("public = 7\n", "public: expected a string"),
        ("\xff\xfe", "not a key file"),
        ("not toml", "not a key file"),
        ("a = 'x'\n" * 2000, "larger than 4096 bytes"),
    ],
)
def test_key_files_that_are_none(folder: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "server.secret"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BadConfig, match=f"server.secret: {said}"):
        Access(folder)
    monkeypatch.setenv("FLOWCHECK_KEY", str(path))
    with pytest.raises(BadConfig, match=said):
        client.status("tcp://127.0.0.1:1")


def test_a_pair_that_is_none_and_files_that_are_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "server.secret"
    other = zmq.curve_keypair()[0].decode()
    path.write_text(re.sub('public = ".*"', f'public = "{other}"', path.read_text()))
    with pytest.raises(BadConfig, match="not the public key of that secret"):
        Access(folder)
    path.unlink()
    with pytest.raises(BadConfig, match="flowcheck keygen"):
        Access(folder)
    path.mkdir()
    with pytest.raises(BadConfig, match=r"server\.secret"):
        Access(folder)
    monkeypatch.setenv("FLOWCHECK_KEY", str(folder / "nowhere"))
    with pytest.raises(BadConfig, match="nowhere: No such file"):
        client.status("tcp://127.0.0.1:1")
    with pytest.raises(BadConfig, match="No such file"):
        Access(folder / "nowhere")


def test_the_daemons_public_key_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "clients" / "reader.secret"
    lines = path.read_text().splitlines()
    server = next(line for line in lines if line.startswith("server")).split('"')[1]
    path.write_text("\n".join(line for line in lines if not line.startswith("server")))
    monkeypatch.setenv("FLOWCHECK_KEY", str(path))
    with pytest.raises(BadConfig, match="FLOWCHECK_SERVER_KEY"):
        keys.client_key()
    public = folder / "server.public"
    public.write_text(f'public = "{server}"\n')
    public.chmod(0o644)  # no secret
    for given in (server, str(public)):
        monkeypatch.setenv("FLOWCHECK_SERVER_KEY", given)
        found = keys.client_key()
        assert found is not None and found.server == server.encode()


# The command line


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "keys"
    status, out, _ = command("keygen", str(folder), capsys=capsys)
    assert status == 0
    made = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    assert sorted(line.split("  ")[0] for line in out.splitlines()) == made and len(made) == 5
    assert f"flowcheck daemon --keys {folder}" in out and "FLOWCHECK_KEY" in out
    rights = Access(folder)
    names = ("board", "--read-only")
    assert command("keygen", str(folder), "--client", *names, capsys=capsys)[0] == 0
    public, who = keys.read_client(folder / "authorized" / "board.public")
    assert who.rights == "read"
    assert rights.authenticate([b"1.0", b"1", b"", b"here", b"", b"CURVE", zmq.utils.z85.decode(public)])[2] == b"200"
    for arguments, said in (
        (("--client", "board"), "is there already"), (("--client", "a/b"), "client 'a/b'"), ((), "is there already"),
        (("--read-only",), "--client"),
    ):  # fmt: skip
        status, _, err = command("keygen", str(folder), *arguments, capsys=capsys)
        assert status == 2 and said in err and len(err.splitlines()) == 1


def test_options_of_the_daemon_that_do_not_fit_keys(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = ("daemon", "-i", "nowhere0")
    status, _, err = command(*daemon, "--insecure", "--keys", str(folder), capsys=capsys)
    assert status == 2 and "leave out one" in err
    monkeypatch.setenv("FLOWCHECK_KEYS", str(folder))
    status, _, err = command(*daemon, "--insecure", capsys=capsys)
    assert status == 2 and "leave out one" in err
