// What tests may do with the fake TensorFlow: find the kernels that a library has registered, and
// run them with tensors of their own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/tf_c_api.h"

struct TF_Tensor {
  TF_DataType dtype = TF_FLOAT;
  std::vector<std::int64_t> dims;
  std::shared_ptr<void> memory;
};

// A kernel's attributes.
struct TF_OpKernelConstruction {
  std::string tensor_name;
  std::int32_t process_set = 0;
  std::int32_t op = 0;
};

struct TF_KernelBuilder {
  std::string op;
  std::string device;
  std::vector<std::string> on_host;
  void* (*create)(TF_OpKernelConstruction*) = nullptr;
  void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*) = nullptr;
  void (*destroy)(void*) = nullptr;
};

// One call of a kernel.
struct TF_OpKernelContext {
  std::vector<TF_Tensor> inputs;
  std::vector<TF_Tensor> outputs;  // by index, once allocated
  std::function<std::shared_ptr<void>(int output, std::size_t bytes)> allocate;
  void* stream = nullptr;  // of the kernel's GPU
  std::string failure;     // the kernel's error; "" when the kernel succeeded
};

using FakeKernels = const std::vector<TF_KernelBuilder>*();
extern "C" __attribute__((visibility("default"))) FakeKernels fake_tensorflow_kernels;
