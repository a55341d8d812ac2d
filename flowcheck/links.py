"""The connections on which markers come: whether a job's trainer can still reach the daemon."""

from __future__ import annotations

from flowcheck.answers import Answers
from flowcheck.service import Service


class Links:
    """Connections go by their descriptors, as libzmq tells them; -1 is none."""

    def __init__(self, service: Service, answers: Answers) -> None:
        self._service = service
        self._answers = answers
        self._jobs: dict[int, tuple[str, int]] = {}  # descriptor -> (run, epoch) whose markers come on it
        self._gone: list[int] = []

    def stands(self, descriptor: int, run: str, epoch: int) -> None:
        """The trainer of (run, epoch) is at the other end of a connection."""
        if descriptor >= 0 and self._jobs.get(descriptor) != (run, epoch):
            self._jobs = {fd: job for fd, job in self._jobs.items() if job != (run, epoch)}
            self._jobs[descriptor] = (run, epoch)
            self._service.link(run, epoch, True)

    def gone(self, descriptor: int) -> None:
        """A connection has ended, or nobody of ours is at its other end; what came on it may still wait to be taken."""
        self._gone.append(descriptor)

    def settle(self) -> None:
        """What ended connections carried has all been taken: now their trainers and agents count as gone."""
        gone, self._gone = self._gone, []
        for descriptor in gone:
            job = self._jobs.pop(descriptor, None)
            if job is not None:
                self._service.link(*job, False)
            self._answers.ended(descriptor)
