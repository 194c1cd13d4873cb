"""Tensors on the wire of inference (WIRE.md W41): float32, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetddp.common.errors import Reason, Refused
from fleetddp.common.transport import limits
from fleetddp.protos import inference_pb2 as pb


def pack(tensor: Tensor) -> Any:
    """A tensor of at least one dimension. Raises ``Refused(TOO_LARGE)`` where it does not fit one message."""
    data = tensor.detach().cpu().float().numpy().astype("<f4", copy=False).tobytes()
    limits.size(len(data), "a tensor", limits.TENSOR_BYTES)
    return pb.FloatTensor(shape=tensor.shape, data=data)


def unpack(message: Any) -> Tensor:
    """f32 of the message's shape; raises ``Refused``: ``MALFORMED``, ``TOO_LARGE``, ``WRONG_SIZE``, ``NOT_FINITE``."""
    shape = tuple(message.shape)
    limits.count(len(shape), "shape", limits.MAX_AXES)
    if not shape or 0 in shape:
        raise limits.malformed("shape", list(shape), "at least one dimension, none of them 0")
    limits.size(len(message.data), "data", limits.TENSOR_BYTES)
    if shape[0] > limits.MAX_ROWS:
        raise Refused(Reason.TOO_LARGE, f"{shape[0]} samples in one request; at most {limits.MAX_ROWS} are allowed")
    due = 4 * math.prod(shape)
    if len(message.data) != due:
        raise Refused(Reason.WRONG_SIZE, f"{len(message.data)} bytes for a tensor of shape {list(shape)}, which has {due}")
    tensor = torch.from_numpy(np.frombuffer(message.data, dtype="<f4").astype(np.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise Refused(Reason.NOT_FINITE, "a value is infinite or not a number")
    return tensor.reshape(shape)


def rows_at_once(inputs: Tensor) -> int:
    """How many samples of this shape go into one request; raises ``Refused(TOO_LARGE)`` where not even one does."""
    row_bytes = 4 * math.prod(inputs.shape[1:])
    limits.size(row_bytes, "a sample", limits.TENSOR_BYTES)
    return min(limits.MAX_ROWS, limits.TENSOR_BYTES // row_bytes)
