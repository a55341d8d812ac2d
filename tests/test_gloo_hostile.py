"""The gloo decoder on bytes that are no gloo."""

from __future__ import annotations

import struct

import pytest
from gloo_traffic import (
    Follower,
    Job,
    port,
    preamble,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reconstruct.decoder import ALLREDUCE, BROADCAST, IGNORE, LENGTHS, RAW, AllReduce, LinkLost
from reconstruct.gloo.decoder import GlooDecoder


def _stream(payloads: list[bytes]) -> Job:
    job = Job(2, [(1, 0), (0, 1)])
    job.connect()
    for payload in payloads:
        job.send((1, 0), payload)
    return job


@pytest.mark.parametrize(
    "fields",
    [
        (48, 0, ALLREDUCE << 56, 0, 0, 0),
        (48, 4, ALLREDUCE << 56, 0, 0, 0),
        (49, 2, ALLREDUCE << 56, 0, 0, 0),
        (48, 1, ALLREDUCE << 56, 0, 8, 0),
        ((1 << 64) - 1, 1, ALLREDUCE << 56, 0, (1 << 64) - 49, 0),
        (48 + (1 << 50), 1, BROADCAST << 56, 0, 1 << 50, 0),
        (48 + (2 << 20), 1, ALLREDUCE << 56, 0, 2 << 20, 0),
        (48, 2, 9 << 56, 0, 0, 0),
        (48, 2, (1 << 63) | 5, 0, 0, 0),
        (48, 2, ALLREDUCE << 56 | 1 << 8, 0, 0, 0),
        (48, 2, ALLREDUCE << 56, 1, 0, 0),
        (48, 2, ALLREDUCE << 56, 0, 0, 1),
    ],
)
def test_impossible_preambles(fields: tuple[int, ...]) -> None:
    job = _stream([struct.pack("<6Q", *fields), bytes(500), preamble(2, ALLREDUCE, 7, 100)])
    follower = Follower(job)
    follower.feed(job.frames)
    assert follower.decoder.counters["bad_preambles"] == 1
    assert follower.decoder.counters["resynced"] == 1
    assert follower.decoder.counters["placed_bytes"] == 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda op, kind, tag, n, body: preamble(op, kind, tag, n) + body,
        st.integers(0, 4), st.integers(0, 9), st.integers(0, 40), st.integers(0, 300), st.binary(max_size=300),
    ),
), max_size=30), st.booleans())
def test_any_bytes(payloads: list[bytes], known: bool) -> None:
    job = _stream(payloads)
    for plan in (RAW, LENGTHS, AllReduce(64, 4)):
        follower = Follower(job, group=known)
        follower.decoder.planner = lambda r, plan=plan: plan if r.kind == ALLREDUCE or plan is RAW else IGNORE
        follower.feed(job.frames, per_block=4)
        follower.finish()
        for tag in range(41):
            landing = follower.decoder.landing("g", tag) if known else None
            assert landing is None or not landing.complete or sum(map(len, payloads)) > 64


def test_other_protocols_cost_nothing() -> None:
    job = Job(2, [(1, 0), (0, 1)])
    for link in job.mirrored:
        job._flags(link, 0x02)
    for _ in range(20):
        job.send((1, 0), b"GET / HTTP/1.1\r\n" + bytes(100))
        job.send((0, 1), bytes(1000))
    follower = Follower(job, group=False)
    follower.feed(job.frames)
    assert [follower.decoder.flow_kind(f) for f in range(2)] == ["other", "other"]
    assert follower.decoder.counters["flows"] == 0


def test_encrypted_gloo_is_named() -> None:
    for known in (True, False):
        job = Job(2, [(1, 0), (0, 1)])
        job.connect()
        job.send((1, 0), b"\x16\x03\x01" + bytes(200))
        follower = Follower(job, group=known)
        follower.feed(job.frames)
        if known:
            (lost,) = [e for e in follower.events if isinstance(e, LinkLost)]
            assert "encrypted" in lost.reason
        else:
            assert "tls" in [follower.decoder.flow_kind(f) for f in range(2)]


def test_flow_limit() -> None:
    job = Job(12, port(12, 0), seed=1)
    job.connect()
    job.allreduce({0: (4000, 4)})
    follower = Follower(job)
    follower.decoder = GlooDecoder(follower.flows, max_lanes=4)
    follower.decoder.planner = lambda r: AllReduce(4000, 4)
    follower.decoder.add_group(job.group())
    follower.feed(job.frames)
    assert follower.decoder.counters["flows"] == 4
    assert follower.decoder.counters["flows_refused"] > 0
