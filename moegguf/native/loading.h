// loading.h: functions that the patched llama.cpp calls while it loads a model. They read the tensors that the store
// does not hold into their memory, and convert them for the CPU's kernels.
#pragma once

#include "moegguf.h"

#include "ggml-backend.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>

namespace moegguf {

// Reads n bytes of a file. Returns false if a read fails.
inline bool read_bytes(int file, void * to, size_t offset, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t n_read = pread(file, (uint8_t *)to + done, n - done, (off_t)(offset + done));
        if (n_read <= 0) { return false; }
        done += (size_t)n_read;
    }
    return true;
}

// Reads n bytes of a llama_file. Two threads share a read of at least 1 MiB, because one thread copies from the page
// cache at only half of the memory bandwidth. Smaller reads use llama.cpp's own function. That function also repeats a
// failed large read, and throws the error.
template <typename File>
void read_tensor(File & file, void * to, size_t offset, size_t n) {
    constexpr size_t least_bytes = 1u << 20;
    const auto read = [&](size_t begin, size_t end) {
        return read_bytes(file.file_id(), (uint8_t *)to + begin, offset + begin, end - begin);
    };
    if (n >= least_bytes) {
        auto first = std::async(std::launch::async, read, 0, n / 2);
        const bool second = read(n / 2, n);
        if (first.get() && second) { return; }
    }
    file.seek(offset, SEEK_SET);
    file.read_raw(to, n);
}

// Reads a tensor from a llama_file, and writes it into a buffer that interleaves rows for the CPU's kernels. Two
// threads each read some rows at a time and convert them while they are in the processor's cache. Returns false if the
// tensor is in another kind of buffer, or if a read fails. llama.cpp then loads the whole tensor, and throws the error.
template <typename File>
bool load_rows(File & file, const ggml_tensor * tensor, size_t offset) {
    if (strcmp(ggml_backend_buft_name(ggml_backend_buffer_get_type(tensor->buffer)), "CPU_REPACK") != 0) {
        return false;
    }
    constexpr int64_t group_rows = 64, piece_bytes = 256 << 10; // no layout interleaves more rows in one group
    const int64_t row_bytes = (int64_t)tensor->nb[1], n_rows = ggml_nrows(tensor);
    const int64_t piece_rows = std::max<int64_t>(piece_bytes / row_bytes / group_rows, 1) * group_rows;
    std::atomic<int64_t> next_row{0};
    const auto load = [&] {
        const std::unique_ptr<uint8_t[]> rows(new uint8_t[piece_rows * row_bytes]);
        for (int64_t row; (row = next_row.fetch_add(piece_rows)) < n_rows;) {
            ggml_tensor piece = *tensor;
            piece.ne[1] = std::min(piece_rows, n_rows - row);
            piece.ne[2] = piece.ne[3] = 1;
            piece.nb[2] = piece.nb[3] = piece.ne[1] * row_bytes;
            piece.data = (uint8_t *)tensor->data + row * row_bytes;
            if (!read_bytes(file.file_id(), rows.get(), offset + row * row_bytes, piece.nb[2])) { return false; }
            ggml_backend_tensor_set(&piece, rows.get(), 0, piece.nb[2]);
        }
        return true;
    };
    auto other = std::async(std::launch::async, load);
    const bool ours = load();
    return other.get() && ours;
}

} // namespace moegguf
