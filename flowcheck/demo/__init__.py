"""`flowcheck demo`: train, kill, restore, resume, compare. Real processes, network, mirroring and kills."""

from flowcheck.demo.story import run

__all__ = ["run"]
