"""Switch configurations that copy a training port to a checkpoint node and cannot slow the training.

One module per vendor; `VENDORS[name].script(request)` gives the text. See docs/switches.md.
"""

from __future__ import annotations

from flowcheck.switchconfig.aws import Aws
from flowcheck.switchconfig.cloudengine import CloudEngine
from flowcheck.switchconfig.comware import Comware
from flowcheck.switchconfig.cumulus import Cumulus
from flowcheck.switchconfig.eos import Eos
from flowcheck.switchconfig.junos import Junos
from flowcheck.switchconfig.linux import Linux
from flowcheck.switchconfig.nxos import Nxos
from flowcheck.switchconfig.ovs import Ovs
from flowcheck.switchconfig.request import MirrorRequest, Source, Tunnel
from flowcheck.switchconfig.sonic import Sonic
from flowcheck.switchconfig.vendor import Vendor

__all__ = ["VENDORS", "MirrorRequest", "Source", "Tunnel", "Vendor"]

VENDORS: dict[str, Vendor] = {
    vendor.name: vendor
    for vendor in (
        Sonic(), Cumulus(), Eos(), Nxos(), Comware(), Junos(), CloudEngine(), Linux(), Ovs(), Aws(),
    )
}  # fmt: skip
