// kernels.h: products of activations with interleaved weights whose bits do not depend on how many rows are multiplied
// together, nor on which of these kernels do it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moegguf::kernels {

// Weights of 8 interleaved rows, as upstream's repack.cpp lays them out.
enum class Layout { q4_0x8, iq4_nlx8, mxfp4x8, q4_kx8, q5_kx8, q6_kx8 };

// A row of activations becomes blocks; rows that are multiplied together, a tile, lie block by block.
struct Kernel {
    int block_values;
    size_t block_bytes;
    int max_rows; // of a tile: 1, 2, 4 and so on up to this

    // A row of n values into blocks that are `stride` bytes apart.
    void (*quantize)(const float * x, int64_t n, char * blocks, size_t stride);

    // A tile from rows that lie each by itself.
    void (*gather)(const char * const * rows, int n_rows, int64_t n, char * tile);

    // out[r][0, n_cols) = a tile of rows times weights. n_cols is a multiple of 8, row_bytes are those of n weights.
    void (*multiply)(const char * weights, size_t row_bytes, int64_t n_cols, const char * tile, int n_rows, int64_t n,
                     float * const * out);
};

enum class FloatType { f32, f16, bf16 };

// out[r][0, n_cols) = n_rows rows of n floats times n_cols rows of weights, `stride` bytes apart.
using MultiplyFloats = void (*)(const char * weights, size_t stride, int64_t n_cols, const float * const * rows,
                                int n_rows, int64_t n, float * const * out);

// The kernels of a layout for processors with AVX2, FMA and F16C, or with AVX-512 and VNNI.
const Kernel * find_avx2(Layout layout);
const Kernel * find_avx512(Layout layout);
MultiplyFloats find_floats_avx2(FloatType type);
MultiplyFloats find_floats_avx512(FloatType type);

} // namespace moegguf::kernels
