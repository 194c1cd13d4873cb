from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    SITE: _ClassVar[Tier]
    EDGE: _ClassVar[Tier]
    REGION: _ClassVar[Tier]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    INIT: _ClassVar[Kind]
    DELTA: _ClassVar[Kind]
    GRADIENT: _ClassVar[Kind]
    LOGITS: _ClassVar[Kind]
    PARTIAL: _ClassVar[Kind]

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[State]
    STAGED: _ClassVar[State]
    ACCEPTED: _ClassVar[State]
    MERGED: _ClassVar[State]
    EXPIRED: _ClassVar[State]
    REFUSED: _ClassVar[State]
    UNKNOWN: _ClassVar[State]
TIER_UNSPECIFIED: Tier
SITE: Tier
EDGE: Tier
REGION: Tier
KIND_UNSPECIFIED: Kind
INIT: Kind
DELTA: Kind
GRADIENT: Kind
LOGITS: Kind
PARTIAL: Kind
STATE_UNSPECIFIED: State
STAGED: State
ACCEPTED: State
MERGED: State
EXPIRED: State
REFUSED: State
UNKNOWN: State

class UpdateId(_message.Message):
    __slots__ = ("node", "incarnation", "sequence")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    sequence: int
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("update_id", "state", "version", "reason", "message", "duplicate", "overlap")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    update_id: UpdateId
    state: State
    version: int
    reason: str
    message: str
    duplicate: bool
    overlap: _containers.RepeatedCompositeFieldContainer[UpdateId]
    def __init__(self, update_id: _Optional[_Union[UpdateId, _Mapping]] = ..., state: _Optional[_Union[State, str]] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., duplicate: bool = ..., overlap: _Optional[_Iterable[_Union[UpdateId, _Mapping]]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("node", "tier", "incarnation", "run", "layout", "leaves", "open", "track")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    node: str
    tier: Tier
    incarnation: int
    run: str
    layout: str
    leaves: int
    open: _containers.RepeatedCompositeFieldContainer[UpdateId]
    track: str
    def __init__(self, node: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., incarnation: _Optional[int] = ..., run: _Optional[str] = ..., layout: _Optional[str] = ..., leaves: _Optional[int] = ..., open: _Optional[_Iterable[_Union[UpdateId, _Mapping]]] = ..., track: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("run", "version", "layout", "wants_init", "heartbeat_s", "lease_s", "gradient_lr", "codecs", "receipts", "finished", "max_staleness", "steps", "fragments")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WANTS_INIT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_LR_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    layout: str
    wants_init: bool
    heartbeat_s: float
    lease_s: float
    gradient_lr: float
    codecs: _containers.RepeatedScalarFieldContainer[str]
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    finished: str
    max_staleness: int
    steps: int
    fragments: int
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., layout: _Optional[str] = ..., wants_init: bool = ..., heartbeat_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., gradient_lr: _Optional[float] = ..., codecs: _Optional[_Iterable[str]] = ..., receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., finished: _Optional[str] = ..., max_staleness: _Optional[int] = ..., steps: _Optional[int] = ..., fragments: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node", "incarnation", "base_version", "open", "metrics", "metrics_version", "leaves", "track")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    METRICS_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    base_version: int
    open: _containers.RepeatedCompositeFieldContainer[UpdateId]
    metrics: _containers.ScalarMap[str, float]
    metrics_version: int
    leaves: int
    track: str
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., base_version: _Optional[int] = ..., open: _Optional[_Iterable[_Union[UpdateId, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., metrics_version: _Optional[int] = ..., leaves: _Optional[int] = ..., track: _Optional[str] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("version", "closes_at", "receipts", "finished", "steps")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOSES_AT_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    version: int
    closes_at: float
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    finished: str
    steps: int
    def __init__(self, version: _Optional[int] = ..., closes_at: _Optional[float] = ..., receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., finished: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node", "incarnation", "track")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    track: str
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., track: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("track",)
    TRACK_FIELD_NUMBER: _ClassVar[int]
    track: str
    def __init__(self, track: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class LayoutRequest(_message.Message):
    __slots__ = ("track",)
    TRACK_FIELD_NUMBER: _ClassVar[int]
    track: str
    def __init__(self, track: _Optional[str] = ...) -> None: ...

class LayoutReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class VersionInfo(_message.Message):
    __slots__ = ("number", "layout", "codec", "payload_bytes", "digest", "published_at", "updates", "metrics", "changed")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    number: int
    layout: str
    codec: str
    payload_bytes: int
    digest: int
    published_at: float
    updates: int
    metrics: _containers.ScalarMap[str, float]
    changed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., layout: _Optional[str] = ..., codec: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., digest: _Optional[int] = ..., published_at: _Optional[float] = ..., updates: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., changed: _Optional[_Iterable[int]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "crc32c", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    crc32c: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., crc32c: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("node", "version", "ranges", "track")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    track: str
    def __init__(self, node: _Optional[str] = ..., version: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., track: _Optional[str] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("version", "chunk")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    version: VersionInfo
    chunk: Chunk
    def __init__(self, version: _Optional[_Union[VersionInfo, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class ProxyInfo(_message.Message):
    __slots__ = ("name", "digest", "file_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    file_bytes: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., file_bytes: _Optional[int] = ...) -> None: ...

class ProxyRequest(_message.Message):
    __slots__ = ("node", "ranges", "track")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    node: str
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    track: str
    def __init__(self, node: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., track: _Optional[str] = ...) -> None: ...

class ProxyReply(_message.Message):
    __slots__ = ("proxy", "chunk")
    PROXY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    proxy: ProxyInfo
    chunk: Chunk
    def __init__(self, proxy: _Optional[_Union[ProxyInfo, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class OpenItem(_message.Message):
    __slots__ = ("slot", "digest", "since", "until", "expires_at")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    digest: bytes
    since: int
    until: int
    expires_at: float
    def __init__(self, slot: _Optional[int] = ..., digest: _Optional[bytes] = ..., since: _Optional[int] = ..., until: _Optional[int] = ..., expires_at: _Optional[float] = ...) -> None: ...

class Catalogue(_message.Message):
    __slots__ = ("pool", "version", "shape", "whole", "items", "gone", "at")
    POOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    pool: int
    version: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    whole: bool
    items: _containers.RepeatedCompositeFieldContainer[OpenItem]
    gone: _containers.RepeatedScalarFieldContainer[int]
    at: float
    def __init__(self, pool: _Optional[int] = ..., version: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., whole: bool = ..., items: _Optional[_Iterable[_Union[OpenItem, _Mapping]]] = ..., gone: _Optional[_Iterable[int]] = ..., at: _Optional[float] = ...) -> None: ...

class ItemsRequest(_message.Message):
    __slots__ = ("node", "pool", "known", "ranges", "track")
    NODE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    node: str
    pool: int
    known: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    track: str
    def __init__(self, node: _Optional[str] = ..., pool: _Optional[int] = ..., known: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., track: _Optional[str] = ...) -> None: ...

class ItemsReply(_message.Message):
    __slots__ = ("items", "chunk")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    items: Catalogue
    chunk: Chunk
    def __init__(self, items: _Optional[_Union[Catalogue, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class ShareHeader(_message.Message):
    __slots__ = ("run", "node", "incarnation", "of", "shape", "digests", "track")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    run: str
    node: str
    incarnation: int
    of: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    track: str
    def __init__(self, run: _Optional[str] = ..., node: _Optional[str] = ..., incarnation: _Optional[int] = ..., of: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[bytes]] = ..., track: _Optional[str] = ...) -> None: ...

class ShareRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ShareHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[ShareHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Shared(_message.Message):
    __slots__ = ("known", "room")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    known: _containers.RepeatedScalarFieldContainer[bytes]
    room: int
    def __init__(self, known: _Optional[_Iterable[bytes]] = ..., room: _Optional[int] = ...) -> None: ...

class ShareReply(_message.Message):
    __slots__ = ("wanted", "shared")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    wanted: Wanted
    shared: Shared
    def __init__(self, wanted: _Optional[_Union[Wanted, _Mapping]] = ..., shared: _Optional[_Union[Shared, _Mapping]] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("run", "node", "incarnation", "of", "digests", "track")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    run: str
    node: str
    incarnation: int
    of: str
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    track: str
    def __init__(self, run: _Optional[str] = ..., node: _Optional[str] = ..., incarnation: _Optional[int] = ..., of: _Optional[str] = ..., digests: _Optional[_Iterable[bytes]] = ..., track: _Optional[str] = ...) -> None: ...

class WithdrawReply(_message.Message):
    __slots__ = ("erased",)
    ERASED_FIELD_NUMBER: _ClassVar[int]
    erased: int
    def __init__(self, erased: _Optional[int] = ...) -> None: ...

class Fragment(_message.Message):
    __slots__ = ("index", "count")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    index: int
    count: int
    def __init__(self, index: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("tier", "base_version", "samples", "buffer_samples", "ids")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    base_version: int
    samples: float
    buffer_samples: float
    ids: _containers.RepeatedCompositeFieldContainer[UpdateId]
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., base_version: _Optional[int] = ..., samples: _Optional[float] = ..., buffer_samples: _Optional[float] = ..., ids: _Optional[_Iterable[_Union[UpdateId, _Mapping]]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("run", "update_id", "kind", "tier", "base_version", "codec", "layout", "steps", "seconds", "metrics", "groups", "layout_spec", "intervals", "samples", "digest", "fragment", "track", "covers")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_SPEC_FIELD_NUMBER: _ClassVar[int]
    INTERVALS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    COVERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    update_id: UpdateId
    kind: Kind
    tier: Tier
    base_version: int
    codec: str
    layout: str
    steps: int
    seconds: float
    metrics: _containers.ScalarMap[str, float]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    layout_spec: bytes
    intervals: _containers.RepeatedCompositeFieldContainer[Range]
    samples: float
    digest: int
    fragment: Fragment
    track: str
    covers: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, run: _Optional[str] = ..., update_id: _Optional[_Union[UpdateId, _Mapping]] = ..., kind: _Optional[_Union[Kind, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., base_version: _Optional[int] = ..., codec: _Optional[str] = ..., layout: _Optional[str] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., layout_spec: _Optional[bytes] = ..., intervals: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., samples: _Optional[float] = ..., digest: _Optional[int] = ..., fragment: _Optional[_Union[Fragment, _Mapping]] = ..., track: _Optional[str] = ..., covers: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("held", "receipt")
    HELD_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    held: Held
    receipt: Receipt
    def __init__(self, held: _Optional[_Union[Held, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("node", "incarnation", "after_version", "track")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    after_version: int
    track: str
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., after_version: _Optional[int] = ..., track: _Optional[str] = ...) -> None: ...

class News(_message.Message):
    __slots__ = ("version", "receipts", "finished", "closes_at")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CLOSES_AT_FIELD_NUMBER: _ClassVar[int]
    version: int
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    finished: str
    closes_at: float
    def __init__(self, version: _Optional[int] = ..., receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., finished: _Optional[str] = ..., closes_at: _Optional[float] = ...) -> None: ...
