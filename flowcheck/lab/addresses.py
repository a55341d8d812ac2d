"""Addresses of the training network: of node and rail, the same for the kernel's interfaces and for made frames."""

from __future__ import annotations

from typing import NamedTuple


class Port(NamedTuple):
    """A switch port, so one interface of one node: node and rail count from 0."""

    node: int
    rail: int


def training_interface(rail: int) -> str:
    return f"train{rail}"


def training_address(port: Port, ipv6: bool) -> str:
    """Every rail is a subnet of its own, as on a rail-optimized fabric."""
    if ipv6:
        return f"fd77::{port.rail:x}:{port.node + 1:x}" if port.rail else f"fd77::{port.node + 1:x}"
    return f"10.77.{port.rail}.{port.node + 1}"


def training_mac(port: Port) -> bytes:
    """Locally administered; fixed, so that frames can be addressed without asking."""
    return bytes((0x02, 0x77, 0, port.rail, port.node >> 8, port.node & 0xFF))
