// Trace replay: a stack of tiers simulated block by block. The same as kvtier/replay/reference.py, which says what the
// numbers mean; blocks are dense integers, so every list is an array of links.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Vector = nb::ndarray<T, nb::c_contig, nb::device::cpu, nb::ndim<1>>;
template <class T>
using Matrix = nb::ndarray<T, nb::c_contig, nb::device::cpu, nb::ndim<2>>;

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument(what); }

constexpr int32_t kNone = -1;
constexpr int64_t kUnlimited = -1;
constexpr size_t kRememberedEvictions = 65536;

enum Policy : int32_t { kLru = 0, kFifo = 1, kS3Fifo = 2 };
enum Placement : int32_t { kWriteThrough = 0, kWriteBack = 1 };
enum Queue : uint8_t { kAbsent = 0, kMain = 1, kSmall = 2, kGhost = 3 };

struct Block {
  int32_t id;
  double used;
};

// A block is in one queue at most. Queues are lists from the newest to the oldest, which is the next to go.
class Tier {
 public:
  Tier(int64_t capacity, int32_t policy, double ttl_s, bool keep_times, int64_t unique)
      : capacity_(capacity), policy_(policy), ttl_s_(ttl_s), queue_(unique, kAbsent), links_(unique),
        small_capacity_(std::max<int64_t>(1, capacity / 10)), ghost_capacity_(capacity - small_capacity_) {
    if (keep_times) used_.resize(unique);
    if (policy == kS3Fifo) uses_.resize(unique);
  }

  bool use(int32_t id, double now) {
    const uint8_t queue = queue_[id];
    if (queue != kMain && queue != kSmall) return false;
    if (!used_.empty()) {
      if (now - used_[id] > ttl_s_) {
        unlink(id);
        return false;
      }
      used_[id] = now;
    }
    if (policy_ == kLru) {
      if (lists_[kMain].newest != id) {
        unlink(id);
        push(id, kMain);
      }
    } else if (policy_ == kS3Fifo) {
      uses_[id] = std::min<uint8_t>(uses_[id] + 1, 3);
    }
    return true;
  }

  bool has(int32_t id) const { return queue_[id] == kMain || queue_[id] == kSmall; }

  void remove(int32_t id) { unlink(id); }

  // The block that made room, or one with id kNone.
  Block insert(Block block) {
    Block victim{kNone, 0};
    if (capacity_ != kUnlimited && lists_[kMain].size + lists_[kSmall].size >= capacity_) victim = evict();
    uint8_t queue = kMain;
    if (policy_ == kS3Fifo) {
      uses_[block.id] = 0;
      if (queue_[block.id] == kGhost)
        unlink(block.id);
      else
        queue = kSmall;
    }
    push(block.id, queue);
    if (!used_.empty()) used_[block.id] = block.used;
    return victim;
  }

  // Hide the latency of a block that will be accessed soon.
  void prefetch(int32_t id) const {
    __builtin_prefetch(&queue_[id]);
    __builtin_prefetch(&links_[id], 1);
  }

 private:
  struct Links {
    int32_t newer, older;
  };
  struct List {
    int32_t newest = kNone, oldest = kNone;
    int64_t size = 0;
  };

  Block evict() {
    if (policy_ != kS3Fifo) return take(lists_[kMain].oldest);
    for (;;) {
      if (lists_[kSmall].size && (lists_[kSmall].size >= small_capacity_ || !lists_[kMain].size)) {
        const int32_t id = lists_[kSmall].oldest;
        if (uses_[id] > 1) {
          unlink(id);
          uses_[id] = 0;
          push(id, kMain);
          continue;
        }
        const Block victim = take(id);
        if (ghost_capacity_) {
          push(id, kGhost);
          if (lists_[kGhost].size > ghost_capacity_) unlink(lists_[kGhost].oldest);
        }
        return victim;
      }
      const int32_t id = lists_[kMain].oldest;
      if (!uses_[id]) return take(id);
      --uses_[id];
      unlink(id);
      push(id, kMain);
    }
  }

  Block take(int32_t id) {
    unlink(id);
    return {id, used_.empty() ? 0.0 : used_[id]};
  }

  void push(int32_t id, uint8_t queue) {
    List& list = lists_[queue];
    links_[id] = {kNone, list.newest};
    if (list.newest != kNone)
      links_[list.newest].newer = id;
    else
      list.oldest = id;
    list.newest = id;
    ++list.size;
    queue_[id] = queue;
  }

  void unlink(int32_t id) {
    List& list = lists_[queue_[id]];
    const Links links = links_[id];
    (links.newer != kNone ? links_[links.newer].older : list.newest) = links.older;
    (links.older != kNone ? links_[links.older].newer : list.oldest) = links.newer;
    --list.size;
    queue_[id] = kAbsent;
  }

  int64_t capacity_;
  int32_t policy_;
  double ttl_s_;
  std::vector<uint8_t> queue_;
  std::vector<Links> links_;
  std::vector<double> used_;
  std::vector<uint8_t> uses_;
  int64_t small_capacity_, ghost_capacity_;
  List lists_[4];
};

struct Counts {
  int32_t *hits, *prefix, *stored;
};

// Which tiers admit on second use, and in which a hit above counts as a use.
struct Rules {
  std::vector<bool> second_use, refresh;

  Rules(const Vector<const int32_t>& second, const Vector<const int32_t>& fresh, size_t tiers) {
    if (second.size() != tiers || fresh.size() != tiers)
      fail("second_use and refresh must be as long as there are tiers");
    for (size_t t = 0; t < tiers; ++t) {
      second_use.push_back(second.data()[t] != 0);
      refresh.push_back(fresh.data()[t] != 0);
    }
  }
};

class Stack {
 public:
  Stack(const Vector<const int64_t>& capacity, const Vector<const int32_t>& policy, const Vector<const double>& ttl_s,
        int32_t placement, const Rules& rules, int64_t unique)
      : placement_(placement), rules_(rules) {
    for (const bool second : rules.second_use) second_ |= second;
    if (second_) {
      evicted_.resize(size_t(unique));
      used_again_.resize(size_t(unique));
    }
    // A block that is written back takes the time of its last use along, so every tier keeps it or none does.
    bool keep_times = false;
    for (size_t t = 0; t < capacity.size(); ++t) keep_times |= std::isfinite(ttl_s.data()[t]);
    for (size_t t = 0; t < capacity.size(); ++t)
      tiers_.emplace_back(capacity.data()[t], policy.data()[t], ttl_s.data()[t], keep_times, unique);
  }

  // `counts` point at this request's row.
  void request(const int32_t* blocks, int64_t n, double now, Counts counts) {
    constexpr int64_t kAhead = 16;
    bool gap = false;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) tiers_[0].prefetch(blocks[i + kAhead]);
      const int tier = access(blocks[i], now, counts.stored);
      if (tier < 0) {
        gap = true;
      } else {
        ++counts.hits[tier];
        counts.prefix[tier] += !gap;
      }
    }
  }

 private:
  int access(int32_t id, double now, int32_t* stored) {
    const int tiers = int(tiers_.size());
    int found = -1;
    for (int t = 0; t < tiers && found < 0; ++t)
      if (tiers_[t].use(id, now)) found = t;
    if (second_) used_again_[id] = found >= 0 || evicted_[id];
    if (placement_ == kWriteThrough) {
      for (int t = 0; t < tiers; ++t) {
        if (found >= 0 && t > found && rules_.refresh[t]) tiers_[t].use(id, now);
        const bool wanted = found < 0 || t < found || rules_.second_use[t];
        if (!wanted || !admitted(t, id) || tiers_[t].has(id)) continue;
        remember(tiers_[t].insert({id, now}));
        ++stored[t];
      }
    } else if (found != 0) {
      if (found > 0) tiers_[found].remove(id);
      Block down{id, now};
      for (int t = 0; t < tiers && down.id != kNone && admitted(t, down.id); ++t) {
        down = tiers_[t].insert(down);
        ++stored[t];
        remember(down);
      }
    }
    return found;
  }

  bool admitted(int tier, int32_t id) const { return !tier || !rules_.second_use[tier] || used_again_[id]; }

  void remember(Block victim) {
    if (!second_ || victim.id == kNone || evicted_[victim.id]) return;
    evicted_[victim.id] = true;
    order_.push(victim.id);
    if (order_.size() > kRememberedEvictions) {
      evicted_[order_.front()] = false;
      order_.pop();
    }
  }

  std::vector<Tier> tiers_;
  int32_t placement_;
  Rules rules_;
  bool second_ = false;
  std::vector<uint8_t> evicted_, used_again_;
  std::queue<int32_t> order_;
};

struct Trace {
  const int32_t* blocks;
  const int64_t* offsets;
  int64_t requests;

  int64_t size(int64_t row) const { return offsets[row + 1] - offsets[row]; }
};

Trace checked_trace(const Vector<const int32_t>& blocks, const Vector<const int64_t>& offsets, int64_t unique) {
  if (offsets.size() < 1 || offsets.data()[0] != 0 || offsets.data()[offsets.size() - 1] != int64_t(blocks.size()))
    fail("offsets must lead from 0 to the number of blocks");
  for (size_t i = 1; i < offsets.size(); ++i)
    if (offsets.data()[i] < offsets.data()[i - 1]) fail("offsets must not decrease");
  for (size_t i = 0; i < blocks.size(); ++i)
    if (blocks.data()[i] < 0 || blocks.data()[i] >= unique)
      fail("block " + std::to_string(blocks.data()[i]) + " is outside [0, " + std::to_string(unique) + ")");
  return {blocks.data(), offsets.data(), int64_t(offsets.size()) - 1};
}

void check_plan(const Vector<const int64_t>& capacity, const Vector<const int32_t>& policy,
                const Vector<const double>& ttl_s, int32_t placement) {
  if (!capacity.size() || policy.size() != capacity.size() || ttl_s.size() != capacity.size())
    fail("capacity_blocks, policies and ttl_s must be as long as there are tiers, at least one");
  for (size_t t = 0; t < capacity.size(); ++t) {
    if (capacity.data()[t] != kUnlimited && capacity.data()[t] < 1) fail("capacity_blocks must be at least 1, or -1");
    if (policy.data()[t] < kLru || policy.data()[t] > kS3Fifo) fail("unknown policy");
    if (!(ttl_s.data()[t] > 0)) fail("ttl_s must be larger than 0");
  }
  if (placement != kWriteThrough && placement != kWriteBack) fail("unknown placement");
}

template <class T>
void check_length(const char* name, const T& array, int64_t length) {
  if (int64_t(array.size()) != length)
    fail(std::string(name) + " has " + std::to_string(array.size()) + " entries, must have " + std::to_string(length));
}

struct CountsOut {
  Matrix<int32_t> hits, prefix, stored;

  void check(int64_t requests, size_t tiers) const {
    for (const auto* m : {&hits, &prefix, &stored})
      if (int64_t(m->shape(0)) != requests || m->shape(1) != tiers) fail("counts must be [requests, tiers]");
  }
  Counts row(int64_t r, size_t tiers) const {
    const size_t at = size_t(r) * tiers;
    return {hits.data() + at, prefix.data() + at, stored.data() + at};
  }
};

void replay_open(const Vector<const int32_t>& blocks, const Vector<const int64_t>& offsets, int64_t unique_blocks,
                 const Vector<const double>& times_s, const Vector<const int64_t>& capacity_blocks,
                 const Vector<const int32_t>& policies, const Vector<const double>& ttl_s, int32_t placement,
                 const Vector<const int32_t>& second_use, const Vector<const int32_t>& refresh,
                 const Matrix<int32_t>& hits, const Matrix<int32_t>& prefix, const Matrix<int32_t>& stored) {
  const CountsOut out{hits, prefix, stored};
  const size_t tiers = capacity_blocks.size();
  check_plan(capacity_blocks, policies, ttl_s, placement);
  const Rules rules(second_use, refresh, tiers);
  nb::gil_scoped_release nogil;
  const Trace trace = checked_trace(blocks, offsets, unique_blocks);
  check_length("times_s", times_s, trace.requests);
  out.check(trace.requests, tiers);
  Stack stack(capacity_blocks, policies, ttl_s, placement, rules, unique_blocks);
  for (int64_t r = 0; r < trace.requests; ++r)
    stack.request(trace.blocks + trace.offsets[r], trace.size(r), times_s.data()[r], out.row(r, tiers));
}

enum Kind { kIssue, kLoaded, kFirstToken, kFinished };

struct Event {
  double at;
  int64_t number;
  Kind kind;
  int64_t user;

  bool operator<(const Event& other) const {  // std::priority_queue keeps the largest in front
    return at != other.at ? at > other.at : number > other.number;
  }
};

void replay_closed(const Vector<const int32_t>& blocks, const Vector<const int64_t>& offsets, int64_t unique_blocks,
                   const Vector<const int64_t>& input_tokens, const Vector<const int64_t>& output_tokens,
                   const Vector<const double>& think_s, int64_t block_tokens, const Vector<const int32_t>& order,
                   const Vector<const int64_t>& session_starts, const Vector<const int64_t>& capacity_blocks,
                   const Vector<const int32_t>& policies, const Vector<const double>& ttl_s, int32_t placement,
                   const Vector<const int32_t>& second_use, const Vector<const int32_t>& refresh, int64_t block_bytes,
                   const Vector<const double>& bandwidth, const Vector<const double>& latency_s,
                   double prefill_base_s, double prefill_s_per_token, double decode_step_s,
                   double decode_step_per_request_s, int64_t concurrency, double duration_s, const Matrix<int32_t>& hits,
                   const Matrix<int32_t>& prefix, const Matrix<int32_t>& stored, const Vector<double>& issued_s,
                   const Vector<double>& first_token_s, const Vector<double>& finished_s) {
  const CountsOut out{hits, prefix, stored};
  const size_t tiers = capacity_blocks.size();
  check_plan(capacity_blocks, policies, ttl_s, placement);
  const Rules rules(second_use, refresh, tiers);
  check_length("bandwidth", bandwidth, int64_t(tiers));
  check_length("latency_s", latency_s, int64_t(tiers));
  nb::gil_scoped_release nogil;
  const Trace trace = checked_trace(blocks, offsets, unique_blocks);
  out.check(trace.requests, tiers);
  check_length("input_tokens", input_tokens, trace.requests);
  check_length("output_tokens", output_tokens, trace.requests);
  check_length("think_s", think_s, trace.requests);
  check_length("order", order, trace.requests);
  check_length("issued_s", issued_s, trace.requests);
  check_length("first_token_s", first_token_s, trace.requests);
  check_length("finished_s", finished_s, trace.requests);
  if (concurrency < 1) fail("concurrency must be at least 1");
  const int64_t sessions = int64_t(session_starts.size()) - 1;
  const int64_t* starts = session_starts.data();
  if (sessions < 0 || starts[0] != 0 || starts[sessions] != trace.requests)
    fail("session_starts must lead from 0 to the number of requests");
  for (int64_t s = 0; s < sessions; ++s)
    if (starts[s + 1] <= starts[s]) fail("a session must have a request");
  for (int64_t i = 0; i < trace.requests; ++i)
    if (order.data()[i] < 0 || order.data()[i] >= trace.requests) fail("order must hold numbers of requests");

  Stack stack(capacity_blocks, policies, ttl_s, placement, rules, unique_blocks);
  const int64_t users = std::min(concurrency, sessions);
  std::vector<int64_t> at(starts, starts + users), end(starts + 1, starts + 1 + users);
  int64_t next_session = users, number = users, decoding = 0;
  std::vector<double> tier_free_s(tiers, 0.0);
  double engine_free_s = 0;
  std::priority_queue<Event> events;
  for (int64_t u = 0; u < users; ++u) events.push({0.0, u, kIssue, u});

  while (!events.empty()) {
    const Event event = events.top();
    events.pop();
    const double now = event.at;
    if (now > duration_s) break;
    const int64_t user = event.user;
    const int64_t row = order.data()[at[user]];
    const Counts counts = out.row(row, tiers);
    double then = now;
    Kind kind;
    if (event.kind == kIssue) {
      issued_s.data()[row] = now;
      stack.request(trace.blocks + trace.offsets[row], trace.size(row), now, counts);
      for (size_t t = 0; t < tiers; ++t) {
        if (!counts.prefix[t]) continue;
        const double busy_s = counts.prefix[t] * double(block_bytes) / bandwidth.data()[t];
        tier_free_s[t] = std::max(then, tier_free_s[t]) + busy_s;
        then = tier_free_s[t] + latency_s.data()[t];
      }
      kind = kLoaded;
    } else if (event.kind == kLoaded) {
      const int64_t tokens = input_tokens.data()[row];
      int64_t restored = 0;
      for (size_t t = 0; t < tiers; ++t) restored += counts.prefix[t];
      restored *= block_tokens;
      const int64_t fresh = tokens - std::min(restored, std::max<int64_t>(tokens - 1, 0));
      engine_free_s = std::max(now, engine_free_s) + (prefill_base_s + double(fresh) * prefill_s_per_token);
      then = engine_free_s;
      kind = kFirstToken;
    } else if (event.kind == kFirstToken) {
      first_token_s.data()[row] = now;
      ++decoding;
      const int64_t steps = std::max<int64_t>(output_tokens.data()[row] - 1, 0);
      then = now + double(steps) * (decode_step_s + double(decoding) * decode_step_per_request_s);
      kind = kFinished;
    } else {
      finished_s.data()[row] = now;
      --decoding;
      if (++at[user] < end[user]) {
        then = now + think_s.data()[order.data()[at[user]]];
      } else if (next_session < sessions) {
        at[user] = starts[next_session];
        end[user] = starts[++next_session];
      } else {
        continue;
      }
      kind = kIssue;
    }
    events.push({then, number++, kind, user});
  }
}

}  // namespace

void bind_replay(nb::module_& m) {
  m.def("replay_open", &replay_open, nb::arg("blocks").noconvert(), nb::arg("offsets").noconvert(), "unique_blocks"_a,
        nb::arg("times_s").noconvert(), nb::arg("capacity_blocks").noconvert(), nb::arg("policies").noconvert(),
        nb::arg("ttl_s").noconvert(), "placement"_a, nb::arg("second_use").noconvert(),
        nb::arg("refresh").noconvert(), nb::arg("hits").noconvert(), nb::arg("prefix").noconvert(),
        nb::arg("stored").noconvert(), "kvtier.replay.reference.replay_open; counts must come in as zeros");
  m.def("replay_closed", &replay_closed, nb::arg("blocks").noconvert(), nb::arg("offsets").noconvert(),
        "unique_blocks"_a, nb::arg("input_tokens").noconvert(), nb::arg("output_tokens").noconvert(),
        nb::arg("think_s").noconvert(), "block_tokens"_a, nb::arg("order").noconvert(),
        nb::arg("session_starts").noconvert(), nb::arg("capacity_blocks").noconvert(), nb::arg("policies").noconvert(),
        nb::arg("ttl_s").noconvert(), "placement"_a, nb::arg("second_use").noconvert(),
        nb::arg("refresh").noconvert(), "block_bytes"_a, nb::arg("bandwidth").noconvert(),
        nb::arg("latency_s").noconvert(), "prefill_base_s"_a, "prefill_s_per_token"_a, "decode_step_s"_a,
        "decode_step_per_request_s"_a, "concurrency"_a, "duration_s"_a, nb::arg("hits").noconvert(),
        nb::arg("prefix").noconvert(), nb::arg("stored").noconvert(), nb::arg("issued_s").noconvert(),
        nb::arg("first_token_s").noconvert(), nb::arg("finished_s").noconvert(),
        "kvtier.replay.reference.replay_closed; counts must come in as zeros, times as NaN");
}
