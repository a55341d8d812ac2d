"""Whether this machine's optimizer steps have the trainer's bits, and if that is not shown, why.

Measured with torch 2.13 on x86-64: the AVX2 and AVX512 builds of torch's CPU kernels give the same bits for
SGD, Adam and AdamW in all implementations and dtypes; the DEFAULT build differs in all of them. CUDA kernels
were not compared, nor other architectures or torch versions with each other. In float16 and bfloat16 torch's
fused SGD reads memory that is not its own (results differ from call to call), and its single-tensor and
foreach loops cut large tensors by thread count, which then shows in the bits.
"""

from __future__ import annotations

import platform

from flowcheck.description import JobDescription
from reconstruct.arena import GRAIN, LOW_PRECISION

EQUAL_CAPABILITIES = {"AVX2", "AVX512"}


def exactness(description: JobDescription) -> tuple[bool, list[str]]:
    """(exact, reasons): whether the shadow's state is bit for bit the trainer's; reasons if it may not be."""
    import torch

    reasons = []
    if description.torch_version != str(torch.__version__):
        reasons.append(f"torch differs: {description.torch_version} in the job, {torch.__version__} here")
    if description.arch != platform.machine():
        reasons.append(f"architecture differs: {description.arch} in the job, {platform.machine()} here")
    here = torch.backends.cpu.get_cpu_capability()
    there = description.cpu_capability
    if there != here and not {there, here} <= EQUAL_CAPABILITIES:
        reasons.append(f"torch uses {there} kernels in the job and {here} kernels here, their bits differ")
    if description.device != "cpu":
        reasons.append(f"the job's optimizer runs on {description.device}, whose bits are not those of a CPU")
    reasons += _precision(description)
    return not reasons, reasons


def _precision(description: JobDescription) -> list[str]:
    specs = {parameter.name: parameter.spec for parameter in description.parameters}
    undefined, by_threads = 0, 0
    for group in description.optimizer.groups:
        fused = bool(group.fields.get("fused"))
        for spec in (specs[name] for name in group.parameters):
            if spec.dtype not in LOW_PRECISION:
                continue
            if fused:
                undefined += description.optimizer.name == "SGD"
            elif spec.numel > GRAIN and description.threads is None:
                by_threads += 1
    reasons = []
    if undefined:
        reasons.append(f"torch's fused SGD gives undefined values for {undefined} float16 or bfloat16 tensors")
    if by_threads:
        reasons.append(f"bits of {by_threads} float16 or bfloat16 tensors depend on the job's thread count (unknown)")
    return reasons
