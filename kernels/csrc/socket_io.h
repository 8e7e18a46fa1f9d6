// What calls on sockets share: the caller's buffers, clock and signals.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/uio.h>
#include <time.h>

#include <cerrno>
#include <cstdint>

namespace kvtier {

// Why a read ended where it is no errno.
constexpr int kClosed = -1, kNoLineEnd = -2;

// Small enough to stay in the second level of the cache between the copy and the hash.
constexpr size_t kPieceBytes = 256 << 10;

class View {
 public:
  View(nanobind::handle buffer, int flags) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
  size_t size() const { return size_t(view_.len); }

 private:
  Py_buffer view_;
};

inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// With the GIL released: handlers of signals run, and may raise, before the call goes on.
inline void check_signals() {
  nanobind::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

// Reads as far as one call gives something; bytes, 0 at the end of the stream, or -errno. With the GIL released.
inline int64_t read_once(int fd, const iovec* parts, int count) {
  for (;;) {
    const ssize_t n = readv(fd, parts, count);
    if (n >= 0) return n;
    if (errno != EINTR) return -errno;
    check_signals();
  }
}

}  // namespace kvtier
