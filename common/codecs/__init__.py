"""Codecs: how a float32 vector becomes bytes, one file each, chosen by a spec such as ``int8`` or ``topk:0.03``."""

from __future__ import annotations

from functools import lru_cache

from fleetddp.common.codecs.base import BLOCK, Codec
from fleetddp.common.codecs.bfloat16 import Bfloat16
from fleetddp.common.codecs.float32 import Float32
from fleetddp.common.codecs.float64 import Float64
from fleetddp.common.codecs.int4 import Int4
from fleetddp.common.codecs.int8 import Int8
from fleetddp.common.codecs.prob16 import Prob16
from fleetddp.common.codecs.prob64 import Prob64
from fleetddp.common.codecs.probtop import ProbTop
from fleetddp.common.codecs.topk import TopK
from fleetddp.common.errors import Reason, Refused

NAMES = ("float32", "bfloat16", "int8", "int4", "topk", "float64", "prob16", "probtop", "prob64")  # before the colon of a spec

__all__ = ["BLOCK", "NAMES", "Codec", "get"]


@lru_cache(maxsize=64)  # a codec has no state; a spec may come from anybody
def get(spec: str) -> Codec:
    """The codec of a spec: ``float32``, ``bfloat16``, ``int8``, ``int4``, ``topk:R``; of a partial ``float64``; of soft labels
    of C classes ``prob16:C`` or ``probtop:K:C``, and of partials of them ``prob64:C``.

    Raises ``Refused(UNKNOWN_CODEC)``.
    """
    match spec.split(":"):
        case ["float32"]:
            return Float32()
        case ["bfloat16"]:
            return Bfloat16()
        case ["int8"]:
            return Int8()
        case ["int4"]:
            return Int4()
        case ["float64"]:
            return Float64()
        case ["topk", ratio] if TopK.accepts(ratio):
            return TopK(ratio)
        case ["prob16", classes] if Prob16.accepts_classes(classes):
            return Prob16(int(classes))
        case ["prob64", classes] if Prob16.accepts_classes(classes):
            return Prob64(int(classes))
        case ["probtop", kept, classes] if ProbTop.accepts(kept, classes):
            return ProbTop(int(kept), int(classes))
    known = "float32, bfloat16, int8, int4, topk:R with 0 < R <= 1; of C soft labels prob16:C, probtop:K:C with K < C"
    raise Refused(Reason.UNKNOWN_CODEC, f"there is no codec {spec[:40]!r}; known: {known}")
