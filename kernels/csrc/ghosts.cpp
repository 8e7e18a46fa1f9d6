// A sampled list of recently used pages that knows, for each page asked for, how many bytes were used since its last
// use. The same as kernels/ghosts/reference.py, which says in plain Python what it does; here a Fenwick tree over the
// order of use gives each distance in logarithmic time.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr size_t kKeyBytes = 32;
constexpr uint64_t kHashSpace = uint64_t(1) << 32;
constexpr size_t kSubBuckets = 16;
constexpr size_t kBuckets = kSubBuckets + 60 * kSubBuckets;

size_t bucket_of(uint64_t distance) {
  if (distance < kSubBuckets) return distance;
  const int shift = 59 - __builtin_clzll(distance);  // leaves five bits, the highest of them set
  return (size_t(shift) << 4) + size_t(distance >> shift);
}

struct Key {
  uint64_t id;
  uint32_t hash;
};

class Keys {
 public:
  explicit Keys(const nb::bytes& joined) : data_(joined.c_str()), size_(joined.size() / kKeyBytes) {
    if (joined.size() % kKeyBytes) throw std::invalid_argument("keys are 32 bytes each, got " + std::to_string(joined.size()));
  }
  size_t size() const { return size_; }
  Key operator[](size_t i) const {
    Key key;
    std::memcpy(&key.id, data_ + i * kKeyBytes, 8);
    std::memcpy(&key.hash, data_ + i * kKeyBytes + 8, 4);
    return key;
  }

 private:
  const char* data_;
  size_t size_;
};

class GhostStack {
 public:
  GhostStack(int64_t max_keys, int64_t max_bytes) : max_keys_(size_t(max_keys)), max_bytes_(max_bytes) {
    if (max_keys < 1 || max_keys > (int64_t(1) << 24)) throw std::invalid_argument("max_keys must be from 1 to 2^24");
    if (max_bytes < 1) throw std::invalid_argument("max_bytes must be positive");
    order_.assign(2 * (max_keys_ + 1), 0);
    tree_.assign(order_.size() + 1, 0);
    histogram_.assign(kBuckets + 1, 0.0);
    entries_.reserve(max_keys_ + 1);
  }

  void looked_up(const nb::bytes& joined) {
    const Keys keys(joined);
    lookups_ += int64_t(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      const Key key = keys[i];
      if (key.hash >= threshold_) continue;
      const double weight = double(kHashSpace) / double(threshold_);
      const auto found = entries_.find(key.id);
      if (found == entries_.end()) {
        histogram_[kBuckets] += weight;
        continue;
      }
      const Entry& entry = found->second;
      const uint64_t newer = scaled(total_ - sum_up_to(entry.place));
      histogram_[bucket_of(newer + uint64_t(entry.bytes))] += weight;
      move_to_front(key.id, found->second);
    }
  }

  void stored(const nb::bytes& joined, const nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu, nb::ndim<1>>& nbytes) {
    const Keys keys(joined);
    if (nbytes.size() != keys.size()) throw std::invalid_argument("nbytes must have one number per key");
    for (size_t i = 0; i < keys.size(); ++i) store(keys[i], nbytes.data()[i]);
  }

  void stored_one(const nb::bytes& key, int64_t nbytes) {
    const Keys keys(key);
    if (keys.size() != 1) throw std::invalid_argument("key must be one key");
    store(keys[0], nbytes);
  }

  void dropped(const nb::bytes& joined) {
    const Keys keys(joined);
    for (size_t i = 0; i < keys.size(); ++i) {
      const Key key = keys[i];
      if (key.hash >= threshold_) continue;
      const auto found = entries_.find(key.id);
      if (found != entries_.end()) remove(found);
    }
  }

  int64_t lookups() const { return lookups_; }
  int64_t keys() const { return int64_t(entries_.size()); }
  uint64_t threshold() const { return threshold_; }

  void histogram(const nb::ndarray<double, nb::c_contig, nb::device::cpu, nb::ndim<1>>& out) const {
    if (out.size() != histogram_.size()) throw std::invalid_argument("out must hold " + std::to_string(histogram_.size()) + " numbers");
    std::memcpy(out.data(), histogram_.data(), histogram_.size() * sizeof(double));
  }

 private:
  struct Entry {
    uint32_t hash;
    int64_t bytes;
    size_t place;
  };
  using Entries = std::unordered_map<uint64_t, Entry>;

  void store(const Key& key, int64_t bytes) {
    if (bytes < 0) throw std::invalid_argument("nbytes must not be negative");
    if (key.hash >= threshold_) return;
    const auto found = entries_.find(key.id);
    if (found != entries_.end()) remove(found);
    append(key.id, Entry{key.hash, bytes, 0});
    while (entries_.size() > max_keys_) lower_threshold();
    while (entries_.size() > 1 && scaled(total_) > uint64_t(max_bytes_)) drop_oldest();
  }

  // Of sampled bytes: what they stand for.
  uint64_t scaled(int64_t bytes) const { return uint64_t((unsigned __int128)(uint64_t(bytes)) * kHashSpace / threshold_); }

  void add(size_t place, int64_t bytes) {
    total_ += bytes;
    for (size_t i = place + 1; i < tree_.size(); i += i & (~i + 1)) tree_[i] += bytes;
  }

  int64_t sum_up_to(size_t place) const {
    int64_t sum = 0;
    for (size_t i = place + 1; i; i &= i - 1) sum += tree_[i];
    return sum;
  }

  void append(uint64_t id, Entry entry) {
    if (next_ == order_.size()) compact();
    entry.place = next_;
    order_[next_++] = id;
    add(entry.place, entry.bytes);
    entries_[id] = entry;
  }

  void move_to_front(uint64_t id, Entry& entry) {
    if (next_ == order_.size()) compact();
    add(entry.place, -entry.bytes);
    entry.place = next_;
    order_[next_++] = id;
    add(entry.place, entry.bytes);
  }

  void remove(Entries::iterator at) {
    add(at->second.place, -at->second.bytes);
    entries_.erase(at);
  }

  // Whether the page named at this place was last used there: places are not cleared when a page is used again.
  Entries::iterator at_place(size_t place) {
    const auto found = entries_.find(order_[place]);
    return found != entries_.end() && found->second.place == place ? found : entries_.end();
  }

  void drop_oldest() {
    for (;; ++oldest_) {
      const auto found = at_place(oldest_);
      if (found == entries_.end()) continue;
      remove(found);
      return;
    }
  }

  void lower_threshold() {
    threshold_ -= threshold_ / 8 ? threshold_ / 8 : 1;
    for (auto at = entries_.begin(); at != entries_.end();) {
      if (at->second.hash < threshold_) {
        ++at;
        continue;
      }
      add(at->second.place, -at->second.bytes);
      at = entries_.erase(at);
    }
  }

  void compact() {
    size_t to = 0;
    std::fill(tree_.begin(), tree_.end(), 0);
    total_ = 0;
    for (size_t from = 0; from < next_; ++from) {
      const auto found = at_place(from);
      if (found == entries_.end()) continue;
      order_[to] = order_[from];
      found->second.place = to;
      add(to++, found->second.bytes);
    }
    next_ = to;
    oldest_ = 0;
  }

  size_t max_keys_;
  int64_t max_bytes_;
  uint64_t threshold_ = kHashSpace;
  int64_t lookups_ = 0;
  int64_t total_ = 0;
  size_t next_ = 0, oldest_ = 0;
  Entries entries_;
  std::vector<uint64_t> order_;
  std::vector<int64_t> tree_;
  std::vector<double> histogram_;
};

}  // namespace

void bind_ghosts(nb::module_& m) {
  m.attr("GHOST_BUCKETS") = kBuckets;
  nb::class_<GhostStack>(m, "GhostStack", "kvtier.kernels.ghosts.reference.GhostStack; not thread-safe")
      .def(nb::init<int64_t, int64_t>(), "max_keys"_a, "max_bytes"_a)
      .def("looked_up", &GhostStack::looked_up, "keys"_a)
      .def("stored", &GhostStack::stored, "keys"_a, nb::arg("nbytes").noconvert())
      .def("stored_one", &GhostStack::stored_one, "key"_a, "nbytes"_a)
      .def("dropped", &GhostStack::dropped, "keys"_a)
      .def("histogram", &GhostStack::histogram, nb::arg("out").noconvert())
      .def_prop_ro("lookups", &GhostStack::lookups)
      .def_prop_ro("keys", &GhostStack::keys)
      .def_prop_ro("threshold", &GhostStack::threshold);
}
