"""How much one feed may spend on finding out what messages are: a capture ring fills meanwhile.

Honest traffic needs a small part of it. What nothing explains (another job's queue pairs, injured or made-up frames)
would be tried again and again; what is beyond the allowance waits for the next feed, and nothing is decided without it.
"""

from __future__ import annotations

__all__ = ["Allowance"]

_FITS = 1 << 14   # comparisons of a queue pair with a connection: about 15 us each
_PLANS = 1000     # planned collectives of searches by lengths, about 45 us each; a search that has begun goes on


class Allowance:
    """Of one decoder, for all its groups."""

    def __init__(self) -> None:
        self.fits, self.plans = _FITS, _PLANS
        self.short = False
        """Whether something has been put off until the next feed."""

    def renew(self) -> None:
        """The next feed begins."""
        self.fits, self.plans, self.short = _FITS, _PLANS, False

    def compare(self, count: int) -> bool:
        """Whether `count` comparisons may be made now; they are taken off."""
        if self.fits <= 0:
            self.short = True
            return False
        self.fits -= count
        return True

    def search(self) -> bool:
        """Whether a search by lengths may begin now."""
        if self.plans <= 0:
            self.short = True
            return False
        return True

    def planned(self, count: int) -> None:
        """A search has made so many plans."""
        self.plans -= count
