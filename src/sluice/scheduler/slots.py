"""Which groups may still be launched: slots, each with its ticket, its round and, in a mix, its domain.

A ticket is a place in the order of the run: batch k of n groups has the tickets k*n to k*n + n - 1. The replacement of a dropped group has
its ticket, one round later, and its domain. Where domains have shares, a ticket's domain is fixed: the shares hold in every batch as well
as whole groups can hold them, and over many batches exactly. Where the shares are of the draws, it is each draw that has its domain.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple


class Slot(NamedTuple):
    """A group that may be launched."""

    ticket: int
    round: int  # 1, or one more than that of the group it replaces
    domain: str | None  # None: whatever the source gives, or not decided before it is drawn


class ClosedPlace(NamedTuple):
    """A place of a batch that nobody fills (again): the batch is smaller by it."""

    ticket: int  # of the group that had it
    domain: str
    is_by_guard: bool = False  # else the gate cut its group


class Mix:
    """The domain of every ticket: always the one that is furthest behind its share. Ties go to the larger share, then by name."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        """shares: positive numbers by domain; what counts is their ratio."""
        if not shares or not all(share > 0 for share in shares.values()):
            raise ValueError(f"a mix needs a share above 0 for each of its domains, got {dict(shares)}")
        total = sum(Fraction(share) for share in shares.values())
        self._shares = {domain: Fraction(share) / total for domain, share in sorted(shares.items())}
        self._credit = dict.fromkeys(self._shares, Fraction(0))  # share x tickets - tickets it got
        self._first = 0  # ticket of the first entry below
        self._domains: deque[str] = deque()

    @property
    def domains(self) -> tuple[str, ...]:
        """All domains, by name."""
        return tuple(self._shares)

    def domain_of(self, ticket: int) -> str:
        """The domain of a ticket that has not been forgotten."""
        while ticket >= self._first + len(self._domains):
            for domain, share in self._shares.items():
                self._credit[domain] += share
            chosen = max(self._shares, key=lambda domain: (self._credit[domain], self._shares[domain]))
            self._credit[chosen] -= 1
            self._domains.append(chosen)
        return self._domains[ticket - self._first]

    def largest(self, among: set[str]) -> str:
        """The domain with the largest share among these."""
        return max(sorted(among), key=lambda domain: self._shares[domain])

    def counts(self, first: int, end: int) -> Counter[str]:
        """How many tickets of each domain lie in [first, end)."""
        return Counter(self.domain_of(ticket) for ticket in range(first, end))

    def forget_before(self, ticket: int) -> None:
        """These tickets will not be asked for again."""
        while self._first < ticket and self._domains:
            self._domains.popleft()
            self._first += 1

    def advance_to(self, ticket: int) -> None:
        """In a fresh mix: go on at this ticket."""
        while self._first < ticket:
            self.domain_of(self._first)
            self.forget_before(self._first + 1)


class Slots:
    """Slots that wait to be launched, and draws of tasks under way for them."""

    def __init__(self, mix: Mix | None, *, mixes_draws: bool = False) -> None:
        """mixes_draws: the shares are of the draws, and not of the tickets."""
        self.mix = mix
        self._mixes_draws = mixes_draws
        self._drawn = 0  # draws that had their turn in the mix
        self.base = 0  # first ticket of the batch that comes next
        self.next_ticket = 0  # no ticket from here on has been given out
        self.owed: deque[Slot] = deque()
        self.draws: deque[Slot | None] = deque()  # in the order of the DrawTasks; None: its batch was filled meanwhile

    def give(self, ticket: int) -> Slot:
        """A slot of round 1."""
        self.next_ticket = max(self.next_ticket, ticket + 1)
        return Slot(ticket, 1, None if self.mix is None or self._mixes_draws else self.mix.domain_of(ticket))

    def owe_again(self, slot: Slot, round_number: int) -> None:
        """The group of this slot has left: another one may take its place."""
        self.owed.appendleft(slot._replace(round=round_number, domain=None if self._mixes_draws else slot.domain))

    def to_draw(self, slot: Slot) -> Slot:
        """The slot with its domain, which is decided here where the shares are of the draws."""
        if self.mix is None or slot.domain is not None:
            return slot
        domain = self.mix.domain_of(self._drawn)
        self._drawn += 1
        self.mix.forget_before(self._drawn)
        return slot._replace(domain=domain)

    @property
    def drawing(self) -> int:
        """Draws under way whose task will be launched."""
        return len(self.draws) - self.draws.count(None) if self.draws else 0

    def waiting(self) -> list[Slot]:
        """Slots that are owed or drawn for."""
        return [*self.owed, *(slot for slot in self.draws if slot is not None)]

    def forget(self) -> None:
        """Nothing is owed any more, and what is being drawn will be returned."""
        self.owed.clear()
        self.draws = deque([None] * len(self.draws))

    def next_batch(self, size: int) -> None:
        """A batch of `size` tickets has left."""
        self.base += size
        self.next_ticket = max(self.next_ticket, self.base)
        if self.mix is not None and not self._mixes_draws:
            self.mix.forget_before(self.base)

    def state_dict(self) -> dict[str, Any]:
        """Where the tickets are, and the draws in the mix."""
        return {"base": self.base, "next_ticket": self.next_ticket, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at these tickets; nothing is owed."""
        self.base, self.next_ticket, self._drawn = int(state["base"]), int(state["next_ticket"]), int(state["drawn"])
        if self.mix is not None:
            self.mix.advance_to(self._drawn if self._mixes_draws else self.base)
