"""What a gloo decoder holds: landings shared by the links of a group, landings private to a link, raw messages."""

from __future__ import annotations

from mirror.memory import address_of
from reconstruct.gloo import schedule
from reconstruct.landing import Landing
from reconstruct.memory import Budget, RawLink, RawMessage

__all__ = ["Holdings"]


class Holdings:
    """Every landing that the kernel may know is found here by its number, so it outlives the kernel's use of it."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget = Budget(budget_bytes)
        self.landings: dict[tuple[str, int], Landing] = {}  # (group, tag)
        self.names: dict[int, tuple[str, int]] = {}  # ident of a shared landing -> (group, tag)
        self.private: dict[tuple[int, int], Landing] = {}  # (lane, slot)
        self.filling: dict[int, RawMessage] = {}  # lane -> message being received
        self.raw: dict[tuple[str, int], dict[tuple[int, int], RawLink]] = {}  # (group, tag) -> (lane's uid, slot)
        self.placed: dict[tuple[str, int], tuple[int, int]] = {}  # (group, tag) -> (size, itemsize) of raw links

    def landing(self, ident: int) -> Landing:
        """Any landing by its number."""
        return self.budget.of(ident)

    def find(self, ident: int) -> Landing | None:
        """The same; None if it is held no more."""
        return self.budget.find(ident)

    def shared(self, group: str, tag: int, size: int, itemsize: int, world: int) -> Landing | None:
        """The landing of an all-reduce, made if there is none yet; None if the budget does not allow it."""
        landing = self.landings.get((group, tag))
        if landing is None:
            landing = self._new(size, itemsize, world)
            if landing is not None:
                self.landings[group, tag] = landing
                self.names[landing.ident] = (group, tag)
        return landing

    def make_private(self, lane: int, slot: int, size: int, itemsize: int, world: int) -> Landing | None:
        """The landing of one slot on one lane, made if there is none yet; None if the budget does not allow it."""
        landing = self.private.get((lane, slot))
        if landing is None:
            landing = self._new(size, itemsize, world)
            if landing is not None:
                self.private[lane, slot] = landing
        return landing

    def drop_private(self, lane: int, slot: int) -> Landing | None:
        """Forget a private landing; its memory may be used again, so nobody may write to it any more."""
        landing = self.private.pop((lane, slot), None)
        if landing is not None:
            self.budget.free(landing)
        return landing

    def begin_raw(self, lane: int, start: int, length: int) -> RawMessage:
        """A message kept raw begins; its data is None if the budget does not allow it."""
        message = self.filling[lane] = RawMessage(start, length, self.budget.bytes(length))
        return message

    def end_raw(self, lane: int) -> RawMessage | None:
        """The message kept raw that this lane was receiving."""
        return self.filling.pop(lane, None)

    def discard(self, message: RawMessage | None) -> None:
        """Give back the memory of a message that no link keeps."""
        if message is not None and message.data is not None:
            self.budget.free_bytes(message.length)

    def drop(self, group: str, below: int | None) -> list[int]:
        """Forget landings and raw messages of tags below `below` (None: all); returns their addresses."""

        def old(key: tuple[str, int]) -> bool:
            return key[0] == group and (below is None or key[1] < below)

        addresses = []
        for key in [key for key in self.landings if old(key)]:
            landing = self.landings.pop(key)
            del self.names[landing.ident]
            addresses.append(landing.address)
            self.budget.free(landing)
        for key in [key for key in self.raw if old(key)]:
            for link in self.raw.pop(key).values():
                for message in link.messages:
                    if message.data is not None:
                        addresses.append(address_of(message.data))
                    self.discard(message)
        for key in [key for key in self.placed if old(key)]:
            del self.placed[key]
        return addresses

    def _new(self, size: int, itemsize: int, world: int) -> Landing | None:
        segment = schedule.ring(size, itemsize, world)[3]  # no message crosses a segment of the ring
        return self.budget.landing(size, itemsize, world, segment)
