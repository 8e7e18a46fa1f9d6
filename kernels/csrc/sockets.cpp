// Bytes between sockets and pages without the interpreter in between: received and hashed while they are still in the
// processor's cache, sent by reference. Both take the deadline of every call from the socket's own timeouts.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "socket_io.h"
#include "xxh3.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvtier;

namespace {

constexpr size_t kPageBytes = 4096;

void update(Xxh3& hash, nb::handle buffer) {
  const View view(buffer, PyBUF_SIMPLE);
  nb::gil_scoped_release nogil;
  hash.update(view.data(), view.size());
}

std::vector<Xxh3*> pointers(nb::list hashes) {
  std::vector<Xxh3*> all;
  for (nb::handle hash : hashes) all.push_back(nb::cast<Xxh3*>(hash));
  return all;
}

void update_all(nb::handle buffer, nb::list hashes) {
  const View view(buffer, PyBUF_SIMPLE);
  const std::vector<Xxh3*> fed = pointers(hashes);
  nb::gil_scoped_release nogil;
  for (size_t at = 0; at < view.size(); at += kPieceBytes) {
    const size_t left = view.size() - at;
    for (Xxh3* hash : fed) hash->update(view.data() + at, left < kPieceBytes ? left : kPieceBytes);
  }
}

nb::bytes digest(const Xxh3& hash) {
  uint8_t out[16];
  hash.digest(out);
  return nb::bytes(reinterpret_cast<const char*>(out), sizeof out);
}

// (bytes received, errno): errno 0 with fewer bytes than `out` has is the end of the stream.
nb::tuple receive(int fd, nb::handle out, nb::list hashes, double until) {
  const View view(out, PyBUF_WRITABLE);
  const std::vector<Xxh3*> fed = pointers(hashes);
  size_t got = 0;
  int error = 0;
  {
    nb::gil_scoped_release nogil;
    while (got < view.size()) {
      const size_t left = view.size() - got;
      // What is there, not all of a piece: while it is hashed the peer sends on, and nobody sleeps.
      const ssize_t n = recv(fd, view.data() + got, left < kPieceBytes ? left : kPieceBytes, 0);
      if (n < 0 && errno == EINTR) {
        check_signals();
        continue;
      }
      if (n < 0) error = errno;
      if (n <= 0) break;
      for (Xxh3* hash : fed) hash->update(view.data() + got, size_t(n));
      got += size_t(n);
      if (got < view.size() && now_s() >= until) {
        error = EAGAIN;
        break;
      }
    }
  }
  return nb::make_tuple(got, error);
}

// A number in decimal up to the line end at or after `at`; -1 where there is none, or a larger one than `most`.
int64_t number_line(const char*& at, const char* end, int64_t most) {
  int64_t value = 0;
  const char* digit = at;
  for (; digit < end && *digit >= '0' && *digit <= '9'; ++digit) {
    value = value * 10 + (*digit - '0');
    if (value > most) return -1;
  }
  if (digit == at || end - digit < 2 || digit[0] != '\r' || digit[1] != '\n') return -1;
  at = digit + 2;
  return value;
}

// Whether argument `index` of a command is a value: all of SET's second, and every second one of MSET.
bool is_value(const char* name, int64_t name_bytes, int64_t index) {
  if (index < 2) return false;
  if (name_bytes == 3) return index == 2 && !strncasecmp(name, "set", 3);
  return name_bytes == 4 && index % 2 == 0 && !strncasecmp(name, "mset", 4);
}

// (start, end, arguments or None, how many are left, bytes of the value that begins at start or -1, errno): see the stub.
nb::tuple read_command(int fd, nb::handle buffer, size_t start, size_t end, int64_t args_max, int64_t bulk_max,
                       int64_t value_max) {
  const View view(buffer, PyBUF_WRITABLE);
  if (end > view.size() || start > end) throw std::invalid_argument("start and end must lie in the buffer");
  if (start == end && fd >= 0) {
    const iovec all{view.data(), view.size()};
    int64_t n;
    {
      nb::gil_scoped_release nogil;
      n = read_once(fd, &all, 1);
    }
    if (n <= 0) return nb::make_tuple(0, 0, nb::none(), 0, -1, n < 0 ? int(-n) : kClosed);
    start = 0, end = size_t(n);
  }
  const char* const begin = reinterpret_cast<const char*>(view.data());
  const char* const stop = begin + end;
  const char* at = begin + start;
  const auto unread = [&] { return nb::make_tuple(start, end, nb::none(), 0, -1, 0); };
  if (at == stop || *at++ != '*') return unread();
  const int64_t count = number_line(at, stop, args_max);
  if (count < 1) return unread();
  const char* name = nullptr;
  int64_t name_bytes = 0, index = 0, value_bytes = -1;
  nb::list words;
  for (; index < count; ++index) {
    const char* head = at;
    if (head == stop || *head++ != '$') break;
    if (is_value(name, name_bytes, index)) {
      value_bytes = number_line(head, stop, value_max);
      if (value_bytes >= 0) at = head;
      break;
    }
    const int64_t length = number_line(head, stop, bulk_max);
    if (length < 0 || stop - head < length + 2 || head[length] != '\r' || head[length + 1] != '\n') break;
    if (!index) name = head, name_bytes = length;
    words.append(nb::bytes(head, size_t(length)));
    at = head + length + 2;
  }
  return nb::make_tuple(size_t(at - begin), end, words, count - index, value_bytes, 0);
}

// As `read_once`, but looks for `awake_s` before it sleeps: a peer on this machine that is in the middle of a value sends
// on within a microsecond or two, and going to sleep and waking up cost more than that.
int64_t read_awake(int fd, const iovec* parts, int count, double awake_s) {
  if (awake_s > 0) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = size_t(count);
    const double until = now_s() + awake_s;
    do {
      const ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT);
      if (n >= 0) return n;
      if (errno != EAGAIN && errno != EINTR) return -errno;
    } while (now_s() < until);
  }
  return read_once(fd, parts, count);
}

// A value and the line end behind it: from the buffer, and the rest from the socket. With the last piece comes what
// follows, which goes into the buffer. (start, end, checksum, errno): see the stub.
nb::tuple read_value(int fd, nb::handle buffer, size_t start, size_t end, nb::handle out, const nb::bytes& key,
                     double awake_s) {
  const View held(buffer, PyBUF_WRITABLE), value(out, PyBUF_WRITABLE);
  if (end > held.size() || start > end || held.size() < 2 || key.size() < 8)
    throw std::invalid_argument("start and end must lie in the buffer, and the key have 8 bytes");
  uint64_t seed;
  std::memcpy(&seed, key.c_str(), 8);
  const size_t here = std::min(value.size(), end - start);
  if (here) std::memcpy(value.data(), held.data() + start, here);
  start += here;
  uint8_t digest[16];
  int error = 0;
  if (here == value.size() && end - start >= 2) {
    xxh3_128(value.data(), here, seed, digest);
  } else {
    nb::gil_scoped_release nogil;
    Xxh3 hash(seed);
    hash.update(value.data(), here);
    for (size_t got = here; !error && (got < value.size() || end - start < 2);) {
      if (end == held.size() || start == end) {  // of what is there, at most one byte is left
        std::memmove(held.data(), held.data() + start, end - start);
        end -= start, start = 0;
      }
      const size_t left = value.size() - got;
      const iovec parts[2] = {{value.data() + got, std::min(left, kPieceBytes)},
                              {held.data() + end, held.size() - end}};
      // What is there, not all of a piece: while it is hashed the peer sends on, and nobody sleeps.
      const int64_t n = read_awake(fd, left ? parts : parts + 1, left && left <= kPieceBytes ? 2 : 1, awake_s);
      if (n <= 0) {
        error = n < 0 ? int(-n) : kClosed;
        break;
      }
      const size_t taken = std::min(size_t(n), parts[0].iov_len);
      hash.update(value.data() + got, taken);
      got += taken;
      end += size_t(n) - taken;
    }
    hash.digest(digest);
  }
  if (!error && (held.data()[start] != '\r' || held.data()[start + 1] != '\n')) error = kNoLineEnd;
  if (!error) start += 2;
  return nb::make_tuple(start, end, nb::bytes(reinterpret_cast<const char*>(digest), sizeof digest), error);
}

// Bytes sent, or -errno. It never waits, so the interpreter is not given up for it: having it back may take longer than
// the call when other threads want it.
int64_t send_now(int fd, nb::handle data) {
  const View view(data, PyBUF_SIMPLE);
  const ssize_t n = send(fd, view.data(), view.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return n < 0 ? -errno : n;
}

// `before` and what `data` has before its first whole page are copied; (bytes sent of these, errno).
std::pair<size_t, int> send_start(int fd, const uint8_t* before, size_t before_bytes, uint8_t* data, size_t lead) {
  size_t sent = 0;
  while (sent < before_bytes + lead) {
    const size_t of_lead = sent > before_bytes ? sent - before_bytes : 0, of_before = sent - of_lead;
    iovec parts[2] = {{const_cast<uint8_t*>(before) + of_before, before_bytes - of_before},
                      {data + of_lead, lead - of_lead}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t n = sendmsg(fd, &message, MSG_MORE | MSG_NOSIGNAL);
    if (n >= 0) {
      sent += size_t(n);
    } else if (errno == EINTR) {
      check_signals();
    } else {
      return {sent, errno};
    }
  }
  return {sent, 0};
}

// Page references go through the pipe to the socket; nothing but the start is copied here. (bytes sent, errno). What was
// put into the pipe and could not be sent is lost: after an error neither socket nor pipe can be used any further. The
// kernel is told that more follows, so something must.
nb::tuple send_pages(int fd, int pipe_out, int pipe_in, const nb::bytes& before, nb::handle data, double until) {
  const View view(data, PyBUF_SIMPLE);
  const uint8_t* const first = reinterpret_cast<const uint8_t*>(before.c_str());
  const size_t before_bytes = before.size();
  // From a page's start on, so that no more pages are handed over than the data has, which mostly fill the pipe.
  const size_t lead = std::min(view.size(), (kPageBytes - reinterpret_cast<uintptr_t>(view.data()) % kPageBytes) % kPageBytes);
  size_t sent = lead, in_pipe = 0, started;
  int error;
  {
    nb::gil_scoped_release nogil;
    std::tie(started, error) = send_start(fd, first, before_bytes, view.data(), lead);
    while (!error && sent < view.size()) {
      if (!in_pipe) {
        const iovec part{view.data() + sent, view.size() - sent};
        const ssize_t n = vmsplice(pipe_in, &part, 1, 0);
        if (n < 0) {
          error = errno;
          break;
        }
        in_pipe = size_t(n);
      }
      const ssize_t n = splice(pipe_out, nullptr, fd, nullptr, in_pipe, SPLICE_F_MORE);
      if (n < 0 && errno == EINTR) {
        check_signals();
        continue;
      }
      if (n <= 0) {
        error = n < 0 ? errno : EPIPE;
        break;
      }
      in_pipe -= size_t(n);
      sent += size_t(n);
      if (sent < view.size() && now_s() >= until) error = EAGAIN;
    }
  }
  return nb::make_tuple(started + sent - lead, error);
}

}  // namespace

void bind_sockets(nb::module_& m) {
  nb::class_<Xxh3>(m, "Xxh3", "XXH3 with 128 bits of an input that comes in pieces; for one thread at a time")
      .def(nb::init<uint64_t>(), "seed"_a = 0)
      .def("update", &update, "buffer"_a)
      .def("digest", &digest, "16 bytes, as xxh3_128 of all pieces; more may follow");
  m.attr("CLOSED") = kClosed;
  m.attr("NO_LINE_END") = kNoLineEnd;
  m.def("read_command", &read_command, "fd"_a, "buffer"_a, "start"_a, "end"_a, "args_max"_a, "bulk_max"_a,
        "value_max"_a);
  m.def("read_value", &read_value, "fd"_a, "buffer"_a, "start"_a, "end"_a, "out"_a, "key"_a,
        "awake_s"_a);
  m.def("update_all", &update_all, "buffer"_a, "hashes"_a);
  m.def("receive", &receive, "fd"_a, "out"_a, "hashes"_a, "until"_a);
  m.def("send_now", &send_now, "fd"_a, "data"_a);
  m.def("send_pages", &send_pages, "fd"_a, "pipe_out"_a, "pipe_in"_a, "before"_a, "data"_a, "until"_a);
}
