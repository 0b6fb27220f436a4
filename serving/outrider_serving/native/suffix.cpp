// The index of earlier text; what `suffix.compiled` in Python drives. suffix/lookup.py says what it does, and
// suffix/twin.py does the same in the same order and arithmetic.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kOrders = 5;
constexpr int64_t kOrder[kOrders] = {1, 2, 4, 8, 16};
constexpr int kMaxMatch = 64, kMaxPlaces = 64, kScoredMatch = 16;
constexpr double kScoreOfMatch = 20;
constexpr int32_t kBreak = -1;
constexpr size_t kMapped = 1 << 17;  // bytes from which a segment's memory is mapped, and given back in pieces
constexpr size_t kPiece = 1 << 16;
constexpr size_t kCleared = 1 << 12;  // bytes that are cleared for each token that is appended

struct Text {
  int64_t start, time;
  bool used;
};

// Memory that is zero. It is given back piece by piece: while a piece is unmapped, no thread gets fresh memory.
class Zeroed {
 public:
  explicit Zeroed(size_t bytes) : bytes_(bytes) {
    void* memory = bytes < kMapped
                       ? std::calloc(1, bytes)
                       : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == nullptr || memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
  }
  ~Zeroed() {
    if (bytes_ < kMapped) {
      std::free(memory_);
      return;
    }
    for (size_t left = bytes_; left > 0;) {
      const size_t piece = std::min(left, kPiece);
      left -= piece;
      munmap(memory_ + left, piece);
    }
  }
  Zeroed(const Zeroed&) = delete;
  Zeroed& operator=(const Zeroed&) = delete;

  char* data() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  const size_t bytes_;
};

// Places and what is before them are counted from 1; 0 is none.
struct Segment {
  explicit Segment(int64_t of)
      : capacity(of), memory(4 * of * (1 + 2 * kOrders)), tokens(reinterpret_cast<int32_t*>(memory.data())) {
    for (int n = 0; n < kOrders; ++n) {
      latest[n] = reinterpret_cast<uint32_t*>(tokens) + (1 + n) * capacity;
      earlier[n] = latest[n] + kOrders * capacity;
    }
    while ((int64_t(1) << (64 - shift)) < capacity) --shift;
  }

  int64_t capacity, size = 0;
  int shift = 64;  // of a hash, to its place in `latest`
  Zeroed memory;
  int32_t* tokens;
  uint32_t *latest[kOrders], *earlier[kOrders];
  std::vector<Text> texts;
  int64_t oldest = INT64_MAX;  // time of its texts that were not erased
  size_t cleared = 0;  // bytes of `latest` that are zero again, while it waits to be used once more

  size_t to_clear() const { return 4 * size_t(capacity) * kOrders; }

  // Clears a part; false where nothing is left.
  bool clear() {
    const size_t part = std::min(kCleared, to_clear() - cleared);
    std::memset(reinterpret_cast<char*>(latest[0]) + cleared, 0, part);
    cleared += part;
    return cleared < to_clear();
  }

  // The place after the last token of a text: a kBreak stands there, unless the text goes on in the next segment.
  int64_t end_of(size_t n) const {
    if (n + 1 < texts.size()) return texts[n + 1].start - 1;
    return size - (tokens[size - 1] == kBreak);
  }

  // Whether a text has ended here, and a proposal was made from it.
  bool kept(size_t n) const { return texts[n].used && end_of(n) < size; }
};

uint64_t step(uint64_t hash, int32_t token) { return hash * 0x9E3779B97F4A7C15u + uint32_t(token) + 1; }

uint64_t spread(uint64_t hash) { return (hash ^ hash >> 32) * 0xD6E8FEB86659FD93u; }

// Calls on(n, spread hash) for each order that there are enough tokens for; `last` is one after the last token.
template <class On>
void hashes(const int32_t* last, int64_t count, On on) {
  uint64_t hash = 0;
  int n = 0;
  for (int64_t back = 1; back <= count && n < kOrders; ++back) {
    hash = step(hash, last[-back]);
    if (back == kOrder[n]) on(n++, spread(hash));
  }
}

struct Place {
  Segment* segment;
  const int32_t *at, *end;  // what followed, as far as it is known
  int match;
};

struct Index {
  Index(int64_t first, int64_t most) : first(first), most(most) {}

  int64_t first, most;
  bool open = false;
  bool written = false;  // since it lost memory to another one
  std::vector<std::unique_ptr<Segment>> segments, leaving;
  std::unique_ptr<Segment> spare;  // to map fresh memory takes longer than to clear what was dropped

  // Whether a dropped segment is kept for the next one. Half of the largest size will do as well: where that size
  // goes up and down with what a log holds, memory would be mapped each time.
  bool fits(int64_t capacity) const { return capacity <= most && 2 * capacity >= most; }

  std::unique_ptr<Segment> make(int64_t capacity) {
    if (spare == nullptr || spare->capacity > capacity) return std::make_unique<Segment>(capacity);
    while (spare->clear()) {
    }
    spare->size = 0;
    spare->oldest = INT64_MAX;
    spare->texts.clear();
    return std::move(spare);
  }

  // Bounded work beside each token: nothing is cleared all at once.
  void tidy() {
    if (spare != nullptr && spare->cleared < spare->to_clear()) spare->clear();
  }

  // Keeps the largest that fits, of some segments and the one that is kept.
  void keep(std::vector<std::unique_ptr<Segment>>& some) {
    for (auto& segment : some) {
      if (!fits(segment->capacity) || (spare != nullptr && spare->capacity >= segment->capacity)) continue;
      spare.swap(segment);
      spare->cleared = 0;
    }
    std::erase(some, nullptr);
  }

  void limit(int64_t tokens) {
    most = tokens;
    first = std::min(first, most);
    if (spare != nullptr && !fits(spare->capacity)) leaving.push_back(std::move(spare));
  }

  Segment& room(int64_t time) {
    Segment* last = segments.empty() ? nullptr : segments.back().get();
    if (last == nullptr || last->size >= last->capacity - 1) {
      auto made = make(last == nullptr ? first : std::min(2 * last->capacity, most));
      if (last != nullptr && open) {
        const Text& text = last->texts.back();
        made->texts.push_back({0, text.time, false});
        made->oldest = text.time;
        const int64_t from = std::max(text.start, last->size - kMaxMatch);
        made->size = last->size - from;
        std::memcpy(made->tokens, last->tokens + from, 4 * made->size);
      }
      segments.push_back(std::move(made));
      last = segments.back().get();
    }
    if (!open) {
      last->texts.push_back({last->size, time, false});
      last->oldest = std::min(last->oldest, time);
      open = true;
    }
    return *last;
  }

  void put(Segment& segment, int32_t token) {
    const int64_t at = segment.size, before = at - segment.texts.back().start;
    hashes(segment.tokens + at, before, [&](int n, uint64_t spread) {
      uint32_t& latest = segment.latest[n][spread >> segment.shift];
      segment.earlier[n][at - 1] = latest;
      latest = uint32_t(at);
    });
    segment.tokens[at] = token;
    segment.size = at + 1;
  }

  void extend(const int32_t* tokens, int64_t count, int64_t time) {
    written = true;
    for (int64_t n = 0; n < count; ++n) {
      tidy();
      put(room(time), tokens[n]);
    }
  }

  void end() {
    if (!open) return;
    Segment& last = *segments.back();
    last.tokens[last.size++] = kBreak;
    open = false;
  }

  int64_t erase(int64_t before) {
    int64_t erased = 0;
    for (auto& segment : segments) {
      if (segment->oldest >= before) continue;
      segment->oldest = INT64_MAX;
      for (size_t n = 0; n < segment->texts.size(); ++n) {
        Text& text = segment->texts[n];
        if (segment->tokens[text.start] == kBreak) continue;
        if (text.time >= before) {
          segment->oldest = std::min(segment->oldest, text.time);
          continue;
        }
        const int64_t end = segment->end_of(n);
        std::fill(segment->tokens + text.start, segment->tokens + end, kBreak);
        text.used = false;
        erased += end - text.start;
      }
    }
    return erased;
  }

  int collect(const int32_t* last, int64_t length, int max_match, int most_places, Place* found) const {
    uint64_t spreads[kOrders];
    int orders = 0, count = 0, above = kMaxMatch + 1;
    hashes(last, length, [&](int n, uint64_t hash) {
      spreads[n] = hash;
      orders = n + 1;
      for (auto& segment : segments) __builtin_prefetch(&segment->latest[n][hash >> segment->shift]);
    });
    for (int n = orders - 1; n >= 0; above = int(kOrder[n--])) {
      int visits = 0;
      for (auto it = segments.rbegin(); it != segments.rend(); ++it) {
        Segment& segment = **it;
        uint32_t at = segment.latest[n][spreads[n] >> segment.shift];
        for (; at != 0 && visits < 2 * most_places; ++visits) {
          const int32_t* place = segment.tokens + at - 1;
          at = segment.earlier[n][at - 1];
          const int64_t limit = std::min({int64_t(max_match), length, int64_t(place - segment.tokens) + 1});
          int match = 0;
          while (match < limit && place[-match] == last[-1 - match]) ++match;
          if (match < kOrder[n] || match >= above) continue;
          found[count++] = {&segment, place + 1, segment.tokens + segment.size, match};
          if (count == most_places) return count;
        }
      }
    }
    return count;
  }
};

// One group of the places of a path that went on alike.
struct Vote {
  int32_t token;
  int count;
  uint64_t places;
};

// The tokens that followed the places of a set at a distance, in the order of the first of each; how many have any.
int count_votes(const Place* places, uint64_t set, int64_t distance, Vote* votes, int* known) {
  int found = 0;
  *known = 0;
  for (; set != 0; set &= set - 1) {
    const int n = __builtin_ctzll(set);
    if (places[n].end - places[n].at <= distance) continue;
    ++*known;
    const int32_t token = places[n].at[distance];
    if (token == kBreak) continue;
    int at = 0;
    while (at < found && votes[at].token != token) ++at;
    if (at == found) votes[found++] = {token, 0, 0};
    ++votes[at].count;
    votes[at].places |= uint64_t(1) << n;
  }
  return found;
}

uint64_t first_places(int count) { return count == 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1; }

// The path of majorities: its length; the sum of its probabilities is added to `score`.
int64_t follow(const Place* places, uint64_t set, double least, int64_t depth, int32_t* path, double* score) {
  double probability = 1;
  for (int64_t at = 0; at < depth; ++at) {
    Vote votes[kMaxPlaces];
    int known;
    const int found = count_votes(places, set, at, votes, &known);
    if (found == 0) return at;
    const Vote* most = std::max_element(votes, votes + found, [](auto& a, auto& b) { return a.count < b.count; });
    probability = probability * most->count / known;
    if (probability < least) return at;
    *score += probability;
    path[at] = most->token;
    set = most->places;
  }
  return depth;
}

struct Leaf {
  Vote vote;
  int32_t parent;
  int64_t depth;
  double probability;
};

// The most probable continuations, from the most probable on, the first found of equal ones.
int64_t grow(const Place* places, uint64_t set, double least, int64_t depth, int64_t nodes, int32_t* tokens,
             int32_t* parents) {
  std::vector<Leaf> leaves;
  int64_t count = 0;
  auto add = [&](int32_t parent, int64_t at, double probability, uint64_t from) {
    Vote votes[kMaxPlaces];
    int known;
    const int found = count_votes(places, from, at, votes, &known);
    for (int n = 0; n < found; ++n) {
      const double share = probability * votes[n].count / known;
      if (share >= least) leaves.push_back({votes[n], parent, at + 1, share});
    }
  };
  add(-1, 0, 1, set);
  while (!leaves.empty() && count < nodes) {
    auto best = std::max_element(leaves.begin(), leaves.end(),
                                 [](auto& a, auto& b) { return a.probability < b.probability; });
    const Leaf leaf = *best;
    leaves.erase(best);
    tokens[count] = leaf.vote.token;
    parents[count] = leaf.parent;
    ++count;
    if (leaf.depth < depth) add(int32_t(count - 1), leaf.depth, leaf.probability, leaf.vote.places);
  }
  return count;
}

}  // namespace

extern "C" {

// Mirrors that of structs.py.
struct SuffixLook {
  int64_t max_match, places;
  double least;
  int64_t depth, nodes;
  int32_t *tokens, *parents;  // [nodes], set
  double score;               // set
  int64_t scope;              // set
};

OUTRIDER_EXPORT void* outrider_suffix(int64_t first, int64_t most) { return new (std::nothrow) Index(first, most); }

OUTRIDER_EXPORT void outrider_suffix_close(void* index) { delete static_cast<Index*>(index); }

OUTRIDER_EXPORT void outrider_suffix_close_all(void* const* indexes, int64_t count) {
  for (int64_t n = 0; n < count; ++n) outrider_suffix_close(indexes[n]);
}

// 1 where there is no memory.
OUTRIDER_EXPORT int outrider_suffix_extend(void* index, const int32_t* tokens, int64_t count, int64_t time) {
  try {
    static_cast<Index*>(index)->extend(tokens, count, time);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// Segments that begin from now on hold at most so many tokens.
OUTRIDER_EXPORT void outrider_suffix_limit(void* index, int64_t most) {
  static_cast<Index*>(index)->limit(most);
}

// Hands over what the index has no use for any more: to `heir`, which may be the index itself, what that has a use for;
// the rest as an index of its own, to be closed, null where there is no rest.
OUTRIDER_EXPORT void* outrider_suffix_leaving(void* index, void* heir) {
  Index& of = *static_cast<Index*>(index);
  auto& leaving = of.leaving;
  if (heir != index) {
    if (of.spare != nullptr) leaving.push_back(std::move(of.spare));
    static_cast<Index*>(heir)->keep(leaving);
  }
  if (heir == index || std::exchange(of.written, false)) of.keep(leaving);
  if (leaving.empty()) return nullptr;
  Index* left = new (std::nothrow) Index(0, 0);
  if (left != nullptr) left->segments.swap(leaving);
  return left;
}

OUTRIDER_EXPORT void outrider_suffix_end(void* index) { static_cast<Index*>(index)->end(); }

OUTRIDER_EXPORT int64_t outrider_suffix_erase(void* index, int64_t before) {
  return static_cast<Index*>(index)->erase(before);
}

OUTRIDER_EXPORT void outrider_suffix_size(const void* index, int64_t* tokens, int64_t* bytes) {
  *tokens = *bytes = 0;
  const Index& of = *static_cast<const Index*>(index);
  for (auto& segment : of.segments) {
    *tokens += segment->size;
    *bytes += int64_t(segment->memory.bytes());
  }
  if (of.spare != nullptr) *bytes += int64_t(of.spare->memory.bytes());
}

// Of the texts that `drop` would return: how many, and how many tokens; 0 where the oldest segment is the only one.
OUTRIDER_EXPORT int outrider_suffix_oldest(const void* index, int64_t* tokens, int64_t* texts) {
  auto& segments = static_cast<const Index*>(index)->segments;
  *tokens = *texts = 0;
  if (segments.size() < 2) return 0;
  const Segment& oldest = *segments.front();
  for (size_t n = 0; n < oldest.texts.size(); ++n) {
    if (!oldest.kept(n)) continue;
    *tokens += oldest.end_of(n) - oldest.texts[n].start;
    ++*texts;
  }
  return 1;
}

// Drops the oldest segment, which is not the only one; `leaving` is to follow. Of the ended texts in it that proposals
// were made from, the tokens go to `kept`, time and number of tokens of each to `texts`; returns how many texts.
OUTRIDER_EXPORT int64_t outrider_suffix_drop(void* handle, int32_t* kept, int64_t* texts) {
  Index& index = *static_cast<Index*>(handle);
  index.leaving.push_back(std::move(index.segments.front()));
  index.segments.erase(index.segments.begin());
  const Segment* oldest = index.leaving.back().get();
  int64_t count = 0;
  for (size_t n = 0; n < oldest->texts.size(); ++n) {
    const Text& text = oldest->texts[n];
    const int64_t end = oldest->end_of(n);
    if (!oldest->kept(n)) continue;
    kept = std::copy(oldest->tokens + text.start, oldest->tokens + end, kept);
    texts[2 * count] = text.time;
    texts[2 * count + 1] = end - text.start;
    ++count;
  }
  return count;
}

// The best-scored continuation of the open text of `text`, in `scopes`; how many tokens it has, -1 without memory.
OUTRIDER_EXPORT int64_t outrider_suffix_look_up(const void* text, const void* const* scopes, int64_t count,
                                                SuffixLook* look) {
  look->score = 0;
  look->scope = 0;
  const Index& open = *static_cast<const Index*>(text);
  if (!open.open) return 0;
  const Segment& last = *open.segments.back();
  const int64_t length = std::min(look->max_match, last.size - last.texts.back().start);
  Place best[kMaxPlaces];
  int voters = 0;
  int64_t tokens = 0;
  std::vector<int32_t> path;
  try {
    path.resize(look->depth);
    for (int64_t n = 0; n < count; ++n) {
      Place places[kMaxPlaces];
      const Index& scope = *static_cast<const Index*>(scopes[n]);
      const int found = scope.collect(last.tokens + last.size, length, int(look->max_match), int(look->places), places);
      std::stable_sort(places, places + found, [](auto& a, auto& b) { return a.match > b.match; });
      bool won = false;
      for (int some = 1; some <= found; ++some) {
        if (some < found && places[some].match == places[some - 1].match) continue;
        const int match = places[some - 1].match;
        double score = 0;
        const int64_t depth = follow(places, first_places(some), look->least, look->depth, path.data(), &score);
        score += std::min(match, kScoredMatch) / kScoreOfMatch;
        if (depth == 0 || !(score > look->score)) continue;
        look->score = score;
        look->scope = n;
        std::copy(path.begin(), path.begin() + depth, look->tokens);
        tokens = depth;
        voters = some;
        won = true;
      }
      if (won) std::copy(places, places + found, best);
    }
    if (voters == 0) return 0;
    std::vector<Text>& texts = best[0].segment->texts;
    const int64_t place = best[0].at - best[0].segment->tokens;
    (--std::lower_bound(texts.begin(), texts.end(), place, [](auto& t, int64_t at) { return t.start < at; }))->used =
        true;
    if (look->nodes > look->depth)
      return grow(best, first_places(voters), look->least, look->depth, look->nodes, look->tokens, look->parents);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  for (int64_t n = 0; n < tokens; ++n) look->parents[n] = int32_t(n - 1);
  return tokens;
}
}
