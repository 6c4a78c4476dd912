// attention.h: computes attention for a tile of rows (queries) and a block of keys. The product of a row and a key is
// summed value by value, and sums over keys are computed key by key, each sum in its own lane. So the bits of a result
// depend neither on the number of rows nor on the instruction set. A key that a row does not see adds zero.
#pragma once

#include "kernels.h"

namespace moegguf::kernels {
namespace {

template <class Isa>
struct Attention {
    using F = typename Isa::F;
    static constexpr int lanes = Isa::n_cols;
    static constexpr int few_halves = 128; // largest number of half floats of each key that are copied at once
    // Registers hold the sums of this many vectors of rows with `lanes` / 2 keys each (in score), or of this many rows
    // (in mix).
    static constexpr int score_vectors = Isa::n_cols == 8 ? 3 : 2, mix_rows_at_once = Isa::n_cols == 8 ? 3 : 4;

    template <CacheType type>
    static MOEGGUF_INLINE F load(const char * values, int64_t i) {
        return type == CacheType::f16 ? Isa::load_f16_row((const uint16_t *)values + i)
                                      : Isa::load((const float *)values + i);
    }

    static void f16_to_float(const char * values, int64_t n, float * out) {
        for (int64_t i = 0; i < n; i += lanes) { Isa::store(out + i, load<CacheType::f16>(values, i)); }
    }

    static void q8_0_to_float(const char * values, int64_t n, float * out) {
        constexpr int block_values = 32, block_bytes = 34;
        for (int64_t i = 0; i < n; i += block_values, values += block_bytes) {
            const F d = Isa::broadcast_f16(values);
            for (int j = 0; j < block_values; j += lanes) {
                Isa::store(out + i + j, d * Isa::to_float(Isa::load_i8(values + 2 + j)));
            }
        }
    }

    static bool is_finite(const char * values, int64_t n, CacheType type) {
        F sum = {};
        for (int64_t i = 0; i < n; i += lanes) {
            const F x = type == CacheType::f16 ? load<CacheType::f16>(values, i) : load<CacheType::f32>(values, i);
            sum = Isa::fma(x, F{}, sum); // becomes NaN if an x is not finite
        }
        return Isa::greatest(Isa::abs(sum)) == 0;
    }

    // ---- products of queries and keys ----

    template <int n_vectors, int n_keys>
    static MOEGGUF_INLINE void score_tile(const float * queries, int n_lanes, const float * keys, int64_t n,
                                          float * scores) {
        F sums[n_keys][n_vectors] = {};
        for (int64_t i = 0; i < n; i++, queries += n_lanes) {
            F q[n_vectors];
#pragma GCC unroll 4
            for (int v = 0; v < n_vectors; v++) {
                q[v] = Isa::load(queries + v * lanes);
                __asm__("" : "+v"(q[v])); // keeps the vector in a register; GCC would load it anew for every key
            }
#pragma GCC unroll 16
            for (int k = 0; k < n_keys; k++) {
                const F key = Isa::broadcast(keys[k * n + i]);
#pragma GCC unroll 4
                for (int v = 0; v < n_vectors; v++) { sums[k][v] = Isa::fma(q[v], key, sums[k][v]); }
            }
        }
#pragma GCC unroll 16
        for (int k = 0; k < n_keys; k++) {
#pragma GCC unroll 4
            for (int v = 0; v < n_vectors; v++) { Isa::store(scores + k * n_lanes + v * lanes, sums[k][v]); }
        }
    }

    template <int n_vectors>
    static void score_rows(const float * queries, int n_lanes, const float * keys, int n_keys, int64_t n,
                           float * scores) {
        constexpr int n_tile = n_vectors == 1 ? lanes : lanes / 2;
        for (int k = 0; k < n_keys; k += n_tile) {
            score_tile<n_vectors, n_tile>(queries, n_lanes, keys + k * n, n, scores + k * n_lanes);
        }
    }

    static void score(const float * queries, int n_lanes, int n_rows, const float * keys, int n_keys, int64_t n,
                      float * scores) {
        int row = 0;
        for (; row + score_vectors * lanes <= n_rows; row += score_vectors * lanes) {
            score_rows<score_vectors>(queries + row, n_lanes, keys, n_keys, n, scores + row);
        }
        for (; row < n_rows; row += lanes) { score_rows<1>(queries + row, n_lanes, keys, n_keys, n, scores + row); }
    }

    // Transposes half floats i to i + 7 of 2 * lanes rows: x[j] gets element i + j of the first `lanes` rows, y[j]
    // element i + j of the other rows.
    static MOEGGUF_INLINE void transpose_halves(const uint16_t (*rows)[few_halves], int64_t i, F (&x)[8], F (&y)[8]) {
        typename Isa::I h[8], g[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) { h[j] = Isa::load_parts(rows[j] + i, 8 * few_halves); }
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) { g[j] = Isa::low_16(h[j], h[j + 1]), g[j + 1] = Isa::high_16(h[j], h[j + 1]); }
#pragma GCC unroll 2
        for (int j = 0; j < 8; j += 4) {
            h[j] = Isa::low_32(g[j], g[j + 2]), h[j + 1] = Isa::high_32(g[j], g[j + 2]);
            h[j + 2] = Isa::low_32(g[j + 1], g[j + 3]), h[j + 3] = Isa::high_32(g[j + 1], g[j + 3]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            g[2 * j] = Isa::low_64(h[j], h[j + 4]), g[2 * j + 1] = Isa::high_64(h[j], h[j + 4]);
        }
        alignas(64) uint16_t halves[8][2 * lanes]; // a conversion to float needs no shuffle if it reads from memory
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            Isa::store(halves[j], g[j]);
            x[j] = Isa::load_f16_row(halves[j]), y[j] = Isa::load_f16_row(halves[j] + lanes);
        }
    }

    template <int n_rows>
    static void score_few_rows(const float * queries, int n_lanes, const char * const * keys, int64_t n,
                               const RowsToPrefetch & soon, int soon_row, int n_soon, float * scores) {
        F sums[n_rows][2] = {};
        for (int64_t begin = 0; begin < n; begin += few_halves) {
            // The spacing of rows in a KV cache makes them evict each other from the processor's first-level cache. So
            // parts of the rows are copied next to each other here.
            alignas(64) uint16_t rows[2 * lanes][few_halves];
            const int64_t n_halves = n - begin < few_halves ? n - begin : few_halves;
            for (int k = 0; k < 2 * lanes; k++) { memcpy(rows[k], keys[k] + 2 * begin, 2 * n_halves); }
            for (int64_t i = 0; i < n_halves; i += 8, queries += 8 * n_lanes) {
                // Prefetches later rows to the second-level cache, a few in each step, because with few queries most of
                // the time is spent waiting for memory.
                for (int r = 0; r < n_soon && soon_row < soon.n; r++, soon_row++) {
                    for (int64_t at = 0; at < soon.n_bytes; at += 64) {
                        __builtin_prefetch(soon.rows[soon_row] + at, 0, 2);
                    }
                }
                F x[8], y[8];
                transpose_halves(rows, i, x, y);
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
#pragma GCC unroll 8
                    for (int r = 0; r < n_rows; r++) {
                        const F q = Isa::broadcast(queries[j * n_lanes + r]);
                        sums[r][0] = Isa::fma(q, x[j], sums[r][0]);
                        sums[r][1] = Isa::fma(q, y[j], sums[r][1]);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; r++) {
            Isa::store(scores + r * most_keys, sums[r][0]);
            Isa::store(scores + r * most_keys + lanes, sums[r][1]);
        }
    }

    static void score_few(const float * queries, int n_lanes, int n_rows, const char * const * keys, int n_keys,
                          int64_t n, const RowsToPrefetch & soon, float * scores) {
        const auto score_rows = n_rows == 1   ? score_few_rows<1>
                                : n_rows <= 4 ? score_few_rows<4>
                                              : score_few_rows<few_rows>;
        constexpr int n_tile = 2 * lanes;
        const int n_tiles = (n_keys + n_tile - 1) / n_tile;
        const int n_steps = (int)n / 8, n_soon = (int)((soon.n + n_tiles * n_steps - 1) / (n_tiles * n_steps));
        for (int i = 0; i < n_tiles; i++) {
            score_rows(queries, n_lanes, keys + i * n_tile, n, soon, i * n_steps * n_soon, n_soon, scores + i * n_tile);
        }
    }

    // ---- softmax ----

    // Returns e^x for x <= 0: exactly 1 at 0, and 0 below -87.
    static MOEGGUF_INLINE F exp(F x) {
        const F least = Isa::broadcast(-87.0f), magic = Isa::broadcast(12582912.0f); // 1.5 * 2^23: adding it rounds
        const F in_range = Isa::max(x, least);
        const F shifted = Isa::fma(in_range, Isa::broadcast(1.44269504f), magic), n = shifted - magic;
        F r = Isa::fma(n, Isa::broadcast(-0.693359375f), in_range); // r = x - n * ln 2, with ln 2 in two parts
        r = Isa::fma(n, Isa::broadcast(2.12194440e-4f), r);
        constexpr float taylor[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
        F p = Isa::broadcast(1.0f / 720);
#pragma GCC unroll 6
        for (const float coefficient : taylor) { p = Isa::fma(p, r, Isa::broadcast(coefficient)); }
        return Isa::zero_where_less(Isa::times_power(p, shifted), x, least);
    }

    static MOEGGUF_INLINE F tanh(F x) {
        const F one = Isa::broadcast(1.0f);
        const F e = exp(Isa::abs(x) * Isa::broadcast(-2.0f));
        return Isa::with_sign((one - e) / (one + e), x);
    }

    static MOEGGUF_INLINE F scaled(F score, const AttentionScale & scale) {
        const F s = score * Isa::broadcast(scale.factor);
        return scale.cap == 0 ? s : Isa::broadcast(scale.cap) * tanh(s);
    }

    static void soften(float * scores, const float * bias, int n_lanes, int n_rows, int n_keys,
                       const AttentionScale & scale, const AttentionSums & sums, float * rescale) {
        for (int row = 0; row < n_rows; row += lanes) {
            const F before = Isa::load(sums.max + row);
            F max = before;
            for (int k = 0; k < n_keys; k++) {
                float * at = scores + k * n_lanes + row;
                F s = scaled(Isa::load(at), scale);
                s = bias ? Isa::add_or_masked(s, Isa::load(bias + k * n_lanes + row)) : s;
                Isa::store(at, s);
                max = Isa::max(max, s);
            }
            const F factor = exp(before - max);
            F sum = Isa::load(sums.sum + row) * factor;
            for (int k = 0; k < n_keys; k++) {
                float * at = scores + k * n_lanes + row;
                const F p = exp(Isa::load(at) - max);
                Isa::store(at, p);
                sum += p;
            }
            Isa::store(sums.max + row, max);
            Isa::store(sums.sum + row, sum);
            Isa::store(rescale + row, factor);
        }
    }

    static void soften_few(float * scores, const float * bias, int n_rows, int n_keys, const AttentionScale & scale,
                           const AttentionSums & sums, float * rescale) {
        for (int row = 0; row < n_rows; row++, scores += most_keys) {
            F max = Isa::broadcast(sums.max[row]);
            const F before = max;
            for (int k = 0; k < n_keys; k += lanes) {
                F s = scaled(Isa::load(scores + k), scale);
                s = bias ? Isa::add_or_masked(s, Isa::load(bias + row * most_keys + k)) : s;
                Isa::store(scores + k, s);
                max = Isa::max(max, k + lanes <= n_keys ? s : Isa::first_lanes(s, n_keys - k));
            }
            max = Isa::broadcast(Isa::greatest(max));
            for (int k = 0; k < n_keys; k += lanes) { Isa::store(scores + k, exp(Isa::load(scores + k) - max)); }
            rescale[row] = Isa::first(exp(before - max));
            float sum = sums.sum[row] * rescale[row];
            for (int k = 0; k < n_keys; k++) { sum += scores[k]; }
            sums.max[row] = Isa::first(max);
            sums.sum[row] = sum;
        }
    }

    // ---- sums of values ----

    template <CacheType type, int n_rows, int n_vectors>
    static MOEGGUF_INLINE void mix_tile(const float * p, int key_stride, int row_stride, const char * const * values,
                                        int64_t first, int64_t n, const uint8_t * keys, int n_keys,
                                        const float * rescale, float * out) {
        F sums[n_rows][n_vectors];
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++) {
            const F factor = Isa::broadcast(rescale[r]);
#pragma GCC unroll 8
            for (int v = 0; v < n_vectors; v++) { sums[r][v] = Isa::load(out + r * n + first + v * lanes) * factor; }
        }
        for (int i = 0; i < n_keys; i++) {
            const float * of_key = p + keys[i] * key_stride;
            F weights[n_rows];
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; r++) { weights[r] = Isa::broadcast(of_key[r * row_stride]); }
#pragma GCC unroll 8
            for (int v = 0; v < n_vectors; v++) {
                F x = load<type>(values[keys[i]], first + v * lanes);
                __asm__("" : "+v"(x)); // keeps the vector in a register; GCC would load it anew for every row
#pragma GCC unroll 4
                for (int r = 0; r < n_rows; r++) { sums[r][v] = Isa::fma(weights[r], x, sums[r][v]); }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++) {
#pragma GCC unroll 8
            for (int v = 0; v < n_vectors; v++) { Isa::store(out + r * n + first + v * lanes, sums[r][v]); }
        }
    }

    // Computes n_vectors vectors of each row's result, starting at float `first`. All rows use the same part of the
    // values, which stays in the first-level cache.
    template <CacheType type, int n_vectors>
    static void mix_part(const float * p, int key_stride, int row_stride, int n_rows, const char * const * values,
                         int64_t first, int64_t n, const uint8_t * keys, int n_keys, const float * rescale,
                         float * out) {
        int row = 0;
        for (; row + mix_rows_at_once <= n_rows; row += mix_rows_at_once) {
            mix_tile<type, mix_rows_at_once, n_vectors>(p + row * row_stride, key_stride, row_stride, values, first, n,
                                                        keys, n_keys, rescale + row, out + row * n);
        }
        for (; row < n_rows; row++) {
            mix_tile<type, 1, n_vectors>(p + row * row_stride, key_stride, row_stride, values, first, n, keys, n_keys,
                                         rescale + row, out + row * n);
        }
    }

    template <CacheType type>
    static void mix_all(const float * p, int key_stride, int row_stride, int n_rows, const char * const * values,
                        int64_t n, const uint8_t * keys, int n_keys, const float * rescale, float * out) {
        int64_t i = 0;
        for (; n_rows == 1 && i + 8 * lanes <= n; i += 8 * lanes) { // a single row needs 8 independent sums
            mix_part<type, 8>(p, key_stride, row_stride, n_rows, values, i, n, keys, n_keys, rescale, out);
        }
        for (; i + 4 * lanes <= n; i += 4 * lanes) {
            mix_part<type, 4>(p, key_stride, row_stride, n_rows, values, i, n, keys, n_keys, rescale, out);
        }
        for (; i < n; i += lanes) {
            mix_part<type, 1>(p, key_stride, row_stride, n_rows, values, i, n, keys, n_keys, rescale, out);
        }
    }

    static void mix(const float * p, int key_stride, int row_stride, int n_rows, CacheType type,
                    const char * const * values, int64_t n, const uint8_t * keys, int n_keys, const float * rescale,
                    float * out) {
        const auto mix_values = type == CacheType::f16 ? mix_all<CacheType::f16> : mix_all<CacheType::f32>;
        mix_values(p, key_stride, row_stride, n_rows, values, n, keys, n_keys, rescale, out);
    }

    // ---- sums of parts of the keys ----

    static void merge(const AttentionSums & into, const AttentionSums & part, int n_rows, int64_t n) {
        for (int row = 0; row < n_rows; row++) {
            const F before = Isa::broadcast(into.max[row]), of_part = Isa::broadcast(part.max[row]);
            const F max = Isa::max(before, of_part);
            const F a = exp(before - max), b = exp(of_part - max);
            const auto sum = [a, b](F x, F y) { return Isa::fma(y, b, x * a); };
            for (int64_t i = row * n; i < (row + 1) * n; i += lanes) {
                Isa::store(into.values + i, sum(Isa::load(into.values + i), Isa::load(part.values + i)));
            }
            into.max[row] = Isa::first(max);
            into.sum[row] = Isa::first(sum(Isa::broadcast(into.sum[row]), Isa::broadcast(part.sum[row])));
        }
    }
};

template <class Isa>
constexpr AttentionKernels attention_kernels = {
    Isa::n_cols,
    Isa::see,
    Attention<Isa>::q8_0_to_float,
    Attention<Isa>::f16_to_float,
    Attention<Isa>::is_finite,
    Attention<Isa>::score,
    Attention<Isa>::score_few,
    Attention<Isa>::soften,
    Attention<Isa>::soften_few,
    Attention<Isa>::mix,
    Attention<Isa>::merge,
};

} // namespace
} // namespace moegguf::kernels
