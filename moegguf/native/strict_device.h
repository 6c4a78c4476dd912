// strict_device.h: what CUDA asks of those who use its memory and its kernels, for the simulated device's strict mode.
// It may write padding and products of the tensors that it is given. Knows no store.
#pragma once

#include "ggml-backend.h"

#include <cstddef>

namespace moegguf {

// Bytes that a tensor takes: behind the last row of a quantised one lies padding up to a multiple of 512 values.
size_t padded_bytes(const ggml_tensor * t);

// Zeroes that padding, when the tensor is bound to memory which is not that of a graph's results.
void zero_padding(ggml_backend_buffer_t buffer, const ggml_tensor * t);

// Computes as the CPU does. Where kernels read on behind the last row of quantised weights in memory of this type, and
// it is not zeros, or the next expert of a tensor without gaps, that they find, what they multiply with it is NaN.
ggml_status compute_strictly(ggml_backend_t cpu, ggml_cgraph * graph, ggml_backend_buffer_type_t memory);

} // namespace moegguf
