// The operations of the library as PyTorch sees them: torch.ops.multihead.*.

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "arguments.h"
#include "isa.h"
#include "pages.h"
#include "problem.h"
#include "threads.h"

namespace multihead {
namespace {

void isa_op(StableIValue* stack, std::uint64_t, std::uint64_t) { Results(stack).text(isa()); }
void isas_op(StableIValue* stack, std::uint64_t, std::uint64_t) { Results(stack).text(isas()); }
// Changes with the operations and their arguments: kernels/library.py knows by it whether a library fits.
void interface_op(StableIValue* stack, std::uint64_t, std::uint64_t) { Results(stack).integer(3); }

// Memory to work in, one piece for each thread, kept from call to call unless it is large.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  void* of(std::size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(4096, size_);
      if (memory_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }
  void let_go() {
    if (size_ <= KEPT) return;
    std::free(memory_);
    memory_ = nullptr, size_ = 0;
  }

 private:
  static constexpr std::size_t KEPT = std::size_t(4) << 20;
  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

thread_local Scratch scratch;

// Less than this many multiply-adds take no longer than waking up threads does.
constexpr double FEW_PRODUCTS = 1 << 19;

// Runs work(item, memory) for all items, each by whichever thread is free. Returns whether all gave true. What an item
// computes does not depend on who runs it, so results are the same for any number of threads.
template <typename Work>
bool run(std::int64_t items, double products, std::size_t bytes, const Work& work) {
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> good{true};
  const auto some = [&](std::int64_t, std::int64_t) {
    void* memory = scratch.of(bytes);
    bool own = true;
    for (std::int64_t item = next++; item < items; item = next++) own &= work(item, memory);
    scratch.let_go();
    if (!own) good = false;
  };
  const std::int64_t workers = products < FEW_PRODUCTS ? 1 : std::min<std::int64_t>(threads(), items);
  if (workers <= 1) {
    some(0, 1);
  } else {
    parallel(workers, 1, some);
  }
  return good;
}

double products(const Problem& p) { return double(p.B) * double(p.H) * double(p.L) * double(p.S) * double(p.D + p.V); }

// Runs once(), which returns whether all that came out is finite. If not, perhaps it is what hidden keys hold, times a
// weight of 0: then once more, without them.
template <typename Once>
void leave_out_unseen(Setup& setup, std::size_t bytes, const Once& once) {
  Problem& p = setup.problem;
  const bool hides = p.mask_steps > 0 || p.bias.data != nullptr;
  if (once() || !hides) return;
  p.seen = setup.room_for_seen();
  run(p.B * p.K, products(p), bytes, [&](std::int64_t item, void* memory) {
    kernel().find_seen(p, item / p.K, item % p.K, memory);
    return true;
  });
  once();
}

// (B, heads, length, width) in the order in memory in which `like` has heads and tokens: one of
// (B, heads, length, width) and (B, length, heads, width).
Tensor empty_like(const Tensor& like, bool is_wanted) {
  if (!is_wanted) return Tensor::empty({0}, like.dtype());
  const std::int64_t heads = like.size(1), length = like.size(2), width = like.size(3);
  const bool tokens_first = like.stride(1) < like.stride(2);
  return Tensor::empty(
      {like.size(0), heads, length, width},
      {heads * length * width, tokens_first ? width : length * width, tokens_first ? heads * width : width, 1},
      like.dtype());
}

// The numbers of a tensor of these sizes, one after the other.
const float* numbers_of(const char* name, const Tensor& tensor, const std::vector<std::int64_t>& sizes) {
  bool fits = tensor.dtype() == aoti_torch_dtype_float32() && tensor.sizes() == sizes;
  std::int64_t step = 1;
  for (std::size_t i = sizes.size(); fits && i-- > 0;) {
    fits = sizes[i] <= 1 || tensor.stride(static_cast<std::int64_t>(i)) == step;
    step *= sizes[i];
  }
  if (!fits && step != 0) {
    throw std::runtime_error(std::string("multihead: ") + name + ": expected another shape, float32, contiguous");
  }
  return tensor.data<float>();
}

float* state_of(const Problem& p, const Tensor& state) {  // it is only read
  return const_cast<float*>(numbers_of("state", state, {2, p.B, p.H, p.L}));
}

// How the keys of a row are shared out where there are few rows. By sizes alone, so that results do not depend on threads.
void share_out(Problem& p, std::vector<float>& partial) {
  constexpr std::int64_t HEADS_ENOUGH = 32;
  p.parts = 1;
  if (p.G * p.L > ROWS_AT_ONCE || p.B * p.K >= HEADS_ENOUGH || key_blocks(p) < 2 * PART_BLOCKS) return;
  p.parts = (key_blocks(p) + PART_BLOCKS - 1) / PART_BLOCKS;
  partial.resize(static_cast<std::size_t>(p.B * p.K * p.parts * p.G * p.L * (2 + p.V)));
  p.partial = partial.data();
}

void forward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Call call(in);
  const bool wants_state = in.boolean();
  call.stored = in.integer();
  call.k_factors = in.optional_tensor(), call.v_factors = in.optional_tensor(), call.pages = in.optional_tensor();
  Setup setup(call);
  Problem& p = setup.problem;
  const Kernel& isa = kernel();

  // The layout in which the heads are joined without a copy.
  Tensor out = Tensor::empty({p.B, p.H, p.L, p.V}, {p.L * p.H * p.V, p.V, p.H * p.V, 1}, call.q.dtype());
  Tensor lse = Tensor::empty({p.B, p.H, p.L}, aoti_torch_dtype_float32());
  // What a backward pass and the weights are made of: the state of each row, and what out lost when it was rounded.
  const auto nothing = std::vector<std::int64_t>{0};
  Tensor state = Tensor::empty(
      wants_state ? std::vector<std::int64_t>{2, p.B, p.H, p.L} : nothing, aoti_torch_dtype_float32());
  p.out = setup.four(out), p.lse = lse.write<float>(), p.state = wants_state ? state.write<float>() : nullptr;
  const bool has_rest = wants_state && p.out.dtype != Dtype::f32;
  Tensor rest = has_rest ? Tensor::empty(out.sizes(), out.strides(), out.dtype()) : Tensor::empty(nothing, out.dtype());
  if (has_rest) p.rest = setup.four(rest);
  std::vector<float> partial;
  share_out(p, partial);
  const std::size_t bytes = isa.scratch_bytes(p, false);
  const std::int64_t row_blocks = isa.row_blocks(p);
  leave_out_unseen(setup, bytes, [&] {
    const bool good = run(p.B * p.K * row_blocks * p.parts, products(p), bytes, [&](std::int64_t item, void* memory) {
      const std::int64_t part = item % p.parts, block = item / p.parts % row_blocks, head = item / p.parts / row_blocks;
      return isa.forward(p, head / p.K, head % p.K, block, part, memory);
    });
    if (p.parts == 1) return good;
    return run(p.B * p.K, 0, bytes, [&](std::int64_t head, void* memory) {
      return isa.combine(p, head / p.K, head % p.K, memory);
    });
  });
  Results(stack).tensor(std::move(out)).tensor(std::move(lse)).tensor(std::move(state)).tensor(std::move(rest));
}

void backward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  const Tensor grad_out = in.tensor();
  const std::optional<Tensor> grad_lse = in.optional_tensor();
  const Tensor out = in.tensor();
  const std::optional<Tensor> rest = in.optional_tensor();
  const Tensor state = in.tensor();
  const Call call(in);
  const auto wanted = static_cast<unsigned>(in.integer());
  Setup setup(call);
  Problem& p = setup.problem;
  const Kernel& isa = kernel();

  const bool wants_q = wanted & GRAD_Q, wants_kv = wanted & GRAD_KV, wants_bias = wanted & GRAD_BIAS;
  p.state = state_of(p, state);
  if (grad_lse) p.grad_lse = numbers_of("grad_lse", *grad_lse, {p.B, p.H, p.L});
  p.out = setup.four("out", out, p.H, p.L, p.V), p.grad_out = setup.four("grad_out", grad_out, p.H, p.L, p.V);
  if (rest) p.rest = setup.four("rest", *rest, p.H, p.L, p.V);
  if (wants_bias && !call.bias) throw std::runtime_error("multihead: there is no bias to have a gradient");

  Tensor grad_q = empty_like(call.q, wants_q), grad_k = empty_like(call.k, wants_kv);
  Tensor grad_v = empty_like(call.v, wants_kv);
  Tensor grad_bias =
      Tensor::empty(wants_bias ? call.bias->sizes() : std::vector<std::int64_t>{0}, aoti_torch_dtype_float32());
  if (wants_q) p.grad_q = setup.four(grad_q);
  if (wants_kv) p.grad_k = setup.four(grad_k), p.grad_v = setup.four(grad_v);
  std::int64_t bias_size = 0;
  std::vector<double> bias_sums;  // a number that all rows add to would lose what they add
  if (wants_bias) {
    p.grad_bias = grad_bias.write<float>();
    bias_size = 1;
    for (int i = 0; i < 4; i++) {
      p.grad_bias_stride[i] = call.bias->size(i) == 1 ? 0 : grad_bias.stride(i);
      bias_size *= call.bias->size(i);
    }
    if (p.grad_bias_stride[2] == 0 && p.L > 1) {
      bias_sums.resize(static_cast<std::size_t>(bias_size));
      p.grad_bias_sums = bias_sums.data();
    }
  }
  p.parts = 1;
  const std::size_t bytes = isa.scratch_bytes(p, true);
  const std::int64_t rows = isa.row_blocks(p), keys = key_blocks(p), heads = p.B * p.K;
  // A head at a time, all of it. With fewer heads than threads two passes over smaller pieces, which compute the scores
  // twice but add up the same numbers in the same order.
  const bool by_heads = heads >= threads() || rows * keys == 1;
  // Several heads (or pieces of one) that add to the same numbers of the bias: a pass of its own for it.
  const auto& step = p.grad_bias_stride;
  const bool shares_bias = wants_bias && ((p.B > 1 && step[0] == 0) || (p.K > 1 && step[1] == 0) || !by_heads);
  const unsigned with_heads = wanted & ~(shares_bias ? unsigned(GRAD_BIAS) : 0u);

  leave_out_unseen(setup, bytes, [&] {
    std::fill_n(p.grad_bias, bias_size, 0.0f);
    std::fill(bias_sums.begin(), bias_sums.end(), 0.0);
    bool good = true;
    if (by_heads && with_heads != 0) {
      good &= run(heads, 3 * products(p), bytes, [&](std::int64_t head, void* memory) {
        return isa.backward(p, head / p.K, head % p.K, 0, rows, 0, keys, with_heads, memory);
      });
    }
    if (!by_heads && wants_kv) {
      good &= run(heads * keys, 2 * products(p), bytes, [&](std::int64_t item, void* memory) {
        const std::int64_t head = item / keys, key = item % keys;
        return isa.backward(p, head / p.K, head % p.K, 0, rows, key, key + 1, GRAD_KV, memory);
      });
    }
    if (!by_heads && wants_q) {
      good &= run(heads * rows, 2 * products(p), bytes, [&](std::int64_t item, void* memory) {
        const std::int64_t head = item / rows, row = item % rows;
        return isa.backward(p, head / p.K, head % p.K, row, row + 1, 0, keys, GRAD_Q, memory);
      });
    }
    if (shares_bias) {
      const bool by_keys = step[3] != 0;
      good &= run(by_keys ? keys : 1, products(p), bytes, [&](std::int64_t key, void* memory) {
        for (std::int64_t head = 0; head < heads; head++) {
          isa.backward(p, head / p.K, head % p.K, 0, rows, by_keys ? key : 0, by_keys ? key + 1 : keys, GRAD_BIAS, memory);
        }
        return true;
      });
    }
    return good;
  });
  std::transform(bias_sums.begin(), bias_sums.end(), p.grad_bias, [](double sum) { return static_cast<float>(sum); });
  Results(stack).tensor(std::move(grad_q)).tensor(std::move(grad_k)).tensor(std::move(grad_v)).tensor(std::move(grad_bias));
}

void weights_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  const Tensor state = in.tensor();
  const Call call(in);
  const bool average = in.boolean();
  Setup setup(call);
  Problem& p = setup.problem;
  const Kernel& isa = kernel();
  p.state = state_of(p, state);
  p.average = average;
  Tensor weights = Tensor::empty(
      average ? std::vector<std::int64_t>{p.B, p.L, p.S} : std::vector<std::int64_t>{p.B, p.H, p.L, p.S},
      aoti_torch_dtype_float32());
  p.weights = weights.write<float>();
  ask_for_large_pages(p.weights, sizeof(float) * static_cast<std::size_t>(p.B * (p.average ? 1 : p.H) * p.L * p.S));
  const std::int64_t blocks = (p.L + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  run(p.B * blocks, products(p), isa.scratch_bytes(p, false), [&](std::int64_t item, void* memory) {
    const std::int64_t first = item % blocks * ROWS_AT_ONCE;
    isa.weights(p, item / blocks, first, std::min<std::int64_t>(first + ROWS_AT_ONCE, p.L), memory);
    return true;
  });
  Results(stack).tensor(std::move(weights));
}

// (B, H, parts, S) of floats to (B, H, S).
void put_together(const std::vector<float>& from, std::int64_t parts, std::int64_t S, float* to) {
  for (std::size_t start = 0; start < from.size(); start += static_cast<std::size_t>(parts * S), to += S) {
    for (std::int64_t s = 0; s < S; s++) {
      double sum = 0;
      for (std::int64_t part = 0; part < parts; part++) sum += from[start + static_cast<std::size_t>(part * S + s)];
      to[s] = static_cast<float>(sum);
    }
  }
}

void statistics_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  const Tensor state = in.tensor();
  const Call call(in);
  const auto wanted = static_cast<unsigned>(in.integer());
  Setup setup(call);
  Problem& p = setup.problem;
  const Kernel& isa = kernel();
  p.state = state_of(p, state);
  // With few heads their queries are shared out. By sizes alone, so that results do not depend on threads.
  constexpr std::int64_t ITEMS_ENOUGH = 32;
  p.parts = std::clamp<std::int64_t>(ITEMS_ENOUGH / std::max<std::int64_t>(1, p.B * p.H), 1, 8);
  p.parts = std::min(p.parts, std::max<std::int64_t>(1, p.L / ROWS_AT_ONCE));

  const auto room_for = [&](unsigned bit, std::int64_t length) {
    const bool is_wanted = wanted & bit;
    return Tensor::empty(
        is_wanted ? std::vector<std::int64_t>{p.B, p.H, length} : std::vector<std::int64_t>{0},
        aoti_torch_dtype_float32());
  };
  Tensor entropy = room_for(ENTROPY, p.L), visible_keys = room_for(VISIBLE_KEYS, p.L);
  Tensor received = room_for(RECEIVED, p.S), seen_by = room_for(SEEN_BY, p.S);
  const auto size = static_cast<std::size_t>(p.B * p.H * p.parts * p.S);
  std::vector<float> received_parts(wanted & RECEIVED ? size : 0), seen_by_parts(wanted & SEEN_BY ? size : 0);
  p.entropy = wanted & ENTROPY ? entropy.write<float>() : nullptr;
  p.visible_keys = wanted & VISIBLE_KEYS ? visible_keys.write<float>() : nullptr;
  p.received = wanted & RECEIVED ? received_parts.data() : nullptr;
  p.seen_by = wanted & SEEN_BY ? seen_by_parts.data() : nullptr;
  run(p.B * p.H * p.parts, products(p), isa.scratch_bytes(p, false), [&](std::int64_t item, void* memory) {
    const std::int64_t head = item / p.parts;
    isa.statistics(p, head / p.H, head % p.H, item % p.parts, memory);
    return true;
  });
  if (wanted & RECEIVED) put_together(received_parts, p.parts, p.S, received.write<float>());
  if (wanted & SEEN_BY) put_together(seen_by_parts, p.parts, p.S, seen_by.write<float>());
  Results(stack).tensor(std::move(entropy)).tensor(std::move(visible_keys)).tensor(std::move(received)).tensor(std::move(seen_by));
}

// Few arguments are quickly read, so what a plain call has no need of has a default.
#define MULTIHEAD_CALL                                                                                        \
  "Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? slopes=None, Tensor? q_positions=None, "          \
  "Tensor? k_positions=None, int[] mask=[], Tensor[]? tables=None, float scale=1.0, float softcap=0.0, "      \
  "float dropout=0.0, Tensor? seed=None, float? lowest=None"

// Runs when the library is loaded, where nothing may be thrown. PyTorch prints what it could not register, and
// calling it fails.
struct Registration {
  Registration() {
    LibraryHandle definitions = nullptr, everywhere = nullptr, cpu = nullptr;
    if (aoti_torch_library_init_fragment("multihead", __FILE__, __LINE__, &definitions) != 0) return;
    aoti_torch_library_def(definitions, "isa() -> str");
    aoti_torch_library_def(definitions, "isas() -> str");
    aoti_torch_library_def(definitions, "interface() -> int");
    aoti_torch_library_def(
        definitions,
        "forward(" MULTIHEAD_CALL
        ", bool wants_state=False, int stored=-1, Tensor? k_factors=None, Tensor? v_factors=None, Tensor? pages=None)"
        " -> (Tensor, Tensor, Tensor, Tensor)");
    aoti_torch_library_def(
        definitions,
        "backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor? rest, Tensor state, " MULTIHEAD_CALL
        ", int wanted=3) -> (Tensor, Tensor, Tensor, Tensor)");
    aoti_torch_library_def(definitions, "weights(Tensor state, " MULTIHEAD_CALL ", bool average=False) -> Tensor");
    aoti_torch_library_def(
        definitions,
        "statistics(Tensor state, " MULTIHEAD_CALL ", int wanted=15) -> (Tensor, Tensor, Tensor, Tensor)");
    if (aoti_torch_library_init_impl("multihead", "CompositeExplicitAutograd", __FILE__, __LINE__, &everywhere) != 0) {
      return;
    }
    aoti_torch_library_impl(everywhere, "isa", isa_op);
    aoti_torch_library_impl(everywhere, "isas", isas_op);
    aoti_torch_library_impl(everywhere, "interface", interface_op);
    if (aoti_torch_library_init_impl("multihead", "CPU", __FILE__, __LINE__, &cpu) != 0) return;
    aoti_torch_library_impl(cpu, "forward", forward_op);
    aoti_torch_library_impl(cpu, "backward", backward_op);
    aoti_torch_library_impl(cpu, "weights", weights_op);
    aoti_torch_library_impl(cpu, "statistics", statistics_op);
  }
};
const Registration registration;

}  // namespace
}  // namespace multihead
