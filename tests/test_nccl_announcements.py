"""CTS entries against the messages that they announce: one that says otherwise is named, and no value is claimed."""

from __future__ import annotations

import struct

import pytest
from nccl_traffic import Rig, Sender, Sent, group_of, seen_at
from test_nccl_decoder import BIG, SIZES, SMALL

from flowcheck.lab.nccl_wire_job import Job
from reconstruct.nccl.versions import traits

JOBS = [
    Job(2, version="2.19.4", algorithm="ring", protocol="ll"),
    Job(2, version="2.28.9", algorithm="ring", protocol="simple"),
    Job(2, version="2.19.4", algorithm="ring", protocol="ll", qps=2, split=True),
    Job(2, version="2.28.9", algorithm="ring", protocol="simple", qps=2, split=False),
]
PAYLOAD = 70  # of a WRITE in one packet over IPv4


def entries(job: Job, sent: Sent, sender: int, number: int) -> list[int]:
    """Frames that carry the CTS entry of a rank's message `number` (from 1)."""
    form = traits(job.version).cts
    found = []
    for at, (_, _, frame) in enumerate(sent):
        if frame[42] == 10 and len(frame) >= PAYLOAD + form.entry:
            entry = frame[PAYLOAD : PAYLOAD + form.entry]
            tag, index = struct.unpack_from("<I", entry, form.tag)[0], struct.unpack_from("<Q", entry, form.index)[0]
            if (tag, index) == (sender, number):
                found.append(at)
    return found


def changed(job: Job, sent: Sent, at: int, field: str, by: int) -> Sent:
    form = traits(job.version).cts
    offset = PAYLOAD + getattr(form, field)
    time, link, frame = sent[at]
    other = bytearray(frame)
    other[offset + 2] ^= by
    return [*sent[:at], (time, link, bytes(other)), *sent[at + 1 :]]


@pytest.mark.parametrize("field", ["address", "rkeys"])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.protocol}-q{job.qps}")
def test_a_message_that_was_announced_elsewhere_contradicts(job: Job, field: str) -> None:
    sender = Sender(job)
    sent = sender.reduce(BIG)
    each = max(n for n in range(1, 200) if entries(job, sent, 0, n))
    sent = sent + sender.reduce(BIG)
    (at,) = entries(job, sent, 0, each + 3)  # of the third message of the second collective
    rig = Rig(group_of(job), SIZES)
    rig.feed(changed(job, sent, at, field, 1))
    rig.finish()
    assert rig.reduced == [0] and any("CTS entry" in event.reason for event in rig.lost)
    assert rig.landing(1) is None or rig.landing(1).poisoned


@pytest.mark.parametrize("job", JOBS[:2], ids=lambda job: job.protocol)
def test_numbers_are_learnt_where_the_start_was_not_seen(job: Job) -> None:
    """The group comes in the middle of the connection's life: its first message tells what the entries count."""
    sender = Sender(job)
    before = sender.reduce(SMALL) + sender.barrier()
    counted = max(n for n in range(1, 200) if entries(job, before, 0, n))
    first, second = sender.reduce(BIG), sender.reduce(BIG)
    sent = first + second
    each = max(n for n in range(1, 400) if entries(job, first, 0, n)) - counted
    (at,) = entries(job, sent, 0, counted + each + 2)
    for field in (None, "address"):
        rig = Rig(group_of(job, name="old"), SIZES)
        rig.feed(before)
        rig.decoder.remove_group("old")
        rig.name = "g"
        rig.decoder.add_group(group_of(job), 40, sent[0][0])
        rig.events.clear()
        rig.feed(sent if field is None else changed(job, sent, at, field, 1))
        rig.finish()
        assert rig.reduced == ([40, 41] if field is None else [40])
        assert any("CTS entry" in event.reason for event in rig.lost) == (field is not None)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.protocol}-q{job.qps}")
def test_entries_that_were_not_seen_say_nothing(job: Job) -> None:
    sender = Sender(job)
    sent = sender.reduce(BIG) + sender.reduce(BIG)
    gone = {at for number in range(3, 200, 5) for at in entries(job, sent, 0, number)}
    rig = Rig(group_of(job), SIZES)
    rig.feed([item for at, item in enumerate(sent) if at not in gone])
    rig.finish()
    assert rig.reduced == [0, 1] and not rig.lost
    rig = Rig(group_of(job), SIZES)
    rig.feed(seen_at(job, sent, 0, "in"))
    rig.finish()
    assert not rig.lost and not rig.wrong(sender.results)
