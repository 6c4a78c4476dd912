// plain.h: multiplies weights that are stored row by row, as in a file. These rows are called columns here, because
// they are columns of the result. A single activation row is multiplied by 8 columns at once. For more rows, columns
// are unpacked once into a panel, and tile.h multiplies the panel by all rows. A panel has 8-bit codes, with four
// successive values of each column in a vector, and scales. Both methods add the products of a block exactly, as
// integers, and then add the blocks one after another with fma. So their results are bit-identical.
//
// To add a type, write only its unpacking:
// 1. Write a struct in plain_types.h. There are two kinds:
//    - a floating-point scale for every 32 values: derive from `Scaled`, as PlainQ8_0 and PlainMxfp4 do, or from
//      `ScaledWithMin`, as PlainQ5_1 does. `codes` returns the 32 codes of a block. PlainQ2_0 has more values for each
//      scale, and PlainNvfp4 has fewer.
//    - blocks of 256 values with 8-bit integer scales for every 16 values: derive from `Superblock`, as PlainQ2K and
//      PlainQ3K do. `unpack` fills an `Unpacked` with codes, scales, and d. A scale for 32 values is written twice.
//    If codes come from tables, derive from `Grid` in grids.h: `prepare` finds the indices into the tables.
// 2. Choose its kind of codes: `Unsigned<zero, fit>` (the fastest) if codes are from 0 to 63 and the code `zero` stands
//    for the value 0, or `Signed` if codes are from -127 to 127.
// 3. Add it to `find_plain` below, and its name to PLAIN in tests/native/test_width_check.py.
#pragma once

#include "grids.h"
#include "kernels.h"
#include "panels.h"
#include "plain_types.h"

#include <algorithm>

namespace moegguf::kernels {
namespace {

// ---- panels ----

// Loads 16 bytes of each column into four vectors. Each vector has four successive bytes of all columns.
template <class Isa, class At>
MOEGGUF_INLINE void load_columns(At at, typename Isa::I * out) {
    typename Isa::I x[4];
    for (int i = 0; i < 4; i++) { x[i] = Isa::load_lanes(at, i); }
    const auto a = Isa::low_32(x[0], x[1]), b = Isa::high_32(x[0], x[1]);
    const auto c = Isa::low_32(x[2], x[3]), d = Isa::high_32(x[2], x[3]);
    out[0] = Isa::low_64(a, c), out[1] = Isa::high_64(a, c);
    out[2] = Isa::low_64(b, d), out[3] = Isa::high_64(b, d);
}

// The addresses of n columns. If there are only n_cols < n columns, the last address is repeated.
template <int n>
struct Columns {
    const uint8_t * of[n];

    Columns(const uint8_t * weights, size_t row_bytes, int64_t n_cols) {
        for (int i = 0; i < n; i++) { of[i] = weights + std::min<int64_t>(i, n_cols - 1) * row_bytes; }
    }
};

// The offsets in a column of the i-th 32 values, for weights with scales for 32 values or less.
template <class T>
struct PartAt {
    int64_t block; // offset of the block
    int part;      // number of the part of the block

    explicit PartAt(int64_t i) : block(i / T::n_parts * T::bytes), part((int)(i % T::n_parts)) {}

    int64_t codes() const { return block + part * T::part_bytes; }
};

// Unpacks the i-th 32 values of each column into `out`. Returns the end of the output.
template <class Isa, class T>
MOEGGUF_INLINE uint8_t * unpack_scaled(const Columns<Isa::n_cols> & columns, int64_t i_part, uint8_t * out) {
    using I = typename Isa::I;
    const PartAt<T> at(i_part);
    alignas(64) uint8_t codes[Isa::n_cols][32];
    for (int c = 0; c < Isa::n_cols; c++) {
        _mm256_store_si256((__m256i *)codes[c], T::template codes<Isa>(columns.of[c] + at.codes()));
    }
    for (int half = 0; half < 2; half++) {
        I w[4];
        load_columns<Isa>([&](int c) { return codes[c] + 16 * half; }, w);
        for (int i = 0; i < 4; i++, out += sizeof(I)) { Isa::store_codes(out, T::template to_multiply<Isa>(w[i])); }
    }
    for (int i = 0; i < T::n_scales; i++, out += 4 * Isa::n_cols) {
        Isa::store((float *)out, T::template scales<Isa>(columns.of, at.block, at.part * T::n_scales + i));
    }
    if constexpr (T::adds_min) {
        Isa::store((float *)out, Isa::gather_halves(columns.of, at.block + 2));
        out += 4 * Isa::n_cols;
    }
    return out;
}

// Unpacks one block of each column, and calls visit(column number, block) for each one.
template <class Isa, class T, int n, class Visit>
MOEGGUF_INLINE void unpack_each(const Columns<n> & columns, int64_t at, Visit visit) {
    if constexpr (std::is_empty_v<typename T::Prepared>) {
        for (int c = 0; c < n; c++) {
            Unpacked block;
            T::template unpack<Isa>(columns.of[c] + at, block);
            visit(c, block);
        }
    } else {
        typename T::Prepared prepared[n];
        for (int c = 0; c < n; c++) { T::template prepare<Isa>(columns.of[c] + at, prepared[c]); }
        for (int c = 0; c < n; c++) {
            Unpacked block;
            T::template unpack<Isa>(columns.of[c] + at, prepared[c], block);
            visit(c, block);
        }
    }
}

template <class Isa, class T>
MOEGGUF_INLINE uint8_t * unpack_superblock(const Columns<Isa::n_cols> & columns, int64_t at, uint8_t * out) {
    using I = typename Isa::I;
    constexpr int n_cols = Isa::n_cols;
    alignas(64) uint8_t codes[n_cols][256], scales[n_cols][16], mins[n_cols][16];
    float d[n_cols], min[n_cols];
    unpack_each<Isa, T>(columns, at, [&](int c, const Unpacked & block) __attribute__((always_inline)) {
        for (int i = 0; i < 8; i++) { _mm256_store_si256((__m256i *)codes[c] + i, block.codes[i]); }
        _mm_store_si128((__m128i *)scales[c], block.scales);
        d[c] = block.d;
        if constexpr (T::has_mins) {
            _mm_store_si128((__m128i *)mins[c], block.mins);
            min[c] = block.min;
        }
    });
    const auto store = [&out](I x) {
        Isa::store_codes(out, x);
        out += sizeof(I);
    };
    I x[4];
    for (int i = 0; i < 16; i++) {
        load_columns<Isa>([&](int c) { return codes[c] + 16 * i; }, x);
        for (int j = 0; j < 4; j++) { store(T::template to_multiply<Isa>(x[j])); }
    }
    load_columns<Isa>([&](int c) { return scales[c]; }, x);
    for (int i = 0; i < 16; i++) { store(Isa::template scale_of<T::template is_wide<Isa>>(x[i / 4], i % 4)); }
    Isa::store((float *)out, Isa::load(d));
    out += sizeof(d);
    if constexpr (T::has_mins) {
        load_columns<Isa>([&](int c) { return mins[c]; }, x);
        for (int i = 0; i < T::n_pairs; i++) { store(i < 4 ? Isa::even_bytes(x[i]) : Isa::odd_bytes(x[i - 4])); }
        Isa::store((float *)out, Isa::load(min));
        out += sizeof(min);
    }
    return out;
}

template <class Isa, class T>
void unpack_columns(const char * weights, size_t row_bytes, int64_t n_cols, int64_t n, char * panel) {
    auto * out = (uint8_t *)panel;
    for (int64_t col = 0; col < n_cols; col += Isa::n_cols) {
        const Columns<Isa::n_cols> columns((const uint8_t *)weights + col * row_bytes, row_bytes, n_cols - col);
        for (int64_t b = 0; b < n / T::n_values; b++) {
            if constexpr (T::n_values == 32) {
                out = unpack_scaled<Isa, T>(columns, b, out);
            } else {
                out = unpack_superblock<Isa, T>(columns, b * T::bytes, out);
            }
        }
    }
}

// ---- one activation row ----

// Computes the sums of the four lower lanes and of the four upper lanes of each of 8 vectors.
MOEGGUF_INLINE void sums_of_halves(const __m256i * x, __m256i * halves) {
    const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
    const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(x[4], x[5]), _mm256_hadd_epi32(x[6], x[7]));
    halves[0] = _mm256_permute2x128_si256(a, b, 0x20);
    halves[1] = _mm256_permute2x128_si256(a, b, 0x31);
}

// Returns the sum of the lanes of each of 8 vectors.
MOEGGUF_INLINE __m256i sums_of(const __m256i * x) {
    __m256i halves[2];
    sums_of_halves(x, halves);
    return _mm256_add_epi32(halves[0], halves[1]);
}

// Returns signed bytes as 16-bit numbers: first the bytes at even indices, then the bytes at odd indices.
MOEGGUF_INLINE __m256i even_then_odd(__m128i x) {
    return _mm256_cvtepi8_epi16(
        _mm_shuffle_epi8(x, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
}

// Multiplies one activation row by 8 columns. Isa must have vectors of 8 lanes.
template <class Isa, class T>
struct OneRow {
    using Row = typename T::Row;
    using At = const Columns<8> &;
    static constexpr int block_bytes = 8 * T::bytes / T::n_parts; // bytes of 8 columns that have one block of the row

    static MOEGGUF_INLINE void add_scaled(At columns, PartAt<T> at, const Row & row, __m256 & sums) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)row.qs);
        __m256i products[8];
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) {
            products[c] = Isa::template fours<T::has_sign>(T::template codes<Isa>(columns.of[c] + at.codes()), x);
        }
        __m256i parts[2];
        sums_of_halves(products, parts);
        if constexpr (T::n_scales == 1) { parts[0] = _mm256_add_epi32(parts[0], parts[1]); }
        for (int i = 0; i < T::n_scales; i++) {
            if constexpr (T::zero != 0) { parts[i] = _mm256_add_epi32(parts[i], Isa::broadcast(row.minus + i)); }
            const __m256 scale = T::template scales<Isa>(columns.of, at.block, at.part * T::n_scales + i);
            sums = Isa::fma(Isa::to_float(parts[i]), scale * Isa::broadcast(row.d), sums);
        }
        if constexpr (T::adds_min) {
            sums = Isa::fma(Isa::gather_halves(columns.of, at.block + 2), Isa::broadcast(row.sum), sums);
        }
    }

    static MOEGGUF_INLINE void add_superblock(At columns, int64_t at, const Row & row, __m256 & sums, __m256 & mins,
                                              const uint8_t * soon) {
        alignas(32) float d[8], min[8];
        __m256i of_codes[8], of_mins[8];
        const __m256i row_sums = _mm256_loadu_si256((const __m256i *)row.sums);
        unpack_each<Isa, T>(columns, at, [&](int c, const Unpacked & block) __attribute__((always_inline)) {
            prefetch_part<block_bytes, 8>(soon, c);
            of_codes[c] = T::has_scales ? products_of(block, row, row_sums) : unscaled_products(block, row, row_sums);
            d[c] = block.d;
            if constexpr (T::has_mins) {
                of_mins[c] = _mm256_madd_epi16(even_then_odd(block.mins), row_sums);
                min[c] = block.min;
            }
        });
        const __m256 row_d = Isa::broadcast(row.d);
        sums = Isa::fma(Isa::to_float(sums_of(of_codes)), _mm256_load_ps(d) * row_d, sums);
        if constexpr (T::has_mins) {
            mins = Isa::fma(Isa::to_float(sums_of(of_mins)), _mm256_load_ps(min) * row_d, mins);
        }
    }

    // Returns partial sums, one in each lane, of scale * (code - offset) * activation over a block of one column.
    static MOEGGUF_INLINE __m256i products_of(const Unpacked & block, const Row & row, __m256i row_sums) {
        const __m256i scales = even_then_odd(block.scales);
        __m256i sums[2] = {}; // two, because with VNNI each addition to a sum waits for the one before it
        if constexpr (!T::has_sign && T::zero != 0) {
            const __m256i minus = _mm256_mullo_epi16(scales, _mm256_set1_epi16((short)-T::zero));
            sums[0] = _mm256_madd_epi16(minus, row_sums);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)row.qs + i);
            const __m256i w = block.codes[i], both = _mm256_set1_epi16((short)(0x100 * (2 * i + 1) + 2 * i));
            const __m256i pairs = T::has_sign ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                                              : _mm256_maddubs_epi16(w, x);
            sums[i % 2] = Isa::add_pairs(sums[i % 2], pairs, _mm256_shuffle_epi8(scales, both));
        }
        return _mm256_add_epi32(sums[0], sums[1]);
    }

    // Returns partial sums of (code - offset) * activation over a block of one column. Sums of 8 pairs of products fit
    // into 16 bits.
    static MOEGGUF_INLINE __m256i unscaled_products(const Unpacked & block, const Row & row, __m256i row_sums) {
        __m256i pairs = {};
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)row.qs + i);
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(block.codes[i], x));
        }
        const __m256i minus = _mm256_madd_epi16(row_sums, _mm256_set1_epi16((short)-T::zero));
        return Avx2::add_pairs(minus, pairs, _mm256_set1_epi16(1));
    }

    static void multiply(const char * weights, size_t row_bytes, int64_t n_cols, const char * tile, int, int64_t n,
                         float * const * out, const char *) {
        const auto * rows = (const Row *)tile;
        for (int64_t col = 0; col < n_cols; col += 8) {
            const auto * first = (const uint8_t *)weights + col * row_bytes;
            const Columns<8> columns(first, row_bytes, n_cols - col);
            __m256 sums = {}, mins = {};
            for (int64_t b = 0; b < n / T::n_values; b++) {
                // Prefetches follow the order of addresses, not of use.
                const uint8_t * soon = first + b * block_bytes + prefetch_ahead_bytes;
                if constexpr (T::n_values == 32) {
                    prefetch_part<block_bytes, 1>(soon, 0);
                    add_scaled(columns, PartAt<T>(b), rows[b], sums);
                } else {
                    add_superblock(columns, b * T::bytes, rows[b], sums, mins, soon);
                }
            }
            Avx2::store(out[0] + col, T::has_mins ? sums - mins : sums, (int)std::min<int64_t>(8, n_cols - col));
        }
    }
};

// Plain weights are unpacked for two or more activation rows, because OneRow multiplies only a single row.
template <class Isa, class T>
constexpr Panels panels = {&panel_kernel<Isa, T>, Panel<Isa, T>::bytes / Isa::n_cols, unpack_columns<Isa, T>, 2};

template <class Isa, class T>
constexpr Kernel plain_kernel = {
    T::n_values,      sizeof(typename T::Row),          1,
    quantize<Isa, T>, Tile<Isa, Panel<Isa, T>>::gather, OneRow<typename Isa::OneRow, T>::multiply,
    &panels<Isa, T>};

template <class Isa>
const Kernel * find_plain(ggml_type type) {
    return type == GGML_TYPE_Q8_0      ? &plain_kernel<Isa, PlainQ8_0>
           : type == GGML_TYPE_Q5_0    ? &plain_kernel<Isa, PlainQ5_0>
           : type == GGML_TYPE_Q5_1    ? &plain_kernel<Isa, PlainQ5_1>
           : type == GGML_TYPE_Q4_1    ? &plain_kernel<Isa, PlainQ4_1>
           : type == GGML_TYPE_Q2_K    ? &plain_kernel<Isa, PlainQ2K>
           : type == GGML_TYPE_Q3_K    ? &plain_kernel<Isa, PlainQ3K>
           : type == GGML_TYPE_IQ4_XS  ? &plain_kernel<Isa, PlainIq4Xs>
           : type == GGML_TYPE_IQ3_S   ? &plain_kernel<Isa, PlainIq3S>
           : type == GGML_TYPE_IQ3_XXS ? &plain_kernel<Isa, PlainIq3Xxs>
           : type == GGML_TYPE_IQ2_S   ? &plain_kernel<Isa, PlainIq2S>
           : type == GGML_TYPE_IQ2_XS  ? &plain_kernel<Isa, PlainIq2Xs>
           : type == GGML_TYPE_IQ2_XXS ? &plain_kernel<Isa, PlainIq2Xxs>
           : type == GGML_TYPE_IQ1_S   ? &plain_kernel<Isa, PlainIq1S>
           : type == GGML_TYPE_IQ1_M   ? &plain_kernel<Isa, PlainIq1M>
           : type == GGML_TYPE_Q4_0    ? &plain_kernel<Isa, PlainQ4_0>
           : type == GGML_TYPE_IQ4_NL  ? &plain_kernel<Isa, PlainIq4Nl>
           : type == GGML_TYPE_MXFP4   ? &plain_kernel<Isa, PlainMxfp4>
           : type == GGML_TYPE_Q4_K    ? &plain_kernel<Isa, PlainQ45K<false>>
           : type == GGML_TYPE_Q5_K    ? &plain_kernel<Isa, PlainQ45K<true>>
           : type == GGML_TYPE_Q6_K    ? &plain_kernel<Isa, PlainQ6K>
           : type == GGML_TYPE_NVFP4   ? &plain_kernel<Isa, PlainNvfp4>
           : type == GGML_TYPE_TQ1_0   ? &plain_kernel<Isa, PlainTq1_0>
           : type == GGML_TYPE_TQ2_0   ? &plain_kernel<Isa, PlainTq2_0>
           : type == GGML_TYPE_Q1_0    ? &plain_kernel<Isa, PlainQ1_0>
           : type == GGML_TYPE_Q2_0    ? &plain_kernel<Isa, PlainQ2_0>
                                       : nullptr;
}

} // namespace
} // namespace moegguf::kernels
