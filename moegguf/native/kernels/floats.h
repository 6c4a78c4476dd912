// floats.h: rows of floats times weights that are floats. A result is one sum of 16 lanes, each in the order of the
// values, and the lanes are added in one order: whatever the number of rows, of columns and the instructions.
#pragma once

#include "kernels.h"

#include <immintrin.h>

#include <cstring>

namespace moegguf::kernels {
namespace {

template <class Isa>
struct Floats {
    using V = typename Isa::Lanes;

    template <ggml_type type>
    static V load(const char * values, int64_t i) {
        if constexpr (type == GGML_TYPE_F32) {
            return Isa::load_f32((const float *)values + i);
        } else if constexpr (type == GGML_TYPE_F16) {
            return Isa::load_f16((const uint16_t *)values + i);
        } else {
            return Isa::load_bf16((const uint16_t *)values + i);
        }
    }

    // The last n % 16 values, then zeros.
    template <ggml_type type>
    static V load_last(const char * values, int64_t i, int64_t n) {
        constexpr size_t size = type == GGML_TYPE_F32 ? 4 : 2;
        alignas(64) char last[16 * size] = {};
        memcpy(last, values + i * size, (n - i) * size);
        return load<type>(last, 0);
    }

    template <ggml_type type, int n_cols, int n_rows>
    static void tile(const char * const * weights, const float * const * rows, int64_t n, float * const * out,
                     int64_t col) {
        V sums[n_cols][n_rows] = {};
        const auto add = [&](auto load_weights, auto load_row) {
            V x[n_rows];
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; r++) { x[r] = load_row(rows[r]); }
#pragma GCC unroll 4
            for (int c = 0; c < n_cols; c++) {
                const V w = load_weights(weights[c]);
#pragma GCC unroll 4
                for (int r = 0; r < n_rows; r++) { sums[c][r] = Isa::fma_lanes(w, x[r], sums[c][r]); }
            }
        };
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) {
            add([i](const char * w) { return load<type>(w, i); },
                [i](const float * x) { return Isa::load_f32(x + i); });
        }
        if (i < n) {
            add([i, n](const char * w) { return load_last<type>(w, i, n); },
                [i, n](const float * x) { return load_last<GGML_TYPE_F32>((const char *)x, i, n); });
        }
        for (int r = 0; r < n_rows; r++) {
            for (int c = 0; c < n_cols; c++) { out[r][col + c] = sum_of_8(Isa::fold(sums[c][r])); }
        }
    }

    static float sum_of_8(__m256 x) {
        __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        x4 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
        return _mm_cvtss_f32(_mm_add_ss(x4, _mm_movehdup_ps(x4)));
    }

    // Columns of n_rows rows, four or two at once, then one by one.
    template <ggml_type type, int n_rows>
    static void columns(const char * weights, size_t stride, int64_t n_cols, const float * const * rows, int64_t n,
                        float * const * out) {
        for (int64_t col = 0; col < n_cols;) {
            const int n_tile = n_cols - col < Isa::float_cols ? 1 : Isa::float_cols;
            const char * w[Isa::float_cols];
            for (int c = 0; c < n_tile; c++) { w[c] = weights + (col + c) * stride; }
            (n_tile == 1 ? tile<type, 1, n_rows> : tile<type, Isa::float_cols, n_rows>)(w, rows, n, out, col);
            col += n_tile;
        }
    }

    template <ggml_type type>
    static void multiply(const char * weights, size_t stride, int64_t n_cols, const float * const * rows, int n_rows,
                         int64_t n, float * const * out) {
        for (int r = 0; r < n_rows;) {
            const int n_tile = n_rows - r < Isa::float_rows ? 1 : Isa::float_rows;
            const auto multiply_tile = n_tile == 1 ? columns<type, 1> : columns<type, Isa::float_rows>;
            multiply_tile(weights, stride, n_cols, rows + r, n, out + r);
            r += n_tile;
        }
    }
};

template <class Isa>
MultiplyFloats find_floats(ggml_type type) {
    return type == GGML_TYPE_F32    ? Floats<Isa>::template multiply<GGML_TYPE_F32>
           : type == GGML_TYPE_F16  ? Floats<Isa>::template multiply<GGML_TYPE_F16>
           : type == GGML_TYPE_BF16 ? Floats<Isa>::template multiply<GGML_TYPE_BF16>
                                    : nullptr;
}

} // namespace
} // namespace moegguf::kernels
