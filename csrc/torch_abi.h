// The C functions of PyTorch's stable ABI (2.10 or newer) that the library calls, declared by hand, so that no torch is
// needed to build it. All return 0 when they succeed, unless they return a value.
//
// Arguments and results of an operation travel as an array of 64-bit StableIValues. Who owns what:
// - int is the int64_t itself; float the bits of the double; bool the lowest byte.
// - Tensor is a TensorHandle that the callee owns: it has to delete it.
// - Tensor? is 0, or a pointer to a StableIValue made by `new`, with the handle in it. The callee owns both.
// - int[], Tensor[] are a ListHandle that the callee owns. Its items are StableIValues as above; torch_delete_list frees
//   the list and not the tensors in it, which the callee owns too.
// - str is a StringHandle. As a result it is freed by torch.
// - A result that is a Tensor gives the handle away. Results are written over the arguments, which are read by then.
// - What an operation throws arrives in Python as a RuntimeError with its message. Arguments that were not read by then
//   leak, so read them all first.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
using StableIValue = std::uint64_t;
using TensorHandle = struct AtenTensorOpaque*;
using LibraryHandle = struct TorchLibraryOpaque*;
using ListHandle = struct StableListOpaque*;
using StringHandle = struct StringOpaque*;
using BoxedFunction = void (*)(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs);

// Operations. A LibraryHandle may be kept for the life of the process: deleting it takes its operations away.
std::int32_t aoti_torch_library_init_fragment(const char* ns, const char* file, std::uint32_t line, LibraryHandle*);
std::int32_t aoti_torch_library_init_impl(
    const char* ns, const char* dispatch_key, const char* file, std::uint32_t line, LibraryHandle*);
std::int32_t aoti_torch_library_def(LibraryHandle, const char* schema);
std::int32_t aoti_torch_library_impl(LibraryHandle, const char* name, BoxedFunction);

// Tensors. Sizes and strides are borrowed from the tensor. Data pointers are those of the first element: the storage
// offset is in them. The const one leaves a lazily copied storage (torch._lazy_clone) shared.
std::int32_t aoti_torch_empty_strided(
    std::int64_t dim, const std::int64_t* sizes, const std::int64_t* strides, std::int32_t dtype,
    std::int32_t device_type, std::int32_t device_index, TensorHandle*);
std::int32_t aoti_torch_delete_tensor_object(TensorHandle);
std::int32_t aoti_torch_get_dim(TensorHandle, std::int64_t*);
std::int32_t aoti_torch_get_sizes(TensorHandle, std::int64_t**);
std::int32_t aoti_torch_get_strides(TensorHandle, std::int64_t**);
std::int32_t aoti_torch_get_dtype(TensorHandle, std::int32_t*);
std::int32_t torch_get_const_data_ptr(TensorHandle, const void**);
std::int32_t torch_get_mutable_data_ptr(TensorHandle, void**);

// Codes of dtypes and devices are asked for: they are no part of the ABI.
std::int32_t aoti_torch_device_type_cpu();
std::int32_t aoti_torch_dtype_float32();
std::int32_t aoti_torch_dtype_float64();
std::int32_t aoti_torch_dtype_bfloat16();
std::int32_t aoti_torch_dtype_float16();
std::int32_t aoti_torch_dtype_int64();
std::int32_t aoti_torch_dtype_int32();
std::int32_t aoti_torch_dtype_int8();
std::int32_t aoti_torch_dtype_bool();

// Lists and strings.
std::int32_t torch_list_size(ListHandle, std::size_t*);
std::int32_t torch_list_get_item(ListHandle, std::size_t index, StableIValue*);
std::int32_t torch_delete_list(ListHandle);
std::int32_t torch_new_string_handle(const char* data, std::size_t length, StringHandle*);

// Threads: torch's own pool, in the number that torch.set_num_threads says.
std::int32_t torch_parallel_for(
    std::int64_t begin, std::int64_t end, std::int64_t grain_size,
    void (*function)(std::int64_t begin, std::int64_t end, void* context), void* context);
std::int32_t torch_get_num_threads(std::uint32_t*);
}
