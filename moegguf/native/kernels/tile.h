// tile.h: multiplies tiles of rows by interleaved weights or panels. Each result is computed by the same additions for
// any number of rows and any instruction set. The products of a block are added exactly, as integers. The blocks are
// then added one after another with fma.
#pragma once

#include "kernels.h"
#include "plain_types.h"
#include "types.h"

#include <type_traits>

namespace moegguf::kernels {
namespace {

// ---- activation rows, as blocks of 8-bit values with a scale, with the values of upstream's blocks ----

// Multiplies 32 values by `inverse`, rounds the products to integers and writes them to `out`. Returns the sums of
// successive pairs of the integers.
inline __m256i round_32(const float * x, float inverse, int8_t * out) {
    __m256i q[4];
    for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_set1_ps(inverse), _mm256_loadu_ps(x + 8 * i)));
    }
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)out, ordered);
    return _mm256_maddubs_epi16(_mm256_set1_epi8(1), ordered);
}

inline int32_t sum_of_pairs(__m256i pairs) {
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

template <class Isa>
float largest(const float * x, int n) {
    typename Isa::F max = {};
    for (int i = 0; i < n; i += Isa::n_cols) { max = Isa::max(Isa::abs(Isa::load(x + i)), max); }
    return Isa::greatest(max);
}

// Quantises 32 values. The scale is rounded to 16 bits, as in quantize_row_q8_0. Returns the sum of the quantised
// values.
template <class Isa, class Row>
int32_t quantize_32(const float * x, Row & row) {
    const float max = largest<Isa>(x, 32);
    row.d = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(max / 127.0f), _MM_FROUND_TO_NEAREST_INT)));
    return sum_of_pairs(round_32(x, max > 0 ? 127.0f / max : 0.0f, row.qs));
}

template <class Isa, class T>
void quantize_block(const float * x, Row32 & row) {
    row.minus[0] = -T::template offset<Isa> * quantize_32<Isa>(x, row);
}

template <class Isa, class T>
void quantize_block(const float * x, Row16 & row) {
    quantize_32<Isa>(x, row);
    for (int i = 0; i < 2; i++) {
        int32_t sum = 0;
        for (int j = 0; j < 16; j++) { sum += row.qs[16 * i + j]; }
        row.minus[i] = -T::template offset<Isa> * sum;
    }
}

template <class Isa, class T>
void quantize_block(const float * x, RowSum & row) {
    const int32_t sum = quantize_32<Isa>(x, row);
    row.sum = (float)sum * row.d;
}

// Finds the scale of 256 values and returns its inverse. Upstream's quantize_row_q8_K may negate the scale and all
// quantised values, which yields the same products.
template <class Isa, class Row>
float scale_of(const float * x, Row & row) {
    const float max = largest<Isa>(x, 256), inverse = max > 0 ? 127.0f / max : 0.0f;
    row.d = max > 0 ? 1.0f / inverse : 0.0f;
    return inverse;
}

template <class Isa, class T>
void quantize_block(const float * x, RowMins & row) {
    const float inverse = scale_of<Isa>(x, row);
    for (int i = 0; i < 8; i++) { row.sums[i] = (int16_t)sum_of_pairs(round_32(x + 32 * i, inverse, row.qs + 32 * i)); }
}

template <class Isa, class T>
void quantize_block(const float * x, RowOffset & row) {
    const float inverse = scale_of<Isa>(x, row);
    const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    for (int i = 0; i < 8; i++) {
        const __m256i minus = Isa::minus_8(round_32(x + 32 * i, inverse, row.qs + 32 * i), T::offset);
        const __m256i packed = _mm256_permutevar8x32_epi32(minus, even);
        _mm_storeu_si128((__m128i *)(row.minus + 4 * i), _mm256_castsi256_si128(packed));
    }
}

template <class Isa, class T>
void quantize_block(const float * x, RowPlain & row) {
    const float inverse = scale_of<Isa>(x, row);
    for (int i = 0; i < 8; i++) {
        const __m256i pairs = round_32(x + 32 * i, inverse, row.qs + 32 * i);
        const __m256i sums = Isa::minus_16(pairs, T::template offset<Isa>);
        row.minus[2 * i] = _mm256_extract_epi32(sums, 0);
        row.minus[2 * i + 1] = _mm256_extract_epi32(sums, 4);
        if (T::scale_values == 32) { row.minus[2 * i] += row.minus[2 * i + 1]; }
        const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xb1));
        const __m256i sixteens = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
        row.sums[i] = (int16_t)_mm256_extract_epi32(sixteens, 0);
        row.sums[8 + i] = (int16_t)_mm256_extract_epi32(sixteens, 4);
        if (T::scale_values == 32) { row.sums[i] += row.sums[8 + i], row.sums[8 + i] = 0; }
    }
}

template <class Isa, class T>
void quantize(const float * x, int64_t n, char * blocks, size_t stride) {
    for (int64_t i = 0; i < n; i += T::n_values, blocks += stride) {
        quantize_block<Isa, T>(x + i, *(typename T::Row *)blocks);
    }
}

// ---- tiles ----

// Distance by which prefetches run ahead. They go to the second-level cache, because only a few prefetches to the
// first-level cache can be in flight at once.
constexpr int prefetch_ahead_bytes = 32768;

// Prefetches one of n_parts parts of the n_bytes at `soon`; nullptr: prefetches nothing. A burst of prefetches would
// fill the cache's miss queue, and loads would have to wait. Without the barrier, the compiler would collect the
// prefetches of all parts in one burst. A single part needs no barrier, which would slow down its products.
template <int n_bytes, int n_parts>
MOEGGUF_INLINE void prefetch_part(const uint8_t * soon, int part) {
    constexpr int n_lines = (n_bytes + 63) / 64;
    if (!soon) { return; }
#pragma GCC unroll 64
    for (int line = n_lines * part / n_parts; line < n_lines * (part + 1) / n_parts; line++) {
        __builtin_prefetch(soon + 64 * line, 0, 2);
    }
    if (n_parts > 1) { asm volatile("" ::: "memory"); }
}

template <class Isa, class T>
struct Tile {
    using I = typename Isa::I;
    using F = typename Isa::F;
    using Row = typename T::Row;
    using Groups = const uint8_t * [Isa::n_groups]; // addresses of groups of 8 columns
    using OneRow = std::conditional_t<T::is_streamed, typename Isa::OneRow, Isa>;

    static constexpr int32_t no_minus = 0;

    // Adds the products of the weights with one block of n_rows rows to `sums`, for weights with n_scales scales for
    // every 32 values.
    template <int n_rows>
    static MOEGGUF_INLINE void add_32(const Groups & block, const Row * rows, F * sums, F *) {
        constexpr int n_vectors = 8 / T::n_scales;
        I w[8];
        T::template codes<Isa>(block, w);
#pragma GCC unroll 2
        for (int i = 0; i < T::n_scales; i++) {
            const F scale = T::template scale<Isa>(block, i);
#pragma GCC unroll 16
            for (int r = 0; r < n_rows; r++) {
                const int32_t * minus = &no_minus;
                if constexpr (!T::adds_min) { minus = rows[r].minus + i; }
                const I sum = Isa::template sum_of<n_vectors, T::n_dots, T::template is_signed<Isa>>(
                    w + i * n_vectors, rows[r].qs + 16 * i, minus);
                sums[r] = Isa::fma(Isa::to_float(sum), scale * Isa::broadcast(rows[r].d), sums[r]);
            }
        }
        if constexpr (T::adds_min) {
            const F min = T::template min<Isa>(block);
#pragma GCC unroll 16
            for (int r = 0; r < n_rows; r++) { sums[r] = Isa::fma(min, Isa::broadcast(rows[r].sum), sums[r]); }
        }
    }

    // Adds the products of 16 or 32 values of each column, times their scale, to `sums`.
    template <int n_rows, int step, int i, class Block>
    static MOEGGUF_INLINE void add_codes(const Block & block, const Row * rows, I * sums) {
        constexpr int n_vectors = T::n_vectors;
        I w[n_vectors];
        block.template codes<step, i>(w);
        const I scale = block.scales(step, i);
        constexpr int at = T::first_value(step, i);
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; r++) {
            const int32_t * minus = nullptr;
            if constexpr (T::n_minus > 0) { minus = rows[r].minus + at * T::n_minus / 16; }
            if constexpr (T::template is_wide<Isa>) {
                sums[r] = Isa::template wide_sum<n_vectors, T::n_minus>(sums[r], w, rows[r].qs + at, minus, scale);
            } else {
                static_assert(T::n_minus == 0 || n_vectors == 4);
#pragma GCC unroll 2
                for (int j = 0; j < n_vectors; j += 4) {
                    const int8_t * x = rows[r].qs + at + 4 * j;
                    sums[r] = Isa::template scaled_sum<T::n_dots, T::n_minus>(sums[r], w + j, x, minus, scale);
                }
            }
        }
    }

    template <int n_rows, int step = 0, class Block>
    static MOEGGUF_INLINE void add_steps(Block & block, const Row * rows, I * sums, const uint8_t * soon) {
        prefetch_part<T::template read_bytes<Isa>, T::n_steps>(soon, step);
        block.template load<step>();
        add_codes<n_rows, step, 0>(block, rows, sums);
        if constexpr (T::n_codes > 1) { add_codes<n_rows, step, 1>(block, rows, sums); }
        if constexpr (step + 1 < T::n_steps) { add_steps<n_rows, step + 1>(block, rows, sums, soon); }
    }

    // Adds the products of the weights with one block of n_rows rows to `sums` and `mins`, for weights in blocks of 256
    // values with integer scales.
    template <int n_rows>
    static MOEGGUF_INLINE void add_256(const Groups & from, const Row * rows, F * sums, F * mins,
                                       const uint8_t * soon) {
        typename T::template Block<Isa> block(from);
        I exact[n_rows];
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; r++) { exact[r] = I{}; }
        add_steps<n_rows>(block, rows, exact, soon);
        const F scale = block.scale();
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; r++) {
            sums[r] = Isa::fma(Isa::to_float(exact[r]), scale * Isa::broadcast(rows[r].d), sums[r]);
        }
        if constexpr (T::has_mins) {
            I pairs[T::n_pairs];
            for (int i = 0; i < T::n_pairs; i++) { pairs[i] = block.mins(i); }
            const F min = block.min();
#pragma GCC unroll 16
            for (int r = 0; r < n_rows; r++) {
                I sum = {};
                for (int i = 0; i < T::n_pairs; i++) {
                    sum = Isa::add_pairs(sum, pairs[i], Isa::broadcast(rows[r].sums + 2 * i));
                }
                mins[r] = Isa::fma(Isa::to_float(sum), min * Isa::broadcast(rows[r].d), mins[r]);
            }
        }
    }

    template <int n_rows>
    static void columns(const Groups & weights, const Row * rows, int64_t n_blocks, float * const * out, int64_t col,
                        int n_out, const uint8_t * soon) {
        F sums[n_rows], mins[n_rows];
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; r++) { sums[r] = mins[r] = F{}; }
        for (int64_t b = 0; b < n_blocks; b++, rows += n_rows) {
            const Parts<Isa> block(weights, b * T::bytes);
            const uint8_t * next = soon ? soon + b * T::template read_bytes<Isa> : nullptr;
            if constexpr (T::n_values == 32) {
                prefetch_part<T::template read_bytes<Isa>, 1>(next, 0);
                add_32<n_rows>(block.of, rows, sums, mins);
            } else {
                add_256<n_rows>(block.of, rows, sums, mins, next);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; r++) { Isa::store(out[r] + col, T::has_mins ? sums[r] - mins[r] : sums[r], n_out); }
    }

    template <int n_rows>
    static void all_columns(const uint8_t * weights, size_t row_bytes, int64_t n_cols, const Row * rows, int64_t n,
                            float * const * out, const uint8_t * soon) {
        for (int64_t col = 0; col < n_cols; col += Isa::n_cols) {
            const int n_out = n_cols - col < Isa::n_cols ? (int)(n_cols - col) : Isa::n_cols;
            Groups groups; // if only 8 columns are left, they are used twice
            for (int i = 0; i < Isa::n_groups; i++) {
                groups[i] = weights + (col + (8 * i < n_out ? 8 * i : 0)) * row_bytes;
            }
            if (T::is_streamed) { soon = groups[0] + prefetch_ahead_bytes; }
            columns<n_rows>(groups, rows, n / T::n_values, out, col, n_out, soon);
            if (soon) { soon += n / T::n_values * T::template read_bytes<Isa>; }
        }
    }

    static void multiply(const char * weights, size_t row_bytes, int64_t n_cols, const char * tile, int n_rows,
                         int64_t n, float * const * out, const char * soon) {
        const auto *w = (const uint8_t *)weights, *next = (const uint8_t *)soon;
        const auto * rows = (const Row *)tile;
        switch (n_rows) {
            case 1:
                return Tile<OneRow, T>::template all_columns<1>(w, row_bytes, n_cols, rows, n, out, next);
            case 2:
                return all_columns<2>(w, row_bytes, n_cols, rows, n, out, next);
            case 4:
                return all_columns<4>(w, row_bytes, n_cols, rows, n, out, next);
            case 8:
                return all_columns<(Isa::max_rows < 8 ? 1 : 8)>(w, row_bytes, n_cols, rows, n, out, next);
            case 16:
                return all_columns<(Isa::max_rows < 16 ? 1 : 16)>(w, row_bytes, n_cols, rows, n, out, next);
        }
    }

    static void gather(const char * const * rows, int n_rows, int64_t n, char * tile) {
        for (int64_t b = 0; b < n / T::n_values; b++) {
            for (int r = 0; r < n_rows; r++, tile += sizeof(Row)) {
                memcpy(tile, rows[r] + b * sizeof(Row), sizeof(Row));
            }
        }
    }
};

// ---- float weights ----
//
// A result is the sum of 16 lanes. Each lane adds its products in the order of the values. The lanes are then added in
// a fixed order. So the result depends neither on the number of rows or columns nor on the instruction set.

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

    // Loads the last n % 16 values, followed by zeros.
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

    // Multiplies n_rows rows by all columns: four or two columns at once, then the rest one by one.
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
