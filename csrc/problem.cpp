#include "problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace multihead {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("multihead: " + what); }

void require(bool holds, const char* name, const char* expected) {
  if (!holds) fail(std::string(name) + ": expected " + expected);
}

// The stride of an axis along which a tensor is spread if it has 1 there.
std::int64_t spread(const char* name, const Tensor& tensor, std::int64_t axis, std::int64_t size) {
  const std::int64_t own = tensor.size(axis);
  if (own != 1 && own != size) {
    fail(std::string(name) + ": a size of " + std::to_string(own) + " where 1 or " + std::to_string(size) + " fits");
  }
  return own == 1 ? 0 : tensor.stride(axis);
}

Dtype dtype_of(const char* name, const Tensor& tensor) {
  if (tensor.dtype() == aoti_torch_dtype_float32()) return Dtype::f32;
  if (tensor.dtype() == aoti_torch_dtype_bfloat16()) return Dtype::bf16;
  require(tensor.dtype() == aoti_torch_dtype_float16(), name, "float32, bfloat16 or float16");
  return Dtype::f16;
}

// A number for each token, (length,) or (1, length) or (B, length); the rows of the batch one after the other.
template <typename T, typename As>
std::vector<As> numbers(const Tensor& tensor) {
  const std::int64_t rows = tensor.dim() == 2 ? tensor.size(0) : 1, length = tensor.size(-1);
  std::vector<As> found(static_cast<std::size_t>(rows * length));
  for (std::int64_t b = 0; b < rows; b++) {
    for (std::int64_t i = 0; i < length; i++) {
      const std::int64_t place = (tensor.dim() == 2 ? b * tensor.stride(0) : 0) + i * tensor.stride(-1);
      found[static_cast<std::size_t>(b * length + i)] = static_cast<As>(tensor.data<T>()[place]);
    }
  }
  return found;
}

void check_tokens(const char* name, const Tensor& tensor, std::int64_t B, std::int64_t length) {
  require(tensor.dim() == 1 || tensor.dim() == 2, name, "one number for each token, (length,) or (B, length)");
  require(tensor.size(-1) == length, name, "one number for each token");
  if (tensor.dim() == 2) require(tensor.size(0) == 1 || tensor.size(0) == B, name, "as many rows as the batch has, or 1");
}

}  // namespace

Call::Call(Arguments& in)
    : q(in.tensor()),
      k(in.tensor()),
      v(in.tensor()),
      bias(in.optional_tensor()),
      slopes(in.optional_tensor()),
      q_positions(in.optional_tensor()),
      k_positions(in.optional_tensor()),
      mask(in.integers()),
      tables(in.optional_tensors()),
      scale(in.number()),
      softcap(in.number()),
      dropout(in.number()),
      seed(in.optional_tensor()),
      lowest(in.optional_number()) {}

Setup::Setup(const Call& call) {
  Problem& p = problem;
  require(call.q.dim() == 4 && call.k.dim() == 4 && call.v.dim() == 4, "q, k, v", "four axes, (B, heads, length, width)");
  p.B = call.q.size(0), p.H = call.q.size(1), p.L = call.q.size(2), p.D = call.q.size(3);
  p.K = call.k.size(1), p.S = call.stored < 0 ? call.k.size(2) : call.stored, p.V = call.v.size(3);
  require(p.K > 0 && p.H > 0 && p.H % p.K == 0, "k", "heads that divide those of q");
  require(p.D > 0, "q", "a width of at least 1");
  const bool has_own_dtype = call.stored < 0 && call.q.dtype() != call.k.dtype();
  require(call.k.dtype() == call.v.dtype() && !has_own_dtype, "q, k, v", "one dtype");
  p.G = p.H / p.K;
  require(p.L <= INT32_MAX && p.S <= INT32_MAX && p.B * p.H <= INT32_MAX, "q, k", "no more than 2^31 tokens or heads");
  p.q = four("q", call.q, p.H, p.L, p.D);
  if (call.stored < 0) {
    p.k = four("k", call.k, p.K, p.S, p.D), p.v = four("v", call.v, p.K, p.S, p.V);
  } else {
    p.k = stored("k", call.k, call.k_factors, call, p.D), p.v = stored("v", call.v, call.v_factors, call, p.V);
  }
  p.scale = static_cast<float>(call.scale), p.softcap = static_cast<float>(call.softcap);
  p.keep_scale = 1;

  if (call.bias) {
    const Tensor& bias = *call.bias;
    require(bias.dim() == 4, "bias", "four axes, (B or 1, H or 1, L or 1, S or 1)");
    p.bias = {bias.data(), dtype_of("bias", bias), {}, 0};
    const std::int64_t sizes[4] = {p.B, p.H, p.L, p.S};
    for (int i = 0; i < 4; i++) p.bias.stride[i] = spread("bias", bias, i, sizes[i]);
    // Half of the lowest number: models write that one where they mean -inf.
    p.bias.lowest = p.bias.dtype == Dtype::f16 ? -32752.0f : std::numeric_limits<float>::lowest() / 2;
    if (p.bias.dtype == Dtype::bf16) p.bias.lowest = -3.3895313892515355e38f / 2;
    if (call.lowest) p.bias.lowest = static_cast<float>(*call.lowest);
  }
  if (call.slopes) {
    const Tensor& slopes = *call.slopes;
    require(slopes.dim() == 1 && slopes.size(0) == p.H && slopes.stride(0) == 1, "slopes", "(H,)");
    require(slopes.dtype() == aoti_torch_dtype_float32(), "slopes", "float32");
    p.slopes = slopes.data<float>();
  }
  if (call.slopes) need_positions(call);
  read_mask(call);
  read_dropout(call);
}

Tensor4 Setup::four(
    const char* name, const Tensor& tensor, std::int64_t heads, std::int64_t tokens, std::int64_t width) const {
  const bool fits = tensor.dim() == 4 && tensor.size(0) == problem.B && tensor.size(1) == heads &&
                    tensor.size(2) == tokens && tensor.size(3) == width;
  require(fits, name, "a shape that fits the other tensors");
  const Dtype dtype = dtype_of(name, tensor);
  Tensor4 found{};
  found.data = const_cast<void*>(tensor.data()), found.dtype = dtype;
  for (int i = 0; i < 4; i++) found.stride[i] = tensor.stride(i);
  return found;
}

// What a cache stores: (B, K, slots, width), or with pages (pages, K, tokens of a page, width), of any dtype that can be
// read; of int8 with factors (..., 1).
Tensor4 Setup::stored(const char* name, const Tensor& tensor, const std::optional<Tensor>& factors, const Call& call,
                      std::int64_t width) const {
  const Problem& p = problem;
  const std::int64_t rows = tensor.size(0), slots = tensor.size(2);
  require(tensor.size(1) == p.K && tensor.size(3) == width, name, "heads and width that fit the other tensors");
  Tensor4 found{};
  found.data = const_cast<void*>(tensor.data());
  for (int i = 0; i < 4; i++) found.stride[i] = tensor.stride(i);
  if (factors) {
    const bool fits = factors->dim() == 4 && factors->size(0) == rows && factors->size(1) == p.K &&
                      factors->size(2) == slots && factors->size(3) == 1;
    require(fits && factors->dtype() == aoti_torch_dtype_float32(), name, "a float32 factor for each row of the width");
    require(tensor.dtype() == aoti_torch_dtype_int8(), name, "int8, where there are factors");
    found.dtype = Dtype::i8, found.factors = factors->data<float>();
    for (int i = 0; i < 3; i++) found.factor_stride[i] = factors->stride(i);
  } else {
    found.dtype = dtype_of(name, tensor);
  }
  if (!call.pages) {
    require(rows == p.B && slots >= p.S, name, "a row for each of the batch, with all tokens");
    return found;
  }
  const Tensor& pages = *call.pages;
  require(pages.dim() == 2 && pages.size(0) == p.B && pages.dtype() == aoti_torch_dtype_int64(), "pages", "int64 (B, n)");
  require(pages.size(1) <= 1 || pages.stride(1) == 1, "pages", "each row's side by side");
  require(slots > 0 && pages.size(1) * slots >= p.S, "pages", "enough for all tokens");
  found.pages = pages.data<std::int64_t>(), found.pages_stride = pages.stride(0), found.page_size = slots;
  for (std::int64_t b = 0; b < p.B; b++) {
    for (std::int64_t i = 0; i < pages.size(1); i++) {
      const std::int64_t page = found.pages[b * found.pages_stride + i];
      require(page >= 0 && page < rows, "pages", "numbers of pages that there are");
    }
  }
  return found;
}

Tensor4 Setup::four(Tensor& tensor) const {
  Tensor4 found{};
  found.dtype = dtype_of("result", tensor), found.data = tensor.write();
  for (int i = 0; i < 4; i++) found.stride[i] = tensor.stride(i);
  return found;
}

std::uint8_t* Setup::room_for_seen() {
  seen_.resize(static_cast<std::size_t>(problem.B * problem.K * problem.S));
  return seen_.data();
}

Ranges Setup::ranges(const std::vector<double>& values) {
  const std::int64_t S = problem.S, rows = S > 0 ? static_cast<std::int64_t>(values.size()) / S : 0;
  const std::int64_t cells = (S + CELL - 1) / CELL, blocks = (S + KEY_BLOCK - 1) / KEY_BLOCK;
  const double inf = std::numeric_limits<double>::infinity();
  const auto find = [&](std::int64_t count, std::int64_t size) {
    auto& low = doubles_.emplace_back(static_cast<std::size_t>(rows * count), inf);
    auto& high = doubles_.emplace_back(static_cast<std::size_t>(rows * count), -inf);
    for (std::int64_t b = 0; b < rows; b++) {
      for (std::int64_t s = 0; s < S; s++) {
        const double value = values[static_cast<std::size_t>(b * S + s)];
        double& least = low[static_cast<std::size_t>(b * count + s / size)];
        double& greatest = high[static_cast<std::size_t>(b * count + s / size)];
        if (value < least) least = value;
        if (value > greatest) greatest = value;
        if (value != value) least = -inf, greatest = inf;  // NaN: it may be anywhere
      }
    }
    return std::pair<const double*, const double*>(low.data(), high.data());
  };
  const auto by_cell = find(cells, CELL), by_block = find(blocks, KEY_BLOCK);
  const bool is_one = rows <= 1;
  return {by_cell.first, by_cell.second, by_block.first, by_block.second, is_one ? 0 : cells, is_one ? 0 : blocks};
}

// Only called where something follows positions.
void Setup::need_positions(const Call& call) {
  if (problem.positions.k != nullptr) return;
  const auto is_whole = [](const std::optional<Tensor>& given) {
    return !given || given->dtype() == aoti_torch_dtype_int64() || given->dtype() == aoti_torch_dtype_int32();
  };
  if (is_whole(call.q_positions) && is_whole(call.k_positions)) {
    read_whole_positions(call);
  } else {
    read_real_positions(call);
  }
}

// Both sides, by `read(tensor)`. Where they are not given keys stand at 0 ... S - 1, and queries are the last L keys.
template <typename T, typename Read>
Setup::Sides<T> Setup::read_sides(const Call& call, const Read& read) {
  Problem& p = problem;
  Sides<T> sides;
  if (call.k_positions) {
    check_tokens("k_positions", *call.k_positions, p.B, p.S);
    sides.k = read(*call.k_positions);
  } else {
    for (std::int64_t s = 0; s < p.S; s++) sides.k.push_back(static_cast<T>(s));
  }
  if (call.q_positions) {
    check_tokens("q_positions", *call.q_positions, p.B, p.L);
    sides.q = read(*call.q_positions);
  } else if (call.k_positions) {
    require(p.L <= p.S, "q_positions", "a tensor, where k_positions is one and L > S");
    const std::int64_t rows = call.k_positions->dim() == 2 ? call.k_positions->size(0) : 1;
    for (std::int64_t b = 0; b < rows; b++) {
      sides.q.insert(sides.q.end(), sides.k.begin() + (b + 1) * p.S - p.L, sides.k.begin() + (b + 1) * p.S);
    }
  } else {
    for (std::int64_t l = 0; l < p.L; l++) sides.q.push_back(static_cast<T>(p.S - p.L + l));
  }
  p.positions.q_stride = static_cast<std::int64_t>(sides.q.size()) > p.L ? p.L : 0;
  p.positions.k_stride = static_cast<std::int64_t>(sides.k.size()) > p.S ? p.S : 0;
  return sides;
}

void Setup::read_whole_positions(const Call& call) {
  Positions& at = problem.positions;
  const auto sides = read_sides<std::int64_t>(call, [](const Tensor& given) {
    return given.dtype() == aoti_torch_dtype_int64() ? numbers<std::int64_t, std::int64_t>(given)
                                                     : numbers<std::int32_t, std::int64_t>(given);
  });
  bool is_first = true;
  std::int64_t high = 0;
  for (const auto* side : {&sides.q, &sides.k}) {
    for (const std::int64_t x : *side) {
      origin_ = is_first || x < origin_ ? x : origin_, high = is_first || x > high ? x : high;
      is_first = false;
    }
  }
  // Counted from the origin in 64 bits, so that large positions lose nothing: only their distances matter.
  const auto place = [&](std::int64_t x) { return static_cast<std::uint64_t>(x) - static_cast<std::uint64_t>(origin_); };
  const std::uint64_t span = place(high);
  at.kind = span < std::uint64_t{1} << 30   ? PositionKind::narrow
            : span < std::uint64_t{1} << 53 ? PositionKind::wide
                                            : PositionKind::huge;
  if (at.kind == PositionKind::huge) origin_ = 0;
  for (const auto* side : {&sides.q, &sides.k}) {
    auto& kept = doubles_.emplace_back(side->size(), std::numeric_limits<double>::quiet_NaN());
    const void* data = kept.data();
    if (at.kind == PositionKind::huge) {
      data = longs_.emplace_back(*side).data();
    } else {
      std::transform(
          side->begin(), side->end(), kept.begin(), [&](std::int64_t x) { return static_cast<double>(place(x)); });
    }
    if (at.kind == PositionKind::narrow) data = ints_.emplace_back(kept.begin(), kept.end()).data();
    (side == &sides.q ? at.q : at.k) = data;
    if (side == &sides.k) at.k_ranges = ranges(kept);
  }
}

void Setup::read_real_positions(const Call& call) {
  Positions& at = problem.positions;
  const auto is_double = [](const std::optional<Tensor>& given) {
    return given && given->dtype() == aoti_torch_dtype_float64();
  };
  at.kind = PositionKind::wide;
  at.rounds = !is_double(call.q_positions) && !is_double(call.k_positions);  // as PyTorch's float32 distances do
  auto sides = read_sides<double>(call, [&](const Tensor& given) {
    if (given.dtype() == aoti_torch_dtype_float32()) return numbers<float, double>(given);
    if (given.dtype() == aoti_torch_dtype_float64()) return numbers<double, double>(given);
    if (given.dtype() == aoti_torch_dtype_int32()) return numbers<std::int32_t, double>(given);
    require(given.dtype() == aoti_torch_dtype_int64(), "positions", "int32, int64, float32 or float64");
    return numbers<std::int64_t, double>(given);
  });
  for (auto* side : {&sides.q, &sides.k}) {
    if (at.rounds) std::transform(side->begin(), side->end(), side->begin(), [](double x) { return double(float(x)); });
    const auto& kept = doubles_.emplace_back(std::move(*side));
    (side == &sides.q ? at.q : at.k) = kept.data();
    if (side == &sides.k) at.k_ranges = ranges(kept);
  }
}

std::vector<std::int64_t> Setup::read_ids(const Tensor& ids, std::int64_t length) const {
  check_tokens("documents", ids, problem.B, length);
  require(ids.dtype() == aoti_torch_dtype_int64(), "documents", "int64");
  return numbers<std::int64_t, std::int64_t>(ids);
}

// Ids in 32 bits. Only whether two are equal matters, so those that do not fit are counted through.
std::vector<std::int32_t> Setup::narrow(const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& others) {
  const auto fits = [](std::int64_t id) { return id == static_cast<std::int32_t>(id); };
  std::vector<std::int32_t> found(ids.size());
  if (std::all_of(ids.begin(), ids.end(), fits) && std::all_of(others.begin(), others.end(), fits)) {
    std::transform(ids.begin(), ids.end(), found.begin(), [](std::int64_t id) { return static_cast<std::int32_t>(id); });
    return found;
  }
  std::vector<std::int64_t> known = ids;
  known.insert(known.end(), others.begin(), others.end());
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  std::transform(ids.begin(), ids.end(), found.begin(), [&](std::int64_t id) {
    return static_cast<std::int32_t>(std::lower_bound(known.begin(), known.end(), id) - known.begin());
  });
  return found;
}

void Setup::read_mask(const Call& call) {
  Problem& p = problem;
  std::size_t next = 0;
  int depth = 0;
  const auto number = [&] {
    require(next < call.mask.size(), "mask", "all numbers of a step");
    return call.mask[next++];
  };
  const auto table = [&]() -> const Tensor& {
    const std::int64_t index = number();
    require(index >= 0 && index < static_cast<std::int64_t>(call.tables.size()), "mask", "the number of a table");
    return call.tables[static_cast<std::size_t>(index)];
  };
  const auto bools = [&](const Tensor& tensor) {
    require(tensor.dtype() == aoti_torch_dtype_bool(), "mask", "bool tables");
    return tensor.data<std::uint8_t>();
  };
  while (next < call.mask.size()) {
    require(p.mask_steps < MAX_STEPS, "mask", "fewer steps");
    MaskStep& step = p.mask[p.mask_steps++];
    const std::int64_t kind = number();
    require(kind >= 0 && kind <= static_cast<std::int64_t>(MaskKind::invert), "mask", "a kind that is known");
    step.kind = static_cast<MaskKind>(kind);
    depth += step.kind < MaskKind::both ? 1 : step.kind == MaskKind::invert ? 0 : -1;
    require(depth >= 1 && depth <= MAX_DEPTH, "mask", "an operation for what it is given, and not too much at once");
    switch (step.kind) {
      case MaskKind::window: {
        need_positions(call);
        step.left = number(), step.right = number();
        break;
      }
      case MaskKind::lengths:
      case MaskKind::prefix: {
        const std::int64_t index = number(), n = number();
        if (step.kind == MaskKind::prefix) need_positions(call);
        // Prefixes are counted from the positions' origin.
        const bool moves = step.kind == MaskKind::prefix;
        const auto place = [&](std::int64_t one) {  // what is beyond 64 bits is beyond all positions
          // As it is compared in PyTorch.
          if (moves && p.positions.rounds) return static_cast<std::int64_t>(static_cast<float>(one));
          std::int64_t moved = one;
          if (moves && __builtin_sub_overflow(one, origin_, &moved)) moved = origin_ < 0 ? INT64_MAX : INT64_MIN;
          return moved;
        };
        auto& found = longs_.emplace_back();
        if (index < 0) {
          found.push_back(place(n));
        } else {
          require(index < static_cast<std::int64_t>(call.tables.size()), "mask", "the number of a table");
          const Tensor& given = call.tables[static_cast<std::size_t>(index)];
          require(given.dim() <= 1 && given.dtype() == aoti_torch_dtype_int64(), "mask", "lengths (B,) of int64");
          const std::int64_t rows = given.dim() ? given.size(0) : 1;
          require(rows == 1 || rows == p.B, "mask", "a length for each row of the batch, or one");
          for (std::int64_t b = 0; b < rows; b++)
            found.push_back(place(given.data<std::int64_t>()[given.dim() ? b * given.stride(0) : 0]));
        }
        step.numbers = found.data(), step.stride[0] = found.size() > 1;
        break;
      }
      case MaskKind::padding: {
        const Tensor& keep = table();
        check_tokens("padding", keep, p.B, p.S);
        step.table = bools(keep);
        step.stride[0] = keep.dim() == 2 && keep.size(0) > 1 ? keep.stride(0) : 0, step.stride[3] = keep.stride(-1);
        break;
      }
      case MaskKind::dense: {
        const Tensor& keep = table();
        require(keep.dim() >= 2 && keep.dim() <= 4, "dense", "(B or 1, H or 1, L or 1, S or 1)");
        const std::int64_t sizes[4] = {p.B, p.H, p.L, p.S}, missing = 4 - keep.dim();
        for (std::int64_t i = missing; i < 4; i++) step.stride[i] = spread("dense", keep, i - missing, sizes[i]);
        step.table = bools(keep);
        break;
      }
      case MaskKind::documents: {
        const std::vector<std::int64_t> of_keys = read_ids(table(), p.S);
        std::vector<std::int64_t> of_queries;
        const std::int64_t index = number();
        if (index >= 0) {
          require(index < static_cast<std::int64_t>(call.tables.size()), "mask", "the number of a table");
          of_queries = read_ids(call.tables[static_cast<std::size_t>(index)], p.L);
        }
        const auto& k_ids = ints_.emplace_back(narrow(of_keys, of_queries));
        step.k_ids = k_ids.data(), step.k_stride = static_cast<std::int64_t>(k_ids.size()) > p.S ? p.S : 0;
        if (index >= 0) {
          const auto& q_ids = ints_.emplace_back(narrow(of_queries, of_keys));
          step.q_ids = q_ids.data(), step.q_stride = static_cast<std::int64_t>(q_ids.size()) > p.L ? p.L : 0;
        } else {  // the queries are the last L of the keys
          require(p.L <= p.S, "documents", "ids of the queries, where L > S");
          step.q_ids = k_ids.data() + (p.S - p.L), step.q_stride = step.k_stride;
        }
        step.k_ranges = ranges({k_ids.begin(), k_ids.end()});
        break;
      }
      default:
        break;
    }
  }
  require(depth == (call.mask.empty() ? 0 : 1), "mask", "steps that come to one answer");
}

void Setup::read_dropout(const Call& call) {
  Problem& p = problem;
  require(call.dropout >= 0 && call.dropout <= 1, "dropout", "a number from 0 to 1");
  if (call.dropout == 0) return;
  require(call.seed.has_value(), "seed", "a tensor, where there is dropout");
  const Tensor& seed = *call.seed;
  require(seed.dim() == 0 && seed.dtype() == aoti_torch_dtype_int64(), "seed", "one number, int64");
  const auto number = static_cast<std::uint64_t>(seed.data<std::int64_t>()[0]);
  p.has_dropout = true;
  p.key[0] = static_cast<std::uint32_t>(number), p.key[1] = static_cast<std::uint32_t>(number >> 32);
  p.threshold = static_cast<std::uint32_t>(std::min(std::nearbyint(call.dropout * 4294967296.0), 4294967295.0));
  p.keep_scale = call.dropout < 1 ? static_cast<float>(1 / (1 - call.dropout)) : 0;
}

}  // namespace multihead
