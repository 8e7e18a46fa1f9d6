from typing import Any, overload

import numpy as np
import numpy.typing as npt

PLAN_FIELDS: int

_U8 = npt.NDArray[np.uint8]
_I64 = npt.NDArray[np.int64]
_I32 = npt.NDArray[np.int32]
_F64 = npt.NDArray[np.float64]

def encode_pages(
    plan: _I64,
    page_ids: _I64,
    valid_tokens: npt.NDArray[np.int32],
    page_tokens: int,
    arena: _U8,
    offsets: _I64,
    cold_bytes: int,
    table_offset: int,
    seeds: npt.NDArray[np.uint64],
    checksums_out: _U8,
    refused_out: _U8,
) -> None: ...
def decode_pages(
    plan: _I64,
    page_ids: _I64,
    valid_tokens: npt.NDArray[np.int32],
    page_tokens: int,
    arena: _U8,
    offsets: _I64,
    cold_bytes: int,
    table_offset: int,
    buffer_begin: int,
    buffer_end: int,
) -> None: ...
def page_errors(
    plan: _I64,
    page_ids: _I64,
    valid_tokens: npt.NDArray[np.int32],
    page_tokens: int,
    arena: _U8,
    offsets: _I64,
    cold_bytes: int,
    table_offset: int,
    sums_out: _F64,
) -> None: ...
def checksum_pages(
    arena: _U8, offsets: _I64, nbytes: int | _I64, seeds: npt.NDArray[np.uint64], checksums_out: _U8
) -> None: ...
def verify_pages(
    arena: _U8, offsets: _I64, nbytes: int | _I64, seeds: npt.NDArray[np.uint64], checksums: _U8
) -> _U8: ...
def xxh3_128(buffer: Any, seed: int = 0) -> bytes: ...

class Xxh3:
    """XXH3 with 128 bits of an input that comes in pieces: the digest of `xxh3_128`. For one thread at a time."""

    def __init__(self, seed: int = 0) -> None: ...
    def update(self, buffer: Any) -> None: ...
    def digest(self) -> bytes: ...

CLOSED: int
NO_LINE_END: int

def read_command(
    fd: int, buffer: bytearray, start: int, end: int, args_max: int, bulk_max: int, value_max: int
) -> tuple[int, int, list[bytes] | None, int, int, int]:
    """The start of a command of the Redis protocol in ``buffer[start:end]``; where that is empty it waits for some on
    the blocking socket `fd` first (-1: it does not). Start and end of what was not read, the arguments that were, how
    many are left, the bytes of the value that begins at the new start (-1: none does), and why nothing came: an errno,
    CLOSED, or 0. It stops before an argument that is not there as a whole or is no argument, and behind the line that
    begins a value of SET or MSET of at most `value_max` bytes. None for the arguments where not even their number could
    be read."""

def read_value(
    fd: int, buffer: bytearray, start: int, end: int, out: memoryview, key: bytes, awake_s: float
) -> tuple[int, int, bytes, int]:
    """Fill `out` from ``buffer[start:end]`` and then from the blocking socket `fd`, and read the line end behind it;
    what follows goes into the buffer. Start and end of what was not read, `kvtier.keys.checksum` of the value, and why
    it is not all there: an errno, CLOSED, NO_LINE_END, or 0. awake_s: how long it looks for more before it sleeps."""

def record_checksums(covered: bytes, page: Any, origin: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Of a record of the Redis tier, of which `covered`, the page's bytes and `origin` are hashed, and of the page
    alone, both seeded with the key. The page is read from memory once."""

def read_record(
    fd: int, buffer: bytearray, start: int, end: int, out: memoryview, key: bytes, until: float
) -> tuple[int, int, int, bytes | None, bytes, bytes, bytes, int]:
    """A bulk reply that holds a record whose page fits into `out`, from ``buffer[start:end]`` and then from the
    blocking socket `fd`: start and end of what was not read, bytes of the record, its header, the checksums of
    `record_checksums` as they are of what came, the origin, and why it is not all there: an errno, CLOSED, NO_LINE_END,
    or 0. None for the header where the reply is something else: nothing of it was taken then. What the header says of
    page and origin was compared with the reply's length, and nothing else."""

def update_all(buffer: Any, hashes: list[Xxh3]) -> None:
    """Feed `buffer` to all `hashes`, but read it from memory once."""

def receive(fd: int, out: Any, hashes: list[Xxh3], until: float) -> tuple[int, int]:
    """Fill `out` from a blocking socket and feed every piece to all `hashes`; (bytes received, errno). Fewer bytes
    with errno 0: the stream ended. The socket's SO_RCVTIMEO ends a wait, and the time `until` (`time.monotonic`) the
    whole, with EAGAIN."""

def send_now(fd: int, data: Any) -> int:
    """Send what the socket takes at once: how many bytes, or minus an errno. Never waits; holds the GIL."""

def send_pages(fd: int, pipe_out: int, pipe_in: int, before: bytes, data: Any, until: float) -> tuple[int, int]:
    """Send `before`, and then `data` by reference through an empty pipe: it must not change until the peer has read it.
    Less than a page at the start of `data` is copied. Something else must be sent after it. (bytes sent of both,
    errno); after an error the pipe is of no more use, and the socket neither if a page was sent. Deadlines as in
    `receive`, with SO_SNDTIMEO."""

def page_keys(namespace_digest: bytes, hashes: bytes, hash_bytes: int) -> bytes: ...
def page_key_list(namespace_digest: bytes, hashes: list[bytes]) -> list[bytes] | None: ...
def page_names(namespace_digest: bytes, hashes: list[str]) -> tuple[list[bytes], list[bytes]] | None: ...
def page_owners(namespace_digests: bytes, keys: bytes, hashes: bytes, hash_bytes: int) -> npt.NDArray[np.int32]: ...
@overload
def quantize(x: npt.NDArray[np.uint16], dtype: int, k: int, data_out: _U8, scales_out: _U8) -> bool: ...
@overload
def quantize(x: npt.NDArray[np.float32], dtype: int, k: int, data_out: _U8, scales_out: _U8) -> bool: ...
@overload
def dequantize(data: _U8, scales: _U8, dtype: int, k: int, out: npt.NDArray[np.uint16]) -> None: ...
@overload
def dequantize(data: _U8, scales: _U8, dtype: int, k: int, out: npt.NDArray[np.float32]) -> None: ...
def split_planes(values: _U8, planes_out: _U8) -> None:
    """Byte p of every element to plane p. values [planes * n]; planes_out [planes, n], 1, 2 or 4 planes. GIL free."""

def join_planes(planes: _U8, values_out: _U8) -> None:
    """The inverse of `split_planes`. GIL free."""

def isas() -> list[str]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
def replay_open(
    blocks: _I32,
    offsets: _I64,
    unique_blocks: int,
    times_s: _F64,
    capacity_blocks: _I64,
    policies: _I32,
    ttl_s: _F64,
    placement: int,
    second_use: _I32,
    refresh: _I32,
    hits: _I32,
    prefix: _I32,
    stored: _I32,
) -> None: ...
def replay_closed(
    blocks: _I32,
    offsets: _I64,
    unique_blocks: int,
    input_tokens: _I64,
    output_tokens: _I64,
    think_s: _F64,
    block_tokens: int,
    order: _I32,
    session_starts: _I64,
    capacity_blocks: _I64,
    policies: _I32,
    ttl_s: _F64,
    placement: int,
    second_use: _I32,
    refresh: _I32,
    block_bytes: int,
    bandwidth: _F64,
    latency_s: _F64,
    prefill_base_s: float,
    prefill_s_per_token: float,
    decode_step_s: float,
    decode_step_per_request_s: float,
    concurrency: int,
    duration_s: float,
    hits: _I32,
    prefix: _I32,
    stored: _I32,
    issued_s: _F64,
    first_token_s: _F64,
    finished_s: _F64,
) -> None: ...

class BoxFit:
    def __init__(self, lower: float, upper: float, capacity: int) -> None: ...
    def extend(self, rows: _F64, rhs: _F64, start: _F64) -> None: ...
    def solve(self, norm: float) -> bool: ...
    def weights(self, out: _F64) -> None: ...
    def __len__(self) -> int: ...

def choose_by_coverage(shares: _F64, covered: _F64, bounds: _F64, epsilon: float, chosen_out: _I64) -> int: ...

GHOST_BUCKETS: int

class GhostStack:
    def __init__(self, max_keys: int, max_bytes: int) -> None: ...
    @property
    def lookups(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def threshold(self) -> int: ...
    def looked_up(self, keys: bytes) -> None: ...
    def stored(self, keys: bytes, nbytes: _I64) -> None: ...
    def stored_one(self, key: bytes, nbytes: int) -> None: ...
    def dropped(self, keys: bytes) -> None: ...
    def histogram(self, out: _F64) -> None: ...
