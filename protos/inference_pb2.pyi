from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FloatTensor(_message.Message):
    __slots__ = ("shape", "data")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class InferRequest(_message.Message):
    __slots__ = ("node", "inputs")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    inputs: FloatTensor
    def __init__(self, node: _Optional[str] = ..., inputs: _Optional[_Union[FloatTensor, _Mapping]] = ...) -> None: ...

class InferReply(_message.Message):
    __slots__ = ("outputs", "version")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    outputs: FloatTensor
    version: int
    def __init__(self, outputs: _Optional[_Union[FloatTensor, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class ServingRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ServingReply(_message.Message):
    __slots__ = ("version", "refused_version", "samples", "batches", "shed", "waiting")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    version: int
    refused_version: int
    samples: int
    batches: int
    shed: int
    waiting: int
    def __init__(self, version: _Optional[int] = ..., refused_version: _Optional[int] = ..., samples: _Optional[int] = ..., batches: _Optional[int] = ..., shed: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...
