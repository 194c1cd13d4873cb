"""The way in of an update: offered, staged, made durable, accepted, or refused on the way. One half of the aggregator.

    Offer -> Proceed          the header and each slice pass ``admission``
    SliceStaged -> Persist    all streams have arrived, and the whole passes
    Persisted -> accepted     it is still in time

A refusal is remembered and counted, and touches nothing else. What a *retry* can mend (the transfer stalled, the disk was
full) settles the update as UNKNOWN with that reason: its sender pushes it again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fleetddp.common import admission
from fleetddp.common.arrivals import Arrivals, Arriving
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import (
    Discard,
    Effect,
    Offer,
    Persist,
    Persisted,
    PersistFailed,
    Proceed,
    Progressed,
    Reply,
    Say,
    Settle,
    SliceRejected,
    SliceStaged,
)
from fleetddp.common.membership import Membership
from fleetddp.common.payload import Geometry
from fleetddp.common.receipts import Receipts
from fleetddp.common.transport.limits import MAX_ARRIVING
from fleetddp.common.update import Kind, Receipt, State, Update, UpdateHeader, UpdateId

# About the call or its caller, not about the update, which they leave as it stands.
_OF_THE_CALL = frozenset({Reason.WRONG_RUN, Reason.SUPERSEDED, Reason.WRONG_IDENTITY, Reason.ID_REUSED, Reason.FINISHED})
# Of a member in good health: the window goes on expecting it.
_BLAMELESS = _OF_THE_CALL | {Reason.STALE, Reason.OVERLAP, Reason.INIT_TAKEN}


class Intake:
    """Takes updates in on behalf of an aggregator, with which it shares the standing, the members and the receipts."""

    def __init__(self, standing: admission.Standing, members: Membership, receipts: Receipts) -> None:
        self.refused: Counter[Reason] = Counter()
        self.duplicates = 0
        self.arrivals = Arrivals(standing.config.members.stall_s)
        self._standing = standing
        self._members = members
        self._receipts = receipts
        self._claimed: dict[UpdateId, UpdateId] = {}  # leaf id -> the update that holds it and is being made durable
        self._late: list[Update] = []  # durable, and stale by the merge in flight

    # ---- offers -----------------------------------------------------------------------------------------------------------

    def offer(self, event: Offer, now: float, out: list[Effect]) -> None:
        """A stream was opened."""
        header = event.header
        try:
            out.append(Reply(value=self._admit(event, now, out)))
        except Refused as refusal:
            if refusal.retry or refusal.reason in _OF_THE_CALL:
                self.reply_no(header.update_id.node, refusal, out)
            else:
                self.refuse(header, refusal, out)
                out.append(Reply(value=refusal))

    def _admit(self, event: Offer, now: float, out: list[Effect]) -> Proceed | Receipt:
        header, part = event.header, event.slice
        update_id = header.update_id
        admission.check_run(event.run, self._standing)
        member = self._members.known(update_id.node)
        if update_id.incarnation > member.incarnation:
            raise Refused(Reason.UNKNOWN_NODE, f"incarnation {update_id.incarnation} of {update_id.node} has not joined")
        self._members.see(member, now)
        known = self._known(event)
        if known is not None:
            self.duplicates += 1
            return known
        arriving = self.arrivals.get(update_id)
        if arriving is not None:
            if arriving.header != header:
                raise Refused(Reason.ID_REUSED, f"{update_id} is arriving already, with another header")
            admission.check_slice(part, header, arriving.geometry, self._standing)
            arriving.offer(part)
            return Proceed()
        admission.check_header(header, self._standing)
        if header.tier is not member.tier:  # its share, its bound of staleness and ``require`` go by it
            raise Refused(Reason.MALFORMED, f"an update of tier {header.tier.value}; {member.node} joined as {member.tier.value}")
        no = self._without(header)
        if no is not None:
            self.say_no(header.update_id.node, Refused(Reason(no.reason), no.message), out)
            self._receipts.note(no)
            return no
        if self.arrivals.of(member.node) >= MAX_ARRIVING:
            raise Refused(
                Reason.TOO_MANY, f"{MAX_ARRIVING} updates of {member.node} are arriving already; that is all that is allowed"
            )
        arriving = Arriving(header=header, geometry=Geometry.of_update(header, self._standing.layout), progressed_at=now)
        admission.check_slice(part, header, arriving.geometry, self._standing)
        arriving.offer(part)
        self.arrivals.add(arriving)
        return Proceed()

    def _known(self, event: Offer) -> Receipt | None:
        """The answer to a repeat: of an update accepted, settled, or whole and being made durable."""
        update_id = event.header.update_id
        receipt = self._receipts.find(update_id)
        update = self._receipts.accepted(update_id)
        if receipt is None and update_id in self._claimed:
            receipt = Receipt(update_id=update_id, state=State.STAGED)
            holder = self.arrivals.get(self._claimed[update_id])
            update = holder.update if holder is not None else None
        # an update that came in a region's partial has no slices of its own to compare
        if update is not None and update.update_id == update_id and event.slice not in update.slices:
            raise Refused(Reason.ID_REUSED, f"{update_id} was accepted already, with other bytes, samples or intervals")
        return None if receipt is None else replace(receipt, duplicate=True)

    def _without(self, header: UpdateHeader) -> Receipt | None:
        """Of a partial that must be sealed again: the refusal that names what to leave out; else None.

        That is what is accepted or settled here, or in something that is being made durable; if nothing is, what is too stale.
        """
        if header.kind is not Kind.PARTIAL:
            return None
        ids, claimed = header.leaf_ids, self._claimed
        overlap = tuple(
            sorted({*self._receipts.taken(ids), *(i for i in ids if claimed.get(i, header.update_id) != header.update_id)})
        )
        if overlap:
            message = f"{len(overlap)} of its updates are here already, {overlap[0]} for one"
            return _naming(header, Reason.OVERLAP, message, overlap)
        stale = admission.stale_in(header, self._standing)
        if stale:
            message = f"{len(stale)} of its updates are too stale by now, {stale[0]} for one"
            return _naming(header, Reason.STALE, message, stale)
        return None

    # ---- streams ----------------------------------------------------------------------------------------------------------

    def progressed(self, event: Progressed, now: float, out: list[Effect]) -> None:
        """Bytes arrived."""
        self._members.touch(event.update_id.node, now)
        arriving = self.arrivals.get(event.update_id)
        if arriving is not None:
            arriving.progressed_at = now
            self._unstall(arriving)

    def slice_staged(self, event: SliceStaged, now: float, out: list[Effect]) -> None:
        """A stream arrived whole."""
        self.progressed(Progressed(update_id=event.update_id), now, out)
        arriving = self.arrivals.get(event.update_id)
        if arriving is None:  # settled or dropped meanwhile; whoever sent it waits for an answer
            out.append(Settle(receipts=(self.receipt(event.update_id),)))
        elif arriving.update is None and arriving.stage(event.slice, event.squared_norm):
            self._complete(arriving, now, out)

    def slice_rejected(self, event: SliceRejected, now: float, out: list[Effect]) -> None:
        """A stream broke a rule. What a retry can mend leaves the update arriving."""
        arriving = self.arrivals.get(event.update_id)
        if arriving is None or arriving.update is not None or event.refusal.retry or event.refusal.reason in _OF_THE_CALL:
            self.say_no(event.update_id.node, event.refusal, out)
        else:
            self.refuse(arriving.header, event.refusal, out)

    def _complete(self, arriving: Arriving, now: float, out: list[Effect]) -> None:
        header, update = arriving.header, arriving.complete()
        known = self._receipts.find(header.update_id)
        if known is not None or header.update_id in self._claimed:  # it came in a region's partial meanwhile
            self.arrivals.remove(header.update_id)
            out.append(Discard(update_id=header.update_id))
            out.append(Settle(receipts=(replace(self.receipt(header.update_id), duplicate=True),)))
            return
        no = self._without(header)
        if no is not None:
            self._refuse_with(header, no, out)
            return
        try:
            admission.check_complete(update, self._standing)
        except Refused as refusal:
            self.refuse(header, refusal, out)
            return
        arriving.update = update
        for update_id in (header.update_id, *header.leaf_ids):
            self._claimed[update_id] = header.update_id
        if header.kind is Kind.INIT:
            self._standing.init_by = header.update_id.node
        out.append(Persist(update=update, at=now))

    # ---- the disk's answer ------------------------------------------------------------------------------------------------

    def persisted(self, event: Persisted, out: list[Effect]) -> Update | None:
        """It is durable; returns it if it is accepted now."""
        update = event.update
        if self.arrivals.get(update.update_id) is None:  # a driver's repeat
            return None
        if self._is_late(update.header):
            self._late.append(update)
            if self._standing.head == self._standing.version:
                self.refuse_late(out)
            return None
        self._unclaim(update)
        out.append(Settle(receipts=self._receipts.accept(update)))
        return update

    def _is_late(self, header: UpdateHeader) -> bool:
        return bool(admission.stale_in(header, self._standing)) or self._stale(header) is not None

    def _stale(self, header: UpdateHeader) -> Refused | None:
        try:
            admission.check_not_stale(header, self._standing)
        except Refused as refusal:
            return refusal
        return None

    def readmit(self, update: Update, out: list[Effect]) -> bool:
        """After a restart: whether a durable update is accepted. A decision may have made it stale before it was acknowledged."""
        if self._is_late(update.header):
            self._refuse_late(update.header, out)
            return False
        self._receipts.accept(update)
        return True

    def refuse_late(self, out: list[Effect]) -> None:
        """Refuse what a merge made stale while it was made durable. Only once that merge is durable itself: a restart before then
        would forget the decision and accept the update, which its sender had taken back."""
        for update in self._late:
            self._unclaim(update)
            self._refuse_late(update.header, out)
        self._late.clear()

    def _refuse_late(self, header: UpdateHeader, out: list[Effect]) -> None:
        refusal, no = self._stale(header), self._without(header)
        if refusal is not None:
            self.refuse(header, refusal, out, staged=True)
        elif no is not None:
            self._refuse_with(header, no, out)

    def persist_failed(self, event: PersistFailed, now: float, out: list[Effect]) -> None:
        """The disk refused: the sender pushes it again."""
        update = event.update
        if self.arrivals.get(update.update_id) is None:  # a driver's repeat
            return
        self._unclaim(update)
        if update.header.kind is Kind.INIT:
            self._standing.init_by = ""
        self._undo(update.header, Refused(Reason.STORAGE, event.message), out)

    def _unclaim(self, update: Update) -> None:
        self.arrivals.remove(update.update_id)
        for update_id in (update.update_id, *update.header.leaf_ids):
            self._claimed.pop(update_id, None)

    # ---- time and end -----------------------------------------------------------------------------------------------------

    def pass_time(self, now: float, out: list[Effect]) -> None:
        """Transfers that stand still are no longer on their way; after a while they are dropped."""
        for arriving, drop in self.arrivals.stalled(now):
            if not arriving.stalled:
                arriving.stalled = True
                self._members.stall(arriving.header.update_id.node, +1)
            if drop:
                idle = now - arriving.progressed_at
                self._drop(arriving, Refused(Reason.STALLED, f"no byte of it came for {idle:.0f} s"), out)

    def supersede(self, node: str, incarnation: int, out: list[Effect]) -> None:
        """A newer process of a node has joined: forget what older ones had not finished sending."""
        for arriving in self.arrivals.older(node, incarnation):
            self._drop(arriving, Refused(Reason.SUPERSEDED, f"incarnation {incarnation} of {node} has joined"), out)

    def close(self, out: list[Effect]) -> None:
        """The run has ended: refuse what is arriving. What is being made durable will expire with what is."""
        refusal = Refused(Reason.FINISHED, f"the run has ended: {self._standing.finished}")
        for arriving in [a for a in self.arrivals if a.update is None]:
            self.refuse(arriving.header, refusal, out)

    def _drop(self, arriving: Arriving, refusal: Refused, out: list[Effect]) -> None:
        self._unstall(arriving)
        self.arrivals.remove(arriving.header.update_id)
        self._undo(arriving.header, refusal, out)

    def _unstall(self, arriving: Arriving) -> None:
        if arriving.stalled:
            arriving.stalled = False
            self._members.stall(arriving.header.update_id.node, -1)

    # ---- answers ----------------------------------------------------------------------------------------------------------

    def receipt(self, update_id: UpdateId) -> Receipt:
        """How an update stands."""
        known = self._receipts.find(update_id)
        if known is not None:
            return known
        arriving = self.arrivals.get(update_id) is not None or update_id in self._claimed
        return Receipt(update_id=update_id, state=State.STAGED if arriving else State.UNKNOWN)

    def say_no(self, node: str, refusal: Refused, out: list[Effect]) -> None:
        """Count and tell a refusal."""
        self.refused[refusal.reason] += 1
        out.append(Say(what="refused", message=str(refusal), node=node, reason=refusal.reason))

    def reply_no(self, node: str, refusal: Refused, out: list[Effect]) -> None:
        """Refuse a call."""
        self.say_no(node, refusal, out)
        out.append(Reply(value=refusal))

    def refuse(self, header: UpdateHeader, refusal: Refused, out: list[Effect], *, staged: bool = False) -> None:
        """Settle an update as refused. ``staged``: bytes of it are stored though it is no longer arriving."""
        update_id = header.update_id
        self.say_no(update_id.node, refusal, out)
        receipt = Receipt(update_id=update_id, state=State.REFUSED, reason=refusal.reason.value, message=refusal.message)
        self._receipts.note(receipt)
        member = self._members.get(update_id.node)
        if member is not None:
            member.refused += 1
            if refusal.reason not in _BLAMELESS:
                self._members.spoil(member)
        arriving = self.arrivals.remove(update_id)
        if arriving is not None:
            self._unstall(arriving)
        if arriving is not None or staged:
            out.append(Discard(update_id=update_id))
            out.append(Settle(receipts=(receipt,)))

    def _refuse_with(self, header: UpdateHeader, no: Receipt, out: list[Effect]) -> None:
        """Settle a partial, all of which is stored, by a receipt that names what to leave out."""
        self.say_no(header.update_id.node, Refused(Reason(no.reason), no.message), out)
        self._receipts.note(no)
        self.arrivals.remove(header.update_id)
        out.append(Discard(update_id=header.update_id))
        out.append(Settle(receipts=(no,)))

    def _undo(self, header: UpdateHeader, refusal: Refused, out: list[Effect]) -> None:
        """Forget an update as if it had never been offered; those who wait for it hear why."""
        self.say_no(header.update_id.node, refusal, out)
        receipt = Receipt(update_id=header.update_id, state=State.UNKNOWN, reason=refusal.reason.value, message=refusal.message)
        out.append(Discard(update_id=header.update_id))
        out.append(Settle(receipts=(receipt,)))


def _naming(header: UpdateHeader, reason: Reason, message: str, ids: tuple[UpdateId, ...]) -> Receipt:
    return Receipt(update_id=header.update_id, state=State.REFUSED, reason=reason.value, message=message, overlap=ids)
