// From the arguments of an operation to a Problem: everything checked, positions and ids in the form that the kernels read.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "arguments.h"
#include "kernel.h"

namespace multihead {

// What the operations have in common, in the order of their schemas:
//   Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? slopes, Tensor? q_positions, Tensor? k_positions, int[] mask,
//   Tensor[]? tables, float scale, float softcap, float dropout, Tensor? seed, float? lowest
struct Call {
  Tensor q, k, v;
  std::optional<Tensor> bias, slopes, q_positions, k_positions;
  std::vector<std::int64_t> mask;
  std::vector<Tensor> tables;
  double scale, softcap, dropout;
  std::optional<Tensor> seed;
  std::optional<double> lowest;  // of the bias: this and below hides; by default half of the lowest number of its dtype

  // Where k and v are what a cache stores: how many tokens, the factors of int8, and the pages that they are in.
  std::int64_t stored = -1;  // they are not
  std::optional<Tensor> k_factors, v_factors, pages;

  explicit Call(Arguments& in);
};

// A Problem, with the memory behind what it points to. It borrows the tensors of the call.
class Setup {
 public:
  Problem problem{};

  // Throws std::runtime_error if something does not fit.
  explicit Setup(const Call& call);

  Tensor4 four(const char* name, const Tensor& tensor, std::int64_t heads, std::int64_t tokens, std::int64_t width) const;
  Tensor4 four(Tensor& tensor) const;  // one that was made here, to write to

  std::uint8_t* room_for_seen();

 private:
  Tensor4 stored(const char* name, const Tensor& tensor, const std::optional<Tensor>& factors, const Call& call,
                 std::int64_t width) const;
  void read_mask(const Call& call);
  template <typename T>
  struct Sides {
    std::vector<T> q, k;
  };

  void need_positions(const Call& call);
  template <typename T, typename Read>
  Sides<T> read_sides(const Call& call, const Read& read);
  void read_whole_positions(const Call& call);
  void read_real_positions(const Call& call);
  void read_dropout(const Call& call);
  std::vector<std::int64_t> read_ids(const Tensor& ids, std::int64_t length) const;
  static std::vector<std::int32_t> narrow(const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& others);
  Ranges ranges(const std::vector<double>& values);

  std::deque<std::vector<double>> doubles_;  // deques: what is in them stays where it is
  std::deque<std::vector<std::int32_t>> ints_;
  std::deque<std::vector<std::int64_t>> longs_;
  std::vector<std::uint8_t> seen_;
  std::int64_t origin_ = 0;  // of whole positions; 0 where they are real numbers
};

}  // namespace multihead
