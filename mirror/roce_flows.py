"""The flow table of RoCEv2: one entry per (vantage group, source address, destination address, destination QP).

Both ends of a connection may use the same queue pair number, and the UDP source port means nothing, so neither a
number nor a port alone names a flow. Which flow runs the other way is in no packet; `mirror.roce_pairs` learns it.
"""

from __future__ import annotations

from mirror.flows import Flows

__all__ = ["QueuePairs"]


class QueuePairs(Flows):
    """Bounded table of RoCE flows with dense ids; eviction as in `mirror.flows`. The queue pair number stands where
    a TCP flow has its ports."""

    def endpoint_src(self, flow: int) -> tuple[str, int]:
        """(address, 0): the sender's own queue pair is not in its packets."""
        return super().endpoint_src(flow)[0], 0

    def endpoint_dst(self, flow: int) -> tuple[str, int]:
        """(address, queue pair number) that receives on this flow."""
        return super().endpoint_dst(flow)[0], self.queue_pair(flow)

    def queue_pair(self, flow: int) -> int:
        """Destination queue pair number, 24 bits."""
        return int(self.table.key[flow, 4]) & 0xFFFFFF

    def find_pair(self, vantage: int, src_ip: str, dst_ip: str, queue_pair: int) -> int:
        """Id of a flow, or -1 if it is not in the table. Raises ValueError for text that is no address."""
        return self.lookup(vantage, src_ip, queue_pair >> 16, dst_ip, queue_pair & 0xFFFF)
