// multiply.h: the functions that ggml's CPU backend calls: MUL_MAT and MUL_MAT_ID with the kernels of kernels.h.
#pragma once

#include "ggml.h"

#include <stdbool.h>

struct ggml_compute_params;

#ifdef __cplusplus
extern "C" {
#endif

// MUL_MAT and MUL_MAT_ID with weights as they lie in a file, and MUL_MAT with floats: computes this thread's share.
// False: upstream's kernels do it.
bool moegguf_multiply(const struct ggml_compute_params * params, struct ggml_tensor * op);

// The bytes of work memory that it needs.
size_t moegguf_multiply_work_size(const struct ggml_tensor * op, int n_threads);

// FLASH_ATTN_EXT: computes this thread's share. False: upstream's kernels do it.
bool moegguf_attention(const struct ggml_compute_params * params, struct ggml_tensor * op);

// The bytes of work memory that it needs.
size_t moegguf_attention_work_size(const struct ggml_tensor * op, int n_threads);

// TOP_K: puts a row's candidates into an order that others do not change, since it decides which of equal scores are
// taken. Cells of a KV cache come in the order of their positions. Candidates that a mask hides come last.
void moegguf_order_candidates(const struct ggml_tensor * scores, int64_t row, int32_t * candidates);

#ifdef __cplusplus
}

namespace moegguf::kernels {

// Whether this processor has kernels for weights of that type, interleaved in groups of 8 rows and 8 bytes.
bool has_kernels(ggml_type type);

// The bytes of work memory that `multiply` needs. False: upstream's kernels do it.
bool work_size(int n_threads, const ggml_tensor * op, int64_t n_cols, int64_t interleaved_bytes, size_t & size);

// Computes this thread's share of the product. False: upstream's kernels do it.
bool multiply(ggml_compute_params * params, ggml_tensor * op, int64_t n_cols, int64_t interleaved_bytes);

} // namespace moegguf::kernels

#endif
