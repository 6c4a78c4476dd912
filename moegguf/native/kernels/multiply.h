// multiply.h: functions that ggml's CPU backend calls to compute MUL_MAT, MUL_MAT_ID and attention with the kernels of
// kernels.h.
#pragma once

#include "ggml.h"

#include <stdbool.h>

struct ggml_compute_params;

#ifdef __cplusplus
extern "C" {
#endif

// Computes this thread's share of MUL_MAT or MUL_MAT_ID with quantised weights in a file's layout, or of MUL_MAT with
// float weights. Returns false if upstream's kernels have to compute the operation.
bool moegguf_multiply(const struct ggml_compute_params * params, struct ggml_tensor * op);

// Returns the size in bytes of the work memory that moegguf_multiply needs; 0: none.
size_t moegguf_multiply_work_size(const struct ggml_tensor * op, int n_threads);

// Computes this thread's share of FLASH_ATTN_EXT. Returns false if upstream's kernels have to compute the operation.
bool moegguf_attention(const struct ggml_compute_params * params, struct ggml_tensor * op);

// Returns the size in bytes of the work memory that moegguf_attention needs; 0: upstream's kernels compute the
// operation.
size_t moegguf_attention_work_size(const struct ggml_tensor * op, int n_threads);

// A table whose rows are not in memory. The op_params of the table's tensor begin with the address of this struct.
struct moegguf_rows {
    void (*get)(const struct moegguf_rows * rows, struct ggml_tensor * op); // computes the GET_ROWS `op`
};

// Computes GET_ROWS, on the first thread, if the table's rows are not in memory. Returns false if upstream's kernels
// have to compute the operation.
bool moegguf_get_rows(const struct ggml_compute_params * params, struct ggml_tensor * op);

// Sorts the candidates of one row of TOP_K before they are compared, because their order decides which candidates with
// equal scores are chosen. If the candidates are cells of a KV cache with lists, they are sorted by position, so other
// sequences do not change the result. Candidates that a mask hides come last.
void moegguf_order_candidates(const struct ggml_tensor * scores, int64_t row, int32_t * candidates);

#ifdef __cplusplus
}

namespace moegguf::kernels {

// Returns true if this processor has kernels for weights of this type, interleaved in groups of 8 rows and 8 bytes.
bool has_kernels(ggml_type type);

// Writes to `size` the size in bytes of the work memory that multiply() needs. Returns false if upstream's kernels
// compute the operation.
bool work_size(int n_threads, const ggml_tensor * op, int64_t n_cols, int64_t interleaved_bytes, size_t & size);

// Computes this thread's share of a product with interleaved weights. Returns false if upstream's kernels have to
// compute it.
bool multiply(ggml_compute_params * params, ggml_tensor * op, int64_t n_cols, int64_t interleaved_bytes);

// Converts the rows of a tensor from the file's layout, and writes them into the tensor's interleaving buffer. Returns
// false, and writes nothing, if upstream's code has to convert the rows. This is so for other types than Q4_0, Q4_K,
// Q5_K and Q6_K, and if the tensor's address is not a multiple of 16.
bool interleave(const ggml_tensor * tensor, const void * rows);

} // namespace moegguf::kernels

#endif
