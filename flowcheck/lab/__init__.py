"""A virtual cluster on one machine: trainers, a switch that mirrors ports, a checkpoint node."""

from __future__ import annotations

from flowcheck.lab.config import LabConfig, Mirror
from flowcheck.lab.launcher import Lab, run

__all__ = ["Lab", "LabConfig", "Mirror", "run"]
