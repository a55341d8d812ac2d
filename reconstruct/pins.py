"""Holding one version of the shadow's state for reading."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flowcheck.description import TensorSpec
from reconstruct.arena import ShadowError, Version
from reconstruct.digest import state_digest

__all__ = ["NothingKnown", "Pin", "PinRevoked"]


class PinRevoked(ShadowError):
    """The reader was too slow: the memory of its step was needed for a newer one."""


class NothingKnown(ShadowError):
    """No fully known step is held: elements of the live one wait for repair, and there is no older one."""


class Pin:
    """One version, held for reading.

    tensors: key -> (spec, uint8 view of memory-order bytes); whole: whether all of it is the step's; unknown: elements
    that hold no value of the step. What lies at unknown elements may change while it is read, without the pin being
    revoked.
    """

    def __init__(self, version: Version, release: Callable[[Pin], None]) -> None:
        self._release = release
        self._revoked = False
        self.step = version.step
        self.groups = version.groups
        self.whole = version.known
        self.unknown = version.unknown.copy()
        self.tensors: dict[str, tuple[TensorSpec, np.ndarray]] = version.tensors()

    @property
    def revoked(self) -> bool:
        """Whether the bytes may have changed. Ask after copying a chunk and before using it."""
        return self._revoked

    def revoke(self) -> None:
        """The shadow is about to overwrite the version."""
        self._revoked = True

    def check(self) -> None:
        """PinRevoked if what was copied so far may not be of this step."""
        if self._revoked:
            raise PinRevoked(f"step {self.step} was read too slowly and is gone, ask again for a newer one")

    def digest(self) -> str:
        """`reconstruct.digest.state_digest` of the step; PinRevoked if it was overwritten meanwhile."""
        result = state_digest(self.tensors)
        self.check()
        return result

    def release(self) -> None:
        """Let the memory go; the views must not be read any more. Calling it again does nothing."""
        self._release(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
