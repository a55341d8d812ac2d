"""Declared vantage groups: `--vantage NAME=MEMBER[,MEMBER...]`, and which group a source or a job belongs to.

A member is the name of a captured interface (or the path of a file, as it was given) or a tunnel in the form of
`mirror.vantage.Tunnel.parse`: `[KIND ]SOURCE>DESTINATION[#ID]`, `*` for any:

    --vantage "fabric=mon0,mon1" --vantage "tenant-a=erspan2 *>10.9.0.2#5,erspan2 *>10.9.0.2#6"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowcheck.errors import UsageError
from mirror.vantage import Tunnel, Vantage

__all__ = ["Vantages", "parse"]

MAX_NAME = 64


def parse(texts: Iterable[str], sources: Iterable[str]) -> dict[str, list[str]]:
    """The members of each named group. Raises UsageError for what is no group of the captured `sources` and tunnels."""
    known = set(sources)
    groups: dict[str, list[str]] = {}
    for text in texts:
        name, equals, members = text.partition("=")
        name, listed = name.strip(), [member.strip() for member in members.split(",")]
        if not equals or not name or len(name) > MAX_NAME or not all(listed):
            raise UsageError(f"--vantage {text}: give NAME=MEMBER[,MEMBER...], interfaces or tunnels")
        for member in listed:
            if ">" in member:
                try:
                    Tunnel.parse(member)
                except ValueError as error:
                    raise UsageError(f"--vantage {text}: {error}") from None
            elif member not in known:
                raise UsageError(
                    f"--vantage {text}: {member} is neither captured here ({', '.join(sorted(known))}) nor a tunnel "
                    "([KIND ]SOURCE>DESTINATION[#ID])"
                )
        groups.setdefault(name, []).extend(listed)
    return groups


class Vantages:
    """The declared groups of one daemon. `table` is for the walk of frames; the rest tells who is in which group."""

    def __init__(
        self, texts: Sequence[str] = (), sources: Sequence[str] = (), vxlan_ports: Sequence[int] = (4789,)
    ) -> None:
        """Raises UsageError: see `parse`; an interface in two groups, too many rules or ports."""
        groups = parse(texts, sources)
        try:
            self.table = Vantage(groups, vxlan_ports=vxlan_ports)
            self._numbers = {name: self.table.declare(name) for name in groups}
        except ValueError as error:
            raise UsageError(f"--vantage: {error}") from None

    def of_source(self, name: str) -> int:
        """The group of the frames of an interface or file."""
        return self.table.of_interface(name)

    def number(self, name: str | None) -> int | None:
        """The number of a job's group; None for a job that names none. Raises UsageError for an unknown one."""
        if name is None:
            return None
        if name not in self._numbers:
            known = ", ".join(sorted(self._numbers)) or "none"
            raise UsageError(f"the job's traffic is said to be in vantage group {name!r}, declared here: {known}")
        return self._numbers[name]
