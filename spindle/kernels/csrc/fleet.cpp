// The events of a fleet, for long traces. What is computed, and why, is said in spindle/bench/:
// fleet_events.py, fleet_replica.py and fleet_router.py. Here it is done again, under their names.
//
// All is whole numbers, so the results are not near to Python's: they are the same. But Python's
// integers have no end. What keeps these within theirs:
//
//   given    2^24 requests, 2^24 tokens of a prompt and of an answer, and costs of 10^15 ps, at
//            most: less than 2^50 keys in a step, and less than 2^126 ps.
//   first    A step of 2^63 ps or more is Late, which ends everything. So for those after this,
//            64 bits are enough; for growth too, which is no more; and k of them take 2^113 ps.
//   end_ps   A run of steps may end later than 64 bits can say, and yet be cut short by an arrival.
//            So the latest time stands for all that are later; should it come, that is Late.
//
// Python goes on where this says Late, and refuses the results in the end: whoever takes part in a
// step that ends so late, or comes so late, ends no sooner.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <new>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

typedef __int128 Wide;
constexpr int64_t IDLE = -1, LATEST = std::numeric_limits<int64_t>::max();
struct Late {};

struct Shape {
  int64_t max_seqs, max_batch_tokens, num_blocks, block_size;
};

struct Costs {
  int64_t step_ps, chunk_ps, prompt_row_ps, pair_ps, decode_row_ps, key_ps;

  Wide prompt_ps(int64_t start, int64_t count) const {
    const int64_t pairs = count * (2 * start + count + 1) / 2;
    return chunk_ps + Wide(count) * prompt_row_ps + Wide(pairs) * pair_ps;
  }
};

// What Python gives, and where the results go: of N requests, S system prompts, R replicas.
struct Given {
  const int64_t *session, *system, *prompt, *output, *gap_ps;    // [N]
  const int64_t *full, *drawn;                                   // [S], [N, 2] or null
  int64_t *replica, *arrival_ps, *first_ps, *end_ps, *cached;    // [N]
  int64_t *steps, *busy_ps, *preemptions, *twice, *evicted;      // [R]
  int64_t *counts;                                               // [64 << Gaps::BITS]
  int64_t requests, systems, replicas, policy, jump, low, high;  // the window is [low, high]
  double balance;
  Shape shape;
  Costs costs;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }  // a >= 0
inline int64_t mod(int64_t a, int64_t b) { return (a % b + b) % b; }            // as Python's

// --- runs of steps -------------------------------------------------------------------------------

inline Wide lasting(int64_t k, int64_t first, int64_t growth) {
  return Wide(k) * first + Wide(growth) * (Wide(k) * (k - 1) / 2);
}

// Of `most` steps. The root in doubles, rounded down, is no more than it; integers say the rest.
int64_t begun(int64_t elapsed, int64_t first, int64_t growth, int64_t most) {
  const double b = 2.0 * first - growth;
  const double near = 4.0 * elapsed / (std::sqrt(b * b + 8.0 * growth * elapsed) + b);
  int64_t k = near < most ? std::max<int64_t>(1, near) : most;
  while (k < most && lasting(k, first, growth) < elapsed) ++k;
  return k;
}

struct Gaps {
  static constexpr int BITS = 7;
  int64_t low, high, *counts;

  void add(int64_t start, int64_t k, int64_t first, int64_t growth, int64_t rows) {
    if (start < low || start + lasting(k, first, growth) > high) {
      const int64_t skipped = start < low ? begun(low - start, first, growth, k) : 0;
      k = (start < high ? begun(high - start, first, growth, k) : 0) - skipped;
      if (k <= 0) return;
      first += growth * skipped;
    }
    while (true) {
      const int shift = std::max(0, 64 - __builtin_clzll(first) - BITS);
      const int64_t bucket = first >> shift;
      int64_t here = k;
      if (growth && (first + growth * (k - 1)) >> shift != bucket)
        here = ceil_div((uint64_t(bucket + 1) << shift) - first, growth);
      counts[(shift << BITS) + bucket] += here * rows;
      if ((k -= here) == 0) return;
      first += growth * here;
    }
  }
};

// --- the blocks of a replica ---------------------------------------------------------------------

class Cache {
 public:
  const int64_t num_blocks, *const full;
  int64_t used = 0, cached = 0, evicted = 0;

  Cache(const Given& given, int64_t* known)
      : num_blocks(given.shape.num_blocks),
        full(given.full),
        known(known),
        replicas(given.replicas),
        holders(given.systems) {}

  int64_t free() const { return num_blocks - used; }

  int64_t depth_of(int64_t key) const {
    const auto found = depth.find(key);
    return found == depth.end() ? 0 : found->second.blocks;
  }

  void evict() {
    int64_t excess = used + cached - num_blocks;
    while (excess > 0) {
      const int64_t key = unheld.front(), have = depth_of(key), gone = std::min(have, excess);
      set_depth(key, have - gone);
      if (gone == have) unheld.pop_front();
      cached -= gone;
      evicted += gone;
      excess -= gone;
    }
  }

  int64_t adopt(int64_t session, int64_t system) {
    evict();
    const int64_t shared = depth_of(~system), own = depth_of(session);
    if (++holders[system] == 1 && shared) hold(~system, shared);
    if (own) hold(session, own);
    return shared + own;
  }

  void put_back(int64_t session, int64_t system) {
    const int64_t own = depth_of(session);
    used -= own;
    release_session(session, own);
    release_system(system);
  }

  int64_t learn(int64_t system, int64_t start, int64_t stop) {
    const int64_t before = depth_of(~system);
    stop = std::min(stop, full[system]);
    if (stop > before) set_depth(~system, stop);
    return std::max<int64_t>(0, std::min(before, stop) - start);
  }

  void release(int64_t session, int64_t system, int64_t total, int64_t complete, int64_t twice) {
    evict();
    const int64_t shared = std::min(full[system], complete);
    used -= total - shared + twice;
    release_session(session, complete - shared);
    release_system(system);
  }

 private:
  struct Prefix {
    int64_t blocks = 0;
    std::list<int64_t>::iterator place;  // among the unheld, if it is one of them
  };

  int64_t* const known;  // of the first system prompt here; those of a replica lie R apart
  const int64_t replicas;
  std::vector<int32_t> holders;
  std::unordered_map<int64_t, Prefix> depth;
  std::list<int64_t> unheld;  // keys, the least recently used first

  void hold(int64_t key, int64_t blocks) {
    unheld.erase(depth[key].place);
    cached -= blocks;
    used += blocks;
  }

  void let_go(int64_t key, Prefix& prefix) {
    prefix.place = unheld.insert(unheld.end(), key);
    cached += prefix.blocks;
  }

  void release_session(int64_t session, int64_t blocks) {
    if (!blocks) return;
    Prefix& prefix = depth[session];
    prefix.blocks = blocks;
    let_go(session, prefix);
  }

  void release_system(int64_t system) {
    --holders[system];
    const auto found = depth.find(~system);
    if (found == depth.end() || holders[system]) return;
    used -= found->second.blocks;
    let_go(~system, found->second);
  }

  void set_depth(int64_t key, int64_t blocks) {
    if (blocks)
      depth[key].blocks = blocks;
    else
      depth.erase(key);
    if (key < 0) known[~key * replicas] = blocks;
  }
};

// --- one replica ---------------------------------------------------------------------------------

struct Sequence {
  int64_t request, order, session, system, prompt, length, last;
  int64_t stored = 0, since = IDLE, ends = IDLE, waits = IDLE, twice = 0, gained_ps = IDLE;
};

class Replica {
 public:
  Cache cache;
  int64_t end_ps = IDLE, tick = 0, busy_ps = 0, orders = 0, preemptions = 0, twice = 0;
  std::vector<int64_t> ended;

  Replica(const Given& given, int64_t* known)
      : cache(given, known),
        given(given),
        shape(given.shape),
        costs(given.costs),
        gaps{given.low, given.high, given.counts},
        crossing(given.shape.block_size) {}

  bool add(int64_t now, const Sequence& one) {
    const bool could = waiting.empty() && has_seat();
    waiting.push_back(one);
    if (end_ps == IDLE) {
      now_ps = end_ps = now;
      return true;
    }
    if (!could || k <= 1) return false;
    const int64_t fewer = begun(now - now_ps, first, growth, k);
    if (fewer == k) return false;
    k = fewer;
    end_ps = end_or_latest();
    return true;
  }

  void wake() {
    if (k) commit();
    plan();
  }

 private:
  typedef std::list<Sequence> Sequences;
  typedef Sequences::iterator One;

  const Given& given;
  const Shape& shape;
  const Costs& costs;
  Gaps gaps;
  Sequences waiting, running;  // the oldest first; who goes from one to the other is not moved
  std::vector<std::pair<One, int64_t>> prompts;
  One partial = running.end();
  std::map<std::pair<int64_t, int64_t>, One> ends;  // by step and order, of those that decode now
  std::vector<int64_t> crossing;
  int64_t decodes = 0, keys = 0, now_ps = 0, k = 0, first = 0, growth = 0, endings = 0;
  struct {
    int64_t order, free, running;
  } blocked{IDLE, 0, 0};

  bool has_seat() const { return int64_t(running.size()) < shape.max_seqs; }

  int64_t end_or_latest() const {
    return std::min<Wide>(now_ps + lasting(k, first, growth), LATEST);
  }

  // --- the end of a run of steps

  void commit() {
    if (now_ps + lasting(k, first, growth) > LATEST) throw Late();
    if (k > 1) cache.used += crossings(k - 1);
    if (decodes) gaps.add(now_ps, k, first, growth, decodes);
    busy_ps += std::max<int64_t>(0, std::min(end_ps, gaps.high) - std::max(now_ps, gaps.low));
    tick += k;
    keys += decodes * k;
    now_ps = end_ps, k = 0;
    while (!ends.empty() && ends.begin()->first.first <= tick) {
      const One one = ends.begin()->second;
      stop_decoding(one);
      end(one);
    }
    for (const auto& [one, count] : prompts) store(one, count);
    prompts.clear();
  }

  int64_t crossings(int64_t steps) const {
    const int64_t P = shape.block_size, start = (tick + 1) % P, rest = steps % P;
    int64_t need = steps / P * decodes;
    for (int64_t n = 0; n < rest; ++n) need += crossing[(start + n) % P];
    return need;
  }

  void store(One one, int64_t count) {
    const int64_t P = shape.block_size, before = one->stored;
    one->stored += count;
    if (before < cache.full[one->system] * P) {
      const int64_t known_before = cache.learn(one->system, before / P, one->stored / P);
      one->twice += known_before;
      twice += known_before;
    }
    if (one->stored < one->length) {
      partial = one;
      return;
    }
    if (one->length == one->prompt) given.first_ps[one->request] = now_ps;
    if (one->gained_ps != IDLE) gaps.add(one->gained_ps, 1, now_ps - one->gained_ps, 0, 1);
    if (++one->length == one->last)
      end(one);
    else
      begin_decoding(one);
  }

  void begin_decoding(One one) {
    one->since = tick, one->ends = tick + one->last - one->length;
    ends[{one->ends, one->order}] = one;
    ++decodes;
    keys += one->stored + 1;
    ++crossing[mod(tick - one->stored, shape.block_size)];
  }

  void stop_decoding(One one) {
    --crossing[mod(one->since - one->stored, shape.block_size)];
    ends.erase({one->ends, one->order});
    const int64_t gained = tick - one->since;
    one->stored += gained;
    one->length += gained;
    one->since = one->ends = IDLE;
    --decodes;
    keys -= one->stored + 1;
  }

  void end(One one) {
    ++endings;
    release(one);
    ended.push_back(one->request);
    running.erase(one);
  }

  void release(One one) {
    const int64_t P = shape.block_size, total = ceil_div(one->stored, P);
    cache.release(one->session, one->system, total, one->stored / P, one->twice);
    one->twice = 0;
  }

  // --- the next run of steps

  void plan() {
    int64_t budget = shape.max_batch_tokens - decodes;
    budget -= go_on(budget);
    if (!waiting.empty() && budget > 0) admit(budget);
    if (running.empty()) {
      end_ps = IDLE;
      return;
    }
    Wide length = costs.step_ps + Wide(decodes) * costs.decode_row_ps + Wide(keys) * costs.key_ps;
    for (const auto& [one, count] : prompts) length += costs.prompt_ps(one->stored, count);
    if (length > LATEST) throw Late();
    first = length;
    growth = prompts.empty() ? decodes * costs.key_ps : 0;
    k = prompts.empty() && given.jump ? alike() : 1;
    end_ps = end_or_latest();
  }

  int64_t go_on(int64_t budget) {
    int64_t need = crossing[tick % shape.block_size], count = 0;
    if (partial != running.end()) {
      count = std::min(partial->length - partial->stored, budget);
      need += blocks(partial, count);
    }
    if (cache.used + need <= cache.num_blocks)
      cache.used += need;
    else
      make_room(budget);
    if (partial == running.end()) return 0;
    prompts.emplace_back(partial, count);
    partial = running.end();
    return count;
  }

  int64_t blocks(One one, int64_t count) const {
    const int64_t P = shape.block_size;
    return ceil_div(one->stored + count, P) - ceil_div(one->stored, P);
  }

  void make_room(int64_t budget) {
    for (One one = running.begin(); one != running.end(); ++one) {
      const int64_t need =
          one == partial ? blocks(one, std::min(one->length - one->stored, budget))
                         : (one->stored + tick - one->since) % shape.block_size == 0;
      while (need > cache.free()) {
        const One youngest = std::prev(running.end());
        const bool last = youngest == one;
        preempt(youngest);
        if (last) return;
      }
      cache.used += need;
    }
  }

  void preempt(One one) {
    if (one == partial) {
      partial = running.end();
    } else {
      stop_decoding(one);
      one->gained_ps = now_ps;
    }
    release(one);
    one->stored = 0;
    one->waits = endings + 1;
    waiting.splice(waiting.begin(), running, one);
    ++preemptions;
  }

  void admit(int64_t budget) {
    while (!waiting.empty() && budget > 0 && has_seat()) {
      const One one = waiting.begin();
      if ((!running.empty() && endings < one->waits) || !fits(one)) return;
      running.splice(running.end(), waiting, one);
      const int64_t count = std::min(one->length - one->stored, budget);
      cache.used += blocks(one, count);
      prompts.emplace_back(one, count);
      budget -= count;
    }
  }

  bool fits(One one) {
    const int64_t seats = running.size(), P = shape.block_size;
    if (seats && blocked.order == one->order && cache.free() <= blocked.free &&
        seats >= blocked.running)
      return false;
    const int64_t held = cache.adopt(one->session, one->system);
    if (seats && (one->length + P) / P - held + seats > cache.free()) {
      cache.put_back(one->session, one->system);
      blocked = {one->order, cache.free(), seats};
      return false;
    }
    one->stored = held * P;
    if (one->length == one->prompt && one->waits == IDLE) given.cached[one->request] = one->stored;
    return true;
  }

  int64_t alike() const {
    const int64_t P = shape.block_size, most = ends.begin()->first.first - tick;
    int64_t free = cache.free();
    if ((most / P + 1) * decodes <= free) return most;
    for (int64_t step = 1; step < most; ++step)
      if ((free -= crossing[(tick + step) % P]) < 0) return step;
    return most;
  }
};

// --- which replica a request goes to -------------------------------------------------------------

// The first of the largest of n numbers.
template <typename Score>
int64_t argmax(int64_t n, Score score) {
  int64_t largest = score(0), at = 0;
  for (int64_t i = 1; i < n; ++i) largest = std::max(largest, score(i));
  while (score(at) != largest) ++at;
  return at;
}

class Router {
 public:
  Router(const Given& given, const std::deque<Replica>& replicas, const int64_t* known)
      : given(given), replicas(replicas), known(known), load(given.replicas) {}

  int64_t route(int64_t request) {
    const int64_t number = chosen(request);
    given.replica[request] = number;
    ++load[number];
    ++total;
    return number;
  }

  void ended(int64_t request) {
    --load[given.replica[request]];
    --total;
  }

 private:
  const Given& given;
  const std::deque<Replica>& replicas;
  const int64_t* const known;  // [S, R]
  std::vector<int64_t> load;
  int64_t total = 0, turn = -1;

  int64_t most() const { return std::ceil(given.balance * (total + 1) / given.replicas); }

  int64_t chosen(int64_t request) {  // by the number of a policy in POLICIES
    switch (given.policy) {
      case 0: return turn = (turn + 1) % given.replicas;
      case 1: return argmax(given.replicas, [&](int64_t n) { return -load[n]; });
      case 2: return two_choices(given.drawn[2 * request], given.drawn[2 * request + 1]);
      default: return prefix_aware(request);
    }
  }

  int64_t two_choices(int64_t one, int64_t other) const {
    return load[one] <= load[other] ? one : other;
  }

  int64_t prefix_aware(int64_t request) const {
    const int64_t room = most(), session = given.session[request];
    int64_t best = -1, longest = 0;
    for (int64_t turn = request - 1; turn >= 0 && given.session[turn] == session; --turn) {
      const int64_t number = given.replica[turn], depth = replicas[number].cache.depth_of(session);
      if (depth > longest && load[number] < room) best = number, longest = depth;
    }
    if (best >= 0) return best;
    const int64_t* depth = known + given.system[request] * given.replicas;
    const auto score = [&](int64_t n) { return int64_t((uint64_t(depth[n]) << 32) - load[n]); };
    best = argmax(given.replicas, score);
    if (load[best] < room) return best;
    return argmax(given.replicas, [&](int64_t n) {
      return load[n] < room ? score(n) : -(int64_t(1) << 62);
    });
  }
};

// --- the events ----------------------------------------------------------------------------------

class Fleet {
 public:
  int64_t ended = 0;

  explicit Fleet(const Given& all)
      : given(all), known(given.systems * given.replicas), router(given, replicas, known.data()) {
    for (int64_t n = 0; n < given.replicas; ++n) replicas.emplace_back(given, &known[n]);
    for (int64_t n = 0; n < given.requests; ++n)
      if (!follows(n)) begins.emplace_back(given.gap_ps[n], n);
    std::sort(begins.rbegin(), begins.rend());  // the last one first
    expect_next();
  }

  // Some events more, for about so many seconds. False: there are no more.
  bool run(double seconds) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (int64_t events = 1; !arrivals.empty() || !wakes.empty(); ++events) {
      next();
      if (events % 64 == 0 && std::chrono::steady_clock::now() >= until) return true;
    }
    for (int64_t n = 0; n < given.replicas; ++n) {
      given.steps[n] = replicas[n].tick;
      given.busy_ps[n] = replicas[n].busy_ps;
      given.preemptions[n] = replicas[n].preemptions;
      given.twice[n] = replicas[n].twice;
      given.evicted[n] = replicas[n].cache.evicted;
    }
    return false;
  }

 private:
  typedef std::pair<int64_t, int64_t> Event;  // when, and which request or replica
  typedef std::priority_queue<Event, std::vector<Event>, std::greater<Event>> Heap;

  const Given given;
  std::vector<int64_t> known;
  std::deque<Replica> replicas;
  Router router;
  std::vector<Event> begins;
  Heap arrivals, wakes;

  bool follows(int64_t request) const {
    return 0 < request && request < given.requests &&
           given.session[request] == given.session[request - 1];
  }

  void expect_next() {
    if (begins.empty()) return;
    arrivals.push(begins.back());
    begins.pop_back();
  }

  void next() {
    if (!arrivals.empty() && (wakes.empty() || arrivals.top().first <= wakes.top().first)) {
      const auto [when, request] = arrivals.top();
      arrivals.pop();
      arrive(when, request);
      return;
    }
    const auto [when, number] = wakes.top();
    wakes.pop();
    Replica& replica = replicas[number];
    if (replica.end_ps != when) return;
    replica.wake();
    end(when, replica);
    if (replica.end_ps != IDLE) wakes.emplace(replica.end_ps, number);
  }

  void arrive(int64_t when, int64_t request) {
    if (!follows(request)) expect_next();
    given.arrival_ps[request] = when;
    const int64_t number = router.route(request), prompt = given.prompt[request];
    Replica& replica = replicas[number];
    const Sequence one{request, ++replica.orders, given.session[request], given.system[request],
                       prompt,  prompt,           prompt + given.output[request]};
    if (!replica.add(when, one)) return;
    if (replica.end_ps == when && (arrivals.empty() || arrivals.top().first != when))
      replica.wake();
    wakes.emplace(replica.end_ps, number);
  }

  void end(int64_t when, Replica& replica) {
    for (const int64_t request : replica.ended) {
      given.end_ps[request] = when;
      router.ended(request);
      if (!follows(request + 1)) continue;
      const Wide then = Wide(when) + given.gap_ps[request + 1];
      if (then > LATEST) throw Late();
      arrivals.emplace(then, request + 1);
    }
    ended += replica.ended.size();
    replica.ended.clear();
  }
};

constexpr int DONE = 0, MORE = 1, LATE = 2, NO_MEMORY = 3;

}  // namespace

// A fleet before its first event, or null: no memory. What `given` points to is kept by the caller.
extern "C" void spindle_fleet_begin(const Given* given, Fleet** fleet) {
  try {
    *fleet = new Fleet(*given);
  } catch (const std::bad_alloc&) {
    *fleet = nullptr;
  }
}

// Events for about so many seconds; `ended` becomes how many requests have ended in all. After
// anything but MORE there is nothing to do but to free it.
extern "C" int spindle_fleet_run(Fleet* fleet, double seconds, int64_t* ended) {
  try {
    const bool more = fleet->run(seconds);
    *ended = fleet->ended;
    return more ? MORE : DONE;
  } catch (const Late&) {
    return LATE;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

extern "C" void spindle_fleet_free(Fleet* fleet) { delete fleet; }
