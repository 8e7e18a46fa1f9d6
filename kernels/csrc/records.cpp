// Records of the Redis tier: their two checksums in one call, and a whole reply that holds one, read into its page's place
// and hashed while it arrives. What a header means is checked in Python, before anything is done with the page.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "socket_io.h"
#include "xxh3.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvtier;

namespace {

// The form is docs/formats.md's "Wire record".
constexpr size_t kHeaderBytes = 96, kCoveredBytes = 72, kNbytesAt = 16, kOriginAt = 12, kOriginMost = 255;
// More than a line, a header, an origin and a line end need.
constexpr size_t kLeastRoom = 512;

uint64_t seed_of(const nb::bytes& key) {
  if (key.size() < 8) throw std::invalid_argument("the key must have 8 bytes at least");
  uint64_t seed;
  std::memcpy(&seed, key.c_str(), 8);
  return seed;
}

// A page's hash alone and as a part of its record.
struct Checks {
  explicit Checks(uint64_t seed) : record(seed), page(seed) {}

  // In pieces, so that the second one finds in the cache what the first one read.
  void take(const uint8_t* data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kPieceBytes) {
      const size_t now = std::min(bytes - at, kPieceBytes);
      record.update(data + at, now);
      page.update(data + at, now);
    }
  }

  Xxh3 record, page;
};

nb::bytes digest_of(const Xxh3& hash) {
  uint8_t out[16];
  hash.digest(out);
  return nb::bytes(reinterpret_cast<const char*>(out), sizeof out);
}

nb::tuple record_checksums(const nb::bytes& covered, nb::handle page, const nb::bytes& origin, const nb::bytes& key) {
  const View view(page, PyBUF_SIMPLE);
  Checks checks(seed_of(key));
  checks.record.update(reinterpret_cast<const uint8_t*>(covered.c_str()), covered.size());
  {
    nb::gil_scoped_release nogil;
    checks.take(view.data(), view.size());
  }
  checks.record.update(reinterpret_cast<const uint8_t*>(origin.c_str()), origin.size());
  return nb::make_tuple(digest_of(checks.record), digest_of(checks.page));
}

// The bytes of a bulk reply at `at`, which moves behind its first line; -1: that is something else, or not whole.
int64_t bulk_bytes(const uint8_t*& at, const uint8_t* end) {
  const uint8_t* digit = at;
  if (digit == end || *digit++ != '$') return -1;
  int64_t value = 0;
  for (; digit < end && *digit >= '0' && *digit <= '9'; ++digit) {
    value = value * 10 + (*digit - '0');
    if (value > int64_t(1) << 40) return -1;
  }
  if (end - digit < 2 || digit[0] != '\r' || digit[1] != '\n' || digit - at < 2) return -1;
  at = digit + 2;
  return value;
}

// A record whose page has `page_bytes` and fits, begins at `header`.
bool looks_like_one(const uint8_t* header, size_t length, size_t room, size_t& page_bytes, size_t& origin_bytes) {
  uint64_t nbytes;
  uint32_t flags;
  std::memcpy(&nbytes, header + kNbytesAt, 8);
  std::memcpy(&flags, header + kOriginAt, 4);
  origin_bytes = flags & kOriginMost;
  page_bytes = size_t(nbytes);
  return nbytes <= room && length == kHeaderBytes + page_bytes + origin_bytes;
}

// (start, end, length, header or None, checksum of the record, of the page, origin, errno): see the stub.
nb::tuple read_record(int fd, nb::handle buffer, size_t start, size_t end, nb::handle out, const nb::bytes& key,
                      double until) {
  const View held(buffer, PyBUF_WRITABLE), place(out, PyBUF_WRITABLE);
  if (end > held.size() || start > end || held.size() < 2 * kLeastRoom)
    throw std::invalid_argument("start and end must lie in the buffer, which must have 1024 bytes at least");
  Checks checks(seed_of(key));
  uint8_t header[kHeaderBytes], origin[kOriginMost];
  size_t page_bytes = 0, origin_bytes = 0;
  bool found = false;
  int error = 0;
  const auto left = [&] { return end - start; };
  // Where the buffer takes more.
  const auto room = [&]() -> iovec {
    if (start && held.size() - end < kLeastRoom) {
      std::memmove(held.data(), held.data() + start, left());
      end -= start, start = 0;
    }
    return {held.data() + end, held.size() - end};
  };
  const auto get = [&](const iovec* parts, int count) -> size_t {
    const int64_t n = now_s() >= until ? -EAGAIN : read_once(fd, parts, count);
    if (n > 0) return size_t(n);
    error = n < 0 ? int(-n) : kClosed;
    return 0;
  };
  {
    nb::gil_scoped_release nogil;
    int64_t length = -1;
    const uint8_t* at = nullptr;
    for (;;) {
      at = held.data() + start;
      length = bulk_bytes(at, held.data() + end);
      const bool line = std::memchr(held.data() + start, '\n', left()) != nullptr;
      const size_t have = size_t(held.data() + end - at);
      if ((line && (length < int64_t(kHeaderBytes) || have >= kHeaderBytes)) || left() >= kLeastRoom) break;
      const iovec more = room();
      end += get(&more, 1);
      if (error) break;
    }
    if (!error && length >= int64_t(kHeaderBytes) && size_t(held.data() + end - at) >= kHeaderBytes)
      found = looks_like_one(at, size_t(length), place.size(), page_bytes, origin_bytes);
    if (found) {
      std::memcpy(header, at, kHeaderBytes);
      start = size_t(at - held.data()) + kHeaderBytes;
      checks.record.update(header, kCoveredBytes);
      size_t got = std::min(page_bytes, left());
      std::memcpy(place.data(), held.data() + start, got);
      start += got;
      if (start == end) start = end = 0;
      checks.take(place.data(), got);
      const size_t behind = origin_bytes + 2;
      while (!error && (got < page_bytes || left() < behind)) {
        const size_t missing = page_bytes - got;
        // What is there, not all of a piece: while it is hashed the server sends on, and nobody sleeps. With the last piece
        // comes what follows.
        const iovec parts[2] = {{place.data() + got, std::min(missing, kPieceBytes)}, room()};
        const size_t n = missing > kPieceBytes ? get(parts, 1) : missing ? get(parts, 2) : get(parts + 1, 1);
        const size_t taken = std::min(n, parts[0].iov_len);
        checks.take(place.data() + got, taken);
        got += taken;
        end += n - taken;
      }
      if (!error) {
        std::memcpy(origin, held.data() + start, origin_bytes);
        checks.record.update(origin, origin_bytes);
        if (std::memcmp(held.data() + start + origin_bytes, "\r\n", 2)) error = kNoLineEnd;
        start += behind;
        if (start == end) start = end = 0;
      }
    }
  }
  const size_t length = kHeaderBytes + page_bytes + origin_bytes;
  if (!found || error)
    return nb::make_tuple(start, end, 0, nb::none(), nb::bytes("", 0), nb::bytes("", 0), nb::bytes("", 0), error);
  const auto bytes = [](const uint8_t* from, size_t n) { return nb::bytes(reinterpret_cast<const char*>(from), n); };
  return nb::make_tuple(start, end, length, bytes(header, sizeof header), digest_of(checks.record),
                        digest_of(checks.page), bytes(origin, origin_bytes), 0);
}

}  // namespace

void bind_records(nb::module_& m) {
  m.def("record_checksums", &record_checksums, "covered"_a, "page"_a, "origin"_a, "key"_a);
  m.def("read_record", &read_record, "fd"_a, "buffer"_a, "start"_a, "end"_a, "out"_a, "key"_a, "until"_a);
}
