"""What the gloo kernel reports becomes events; losses are settled here.

One method per kind of log record. `Reports` shares lanes and holdings with the decoder, which asks it to drain the
log whenever the kernel has stopped.
"""

from __future__ import annotations

import numpy as np

from mirror.loss import NOTHING_KNOWN, Why
from reconstruct.decoder import (
    ALLREDUCE,
    NOT_THIS_SIZE,
    Conflict,
    Event,
    FlowClosed,
    LinkLost,
    Message,
    Reduced,
)
from reconstruct.gloo import schedule
from reconstruct.gloo import state as g
from reconstruct.gloo.blame import Blame
from reconstruct.gloo.holdings import Holdings
from reconstruct.gloo.lanes import LaneTable, slot_of, split
from reconstruct.gloo.recovery import after_gap, slot_completed, unproven
from reconstruct.landing import Landing
from reconstruct.memory import RawLink

__all__ = ["Reports"]

_ACTIVE = (g.REDUCE, g.KEPT, g.COUNTED)
_UNPROVEN = "a gap swallowed the start of a message: positions are not certain any more"


class Reports:
    """Turns the kernel's log into `events`; `counts` are cumulative."""

    def __init__(self, lanes: LaneTable, holdings: Holdings) -> None:
        self.events: list[Event] = []
        self.counts = dict.fromkeys(
            (
                "collectives", "links_done", "links_lost", "framing_lost", "resynced", "bad_preambles", "tls",
                "conflicts",
            ),
            0,
        )
        self.blame = Blame(lanes)
        self._lanes = lanes
        self._held = holdings

    def drain(self) -> None:
        """Take everything that the kernel has logged."""
        state = self._lanes.state
        count = int(state.cursor[g.C_LOG])
        state.cursor[g.C_LOG] = 0
        for what, lane, a, b, c, d, e, f in state.log[:count].tolist():
            if what == g.LOG_LANDED:
                self._landed(a)
            elif what == g.LOG_CONFLICT:
                self._conflict(a)
            elif what == g.LOG_DONE:
                self.link_done(lane, a)
            elif what == g.LOG_MESSAGE:
                self._message(lane, a, b, c, d, e)
            elif what == g.LOG_HOLE:
                landing = self._held.find(a)
                if landing is not None:
                    landing.lose(b, c, Why(d, e, f, self._lanes.vantage(lane)))
            elif what == g.LOG_RAW_HOLE:
                if lane in self._held.filling:
                    self._held.filling[lane].holes.append((b, c, Why(d, e, f, self._lanes.vantage(lane))))
            elif what == g.LOG_MISFIT:
                self._misfit(lane, a, b, c, d, bool(e))
            elif what == g.LOG_EVICTED:
                self.drop_private(lane, a)
                self.lose(lane, (split(a)[1],), "too many collectives at once on this link")
            elif what == g.LOG_BAD:
                self.counts["bad_preambles"] += 1
                if a:
                    self._given_up(lane)
            elif what == g.LOG_TLS:
                self.counts["tls"] += 1
                self.lose(lane, (), "the connection is encrypted: turn gloo's TLS off to have it followed")
            elif what == g.LOG_CLOSED:
                self._closed(lane, a)
            elif what == g.LOG_DOUBT:
                self._doubt(lane, a, b, c)
            elif what == g.LOG_GAP:
                self.counts["framing_lost"] += a != 2
                self.blame.gap(lane, Why(d, e, f, self._lanes.vantage(lane)) if a else NOTHING_KNOWN)

    # All-reduces

    def lose(self, lane: int, tags: tuple[int, ...], reason: str) -> None:
        """Say that nothing more of these tags can be used from this lane."""
        member = self._lanes.member(lane)
        if member is not None:
            self.counts["links_lost"] += 1
            self.events.append(LinkLost(member.group.name, *self._lanes.ranks(lane, ALLREDUCE), tags, reason))

    def drop_private(self, lane: int, slot: int) -> None:
        """Forget the private landing of a slot, with every reference of the kernel to it."""
        landing = self._held.private.get((lane, slot))
        if landing is None:
            return
        row, recent = self._lanes.state.lanes[lane], self._lanes.state.recent[lane]
        if row[g.DEST_KIND] == g.TO_LANDING and row[g.DEST] == landing.address:
            row[g.DEST_KIND] = g.NOWHERE
        recent[recent[:, g.R_ADDRESS] == landing.address, g.R_KIND] = g.NOWHERE
        self._held.drop_private(lane, slot)

    def make_private(self, lane: int, entry: np.ndarray) -> None:
        """What the link still brings of this all-reduce is kept apart until its list of messages is complete."""
        slot = int(entry[g.SLOT])
        landing = self._held.make_private(lane, slot, int(entry[g.SIZE]), int(entry[g.ITEM]), int(entry[g.WORLD]))
        if landing is None:
            entry[g.PLAN] = g.LOST
            self.lose(lane, (split(slot)[1],), self.over_budget(int(entry[g.SIZE])))
        else:
            entry[g.META] = landing.address

    def over_budget(self, size: int) -> str:
        """A reason for a person."""
        return f"{size} bytes more are over the memory budget of {self._held.budget.limit}: raise it"

    def link_done(self, lane: int, slot: int) -> None:
        """A link has brought every message of an all-reduce, each with the right length."""
        self.counts["links_done"] += 1
        entry, member = self._lanes.entry(lane, slot), self._lanes.member(lane)
        back = int(self._lanes.state.lanes[lane, g.PEER])
        asked = self._lanes.entry(back, slot) if back >= 0 else None
        if entry is not None and asked is not None and asked[g.WANTED] == entry[g.COUNT]:
            slot_completed(self._lanes.state.lanes[back], asked)  # the reverse lane has shown every request
        private = self._held.private.get((lane, slot))
        if entry is None or member is None or private is None:
            return
        landing = self._held.shared(
            member.group.name, split(slot)[1], private.size, private.itemsize, private.world_size
        )
        if landing is not None:
            was_complete = landing.complete
            landing.merge(private, int(entry[g.SENDER_RANK]))
            recent = self._lanes.state.recent[lane]
            recent[recent[:, g.R_ADDRESS] == private.address, g.R_ADDRESS] = landing.address
            entry[g.META], entry[g.PRIVATE] = landing.address, 0
            self.told(landing, was_complete)
        self.drop_private(lane, slot)
        slot_completed(self._lanes.state.lanes[lane], entry)

    def told(self, landing: Landing, was_complete: bool) -> None:
        """Report what Python's own writes have done to a shared landing."""
        self._conflict(landing.ident)
        if landing.complete and not was_complete:
            self._landed(landing.ident)

    def _landed(self, ident: int) -> None:
        name = self._held.names.get(ident)
        if name is not None and self._held.landing(ident).complete:
            self.events.append(Reduced(*name, self._held.landing(ident)))

    def _conflict(self, ident: int) -> None:
        name = self._held.names.get(ident)
        if name is not None:
            for offset, length, sender in self._held.landing(ident).untold_conflicts():
                self.counts["conflicts"] += 1
                self.events.append(Conflict(*name, offset, length, sender))

    def _misfit(self, lane: int, slot: int, index: int, length: int, expected: int, private: bool) -> None:
        tag = split(slot)[1]
        self.drop_private(lane, slot)
        if private:
            self.lose(lane, (tag,), _UNPROVEN)
        elif expected < 0:
            self.lose(lane, (tag,), f"{NOT_THIS_SIZE}: message {index} comes after the last one")
        else:
            self.lose(lane, (tag,), f"{NOT_THIS_SIZE}: message {index} has {length} bytes, not {expected}")

    # Messages kept raw

    def _message(self, lane: int, slot: int, index: int, length: int, missing: int, ts: int) -> None:
        message = self._held.end_raw(lane)
        member, entry = self._lanes.member(lane), self._lanes.entry(lane, slot)
        kind, tag = split(slot)
        link = self.raw_link(lane, slot)
        if message is not None:
            message.time = ts
            if link is not None and not link.frozen:
                link.messages.append(message)
            else:
                # Its memory lives as long as the event only: no copy may be compared with it later.
                recent = self._lanes.state.recent[lane]
                recent[recent[:, g.R_START] == message.start, g.R_KIND] = g.NOWHERE
                self._held.discard(message)
        if member is None or entry is None:
            return
        data = message.data if message is not None else None
        complete = missing == 0 and (message is None or data is not None)
        group = member.group.name
        self.events.append(
            Message(
                group, tag, kind, *self._lanes.ranks(lane, kind), index, length, data, complete,
                proven=not entry[g.PRIVATE],
            )
        )
        if link is not None and kind == ALLREDUCE and (group, tag) in self._held.placed:
            self.place_raw(group, tag, *self._held.placed[group, tag])

    def raw_link(self, lane: int, slot: int) -> RawLink | None:
        """The raw messages of a slot on a lane."""
        member = self._lanes.member(lane)
        if member is None:
            return None
        links = self._held.raw.get((member.group.name, split(slot)[1]), {})
        return links.get((int(self._lanes.state.lanes[lane, g.UID]), slot))

    def _raw_links(self, group: str, tag: int) -> list[tuple[int, RawLink]]:
        slot = slot_of(ALLREDUCE, tag)
        return [(uid, link) for (uid, s), link in self._held.raw.get((group, tag), {}).items() if s == slot]

    def fits_raw(self, group: str, tag: int, size: int, itemsize: int) -> bool:
        """See `GlooDecoder.fits`; of one that was not placed."""
        slot, links = slot_of(ALLREDUCE, tag), self._raw_links(group, tag)
        world = self._lanes.members[group].group.world_size
        whole = [link.whole(size, itemsize, world) and self._over(uid, slot) for uid, link in links]
        wrong = any(link.sender < 0 or link.contradicts(size, itemsize, world) for _, link in links)
        landing = self._held.landings.get((group, tag))
        short = any(link.untouched and not every for (_, link), every in zip(links, whole, strict=True))
        return any(whole) and not wrong and not short and (landing is None or landing.size == size)

    def may_fit_raw(self, group: str, tag: int, size: int, itemsize: int) -> bool:
        """See `GlooDecoder.may_fit`; of one that was not placed."""
        member, slot = self._lanes.members[group], slot_of(ALLREDUCE, tag)
        if not any(self._lanes.entry(lane, slot) is not None for lane in self._lanes.of_group(member.number)):
            return False
        landing, world = self._held.landings.get((group, tag)), member.group.world_size
        against = any(link.contradicts(size, itemsize, world) for _, link in self._raw_links(group, tag))
        fine = not against and (landing is None or landing.size == size)
        return fine and not self.fits_raw(group, tag, size, itemsize)

    def place_raw(self, group: str, tag: int, size: int, itemsize: int) -> Landing | None:
        """See `GlooDecoder.place`."""
        if (group, tag) not in self._held.placed and not self.fits_raw(group, tag, size, itemsize):
            return None
        slot, links = slot_of(ALLREDUCE, tag), self._raw_links(group, tag)
        world = self._lanes.members[group].group.world_size
        whole = [link.whole(size, itemsize, world) and self._over(uid, slot) for uid, link in links]
        wrong = [uid for uid, link in links if link.sender < 0 or link.contradicts(size, itemsize, world)]
        landing = self._held.shared(group, tag, size, itemsize, world)
        if landing is None:
            return None
        self._held.placed[group, tag] = (size, itemsize)
        was_complete = landing.complete
        for (uid, link), every in zip(links, whole, strict=True):
            lane = self._lanes.with_uid(uid)
            entry = self._lanes.entry(lane, slot) if lane >= 0 else None
            if uid in wrong:
                landing.condemn()
                if entry is not None and entry[g.PLAN] == g.KEPT:
                    entry[g.PLAN] = g.LOST
                    self.lose(lane, (tag,), f"{NOT_THIS_SIZE}: its messages are not those of {size} bytes")
                continue
            link.put(landing, every)
            if every and entry is not None and entry[g.PLAN] == g.KEPT:
                entry[g.PLAN], entry[g.PRIVATE], entry[g.META] = g.DONE, 0, landing.address
                slot_completed(self._lanes.state.lanes[lane], entry)
        self.told(landing, was_complete)
        return landing

    def _over(self, uid: int, slot: int) -> bool:
        """Whether no sign of a further message of the slot was seen on a lane."""
        lane = self._lanes.with_uid(uid)
        entry = self._lanes.entry(lane, slot) if lane >= 0 else None
        if entry is None:
            return True
        back = int(self._lanes.state.lanes[lane, g.PEER])
        asked = self._lanes.entry(back, slot) if back >= 0 else None
        return bool(entry[g.SENT] <= entry[g.COUNT] and (asked is None or asked[g.WANTED] <= entry[g.COUNT]))

    # Losses

    def resync(self, lane: int) -> None:
        """A preamble was found behind a gap."""
        self.counts["resynced"] += 1
        lost = []
        for open_ in after_gap(self._lanes, lane):
            entry = self._lanes.entry(lane, open_.slot)
            assert entry is not None
            link = self.raw_link(lane, open_.slot)
            if link is not None:
                link.certain = len(link.messages) if link.certain is None else link.certain
                link.frozen = link.frozen or open_.lost != 0
            if open_.lost is None:
                self.drop_private(lane, open_.slot)
                lost.append(split(open_.slot)[1])
            elif open_.plan == g.REDUCE:
                self.make_private(lane, entry)
                self._lost_messages(lane, entry, open_.lost)
                if entry[g.PLAN] == g.REDUCE and entry[g.COUNT] == entry[g.TOTAL]:
                    entry[g.PLAN] = g.DONE
                    self.link_done(lane, open_.slot)
        if lost:
            self.lose(lane, tuple(sorted(lost)), _UNPROVEN)

    def _lost_messages(self, lane: int, entry: np.ndarray, count: int) -> None:
        """The last `count` messages of a slot are known to have been in a gap."""
        landing, why = self._held.private.get((lane, int(entry[g.SLOT]))), self.blame.newest(lane)
        if landing is None or why is None:
            return
        for index in range(int(entry[g.COUNT]) - count, int(entry[g.COUNT])):
            offset, length, final = schedule.message(
                landing.size, landing.itemsize, landing.world_size, int(entry[g.SENDER_RANK]), index
            )
            if final:
                landing.lose(offset, length, why)

    def _given_up(self, lane: int) -> None:
        """Framing is lost for good: the stream does not follow the wire format."""
        if self._lanes.member(lane) is None:
            self._lanes.dismiss(lane)
        else:
            self.lose(lane, self._stop(lane), "the stream has no valid messages any more")

    def _stop(self, lane: int) -> tuple[int, ...]:
        """Give up every planned slot of a lane; returns the tags of the all-reduces among them."""
        entries = self._lanes.state.entries[lane]
        tags = []
        for slot in entries[entries[:, g.PLAN] == g.REDUCE, g.SLOT].tolist():
            tags.append(split(slot)[1])
            self.drop_private(lane, slot)
        entries[np.isin(entries[:, g.PLAN], _ACTIVE), g.PLAN] = g.LOST
        return tuple(sorted(tags))

    def _closed(self, lane: int, how: int) -> None:
        member = self._lanes.member(lane)
        self._held.discard(self._held.end_raw(lane))
        if member is not None:
            tags = self._stop(lane)
            if tags:
                self.lose(lane, tags, "the connection ended")
            self.events.append(FlowClosed(member.group.name, *self._lanes.ranks(lane), how == 1))
        self._lanes.free(lane)

    def _doubt(self, lane: int, low: int, high: int, what: int) -> None:
        """Two copies of bytes low..high of a stream differ. what: 0 the start of a message, 1 a message kept raw, 2 the
        start of a message, and one of the copies can be none."""
        if what == 1:
            self._doubt_raw(lane, low, high)
            return
        self.counts["conflicts"] += 1
        if what == 0:
            self._doubt_framing(lane)
        else:
            self.lose(lane, (), "two copies of the start of a message differ, one of them is damaged")

    def _doubt_framing(self, lane: int) -> None:
        """Two copies of a message's start differ: every place that followed from it is in doubt, and what comes next is
        like what comes behind a gap."""
        member, row, entries = self._lanes.member(lane), self._lanes.state.lanes[lane], self._lanes.state.entries[lane]
        if member is None:
            return
        used = entries[np.isin(entries[:, g.PLAN], (g.REDUCE, g.DONE, g.KEPT))]
        for slot, plan in used[:, [g.SLOT, g.PLAN]].tolist():
            key = member.group.name, split(slot)[1]
            landing = self._held.landings.get(key)
            placed = plan != g.KEPT or key in self._held.placed
            if (lane, slot) not in self._held.private and landing is not None and placed:
                landing.condemn()
            link = self.raw_link(lane, slot)
            if link is not None:
                link.certain, link.frozen = 0, True
        self.lose(lane, self._stop(lane), "two copies of the start of a message differ")
        entries[(entries[:, g.PLAN] == g.NONE) & (entries[:, g.COUNT] > 0), g.PLAN] = g.LOST
        entries[entries[:, g.PLAN] != g.DONE, g.PRIVATE] = 1
        unproven(row)

    def _doubt_raw(self, lane: int, low: int, high: int) -> None:
        """Two copies of bytes low..high of the stream differ; they belong to a message kept raw."""
        member = self._lanes.member(lane)
        if member is None:
            return
        uid = int(self._lanes.state.lanes[lane, g.UID])
        current = self._held.filling.get(lane)
        if current is not None:
            current.doubtful |= current.start < high and low < current.start + current.length
        for (group, tag), links in self._held.raw.items():
            for (owner, _), link in links.items():
                for number, message in enumerate(link.messages) if owner == uid else ():
                    if message.start < high and low < message.start + message.length:
                        message.doubtful = True
                        at = max(0, low - message.start)
                        self._differ(group, tag, link, number, at, min(message.length, high - message.start) - at)

    def _differ(self, group: str, tag: int, link: RawLink, number: int, at: int, length: int) -> None:
        """Two copies of bytes at..at+length of a raw link's message differ; it may be in a landing already."""
        landing = self._held.landings.get((group, tag)) if (group, tag) in self._held.placed else None
        if landing is not None and number < link.placed:
            place, _, final = schedule.message(
                landing.size, landing.itemsize, landing.world_size, link.sender, number
            )
            if final:
                landing.poison(place + at, length, link.sender)
                self._conflict(landing.ident)
                return
        self.counts["conflicts"] += 1
        self.events.append(Conflict(group, tag, at, length, link.sender))
