// loading.h: what llama.cpp's loader calls: which tensors it leaves to the store, and a tensor is converted for the
// CPU's kernels while the next one is read. It may write the tensors that it is given. Reads no file.
#pragma once

#include "moegguf.h"

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>

namespace moegguf {

// Bytes that are not initialised, freed by the last who holds them.
class Bytes {
  public:
    explicit Bytes(size_t n) : data_(new uint8_t[n]) {}
    uint8_t * data() const { return data_.get(); }

  private:
    std::shared_ptr<uint8_t[]> data_;
};

// Ends with the last tensor. For one thread.
class ConvertAhead {
  public:
    // A tensor's bytes as in the file: on the CPU they are converted by another thread, one tensor at a time.
    void set(ggml_tensor * tensor, const Bytes & bytes, size_t n) {
        ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
        const bool on_cpu = device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
        before_ = {};
        if (on_cpu) {
            before_ = std::async(std::launch::async, [=] { ggml_backend_tensor_set(tensor, bytes.data(), 0, n); });
        } else {
            ggml_backend_tensor_set(tensor, bytes.data(), 0, n);
        }
    }

  private:
    std::future<void> before_; // waits where it is replaced
};

} // namespace moegguf
