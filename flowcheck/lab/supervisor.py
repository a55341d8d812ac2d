"""Process 1 of the lab: builds the networks, starts daemon and trainers, forwards output, reports ends.

It has no opinion: what to start and whom to signal comes as JSON lines over the control socket, what happened
goes back the same way, in the order in which it happened. `LabConfig` is the first line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowcheck.errors import FlowcheckError
from flowcheck.lab import namespaces, topology
from flowcheck.lab.config import LabConfig, Mirror
from flowcheck.lab.output import LinePrefixer

DAEMON = "daemon"
_READ = 1 << 16


def to_json(config: LabConfig) -> dict[str, Any]:
    """The fields of a config as JSON can hold them."""
    fields = {name: getattr(config, name) for name in LabConfig.__slots__}
    fields["env"] = dict(config.env)
    if config.mirrors is not None:
        fields["mirrors"] = [[mirror.rank, mirror.direction] for mirror in config.mirrors]
    return fields


def from_json(fields: dict[str, Any]) -> LabConfig:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    if values["mirrors"] is not None:
        values["mirrors"] = tuple(Mirror(rank, direction) for rank, direction in values["mirrors"])
    return LabConfig(**values)


@dataclass(slots=True)
class _Process:
    """One child: who it is, its pidfd, and what its output goes to."""

    name: str
    pid: int
    pidfd: int
    outputs: dict[int, Callable[[bytes], None]] = field(default_factory=dict)
    closers: list[Callable[[], None]] = field(default_factory=list)


def supervise(control: socket.socket, folder: str) -> int:
    """Run the lab until the caller closes the control socket. Returns the exit status of process 1.

    `folder` is private to this lab and takes its small files.
    """
    buffer = b""
    while b"\n" not in buffer:
        data = control.recv(_READ)
        if not data:
            return 1
        buffer += data
    line, _, buffer = buffer.partition(b"\n")
    config = from_json(json.loads(line))
    try:
        nodes = [namespaces.new_network() for _ in range(config.nodes)]
        checkpoint = namespaces.new_network()
        switch = namespaces.current_network()
        topology.build_in_child(config, switch, checkpoint, nodes)
    except (FlowcheckError, OSError) as error:
        message = f"the lab's networks could not be built: {error}"
        control.sendall(json.dumps({"event": "failed", "code": 1, "message": message}).encode() + b"\n")
        return 1
    _name_nodes(config, folder)
    supervisor = _Supervisor(control, config, nodes, checkpoint)
    supervisor.send(event="built")
    supervisor.run(buffer)
    return 0


def _name_nodes(config: LabConfig, folder: str) -> None:
    names = Path(folder, "hosts")
    # Names are a convenience: a system without /etc/hosts, or one that forbids the mount, does without.
    with suppress(OSError):
        names.write_text(Path("/etc/hosts").read_text() + topology.hosts(config))
        namespaces.mount_over(str(names), "/etc/hosts")


class _Supervisor:
    def __init__(self, control: socket.socket, config: LabConfig, nodes: list[int], checkpoint: int) -> None:
        self._control = control
        self._config = config
        self._nodes = nodes
        self._checkpoint = checkpoint
        self._processes: dict[str, _Process] = {}
        self._readers: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        self._ended = False

    def send(self, **event: Any) -> None:
        self._control.sendall(json.dumps(event).encode() + b"\n")

    def run(self, buffer: bytes) -> None:
        """Serve until the control socket ends. `buffer` holds what was already read from it."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        commands = LineReader(self._obey)
        commands.feed(buffer)

        def read_control() -> None:
            data = self._control.recv(_READ)
            if not data:
                self._ended = True
            commands.feed(data)

        def drain() -> None:
            os.read(wake_read, _READ)

        self._watch(self._control.fileno(), read_control)
        self._watch(wake_read, drain)
        while not self._ended:
            # epoll reports in the order of the events: of two ranks that ended, the first one comes first.
            for descriptor, _ in self._epoll.poll():
                reader = self._readers.get(descriptor)
                if reader is not None:
                    reader()
            self._reap_orphans()

    def _watch(self, descriptor: int, reader: Callable[[], None]) -> None:
        self._readers[descriptor] = reader
        self._epoll.register(descriptor, select.EPOLLIN)

    def _unwatch(self, descriptor: int) -> None:
        if self._readers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            os.close(descriptor)

    def _obey(self, line: bytes) -> None:
        command = json.loads(line)
        match command["do"]:
            case "train":
                for rank in range(self._config.ranks):
                    self._start_trainer(rank, command["argv"], command["env"])
            case "daemon":
                self._start_daemon(command["argv"], command["env"])
            case "signal":
                for name in command["names"]:
                    self._signal(name, command["signal"], command["group"])
            case "management":
                for node in range(self._config.nodes):
                    topology.set_link(topology.management_port(node), command["up"])
                self.send(event="management", up=command["up"])

    def _start_trainer(self, rank: int, argv: list[str], env: dict[str, str]) -> None:
        name = f"rank {rank}"
        namespace = self._nodes[self._config.node_of(rank)]
        env = {**env, **topology.trainer_environment(self._config, rank)}
        process, out, err = self._spawn(name, argv, env, namespace, self._config.trainer_cpus)
        self._forward(process, out, LinePrefixer(name, sys.stdout.fileno()))
        self._forward(process, err, LinePrefixer(name, sys.stderr.fileno()))

    def _start_daemon(self, argv: list[str], env: dict[str, str]) -> None:
        process, out, err = self._spawn(DAEMON, argv, env, self._checkpoint, self._config.daemon_cpus)
        rest = LinePrefixer(DAEMON, sys.stdout.fileno())
        first = b""

        def read_first_line(data: bytes) -> None:
            nonlocal first
            first += data
            line, newline, more = first.partition(b"\n")
            if newline:
                self.send(event="daemon-line", line=line.decode(errors="replace"))
                process.outputs[out] = rest.feed
                rest.feed(more)

        self._forward(process, out, rest)
        process.outputs[out] = read_first_line
        process.closers.insert(0, lambda: rest.feed(b"" if b"\n" in first else first))
        self._forward(process, err, LinePrefixer(DAEMON, sys.stderr.fileno()))

    def _forward(self, process: _Process, descriptor: int, prefixer: LinePrefixer) -> None:
        process.outputs[descriptor] = prefixer.feed
        process.closers.append(prefixer.close)

        def read() -> None:
            with suppress(BlockingIOError):
                data = os.read(descriptor, _READ)
                if not data:
                    self._unwatch(descriptor)
                process.outputs[descriptor](data)

        self._watch(descriptor, read)

    def _spawn(
        self, name: str, argv: list[str], env: dict[str, str], namespace: int, cpus: tuple[int, ...] | None
    ) -> tuple[_Process, int, int]:
        """Fork and exec in a network namespace; returns the process and the ends of stdout and stderr."""
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                # A session of its own: what a rank started ends with it.
                os.setsid()
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out_write, 1)
                os.dup2(err_write, 2)
                namespaces.enter_network(namespace)
                if cpus:
                    os.sched_setaffinity(0, cpus)
                os.execvpe(argv[0], argv, env)
            except BaseException as error:
                os.write(2, f"{argv[0]} cannot be started: {error}\n".encode())
            finally:
                os._exit(127)
        os.close(out_write)
        os.close(err_write)
        for descriptor in (out_read, err_read):
            os.set_blocking(descriptor, False)
        process = _Process(name, pid, os.pidfd_open(pid))
        self._processes[name] = process
        self._watch(process.pidfd, lambda: self._reap(process))
        self.send(event="started", name=name)
        return process, out_read, err_read

    def _signal(self, name: str, number: int, group: bool) -> None:
        process = self._processes.get(name)
        if process is not None:
            with suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(process.pid, number)

    def _reap(self, process: _Process) -> None:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid:
            self._end(process, status)

    def _reap_orphans(self) -> None:
        """Collect processes that lost their parents: process 1 is the only one who can."""
        by_pid = {process.pid: process for process in self._processes.values()}
        with suppress(ChildProcessError):
            while True:
                # Only look: our own children are collected by their pidfd, in the order of their ends.
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if info is None or info.si_pid in by_pid:
                    return
                os.waitpid(info.si_pid, 0)

    def _end(self, process: _Process, status: int) -> None:
        # Workers that a rank left behind would hold its address and its memory.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for descriptor, feed in list(process.outputs.items()):
            if descriptor in self._readers:
                with suppress(BlockingIOError):
                    while data := os.read(descriptor, _READ):
                        feed(data)
                self._unwatch(descriptor)
        for close in process.closers:
            close()
        self._unwatch(process.pidfd)
        del self._processes[process.name]
        code = os.waitstatus_to_exitcode(status)
        self.send(event="ended", name=process.name, status=code if code >= 0 else 128 - code)


class LineReader:
    """Cuts a byte stream into lines and hands each to a function."""

    def __init__(self, handle: Callable[[bytes], None]) -> None:
        self._handle = handle
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._handle(line)
