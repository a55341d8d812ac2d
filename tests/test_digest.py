"""The digest: equal on both sides, different after any change."""

from __future__ import annotations

import pytest
import torch
from shadow_cases import Job, fill_gradients, shadow_of

import flowcheck
from flowcheck.description import TensorSpec
from reconstruct.digest import digest_of, state_digest


def test_digest_sees_every_bit_and_nothing_else() -> None:
    job = Job("convolutions")
    shadow = shadow_of(job.model, job.optimizer)
    shadow.apply(*job.train())
    reference = job.digest()
    assert flowcheck.digest(job.model, job.optimizer) == reference == shadow.digest()
    with shadow.pin() as pin:
        for key, (_, view) in pin.tensors.items():
            for byte, bit in ((0, 1), (len(view) - 1, 128)):
                view[byte] ^= bit
                assert (shadow.digest() == reference) is key.startswith("buffer/"), key
                view[byte] ^= bit
    assert shadow.digest() == reference
    shuffled = dict(reversed(list(pin.tensors.items())))
    assert state_digest(shuffled) == reference


def test_digest_names_what_bytes_alone_do_not() -> None:
    data = bytes(range(24))
    base = state_digest({"model/a": (TensorSpec("float32", (2, 3), (3, 1)), data)})
    for key, spec in (
        ("model/b", TensorSpec("float32", (2, 3), (3, 1))),
        ("model/a", TensorSpec("int32", (2, 3), (3, 1))),
        ("model/a", TensorSpec("float32", (3, 2), (2, 1))),
        ("model/a", TensorSpec("float32", (2, 3), (1, 2))),
        ("optimizer/a/exp_avg", TensorSpec("float32", (2, 3), (3, 1))),
    ):
        assert state_digest({key: (spec, data)}) != base
    one, other = TensorSpec("float32", (1, 6), (6, 1)), TensorSpec("float32", (1, 6), (1, 1))
    assert state_digest({"model/a": (one, data)}) == state_digest({"model/a": (other, data)})


def test_digest_of_refuses_what_it_cannot_name() -> None:
    model = torch.nn.Linear(3, 2)
    stranger = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *stranger.parameters()])
    fill_gradients(stranger, torch.Generator().manual_seed(0))
    optimizer.step()
    with pytest.raises(ValueError, match="not in the model"):
        digest_of(model, optimizer)
    gaps = torch.nn.Module()
    gaps.weight = torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(ValueError, match=r"weight: strides \(6, 2\) leave gaps"):
        digest_of(gaps, torch.optim.SGD(gaps.parameters(), lr=0.1))
