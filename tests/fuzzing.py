"""Input that nobody sends: JSON with one thing wrong, and blocks of frames that were injured by the thousand."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mirror.block import Block

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -(2**63), 1.5, float("nan"), float("inf"), 1e308, "",
    "x", "\0", "\ud800", "../../etc/passwd", "x" * 70_000, "__import__('os')", [], [[]], {}, [None] * 3, {"": {}},
    {"__tuple__": 1}, {"__dict__": [[[], 1]]}, {"__float__": "1"}, {"__class__": "os.system"}, "nan", "1" * 5000,
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a tree of dicts and lists."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of the tree with another value at a path."""
    if not path:
        return value
    result = copy.deepcopy(tree)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def injured(tree: Any, chance: random.Random) -> Any:
    """A copy of the tree with one place changed: another value, a twin, a field gone or one too many."""
    path = chance.choice(list(places(tree)))
    inner = tree
    for key in path:
        inner = inner[key]
    kind = chance.randrange(6)
    if kind == 0 and path:
        result = copy.deepcopy(tree)
        outer = result
        for key in path[:-1]:
            outer = outer[key]
        del outer[path[-1]]
        return result
    if kind == 1 and isinstance(inner, dict):
        return put(tree, path, {**inner, chance.choice(["extra", "", "\0", "__class__"]): chance.choice(HOSTILE)})
    if kind == 1 and isinstance(inner, list) and inner:
        return put(tree, path, inner * chance.choice([2, 3, 50]))
    if kind == 2:
        deep: Any = chance.choice(HOSTILE)
        for _ in range(chance.choice([1, 2, 20, 200])):
            deep = [deep] if chance.random() < 0.5 else {"a": deep}
        return put(tree, path, deep)
    if kind == 3 and isinstance(inner, int) and not isinstance(inner, bool):
        return put(tree, path, inner + chance.choice([-1, 1, 1 << 20, 1 << 40, 1 << 62]))
    return put(tree, path, chance.choice(HOSTILE))


LENGTHS = np.array([0, 1, 4, 5, 7, 8, 15, 16, 20, 0x7F, 0x80, 0xFF, 0x100, 0x5DC, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF])


class Mutator:
    """Injures copies of frames: bits, bytes and 16-, 32- and 64-bit fields, mostly in the headers; cuts, padding,
    copies of a part of another frame, other lengths on the wire, times, order, duplicates, VLAN tags and link types.
    """

    def __init__(self, frames: Sequence[bytes], seed: int, linktype: int = 1) -> None:
        longest = max(map(len, frames))
        self._size = np.array([len(frame) for frame in frames], np.int64)
        self._frames = np.zeros((len(frames), longest + 64), np.uint8)
        for row, frame in zip(self._frames, frames, strict=True):
            row[: len(frame)] = np.frombuffer(frame, np.uint8)
        self._chance = np.random.default_rng(seed)
        self._linktype = linktype
        self._at = 0
        self._now = 1_700_000_000_000_000_000

    def block(self, count: int, harm: float) -> Block:
        """The next `count` frames; about the share `harm` of them injured."""
        chance = self._chance
        rows = (self._at + np.arange(count)) % len(self._frames)
        self._at = int(rows[-1]) + 1
        if chance.random() < 0.3:  # out of order, or twice
            moved = chance.random(count) < harm
            rows[moved] = np.clip(rows[moved] + chance.integers(-20, 21, int(moved.sum())), 0, len(self._frames) - 1)
        frames, size = self._frames[rows], self._size[rows].copy()
        width = frames.shape[1]
        hit = np.flatnonzero(chance.random(count) < harm)
        place = self._places(hit, size)
        kind = chance.integers(0, 8, len(hit))
        one = kind == 0
        frames[hit[one], place[one]] ^= (1 << chance.integers(0, 8, int(one.sum()))).astype(np.uint8)
        one = kind == 1
        frames[hit[one], place[one]] = chance.integers(0, 256, int(one.sum()))
        for code, bytes_ in ((2, 2), (3, 4), (4, 8)):
            one = kind == code
            value = chance.choice(LENGTHS, int(one.sum()))
            for byte in range(bytes_):
                at = np.minimum(place[one] + byte, width - 1)
                frames[hit[one], at] = (value >> (8 * max(0, bytes_ - 1 - byte)) & 0xFF) if byte else value >> 8 & 0xFF
        one = kind == 5  # cut
        size[hit[one]] = chance.integers(0, np.maximum(size[hit[one]], 1))
        one = kind == 6  # longer
        size[hit[one]] = np.minimum(width, size[hit[one]] + chance.integers(1, 64, int(one.sum())))
        for row, at in zip(hit[kind == 7].tolist(), place[kind == 7].tolist(), strict=True):  # a part of another frame
            other = int(chance.integers(0, len(self._frames)))
            length = int(chance.integers(1, 64))
            frames[row, at : at + length] = self._frames[other, at : at + length]
        wire = size.copy()
        odd = chance.random(count) < 0.02 * harm
        wire[odd] = chance.choice(np.array([0, 1, 60, 1514, 1 << 20, (1 << 31) - 1]), int(odd.sum()))
        vlan = np.full(count, -1, np.int64)
        tagged = chance.random(count) < 0.02 * harm
        vlan[tagged] = (0x8100 << 16) | chance.integers(0, 1 << 16, int(tagged.sum()))
        step = chance.integers(0, 20_000, count)
        if chance.random() < 0.02 * harm:  # a clock that jumps
            step[0] = chance.choice(np.array([-(10**9), 10**9, 10**11]))
        ts = self._now + np.cumsum(step)
        self._now = int(ts[-1])
        linktype = self._linktype
        if chance.random() < 0.01 * harm:
            linktype = int(chance.choice(np.array([0, 1, 101, 113, 276])))
        offset = np.arange(count, dtype=np.int64) * width
        return Block(frames.reshape(-1), offset, size, wire, ts, vlan, int(chance.random() < 0.02 * harm), linktype)

    @property
    def now(self) -> int:
        return self._now

    def _places(self, hit: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Where each is injured: eight of ten in the first 128 bytes, where the headers are."""
        chance = self._chance
        bound = np.maximum(size[hit], 1)
        near = chance.random(len(hit)) < 0.8
        bound[near] = np.minimum(bound[near], 128)
        return chance.integers(0, bound)
