"""Memory that a process shares with the workers it starts.

It is an anonymous file whose descriptor travels when a worker starts: it has no name that could stay behind, and no limit but the
machine's memory (``/dev/shm`` in a container often has 64 MB).
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: of every buffer, as torch's own allocator aligns


class SharedRows:
    """Blocks of float32[rows, elements], zeros at first; as many as are asked for by number. Pickled only to start a worker."""

    def __init__(self, rows: int, elements: int) -> None:
        self.rows, self.elements = rows, elements
        self._open(_anonymous_file())

    def _open(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._stride = _round_up(max(self.rows * self.elements * 4, 1), mmap.ALLOCATIONGRANULARITY)
        self._blocks: dict[int, Tensor] = {}

    def block(self, number: int) -> Tensor:
        """The block itself, not a copy: what one process writes, all see."""
        found = self._blocks.get(number)
        if found is None:
            end = (number + 1) * self._stride
            if os.fstat(self._descriptor).st_size < end:
                os.ftruncate(self._descriptor, end)
            mapped = mmap.mmap(self._descriptor, self._stride, offset=number * self._stride)
            found = torch.frombuffer(mapped, dtype=torch.float32, count=self.rows * self.elements).view(self.rows, self.elements)
            self._blocks[number] = found
        return found

    def close(self) -> None:
        """Give up the file; blocks that somebody still holds stay valid."""
        self._blocks.clear()
        os.close(self._descriptor)

    def __getstate__(self) -> tuple[int, int, Any]:
        return self.rows, self.elements, DupFd(self._descriptor)

    def __setstate__(self, state: tuple[int, int, Any]) -> None:
        self.rows, self.elements, descriptor = state
        self._open(descriptor.detach())


class SharedObject:
    """Any object that can be pickled. Its tensors and arrays lie in the file once, whoever loads it: a worker that writes to one
    changes a copy of its own (of the pages it wrote to)."""

    def __init__(self, value: object) -> None:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        self._pickled = stream.getvalue()
        self._places: list[tuple[int, int]] = []
        self._size = 0
        self._descriptor = _anonymous_file()
        with open(os.dup(self._descriptor), "r+b") as file:
            for buffer in buffers:
                raw = buffer.raw()
                self._places.append((self._size, raw.nbytes))
                file.seek(self._size)
                file.write(raw)
                self._size = _round_up(self._size + raw.nbytes, ALIGNMENT)
            file.truncate(max(self._size, 1))

    def load(self) -> Any:
        """The object, made anew."""
        mapped = memoryview(mmap.mmap(self._descriptor, max(self._size, 1), access=mmap.ACCESS_COPY))
        return pickle.loads(self._pickled, buffers=[mapped[start : start + size] for start, size in self._places])

    def close(self) -> None:
        """Give up the file; objects that were loaded stay valid."""
        os.close(self._descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _descriptor=state["_descriptor"].detach())


class _Pickler(pickle.Pickler):
    """Tensors as views of arrays, which pickle hands out as buffers. Torch's own way to share them passes one descriptor for each
    storage, and there is a limit of about 250 to that."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._storages: dict[int, np.ndarray[Any, Any]] = {}  # by address: tensors that share memory go on sharing it

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise pickle.PicklingError("a tensor in the task is the result of a computation with gradients: detach() it")
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        array = self._storages[storage.data_ptr()]
        return _tensor, (array, value.dtype, value.storage_offset(), tuple(value.shape), value.stride(), value.requires_grad)


def _tensor(
    array: np.ndarray[Any, Any], dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> Tensor:
    storage = torch.from_numpy(array).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride).requires_grad_(grad)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fleetddp")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
