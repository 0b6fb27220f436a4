// A pass of a decoder over new tokens of many requests, in one call; what `native.decoder` in Python drives.
//
// Numbers are rounded to the model's type wherever transformers' own modelling code rounds them: between the
// linear layers, norms, rotations and additions of the residual stream. Sums inside of these are wider.

#include <omp.h>

#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "memory.h"
#include "product.h"
#include "team.h"

using namespace outrider;

// The structures mirror those of structs.py.
extern "C" {

struct Norm {
  const void* weight;  // null: no norm here
  double epsilon;
  int32_t one_added;      // to the weight
  int32_t rounded_first;  // before the multiplication with the weight
};

struct Linear {
  const void *weight, *bias;  // [rows, columns]; [rows] or null
  int64_t rows, columns;
};

enum Activation : int32_t { kSilu, kGeluTanh, kGelu, kRelu };

struct Layer {
  Norm before_attention, query, key, after_attention, before_mlp, after_mlp;
  Linear q, k, v, o, gate, up, down;
  Scoring scoring;
  int32_t rope, activation;
  void *keys, *values;  // [slots, key heads, size]
};

struct Model {
  int32_t type, layers;
  int64_t hidden;
  HeadShape shape;
  int64_t rotary;  // leading elements of a head that are rotated
  const Layer* layer;
  int64_t slots, vocabulary;
  const void* embedding;
  double embedding_scale;  // none where it is 1
  Norm last;
  Linear head;
  double logit_softcap;
};

struct Batch {
  int64_t tokens, segments, rows;
  const int64_t *ids, *positions, *slots;
  const Segment* segment;
  const int64_t* logit_rows;     // [rows]
  const void *cosines[2], *sines[2];  // [positions, rotary / 2], by kind of rope
  void* logits;                  // [rows, vocabulary]
  void* const* states;           // [layers + 1] of [tokens, hidden] or null: hidden states that are wanted
};
}

namespace {

constexpr int64_t kWorthThreads = 1 << 22;  // fewer multiplications are done before other threads have begun
constexpr int kUnit = 32;  // rows of a weight that a thread takes at once: whole lines of memory in results

template <class S>
__attribute__((noinline)) void normalise(const S* x, int64_t size, const Norm& norm, S* out) {
  using E = Element<S>;
  using C = typename E::C;
  using V = typename E::V;
  const S* weight = static_cast<const S*>(norm.weight);
  V squares = {};
  int64_t at = 0;
  for (; at + E::lanes <= size; at += E::lanes) {
    const V v = E::load(x + at);
    squares += v * v;
  }
  C total = sum(squares);
  for (; at < size; ++at) total = fused(E::get(x[at]), E::get(x[at]), total);
  const C factor = 1 / std::sqrt(total / C(size) + C(norm.epsilon));
  const C added = norm.one_added ? 1 : 0;
  for (at = 0; at + E::lanes <= size; at += E::lanes) {
    V v = E::load(x + at) * factor;
    if (norm.rounded_first) v = E::rounded(v);
    E::store(out + at, v * (E::load(weight + at) + added));
  }
  for (; at < size; ++at) {
    C v = E::get(x[at]) * factor;
    if (norm.rounded_first) v = E::get(E::put(v));
    out[at] = E::put(v * (E::get(weight[at]) + added));
  }
}

template <class S>
void add(S* x, const S* y, int64_t size) {
  using E = Element<S>;
  int64_t at = 0;
  for (; at + E::lanes <= size; at += E::lanes) E::store(x + at, E::load(x + at) + E::load(y + at));
  for (; at < size; ++at) x[at] = E::put(E::get(x[at]) + E::get(y[at]));
}

// Rotates the pairs (i, i + rotary / 2), rounding each product.
template <class S>
__attribute__((noinline)) void rotate(S* x, const S* cosine, const S* sine, int64_t rotary) {
  using E = Element<S>;
  using C = typename E::C;
  using V = typename E::V;
  const int64_t half = rotary / 2;
  int64_t at = 0;
  for (; at + E::lanes <= half; at += E::lanes) {
    const V a = E::load(x + at), b = E::load(x + half + at), c = E::load(cosine + at), s = E::load(sine + at);
    E::store(x + at, E::rounded(a * c) - E::rounded(b * s));
    E::store(x + half + at, E::rounded(b * c) + E::rounded(a * s));
  }
  const auto rounded = [](C v) { return E::get(E::put(v)); };
  for (; at < half; ++at) {
    const C a = E::get(x[at]), b = E::get(x[half + at]), c = E::get(cosine[at]), s = E::get(sine[at]);
    x[at] = E::put(rounded(a * c) - rounded(b * s));
    x[half + at] = E::put(rounded(b * c) + rounded(a * s));
  }
}

template <class V>
V activated(V x, int32_t kind) {
  switch (kind) {
    case kSilu: return x / (1 + exp(-x));
    case kGeluTanh: return x * 0.5f * (1 + tanh((x + x * x * x * 0.044715f) * 0.7978845608028654f));
    case kRelu: return x > 0 ? x : V{};
    default:
      for (size_t i = 0; i < sizeof x / sizeof x[0]; ++i) x[i] = x[i] * (1 + std::erf(x[i] * M_SQRT1_2)) / 2;
      return x;
  }
}

template <class S>
class Decoder {
 public:
  using E = Element<S>;
  using C = typename E::C;
  using V = typename E::V;

  explicit Decoder(const Model& model) : model_(model) {}

  // False, and nothing is done, where a token or a slot is out of range.
  bool run(const Batch& batch, int threads) {
    for (int64_t n = 0; n < batch.tokens; ++n) {
      const int64_t id = batch.ids[n], slot = batch.slots[n];
      if (id < 0 || id >= model_.vocabulary || slot < 0 || slot >= model_.slots) return false;
    }
    const HeadShape& shape = model_.shape;
    const int64_t tokens = batch.tokens, hidden = model_.hidden;
    int64_t inner = 0;
    for (int i = 0; i < model_.layers; ++i) inner = std::max(inner, model_.layer[i].gate.rows);
    x_ = x_rows_.reserve(tokens * hidden);
    h_ = h_rows_.reserve(tokens * hidden);
    t_ = t_rows_.reserve(tokens * hidden);
    q_ = q_rows_.reserve(tokens * shape.heads * shape.key_size);
    k_ = k_rows_.reserve(tokens * shape.key_heads * shape.key_size);
    v_ = v_rows_.reserve(tokens * shape.key_heads * shape.value_size);
    a_ = a_rows_.reserve(tokens * shape.heads * shape.value_size);
    m_ = m_rows_.reserve(tokens * inner);
    states_ = states_rows_.reserve(threads * per_thread());
    staging_size_ = (tokens + 1) * kUnit;
    staging_ = staging_rows_.reserve(threads * staging_size_);
    if (work(tokens) < kWorthThreads) threads = 1;
    plan(batch, threads);
    std::unique_ptr<Team> team;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
      team = std::make_unique<Team>(omp_get_num_threads());
      pass(batch, *team, omp_get_thread_num());
    }
    return true;
  }

 private:
  // Multiplications in the layers' weights.
  int64_t work(int64_t tokens) const {
    if (!model_.layers) return 0;
    const Layer& layer = model_.layer[0];
    const int64_t attention = (layer.q.rows + layer.k.rows + layer.v.rows + layer.o.columns) * model_.hidden;
    return tokens * model_.layers * (attention + 3 * layer.gate.rows * model_.hidden);
  }

  // What a thread needs to attend: scores, and the values of chunk and of what is merged.
  int64_t per_thread() const { return kQueryRows * (kChunk + 2 * model_.shape.value_size) + kBytes; }

  void pass(const Batch& batch, Team& team, int thread) {
    const int64_t hidden = model_.hidden, tokens = batch.tokens;
    team.each(tokens, [&](int64_t n) {
      embed(batch.ids[n], x_ + n * hidden);
      keep(batch, 0, n);
      if (model_.layers) normalise(x_ + n * hidden, hidden, model_.layer[0].before_attention, h_ + n * hidden);
    });
    int64_t rows = tokens;
    for (int i = 0; i < model_.layers; ++i) {
      const Layer& layer = model_.layer[i];
      attend(layer, batch, team, thread);
      if (i + 1 == model_.layers && shortens(batch)) {
        rows = batch.rows;
        team.each(1, [&](int64_t) { shorten(batch); });
      }
      linear(layer.o, a_, rows, t_, team, thread);
      team.each(rows, [&](int64_t n) {
        join(n, layer.after_attention);
        normalise(x_ + n * hidden, hidden, layer.before_mlp, h_ + n * hidden);
      });
      gated(layer, rows, team, thread);
      linear(layer.down, m_, rows, t_, team, thread);
      team.each(rows, [&](int64_t n) {
        join(n, layer.after_mlp);
        if (i + 1 == model_.layers) return last(batch, n);
        keep(batch, i + 1, n);
        normalise(x_ + n * hidden, hidden, model_.layer[i + 1].before_attention, h_ + n * hidden);
      });
    }
    head(batch, team, thread);
  }

  // Whether after the last attention only those tokens go on that have logits: nobody wants the others' states.
  bool shortens(const Batch& batch) const {
    return model_.layers && batch.rows < batch.tokens && !batch.states[model_.layers];
  }

  void shorten(const Batch& batch) {
    const int64_t attended = model_.shape.heads * model_.shape.value_size;
    for (int64_t n = 0; n < batch.rows; ++n) {
      const int64_t from = batch.logit_rows[n];  // ascending, so what is overwritten was moved before
      std::copy_n(x_ + from * model_.hidden, model_.hidden, x_ + n * model_.hidden);
      std::copy_n(a_ + from * attended, attended, a_ + n * attended);
    }
  }

  void embed(int64_t id, S* out) const {
    const S* from = static_cast<const S*>(model_.embedding) + id * model_.hidden;
    for (int64_t i = 0; i < model_.hidden; ++i)
      out[i] = model_.embedding_scale == 1 ? from[i] : E::put(E::get(from[i]) * C(model_.embedding_scale));
  }

  // Adds what came out of attention or of the MLP to the residual stream.
  void join(int64_t n, const Norm& norm) {
    S* t = t_ + n * model_.hidden;
    if (norm.weight) normalise(t, model_.hidden, norm, t);
    add(x_ + n * model_.hidden, t, model_.hidden);
  }

  void keep(const Batch& batch, int state, int64_t n) const {
    if (S* to = static_cast<S*>(batch.states[state]))
      std::copy_n(x_ + n * model_.hidden, model_.hidden, to + n * model_.hidden);
  }

  void last(const Batch& batch, int64_t n) {
    normalise(x_ + n * model_.hidden, model_.hidden, model_.last, h_ + n * model_.hidden);
    if (S* to = static_cast<S*>(batch.states[model_.layers]))
      std::copy_n(h_ + n * model_.hidden, model_.hidden, to + n * model_.hidden);
  }

  // How many units a linear layer's rows are shared out in.
  static int64_t units(const Linear& linear) { return pieces(linear.rows, kUnit); }

  // Calls compute(row, rows, to) for each block of a unit's rows, where what it computes of token m belongs at
  // to + m * stride. Results of several tokens lie together first: written to their places as they come, half
  // lines of memory would go to and fro between threads.
  template <class Compute>
  void unit_of(const Linear& linear, int64_t unit, int64_t tokens, S* out, int thread, Compute compute) const {
    const int64_t first = unit * kUnit, rows = std::min(int64_t(kUnit), linear.rows - first);
    S* together = tokens == 1 ? out + first : staging_ + thread * staging_size_;
    for (int64_t at = 0; at < rows; at += kRows) compute(first + at, int(std::min(int64_t(kRows), rows - at)), together + at);
    if (tokens == 1) return;
    for (int64_t m = 0; m < tokens; ++m) std::copy_n(together + m * kUnit, rows, out + m * linear.rows + first);
  }

  // One unit of a linear layer's rows for all tokens.
  void linear_unit(const Linear& linear, int64_t unit, const S* x, int64_t tokens, S* out, int thread) const {
    unit_of(linear, unit, tokens, out, thread, [&](int64_t row, int rows, S* to) {
      const S* const w[1] = {static_cast<const S*>(linear.weight) + row * linear.columns};
      const S* bias = linear.bias ? static_cast<const S*>(linear.bias) + row : nullptr;
      block<S, 1>(w, rows, linear.columns, x, tokens, [&](int64_t m, const C* const* products) {
        put(products[0], bias, rows, to + m * kUnit);
      });
    });
  }

  static void put(const C* products, const S* bias, int rows, S* out) {
    if (rows == kRows && !bias) {
      for (int i = 0; i < kRows; i += E::lanes) E::store(out + i, Element<C>::load(products + i));
    } else {
      for (int i = 0; i < rows; ++i) out[i] = E::put(products[i] + (bias ? E::get(bias[i]) : C(0)));
    }
  }

  void linear(const Linear& linear, const S* x, int64_t tokens, S* out, Team& team, int thread) const {
    team.each(units(linear), [&](int64_t unit) { linear_unit(linear, unit, x, tokens, out, thread); });
  }

  void gated(const Layer& layer, int64_t tokens, Team& team, int thread) {
    const int64_t columns = layer.gate.columns;
    const auto compute = [&](int64_t row, int rows, S* to) {
      const S* const w[2] = {static_cast<const S*>(layer.gate.weight) + row * columns,
                             static_cast<const S*>(layer.up.weight) + row * columns};
      const S* gate_bias = layer.gate.bias ? static_cast<const S*>(layer.gate.bias) + row : nullptr;
      const S* up_bias = layer.up.bias ? static_cast<const S*>(layer.up.bias) + row : nullptr;
      block<S, 2>(w, rows, columns, h_, tokens, [&](int64_t m, const C* const* products) {
        alignas(kBytes) S gate[kRows] = {}, up[kRows] = {};
        put(products[0], gate_bias, rows, gate);
        put(products[1], up_bias, rows, up);
        for (int i = 0; i < kRows; i += E::lanes)
          E::store(gate + i, E::rounded(activated(E::load(gate + i), layer.activation)) * E::load(up + i));
        std::copy_n(gate, rows, to + m * kUnit);
      });
    };
    team.each(units(layer.gate), [&](int64_t unit) { unit_of(layer.gate, unit, tokens, m_, thread, compute); });
  }

  void attend(const Layer& layer, const Batch& batch, Team& team, int thread) {
    const HeadShape& shape = model_.shape;
    const int64_t tokens = batch.tokens, q = units(layer.q), k = units(layer.k), v = units(layer.v);
    team.each(q + k + v, [&](int64_t unit) {
      if (unit < q) linear_unit(layer.q, unit, h_, tokens, q_, thread);
      else if (unit < q + k) linear_unit(layer.k, unit - q, h_, tokens, k_, thread);
      else linear_unit(layer.v, unit - q - k, h_, tokens, v_, thread);
    });
    team.each(tokens, [&](int64_t n) {
      for (int64_t head = 0; head < shape.heads; ++head)
        turn(q_ + (n * shape.heads + head) * shape.key_size, layer.query, layer.rope, batch, n);
      const int64_t keys = shape.key_heads * shape.key_size, values = shape.key_heads * shape.value_size;
      for (int64_t head = 0; head < shape.key_heads; ++head)
        turn(k_ + n * keys + head * shape.key_size, layer.key, layer.rope, batch, n);
      std::copy_n(k_ + n * keys, keys, static_cast<S*>(layer.keys) + batch.slots[n] * keys);
      std::copy_n(v_ + n * values, values, static_cast<S*>(layer.values) + batch.slots[n] * values);
    });
    C* scores = states_ + thread * per_thread();
    team.each(int64_t(groups_.size()), [&](int64_t unit) { attend_whole(groups_[unit], layer, batch, scores); });
    if (parts_.empty()) return;
    team.each(int64_t(parts_.size()), [&](int64_t unit) { attend_part(parts_[unit], layer, batch, scores); });
    team.each(int64_t(split_.size()), [&](int64_t unit) { merge_parts(split_[unit], layer, batch, scores); });
  }

  void turn(S* x, const Norm& norm, int rope, const Batch& batch, int64_t n) const {
    const int64_t half = model_.rotary / 2, at = batch.positions[n] * half;
    if (norm.weight) normalise(x, model_.shape.key_size, norm, x);
    if (half) {
      rotate(x, static_cast<const S*>(batch.cosines[rope]) + at, static_cast<const S*>(batch.sines[rope]) + at,
             model_.rotary);
    }
  }

  // Queries that are attended together, and where their chunks' states are kept when threads share them.
  struct Unit {
    int64_t segment;
    Sharing sharing;
    int64_t parts;  // index of the first chunk's states
  };
  struct Part {
    int64_t unit, chunk;
  };

  // Few queries over long contexts are shared out by chunks, as else most threads would wait.
  void plan(const Batch& batch, int threads) {
    const HeadShape& shape = model_.shape;
    const int64_t per_key = shape.heads / shape.key_heads;
    groups_.clear();
    split_.clear();
    parts_.clear();
    for (int64_t s = 0; s < batch.segments; ++s) {
      const Segment& segment = batch.segment[s];
      const int64_t queries = segment.paths ? 1 : std::max(int64_t(1), kQueryRows / per_key);
      for (int64_t first = 0; first < segment.count; first += queries)
        for (int64_t key_head = 0; key_head < shape.key_heads; ++key_head)
          for (int64_t head = 0; head < per_key; head += kQueryRows) {
            const int64_t heads = std::min(int64_t(kQueryRows), per_key - head);
            const Sharing sharing{key_head, key_head * per_key + head, heads, first, std::min(queries, segment.count - first)};
            groups_.push_back({s, sharing, 0});
          }
    }
    if (int64_t(groups_.size()) >= 2 * threads) return;
    int64_t states = 0;
    for (const Unit& unit : groups_) {
      const Segment& segment = batch.segment[unit.segment];
      const int64_t chunks = segment.positions[unit.sharing.first + unit.sharing.queries - 1] / kChunk + 1;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) parts_.push_back({int64_t(split_.size()), chunk});
      split_.push_back(unit);
      split_.back().parts = states;
      states += chunks;
    }
    if (parts_.size() == split_.size()) {  // one chunk each
      split_.clear();
      parts_.clear();
      return;
    }
    groups_.clear();
    parts_values_ = parts_rows_.reserve(states * kQueryRows * (shape.value_size + 2));
  }

  Group<S> group(const Unit& unit, const Layer& layer, const Batch& batch) const {
    return Group<S>(batch.segment[unit.segment], model_.shape, layer.scoring, q_, static_cast<const S*>(layer.keys),
                    static_cast<const S*>(layer.values), unit.sharing);
  }

  void attend_whole(const Unit& unit, const Layer& layer, const Batch& batch, C* scores) {
    const int64_t size = model_.shape.value_size;
    const Group<S> group = this->group(unit, layer, batch);
    Softmax<C> found[kQueryRows], merged[kQueryRows];
    C* values = scores + kQueryRows * kChunk;
    for (int row = 0; row < group.rows(); ++row) {
      found[row].values = values + 2 * row * size;
      merged[row].values = values + (2 * row + 1) * size;
      clear(merged[row], size);
    }
    for (int64_t number = group.begin(); number < group.end(); ++number) {
      group.chunk(number, found, scores);
      for (int row = 0; row < group.rows(); ++row) merge(merged[row], found[row], size);
    }
    for (int row = 0; row < group.rows(); ++row) finish(group, row, merged[row], batch.segment[unit.segment].first);
  }

  C* part_state(const Unit& unit, int64_t chunk, int row) const {
    return parts_values_ + ((unit.parts + chunk) * kQueryRows + row) * (model_.shape.value_size + 2);
  }

  void attend_part(const Part& part, const Layer& layer, const Batch& batch, C* scores) {
    const Unit& unit = split_[part.unit];
    const Group<S> group = this->group(unit, layer, batch);
    if (part.chunk < group.begin() || part.chunk >= group.end()) return;
    Softmax<C> found[kQueryRows];
    for (int row = 0; row < group.rows(); ++row) found[row].values = part_state(unit, part.chunk, row) + 2;
    group.chunk(part.chunk, found, scores);
    for (int row = 0; row < group.rows(); ++row) {
      part_state(unit, part.chunk, row)[0] = found[row].highest;
      part_state(unit, part.chunk, row)[1] = found[row].sum;
    }
  }

  void merge_parts(const Unit& unit, const Layer& layer, const Batch& batch, C* scores) {
    const int64_t size = model_.shape.value_size;
    const Group<S> group = this->group(unit, layer, batch);
    for (int row = 0; row < group.rows(); ++row) {
      Softmax<C> merged{0, 0, scores};
      clear(merged, size);
      for (int64_t number = group.begin(); number < group.end(); ++number) {
        C* state = part_state(unit, number, row);
        merge(merged, Softmax<C>{state[0], state[1], state + 2}, size);
      }
      finish(group, row, merged, batch.segment[unit.segment].first);
    }
  }

  void finish(const Group<S>& group, int row, const Softmax<C>& state, int64_t first) {
    const int64_t size = model_.shape.value_size;
    S* out = a_ + ((first + group.token(row)) * model_.shape.heads + group.head(row)) * size;
    for (int64_t i = 0; i < size; ++i) out[i] = E::put(state.values[i] / state.sum);
  }

  void head(const Batch& batch, Team& team, int thread) {
    const Linear& head = model_.head;
    const C cap = C(model_.logit_softcap);
    const bool gather = !shortens(batch) && batch.rows < batch.tokens;
    if (gather) {
      team.each(batch.rows, [&](int64_t n) {
        std::copy_n(h_ + batch.logit_rows[n] * model_.hidden, model_.hidden, t_ + n * model_.hidden);
      });
    }
    S* logits = static_cast<S*>(batch.logits);
    team.each(batch.rows ? units(head) : 0, [&](int64_t unit) {
      linear_unit(head, unit, gather ? t_ : h_, batch.rows, logits, thread);
      if (cap == 0) return;
      const int64_t first = unit * kUnit, end = std::min(first + kUnit, head.rows);
      for (int64_t m = 0; m < batch.rows; ++m)
        for (int64_t row = first; row < end; ++row) soften(logits[m * head.rows + row], cap);
    });
  }

  static void soften(S& logit, C cap) {
    const C part = E::get(E::put(E::get(logit) / cap));
    logit = E::put(E::get(E::put(std::tanh(part))) * cap);
  }

  const Model& model_;
  Memory<S> x_rows_, h_rows_, t_rows_, q_rows_, k_rows_, v_rows_, a_rows_, m_rows_, staging_rows_;
  Memory<C> states_rows_, parts_rows_;
  S *x_, *h_, *t_, *q_, *k_, *v_, *a_, *m_, *staging_;
  int64_t staging_size_;
  C *states_, *parts_values_;
  std::vector<Unit> groups_, split_;
  std::vector<Part> parts_;
};

struct Any {
  virtual ~Any() = default;
  virtual bool run(const Batch& batch, int threads) = 0;
};

template <class S>
struct Of final : Any {
  explicit Of(const Model& model) : decoder(model) {}
  bool run(const Batch& batch, int threads) override { return decoder.run(batch, threads); }
  Decoder<S> decoder;
};

}  // namespace

extern "C" {

// The model, and all that it points to, outlives the decoder. Types: 0 bfloat16, 1 float32, 2 float64.
OUTRIDER_EXPORT void* outrider_decoder(const Model* model) {
  switch (model->type) {
    case 0: return static_cast<Any*>(new Of<bf16>(*model));
    case 1: return static_cast<Any*>(new Of<float>(*model));
    case 2: return static_cast<Any*>(new Of<double>(*model));
    default: return nullptr;
  }
}

// One pass. Returns 0; 1 where there is no memory for it; 2 where a token or a slot is none.
OUTRIDER_EXPORT int outrider_run(void* decoder, const Batch* batch, int threads) {
  try {
    return static_cast<Any*>(decoder)->run(*batch, threads) ? 0 : 2;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

OUTRIDER_EXPORT void outrider_close(void* decoder) { delete static_cast<Any*>(decoder); }
}
