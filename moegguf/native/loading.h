// loading.h: the functions that llama.cpp calls while it reads a model. They decide which tensors belong to the store,
// and read and convert the others. They may write the tensors that they are given.
#pragma once

#include "huge_pages.h"
#include "moegguf.h"

#include "ggml-backend.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <utility>

namespace moegguf {

// Whether the CPU writes the tensor: its plain buffers have no device, those that convert weights are not for reading.
inline bool is_on_cpu(const ggml_tensor * tensor) {
    ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    return ggml_backend_buffer_is_host(buffer) ||
           (device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU);
}

// Reads n bytes of a llama_file, many of them by two threads: one alone copies from the page cache at half of the
// memory's speed. What cannot be read so, llama.cpp reads, or says why not.
template <typename File>
void read_tensor(File & file, void * to, size_t offset, size_t n) {
    constexpr size_t least_bytes = 1u << 20;
    const auto read = [&](size_t begin, size_t end) {
        while (begin < end) {
            const ssize_t n_read = pread(file.file_id(), (uint8_t *)to + begin, end - begin, (off_t)(offset + begin));
            if (n_read <= 0) { return false; }
            begin += (size_t)n_read;
        }
        return true;
    };
    if (n >= least_bytes) {
        auto first = std::async(std::launch::async, read, 0, n / 2);
        const bool second = read(n / 2, n);
        if (first.get() && second) { return; }
    }
    file.seek(offset, SEEK_SET);
    file.read_raw(to, n);
}

// A tensor's bytes as in the file. Not initialised.
struct ReadBytes {
    std::unique_ptr<uint8_t[]> memory;
    size_t size = 0;
    uint8_t * data() const { return memory.get(); }
};

// Converts tensors for the CPU's kernels, each by another thread while the next one is read. Ends with the last tensor.
class ConvertAhead {
  public:
    // Reads a tensor, and begins to convert what it returns: valid until the call after the next one. Memory is used
    // again: fresh memory takes longer to touch than to fill.
    template <typename File>
    const ReadBytes & load(File & file, ggml_tensor * tensor, size_t offset, size_t n) {
        std::swap(next_, last_);
        if (next_.size < n) {
            next_ = {std::unique_ptr<uint8_t[]>(new uint8_t[n]), n};
            ask_for_huge_pages(next_.data(), n);
        }
        uint8_t * data = next_.data();
        read_tensor(file, data, offset, n);
        before_ = {};
        if (is_on_cpu(tensor)) {
            before_ = std::async(std::launch::async, [=] { ggml_backend_tensor_set(tensor, data, 0, n); });
        } else {
            ggml_backend_tensor_set(tensor, data, 0, n);
        }
        return next_;
    }

  private:
    ReadBytes next_, last_;
    std::future<void> before_; // waits where it is replaced
};

} // namespace moegguf
