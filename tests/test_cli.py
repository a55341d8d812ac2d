"""The command line's contract: exit statuses, one-line errors, no torch where none is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowcheck.cli import main

ROOT = Path(__file__).resolve().parent.parent


def flowcheck(*arguments: str, timeout: float = 280.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flowcheck", *arguments],
        capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["daemon"], 2, "-i IFACE"),
        (["daemon", "-i", "eth0", "-r", "x.pcap"], 2, "either -i"),
        (["daemon", "-r", "x.pcap"], 2, "--job"),
        (["daemon", "-i", "nowhere0"], 1, "nowhere0"),
        (["daemon", "-i", "lo", "--config", "/nowhere.toml"], 78, "/nowhere.toml"),
        (["daemon", "--no-such-option"], 2, "--no-such-option"),
        (["restore", "/nowhere", "--out", "x.pt"], 3, "/nowhere"),
        (["restore", "/nowhere"], 2, "--out"),
        (["restore", "/nowhere", "--out", "x.pt", "--step", "newest"], 2, "--step newest"),
        (["status", "ipc:///nowhere/socket", "--timeout", "0.5"], 1, "/nowhere/socket"),
        (["status", "nonsense"], 2, "nonsense"),
        (["lab", "--ranks", "2"], 2, "nothing to run"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_their_status(arguments: list[str], status: int, said: str) -> None:
    done = flowcheck(*arguments)
    assert done.returncode == status, done
    assert said in done.stderr and done.stderr.startswith("flowcheck: ")
    assert len(done.stderr.splitlines()) == 1, "one line that says what and what to do"


def test_config_file_sets_defaults_and_names_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "daemon.toml"

    def daemon(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            main(["daemon", *arguments, "--config", str(config)])
        return end.value.code, capsys.readouterr().err

    config.write_text('interface = ["nowhere0"]\nkeep = 5\n')
    status, error = daemon()
    assert status == 1 and "nowhere0" in error
    config.write_text('interface = "nowhere0"\n')  # one of a repeatable option needs no list
    status, error = daemon()
    assert status == 1 and "nowhere0" in error
    for text, said in (
        ("keeep = 5\n", "keeep"), ("keep = 0\n", "keep"), ("keep = \n", "not TOML"), ("keep = 2.5\n", "keep"),
        ("keep = true\n", "keep"), ("observe = 1\n", "observe"), ("[keep]\na = 1\n", "keep"),
        ("every-seconds = \"soon\"\n", "every-seconds"),
    ):  # fmt: skip
        config.write_text(text)
        status, error = daemon("-i", "nowhere0")
        assert status == 78 and said in error, error


def test_status_and_verify_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from flowcheck.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numba', 'scapy'} & set(sys.modules), sorted(sys.modules)\n"
        "print('light')\n"
    )
    for arguments in (["status", "ipc:///nowhere/socket", "--timeout", "0.2"], ["verify", str(tmp_path)]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
        )
        assert done.stdout.endswith("light\n"), done
