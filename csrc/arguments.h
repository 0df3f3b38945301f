// What an operation is given and gives back, as C++ values that free themselves. See torch_abi.h for who owns what.
//
//   void op(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
//     Arguments in(stack);
//     Tensor q = in.tensor();                          // in the order of the schema; all of them, before anything throws
//     std::optional<Tensor> bias = in.optional_tensor();
//     ...
//     Tensor out = Tensor::empty(q.sizes(), q.dtype());
//     Results(stack).tensor(std::move(out));
//   }
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "torch_abi.h"

namespace multihead {

inline void check(std::int32_t code, const char* what) {
  if (code != 0) throw std::runtime_error(std::string("multihead: PyTorch could not ") + what);
}

// A tensor, owned. Sizes and strides are read once: they are valid as long as it lives and is not resized.
class Tensor {
 public:
  explicit Tensor(TensorHandle handle) : Tensor(handle, Unread{}) {
    check(aoti_torch_get_dim(handle_, &dim_), "tell a tensor's dim");
    check(aoti_torch_get_sizes(handle_, &sizes_), "tell a tensor's sizes");
    check(aoti_torch_get_strides(handle_, &strides_), "tell a tensor's strides");
    check(aoti_torch_get_dtype(handle_, &dtype_), "tell a tensor's dtype");
  }
  Tensor(Tensor&& other) noexcept : Tensor(other.handle_, Unread{}) {
    dim_ = other.dim_, dtype_ = other.dtype_, sizes_ = other.sizes_, strides_ = other.strides_;
    other.handle_ = nullptr;
  }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    dim_ = other.dim_, dtype_ = other.dtype_, sizes_ = other.sizes_, strides_ = other.strides_;
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  // A new one on the CPU, its numbers not set. Contiguous, or with the strides given.
  static Tensor empty(const std::vector<std::int64_t>& sizes, std::int32_t dtype) {
    std::vector<std::int64_t> strides(sizes.size(), 1);
    for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * (sizes[i] > 0 ? sizes[i] : 1);
    return empty(sizes, strides, dtype);
  }
  static Tensor empty(
      const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides, std::int32_t dtype) {
    TensorHandle handle = nullptr;
    const auto dim = static_cast<std::int64_t>(sizes.size());
    check(aoti_torch_empty_strided(
              dim, sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &handle),
          "make a tensor");
    return Tensor(handle);
  }

  std::int64_t dim() const { return dim_; }
  std::int32_t dtype() const { return dtype_; }  // compare with aoti_torch_dtype_float32() and the like
  std::int64_t size(std::int64_t axis) const { return sizes_[axis < 0 ? axis + dim_ : axis]; }
  std::int64_t stride(std::int64_t axis) const { return strides_[axis < 0 ? axis + dim_ : axis]; }
  std::vector<std::int64_t> sizes() const { return {sizes_, sizes_ + dim_}; }
  std::vector<std::int64_t> strides() const { return {strides_, strides_ + dim_}; }

  // The first element. `data` to read, `write` to write.
  const void* data() const {
    const void* pointer = nullptr;
    check(torch_get_const_data_ptr(handle_, &pointer), "tell where a tensor's numbers are");
    bool has_numbers = true;
    for (std::int64_t i = 0; i < dim_; i++) has_numbers &= sizes_[i] > 0;
    if (pointer == nullptr && has_numbers) throw std::runtime_error("multihead: expected a tensor with numbers of its own");
    return pointer;
  }
  void* write() {
    void* pointer = nullptr;
    check(torch_get_mutable_data_ptr(handle_, &pointer), "tell where a tensor's numbers are");
    return pointer;
  }
  template <typename T>
  const T* data() const {
    return static_cast<const T*>(data());
  }
  template <typename T>
  T* write() {
    return static_cast<T*>(write());
  }

  TensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  struct Unread {};
  Tensor(TensorHandle handle, Unread) noexcept : handle_(handle) {}  // so that ~Tensor runs when a reading throws

  TensorHandle handle_;
  std::int64_t dim_ = 0;
  std::int32_t dtype_ = 0;
  std::int64_t* sizes_ = nullptr;
  std::int64_t* strides_ = nullptr;
};

// The arguments, taken one after the other in the order of the schema.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  std::int64_t integer() { return static_cast<std::int64_t>(*next_++); }
  double number() { return as<double>(*next_++); }
  std::optional<double> optional_number() {
    const auto boxed = as<StableIValue*>(*next_++);
    if (boxed == nullptr) return std::nullopt;
    const StableIValue value = *boxed;
    delete boxed;
    return as<double>(value);
  }
  bool boolean() { return (*next_++ & 0xff) != 0; }
  Tensor tensor() { return Tensor(as<TensorHandle>(*next_++)); }
  std::optional<Tensor> optional_tensor() {
    const auto boxed = as<StableIValue*>(*next_++);
    if (boxed == nullptr) return std::nullopt;
    const StableIValue value = *boxed;
    delete boxed;
    return Tensor(as<TensorHandle>(value));
  }
  std::vector<std::int64_t> integers() {
    const List list(*next_++);
    std::vector<std::int64_t> values(list.size());
    for (std::size_t i = 0; i < values.size(); i++) values[i] = static_cast<std::int64_t>(list[i]);
    return values;
  }
  std::vector<Tensor> optional_tensors() {  // an empty list where there is none
    const auto boxed = as<StableIValue*>(*next_++);
    std::vector<Tensor> values;
    if (boxed == nullptr) return values;
    const List list(*boxed);
    delete boxed;
    values.reserve(list.size());
    for (std::size_t i = 0; i < list.size(); i++) values.emplace_back(as<TensorHandle>(list[i]));
    return values;
  }

 private:
  template <typename T>
  static T as(StableIValue value) {
    static_assert(sizeof(T) == sizeof(value));
    T result;
    std::memcpy(&result, &value, sizeof(value));
    return result;
  }

  class List {
   public:
    explicit List(StableIValue value) : handle_(as<ListHandle>(value)) {
      check(torch_list_size(handle_, &size_), "tell a list's size");
    }
    List(const List&) = delete;
    List& operator=(const List&) = delete;
    ~List() { torch_delete_list(handle_); }
    std::size_t size() const { return size_; }
    StableIValue operator[](std::size_t index) const {
      StableIValue item = 0;
      check(torch_list_get_item(handle_, index, &item), "read a list");
      return item;
    }

   private:
    ListHandle handle_;
    std::size_t size_ = 0;
  };

  const StableIValue* next_;
};

// The results, given one after the other in the order of the schema. Only when all arguments were taken.
class Results {
 public:
  explicit Results(StableIValue* stack) : next_(stack) {}

  Results& integer(std::int64_t value) { return raw(value); }
  Results& tensor(Tensor value) { return raw(value.release()); }
  Results& text(const std::string& value) {
    StringHandle handle = nullptr;
    check(torch_new_string_handle(value.data(), value.size(), &handle), "make a string");
    return raw(handle);
  }

 private:
  template <typename T>
  Results& raw(T value) {
    static_assert(sizeof(T) == sizeof(StableIValue));
    std::memcpy(next_++, &value, sizeof(value));
    return *this;
  }

  StableIValue* next_;
};

}  // namespace multihead
