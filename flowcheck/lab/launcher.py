"""The outer end of the lab: starts it, decides when it ends, and turns what happened into one exit status."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from flowcheck import keys
from flowcheck.errors import FlowcheckError, NoPermission
from flowcheck.lab import topology
from flowcheck.lab.config import MAX_IPC_PATH, TCP, LabConfig, check_command
from flowcheck.lab.output import LinePrefixer, write_all
from flowcheck.lab.supervisor import DAEMON, LineReader, to_json

# How long a process has between SIGTERM and SIGKILL, and the lab to come up or go away, in seconds.
TERMINATE = 5.0
BUILD = 60.0
_SLICE = 0.2
_TRAINER = "trainer"
# torch loads what is announced here when it is imported: its documented way for backends from outside.
_ENTRY_POINTS = "[torch.backends]\nflowcheck-lab = flowcheck.lab.nccl_backend:register\n"


class Interrupted(BaseException):
    """A signal asked the lab to end while it waited."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Lab:
    """A running lab; use as a context manager.

    Entering builds the networks and starts the daemon; then `endpoint` is where this host reaches it. `train`
    starts the ranks, `wait` waits for them, `finish` ends the daemon (which writes its final snapshot) and
    the lab. Ranks can be trained again, with the same daemon, after `wait`. Not for several threads at once.
    `stdout` and `stderr` are descriptors for the output of all processes, default this process's own.

    Every method raises FlowcheckError when the lab itself fails, NoPermission when the system forbids it.
    """

    def __init__(self, config: LabConfig, *, stdout: int | None = None, stderr: int | None = None) -> None:
        self.config = config
        self.endpoint: str | None = None
        self.statuses: dict[int, int] = {}
        self.daemon_status: int | None = None
        self.daemon_failed = False
        self._out = stdout
        self._err = 2 if stderr is None else stderr
        self._notes = LinePrefixer("lab", self._err)
        self._running: set[str] = set()
        self._first_failure: int | None = None
        self._escalation: list[tuple[float, int, bool]] = []
        self._built = False
        self._listening = False
        self._stopping_daemon = False
        self._management: bool | None = None
        self._interrupt: int | None = None
        self._control: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._events = LineReader(self._event)

    def __enter__(self) -> Lab:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="flowcheck-lab-")
        path = f"{self._folder}/daemon"
        if self.config.listen:
            path = os.path.abspath(self.config.listen[len("ipc://") :])
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise FlowcheckError(f"{path!r} is too long for a socket's path: set TMPDIR to a shorter one")
        outer, inner = socket.socketpair()
        self._control = outer
        with inner:
            module = ["-P", "-m", "flowcheck.lab.guard", str(inner.fileno()), str(os.getpid()), self._folder]
            self._guard = subprocess.Popen(
                [sys.executable, *module],
                pass_fds=(inner.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                env=child_environment(),
                # Ctrl-C at the terminal is for the outer process alone, which then ends the lab in order.
                start_new_session=True,
            )
        self._send(to_json(self.config))
        self._pump(lambda: self._built, BUILD, "the lab's networks did not come up")
        if self.config.daemon != ():
            self.endpoint = f"ipc://{path}"
            keys.generate(self._keys, {_TRAINER: keys.WRITE})
            self.start_daemon()

    def start_daemon(self, *arguments: str) -> None:
        """Start the daemon, again if it was killed, with `arguments` added; returns when it listens."""
        config = self.config
        command = config.daemon
        if command is None:
            # -P: a folder named like one of flowcheck's packages in the user's working directory is not ours.
            command = (sys.executable, "-P", "-m", "flowcheck", "daemon")
        options = ["-i", topology.MONITOR, "--keys", str(self._keys)]
        for endpoint in (str(self.endpoint), topology.daemon_endpoint()):
            options += ["--listen", endpoint]
        for name in ("store", "journal", "record"):
            value = getattr(config, name)
            if value is not None:
                options += [f"--{name}", str(value)]
        for fault in config.faults:
            options += ["--fault", fault]
        self._listening = self._stopping_daemon = False
        self.daemon_status = None
        self._do("daemon", argv=[*command, *options, *config.daemon_args, *arguments], env=child_environment())
        late = f"the daemon did not listen within {config.daemon_start:.0f} s: see its output above"
        self._pump(lambda: self._listening or self.daemon_status is not None, config.daemon_start, late)
        if not self._listening:
            message = f"the daemon ended with status {self.daemon_status} before it listened: see above"
            raise (NoPermission if self.daemon_status == 77 else FlowcheckError)(message)

    def signal_daemon(self, number: int) -> None:
        """Send the daemon a signal that does not end it, such as SIGSTOP and SIGCONT; returns at once."""
        self._signal([DAEMON], number)

    def kill_daemon(self, number: int = signal.SIGKILL, timeout: float = 60.0) -> int:
        """Signal the daemon and wait for its end; returns its exit status. `start_daemon` may follow."""
        if DAEMON in self._running:
            self._stopping_daemon = True
            self._signal([DAEMON], number)
            self._pump(lambda: DAEMON not in self._running, timeout, "the daemon did not end")
        return self.daemon_status or 0

    def train(self, command: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> None:
        """Start every rank with `command` (default the config's) and `env` added; returns at once."""
        command = self.config.command if command is None else tuple(command)
        check_command(command)
        if self.running:
            raise FlowcheckError("ranks of this lab still run: wait for them or kill them first")
        self.statuses = {}
        self._first_failure = None
        self._escalation = []
        self._running |= {f"rank {rank}" for rank in range(self.config.ranks)}
        self._do("train", argv=[sys.executable, *command], env={**self._trainer_environment(), **(env or {})})

    def _trainer_environment(self) -> dict[str, str]:
        """The trainers' key; for the lab's NCCL: where its backend is announced to torch, and where NCCL's log goes."""
        env = child_environment()
        if self.endpoint is not None:
            env.pop(keys.SERVER_KEY, None)  # the one in the file is right
            env[keys.KEY] = str(self._keys / keys.CLIENTS / f"{_TRAINER}{keys.SECRET}")
        if self.config.transport != TCP:
            logs = Path(str(self._folder), "nccl")
            logs.mkdir(exist_ok=True)
            env["NCCL_DEBUG_FILE"] = f"{logs}/%h.%p"
            announced = Path(str(self._folder), "autoload", "flowcheck_lab-1.dist-info")
            announced.mkdir(parents=True, exist_ok=True)
            (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: flowcheck-lab\nVersion: 1\n")
            (announced / "entry_points.txt").write_text(_ENTRY_POINTS)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(announced.parent))))
        return env

    @property
    def _keys(self) -> Path:
        """The folder of this lab's keys: made for it, and gone with it."""
        return Path(str(self._folder), "keys")

    @property
    def running(self) -> list[int]:
        """Ranks that were started and whose end has not been reported yet."""
        return sorted(int(name.split()[1]) for name in self._running if name != DAEMON)

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to these ranks (default all that run) at once; returns without waiting."""
        self._signal([f"rank {rank}" for rank in ranks or self.running], number)

    def set_management(self, up: bool) -> None:
        """Bring the trainers' ports of the management network up or down; the checkpoint node's stays up."""
        self._management = None
        self._do("management", up=up)
        self._pump(lambda: self._management is not None, BUILD, "the management ports did not change")

    def wait(self, timeout: float | None = None) -> int:
        """Wait until every rank has ended; `statuses` then has all exit statuses (128 + signal).

        Returns 0, or the status of the first rank that failed; the others then have `grace` seconds.
        Raises TimeoutError.
        """
        self._pump(lambda: not self.running, timeout, None)
        return self._first_failure or 0

    def finish(self) -> int:
        """End the ranks, then the daemon, then the lab. Returns 0, or 1 if the daemon failed at any time."""
        if self._control is None:
            return int(self.daemon_failed)
        if self.running:
            self.kill(number=signal.SIGTERM)
            self._escalation = [(time.monotonic() + TERMINATE, signal.SIGKILL, True)]
            self._pump(lambda: not self.running, 2 * TERMINATE, "the ranks did not end")
        if DAEMON in self._running:
            self._stopping_daemon = True
            self._signal([DAEMON], signal.SIGTERM)
            late = f"the daemon did not end within {self.config.daemon_stop:.0f} s: look at its store"
            self._pump(lambda: DAEMON not in self._running, self.config.daemon_stop, late)
            if self.daemon_status != 0:
                self.daemon_failed = True
                self.note(
                    f"the daemon ended with status {self.daemon_status}: its last step may not be stored"
                )
        self.close()
        return int(self.daemon_failed)

    def close(self) -> None:
        """End everything at once, whatever runs. Safe to call again."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._guard is not None:
            try:
                self._guard.wait(BUILD)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
            self._guard = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def interrupt(self, number: int) -> None:
        """Make the wait in progress, or the next one, raise Interrupted; a signal handler may call it."""
        self._interrupt = number

    def note(self, text: str) -> None:
        """Tell the user something, on the lab's stderr."""
        self._notes.feed(text.encode() + b"\n")

    def _do(self, what: str, **fields: Any) -> None:
        self._send({"do": what, **fields})

    def _signal(self, names: Sequence[str], number: int, group: bool = False) -> None:
        self._do("signal", names=list(names), signal=int(number), group=group)

    def _send(self, message: dict[str, Any]) -> None:
        if self._control is None:
            raise FlowcheckError("the lab has ended: enter a new one")
        # A lab that is gone shows as the end of its events, with the reason if there was one.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _pump(self, done: Callable[[], bool], timeout: float | None, late: str | None) -> None:
        """Handle events until `done()`. After `timeout` s raises FlowcheckError(late) or TimeoutError."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not done():
            if self._interrupt is not None:
                number, self._interrupt = self._interrupt, None
                raise Interrupted(number)
            now = time.monotonic()
            if limit is not None and now > limit:
                raise FlowcheckError(late) if late else TimeoutError("ranks still run")
            while self._escalation and now >= self._escalation[0][0]:
                _, number, group = self._escalation.pop(0)
                self._signal([f"rank {rank}" for rank in self.running], number, group)
            self._receive(_SLICE)

    def _receive(self, timeout: float) -> None:
        if self._control is None:
            raise FlowcheckError("the lab has ended: enter a new one")
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            if not selector.select(timeout):
                return
        try:
            data = self._control.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self.close()
            raise FlowcheckError("the lab's processes were killed from outside: start it again")
        self._events.feed(data)

    def _event(self, line: bytes) -> None:
        event = json.loads(line)
        match event["event"]:
            case "built":
                self._built = True
            case "started":
                self._running.add(event["name"])
            case "daemon-line":
                self._listening = event["line"].startswith("listening ")
                if not self._listening:
                    self.note(f"the daemon's first line is not its endpoint but {event['line']!r}")
            case "management":
                self._management = event["up"]
            case "failed":
                raise (NoPermission if event["code"] == 77 else FlowcheckError)(event["message"])
            case "ended" if event["name"] == DAEMON:
                self._running.discard(DAEMON)
                self.daemon_status = event["status"]
                if self._listening and not self._stopping_daemon:
                    self.daemon_failed = True
                    self.note(f"the daemon ended with status {event['status']}: training goes on uncovered")
            case "ended":
                self._rank_ended(event["name"], event["status"])

    def _rank_ended(self, name: str, status: int) -> None:
        self._running.discard(name)
        self.statuses[int(name.split()[1])] = status
        if status == 0 or self._first_failure is not None:
            return
        self._first_failure = status
        others = len(self.running)
        rest = f"; the others have {self.config.grace:g} s" if others else ""
        self.note(f"{name} ended with status {status}{rest}")
        end = time.monotonic() + self.config.grace
        self._escalation = [(end, signal.SIGTERM, False), (end + TERMINATE, signal.SIGKILL, True)]


def run(config: LabConfig) -> int:
    """Train once in a lab. Returns the exit status: 0 if every rank's is 0, else that of the first to fail.

    1 if only the daemon failed. SIGINT and SIGTERM end the ranks, let the daemon store its last step, and
    give 128 + signal; a second one ends at once. Raises FlowcheckError if the lab itself fails, NoPermission
    where it may not.
    """
    check_command(config.command)
    lab = Lab(config)
    try:
        with _signals(lab), lab:
            if lab.endpoint is not None:
                with suppress(OSError):
                    write_all(1, f"listening {lab.endpoint}\n".encode())
            try:
                lab.train()
                status = lab.wait()
            except Interrupted as error:
                lab.note(f"{error}: ending the ranks, then the daemon; once more to end at once")
                status = error.status
            daemon_status = lab.finish()
            return status or daemon_status
    except Interrupted as error:
        return error.status


@contextmanager
def _signals(lab: Lab) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that is ignored (nohup, a background job of a script) stays ignored.
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, lambda received, _: lab.interrupt(received)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def child_environment() -> dict[str, str]:
    """This process's environment, in which children find flowcheck where this process found it."""
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    # An installed flowcheck is found anyway, and its folder must not come before the standard library.
    if root not in installed and root not in paths:
        env["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return env
