// loading.h: functions that the patched llama.cpp calls while it loads a model. They read the tensors that the store
// does not hold, and write each one into its memory. Writing a tensor into a CPU buffer that converts weights also
// converts the tensor for the CPU kernels.
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

// Returns true if the CPU writes this tensor's memory. The memory is then a host buffer, or a CPU buffer that converts
// weights (which does not count as a host buffer).
inline bool is_on_cpu(const ggml_tensor * tensor) {
    ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    return ggml_backend_buffer_is_host(buffer) ||
           (device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU);
}

// Reads n bytes of a llama_file. Two threads share a read of at least 1 MiB, because one thread copies from the page
// cache at only half of the memory bandwidth. Smaller reads use llama.cpp's own function. That function also repeats a
// failed large read, and throws the error.
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

// Memory for a tensor's bytes as they are in the file. The memory is not initialised.
struct ReadBytes {
    std::unique_ptr<uint8_t[]> memory;
    size_t size = 0;
    uint8_t * data() const { return memory.get(); }
};

// Reads tensors and writes them into their memory. A tensor on the CPU is written, and converted for the CPU's kernels
// if necessary, on another thread while the next tensor is read. The destructor waits for that thread.
class ConvertAhead {
  public:
    // Reads a tensor's n bytes from the file, and writes them to the tensor, in the background if the tensor is on the
    // CPU. Returns the bytes as they are in the file. They stay valid until the call after the next one. Memory is
    // reused, because the first touch of fresh memory takes longer than filling it.
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
    std::future<void> before_; // conversion of the previous tensor; an assignment waits for it to end
};

} // namespace moegguf
