"""What single tokens say: their filters and weights, and sums over the runs that other levels are made of; a stretch of rows at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sluice.config.correction import IsWeightConfig, Level
from sluice.correction.levels import Runs, Tokens, of_tokens, runs_of
from sluice.correction.metrics import PASSED, passed_by
from sluice.correction.settings import KINDS, Bands, Kind
from sluice.correction.tensors import answers_at_once


class TokenPass:
    """What single tokens say, and the sums over runs that the other levels are made of."""

    def __init__(
        self,
        mask: Tensor,
        kept: Tensor,
        is_weight: Tensor,
        *,
        bands: Bands,
        weight: IsWeightConfig,
        may_look: bool,
        has_gradient: bool,
    ) -> None:
        """mask: [R, T] of any type. kept [R, T] bool, is_weight [R, T]: what is written into.

        may_look: whether numbers may be read in between. has_gradient: gradients must flow through the weights.
        """
        self._given = mask
        self._has_gradient = has_gradient
        self.may_look = may_look
        self.mask = mask if mask.dtype == torch.bool else torch.empty(mask.shape, dtype=torch.bool, device=mask.device)
        self.bands = bands
        self._weight = weight
        self.is_weight = is_weight  # after `look_at`: of tokens, where that is their level
        self.kept = kept  # after `look_at`: what the filters of tokens leave
        self.stays: list[Tensor] = []  # [r] bool each: rows without a fault; this and what follows is one tensor for each stretch of r rows
        self.vetoed: list[Tensor] = []  # [r] bool each: rows that no token takes out
        self.runs: list[Runs] = []
        self.log_ratios: list[Tensor] = []  # [K] sums over runs
        self.diffs: list[Tensor] = []
        self.ratios: list[Tensor] = []  # [r] sums over rows
        self.counted: dict[str, list[Tensor]] = {}  # name of a sum -> [] each

    def look_at(self, at: slice, old: Tensor, inference: Tensor) -> None:
        """Take in some rows."""
        mask, may_look = self.mask[at], self.may_look
        if self._given is not self.mask:
            given = self._given[at]
            mask.copy_(given.abs() > 0 if given.is_floating_point() and not answers_at_once(given) else given)  # NaN is not
        tokens, runs = of_tokens(mask, old, inference, may_look=may_look), runs_of(mask, may_look=may_look)
        self.runs.append(runs)
        self.log_ratios.append(runs.sums(tokens.exact, exactly=True, may_look=may_look))
        self.diffs.append(-runs.sums(tokens.minus_diff, exactly=False, may_look=may_look))
        self._judge(tokens, self.kept[at])
        if self._weight.enabled and self._weight.weight_type == "token":
            self._weigh(tokens, at)
        with torch.no_grad():
            ratio = tokens.ratio * tokens.weight if self._has_gradient else tokens.ratio.mul_(tokens.weight)  # not looked at any more
            self.ratios.append(ratio.sum(1))
            self._count(squares=tokens.squares, nan_tokens=tokens.nan_tokens, clamped=tokens.clamped)
            if tokens.is_sound is not None:
                self.stays.append(tokens.is_sound)
            else:
                self.stays.append(torch.ones(len(mask), dtype=torch.bool, device=mask.device))

    def total(self, name: str) -> Tensor:
        """One of the sums over all rows. []"""
        return torch.cat([one.reshape(-1) for one in self.counted[name]]).double().sum()

    def _count(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.counted.setdefault(name, []).append(value)

    def _weigh(self, tokens: Tokens, at: slice) -> None:
        bound = math.inf if self._weight.upper_bound is None else self._weight.upper_bound
        if self._has_gradient:  # of all rows at once
            self.is_weight = tokens.ratio.clamp(max=bound)
        else:
            torch.clamp(tokens.ratio, max=bound, out=self.is_weight[at])
        with torch.no_grad():
            cut = self.is_weight[at]
            room = None if self._has_gradient else tokens.log_ratio  # not looked at any more; into bool takes several times as long
            self._count(weight=cut.sum(1), unclipped=torch.eq(cut, tokens.ratio, out=room).sum(1))

    @torch.no_grad()
    def _judge(self, tokens: Tokens, kept: Tensor) -> None:
        inside: Tensor | None = None
        vetoes: list[Tensor] = []
        for kind in KINDS:
            unit, veto = self.bands.unit.get(("token", kind)), self.bands.veto.get(("token", kind))
            values = tokens.log_ratio
            if kind == "diff":
                values, unit, veto = tokens.minus_diff, unit and -unit, veto and -veto
            passes = None if unit is None else unit.weights(values)
            if veto is not None:
                of_row = tokens.weight.sum(1)
                vetoes.append((veto.weights(values) * tokens.weight).sum(1) == of_row)
                passed = vetoes[-1] * (of_row if passes is None else (passes * tokens.weight).sum(1))
                self._count(**{passed_by("token", kind): passed.double().sum()})
            elif passes is not None:
                self._count(**{_everywhere("token", kind): passes.sum()})
            if passes is not None:
                inside = passes if inside is None else inside.mul_(passes)
        if inside is None:
            kept.copy_(tokens.mask)
        else:
            torch.bitwise_and(tokens.mask, inside.bool(), out=kept)
        if vetoes:
            self.vetoed.append(vetoes[0] if len(vetoes) == 1 else vetoes[0] & vetoes[1])

    def passed(self, outside: Tensor) -> dict[str, Tensor]:
        """Tokens of the mask that filters of single tokens let pass. outside: [] places that are not in the mask"""
        found = {name: self.total(name) for name in self.counted if name in PASSED}
        for kind in KINDS:
            band = self.bands.unit.get(("token", kind))
            if band is not None and _everywhere("token", kind) in self.counted:  # outside the mask the two agree everywhere
                found[passed_by("token", kind)] = self.total(_everywhere("token", kind)) - (outside if band.holds_agreement else 0)
        return found


def _everywhere(level: Level, kind: Kind) -> str:
    """The sum of the places that filters let pass, those outside the mask included."""
    return f"everywhere_{passed_by(level, kind)}"
