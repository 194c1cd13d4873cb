"""``probtop:K:C``: the K largest of the C soft labels of an item; the rest's mass is spread evenly over the others."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.base import as_bytes, as_numbers
from fleetddp.common.codecs.prob import COUNT, TOLERANCE, SoftLabels
from fleetddp.common.errors import Reason, Refused


class ProbTop(SoftLabels):
    """An item of C classes, 1 <= K < C: 3 K + 4 bytes, or 4 K + 4 where C > 256.

    First the K classes (uint8, or uint16 where C > 256; ascending), then their K probabilities (float16, rounded to nearest
    even), then the item's weight (float32); all little-endian. Sent are K of the largest (which of equal ones is open). What
    they lack to 1 is spread evenly over the other C - K classes. An item of weight 0 has the classes 0 to K - 1, each 0.
    """

    def __init__(self, kept: int, classes: int) -> None:
        self.kept = kept
        self._index = torch.uint8 if classes <= 256 else torch.int16  # what is over 32767 reads as negative
        super().__init__(f"probtop:{kept}:{classes}", classes)

    @classmethod
    def accepts(cls, kept: str, classes: str) -> bool:
        """Whether these are K and C, 1 <= K < C."""
        return cls.accepts_classes(classes) and COUNT.fullmatch(kept) is not None and int(kept) < int(classes)

    def _size(self, m: int) -> int:
        self._whole(m)
        return self.kept * (2 + self._index.itemsize) + 4

    def _encode(self, x: Tensor, out: Tensor) -> None:
        probabilities, weights = self._probabilities(x)
        classes = probabilities.topk(self.kept, dim=1, sorted=False).indices.sort(dim=1).values
        unlabelled = (weights == 0).unsqueeze(1)
        classes = torch.where(unlabelled, torch.arange(self.kept, device=x.device), classes)
        kept = probabilities.gather(1, classes).to(torch.float16)
        split = self.kept * self._index.itemsize
        out[:, :split].copy_(as_bytes(classes.to(self._index)))
        out[:, split:-4].copy_(as_bytes(kept))
        self._put_weights(weights, out)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        split = self.kept * self._index.itemsize
        classes = as_numbers(data[:, :split], self._index).to(torch.int64) & 0xFFFF
        if int(classes.amax()) >= self.classes:
            raise Refused(Reason.MALFORMED, f"{self.spec}: a class is {int(classes.amax())}; there are {self.classes}")
        if self.kept > 1 and not bool((classes[:, 1:] > classes[:, :-1]).all()):
            raise Refused(Reason.MALFORMED, f"{self.spec}: the classes of an item are not ascending")
        kept = as_numbers(data[:, split:-4], torch.float16).to(torch.float32)
        self.require_finite(kept)
        weights = self._weights(data)
        sums, labelled = kept.sum(1), weights > 0
        self._require(bool((sums <= torch.where(labelled, 1.0 + TOLERANCE, 0.0)).all()) and bool((kept >= 0).all()))
        rest = torch.where(labelled, (1.0 - sums).clamp_(min=0.0), 0.0)
        spread = (rest / (self.classes - self.kept)).unsqueeze(1)
        rows = spread.expand(-1, self.classes).scatter(1, classes, kept)
        out[:, :-1] = rows / torch.where(labelled, sums + rest, 1.0).unsqueeze(1) * weights.unsqueeze(1)
        out[:, -1] = weights
