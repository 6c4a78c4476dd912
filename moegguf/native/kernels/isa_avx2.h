// isa_avx2.h: operations on 8 columns of weights at once, with AVX2. A lane is a column; a vector of codes has four
// successive values of each column. isa_avx512.h has operations with bit-identical results. GCC and Clang provide the
// operators + - * / | for vectors.
#pragma once

#include "kernels.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moegguf::kernels {
namespace {

struct Avx2 {
    using OneRow = Avx2;
    static constexpr int n_cols = 8, n_groups = 1, max_rows = 4;
    // true: for many rows, interleaved weights are unpacked into panels, because tiles have few rows
    static constexpr bool unpacks_interleaved = true;
    // 8-bit codes are signed: with unsigned codes, sums would overflow in maddubs
    static constexpr bool signed_codes = true;
    using I = __m256i;
    using F = __m256;

    static F broadcast(float x) { return _mm256_set1_ps(x); }
    static I broadcast(const void * four_bytes) {
        int32_t x;
        memcpy(&x, four_bytes, sizeof(x));
        return _mm256_set1_epi32(x);
    }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
    static void store(float * out, F x, int n) { // stores the first n results
        if (n == 8) {
            _mm256_storeu_ps(out, x);
        } else {
            const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_maskstore_ps(out, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane), x);
        }
    }

    static I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static I high_nibbles(I x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
    static I flip(I x, int mask) { return _mm256_xor_si256(x, _mm256_set1_epi8((char)mask)); }
    static I look_up(I nibbles, const int8_t * table) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), nibbles);
    }
    template <int shift>
    static I add_high_bits(I nibbles, I x, int bits) {
        const I moved = shift <= 4 ? _mm256_slli_epi16(x, 4 - shift) : _mm256_srli_epi16(x, shift - 4);
        return _mm256_or_si256(nibbles, _mm256_and_si256(moved, _mm256_set1_epi8((char)(bits << 4))));
    }

    static void load_line(const uint8_t * const (&groups)[1], int i, I & first, I & last) {
        const F a = _mm256_loadu_ps((const float *)(groups[0] + 64 * i));
        const F b = _mm256_loadu_ps((const float *)(groups[0] + 64 * i + 32));
        first = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8);
        last = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8);
    }

    static F load_halves(const void * const (&groups)[1]) {
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)groups[0]));
    }
    static F half_powers(const uint8_t * const (&groups)[1]) { // 2^(e - 128) for each byte e
        const I e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)groups[0]));
        const I normal = _mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(-1)), 23);
        const I denormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, denormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
    }

    // The following three functions return scales in the form that scaled_sum needs: the same 16 bits twice in each
    // lane.
    static I twice(I x) { return _mm256_or_si256(x, _mm256_slli_epi32(x, 16)); }
    static I scales(const uint8_t * of_columns) {
        return twice(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)of_columns)));
    }
    template <bool>
    static I signed_scales(const uint8_t * const (&groups)[1]) {
        const I x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)groups[0]));
        return twice(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    }
    // Interleaves two arrays with a byte for each column. Each column's lane then holds two 16-bit numbers: one from
    // the first and one from the second sub-block.
    static I pairs(const uint8_t * first, const uint8_t * second) {
        const __m128i a = _mm_loadl_epi64((const __m128i *)first), b = _mm_loadl_epi64((const __m128i *)second);
        return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
    }
    static I add_pairs(I sum, I a, I b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }

    // Returns sum + scale * (w . x) for 16 values of each column. The products are added in two 16-bit sums. These do
    // not overflow, because the offset of the codes is subtracted first. `minus` has n_minus numbers for these 16
    // values, which subtract the offset.
    template <int, int n_minus>
    static I scaled_sum(I sum, const I * w, const int8_t * x, const int32_t * minus, I scale) {
        I part = {};
        if constexpr (n_minus > 0) { part = broadcast(minus); }
        if constexpr (n_minus > 1) { part = _mm256_add_epi16(part, broadcast(minus + 1)); }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w[i], broadcast(x + 4 * i))); }
        return add_pairs(sum, part, scale);
    }

    // Returns sum + scale * (w . x) for signed codes. The pairs of products of each vector are added in 32 bits:
    // sums over all vectors do not fit into 16 bits.
    template <int n_vectors, int>
    static I wide_sum(I sum, const I * w, const int8_t * x, const int32_t *, I scale) {
#pragma GCC unroll 8
        for (int i = 0; i < n_vectors; i++) { sum = add_pairs(sum, signed_pairs(w[i], broadcast(x + 4 * i)), scale); }
        return sum;
    }
    static I signed_pairs(I w, I x) { return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)); }

    // Returns w . x for 4 * n_vectors values of each column, plus `minus` for unsigned codes. n_dots: number of vectors
    // whose products together fit into 16 bits. The signs of signed codes are moved to x, because maddubs takes
    // unsigned codes.
    template <int n_vectors, int n_dots, bool is_signed>
    static I sum_of(const I * w, const int8_t * x, const int32_t * minus) {
        I sum = is_signed ? I{} : broadcast(minus);
#pragma GCC unroll 8
        for (int i = 0; i < n_vectors; i += n_dots) {
            I part = {};
#pragma GCC unroll 8
            for (int j = i; j < i + n_dots; j++) {
                const I four = broadcast(x + 4 * j);
                const I products = is_signed ? signed_pairs(w[j], four) : _mm256_maddubs_epi16(w[j], four);
                part = _mm256_add_epi16(part, products);
            }
            sum = add_pairs(sum, part, _mm256_set1_epi16(1));
        }
        return sum;
    }

    // Returns the sum of each group of 8 values, times -offset. `pairs` has 16 sums of two successive values. Each
    // result is split into two 16-bit numbers: one for pairs 0 and 2, and one for pairs 1 and 3.
    static __m256i minus_8(__m256i pairs, int offset) {
        const __m256i fours = _mm256_mullo_epi16(pairs, _mm256_set1_epi16((short)-offset));
        return _mm256_add_epi16(fours, _mm256_shuffle_epi32(fours, 0xb1));
    }
    // Returns the sum of each group of 16 values, times -offset. `pairs` has 16 sums of two successive values. Each
    // result is split into two 16-bit numbers: one for even pairs and one for odd pairs.
    static __m256i minus_16(__m256i pairs, int offset) {
        const __m256i eights = minus_8(pairs, offset);
        return _mm256_add_epi16(eights, _mm256_shuffle_epi32(eights, 0x4e));
    }

    // ---- for plain.h ----

    static I load_codes(const uint8_t * x) { return _mm256_loadu_si256((const I *)x); }
    static void store_codes(uint8_t * out, I x) { _mm256_storeu_si256((I *)out, x); }

    // Loads 16 bytes of column i into the lower half of the vector, and 16 bytes of column i + 4 into the upper half.
    template <class At>
    static MOEGGUF_INLINE I load_lanes(At at, int i) {
        const auto part = [at](int column) { return _mm_loadu_si128((const __m128i *)at(column)); };
        return _mm256_inserti128_si256(_mm256_castsi128_si256(part(i)), part(i + 4), 1);
    }
    static F gather_halves(const uint8_t * const * columns, int64_t at) {
        const auto half = [columns, at](int i) {
            int16_t x;
            memcpy(&x, columns[i] + at, sizeof(x));
            return x;
        };
        return _mm256_cvtph_ps(_mm_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7)));
    }
    // Returns half of byte at + i of each column, which is an unsigned float with 4 bits of exponent and 3 bits of
    // mantissa.
    static F gather_ue4m3(const uint8_t * const * columns, int64_t at, int i) {
        const auto four = [columns, at](int c) {
            int32_t x;
            memcpy(&x, columns[c] + at, sizeof(x));
            return x;
        };
        const I fours = _mm256_setr_epi32(four(0), four(1), four(2), four(3), four(4), four(5), four(6), four(7));
        const I x = _mm256_and_si256(_mm256_srli_epi32(fours, 8 * i), _mm256_set1_epi32(0xff));
        const I nan = _mm256_set1_epi32(0x7f), bits = _mm256_andnot_si256(_mm256_cmpeq_epi32(x, nan), x);
        const F small = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(bits, nan), 20));
        return _mm256_mul_ps(small, _mm256_set1_ps(0x1p119f)); // the exponent's bias is 7 instead of 127
    }
    // Returns byte i of each lane as a scale, in the form that scaled_sum and wide_sum need.
    template <bool>
    static I scale_of(I x, int i) {
        const I byte = _mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * i), 24);
        return twice(_mm256_and_si256(byte, _mm256_set1_epi32(0xffff)));
    }
    static I even_bytes(I x) { return _mm256_and_si256(x, _mm256_set1_epi16(0xff)); }
    static I odd_bytes(I x) { return _mm256_srli_epi16(x, 8); }

    // Returns the sum of the four products in each lane.
    template <bool is_signed>
    static I fours(I w, I x) {
        return _mm256_madd_epi16(is_signed ? signed_pairs(w, x) : _mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
    }
    // Returns a byte for each bit: 0, or `value` if the bit is set.
    static __m256i spread_bits(uint32_t bits, char value) {
        const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
        const __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)bits), byte), bit);
        return _mm256_and_si256(_mm256_cmpeq_epi8(found, bit), _mm256_set1_epi8(value));
    }

    // Returns x + sizes for each byte, or x - sizes if its bit in `minus` is set.
    static __m256i plus_or_minus(__m256i x, __m256i sizes, uint32_t minus) {
        const __m256i mask = spread_bits(minus, (char)0xff);
        return _mm256_add_epi8(x, _mm256_sub_epi8(_mm256_xor_si256(sizes, mask), mask));
    }

    // ---- for attention.h ----

    static F load(const float * x) { return _mm256_loadu_ps(x); }
    static void store(float * out, F x) { _mm256_storeu_ps(out, x); }
    static F load_f16_row(const uint16_t * x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }
    static F broadcast_f16(const char * x) { return _mm256_set1_ps(_cvtsh_ss((uint8_t)x[0] | (uint8_t)x[1] << 8)); }
    static I load_i8(const char * x) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
    static F with_sign(F size, F x) { return _mm256_or_ps(size, _mm256_and_ps(_mm256_set1_ps(-0.0f), x)); }
    static F times_power(F x, F shifted) {
        return _mm256_castsi256_ps(
            _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
    }
    static F zero_where_less(F x, F a, F b) { return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), x); }
    static F add_or_masked(F x, F bias) {
        return _mm256_blendv_ps(_mm256_add_ps(x, bias), bias,
                                _mm256_cmp_ps(bias, _mm256_set1_ps(-__builtin_inff()), _CMP_EQ_OQ));
    }
    static F first_lanes(F x, int n) {
        const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_blendv_ps(_mm256_set1_ps(-3e38f), x,
                                _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)));
    }
    static float first(F x) { return _mm256_cvtss_f32(x); }
    static float greatest(F x) {
        __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        most = _mm_max_ps(most, _mm_movehl_ps(most, most));
        return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
    }
    static uint32_t bits(I a, I b) { // returns a bit for each 16-bit lane of a, then of b
        return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8));
    }
    static SeenKeys see(const uint16_t * mask) {
        const I a = _mm256_loadu_si256((const I *)mask), b = _mm256_loadu_si256((const I *)mask + 1);
        const I masked = _mm256_set1_epi16((short)0xfc00);
        const uint32_t seen = ~bits(_mm256_cmpeq_epi16(a, masked), _mm256_cmpeq_epi16(b, masked));
        return {seen, seen & ~bits(_mm256_cmpeq_epi16(a, I{}), _mm256_cmpeq_epi16(b, I{}))};
    }
    // Loads 16 bytes of each of two rows, which begin `stride` elements apart.
    static I load_parts(const uint16_t * row, int64_t stride) {
        const auto part = [row, stride](int i) { return _mm_load_si128((const __m128i *)(row + i * stride)); };
        return _mm256_inserti128_si256(_mm256_castsi128_si256(part(0)), part(1), 1);
    }
    static I low_16(I a, I b) { return _mm256_unpacklo_epi16(a, b); }
    static I high_16(I a, I b) { return _mm256_unpackhi_epi16(a, b); }
    static I low_32(I a, I b) { return _mm256_unpacklo_epi32(a, b); }
    static I high_32(I a, I b) { return _mm256_unpackhi_epi32(a, b); }
    static I low_64(I a, I b) { return _mm256_unpacklo_epi64(a, b); }
    static I high_64(I a, I b) { return _mm256_unpackhi_epi64(a, b); }
    static void store(uint16_t * out, I x) { _mm256_store_si256((I *)out, x); }

    // ---- 16 lanes of floats, for floats in tile.h ----

    static constexpr int float_cols = 2, float_rows = 2;
    struct Lanes {
        __m256 low, high;
    };
    static Lanes fma_lanes(Lanes a, Lanes b, Lanes c) {
        return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
    }
    static Lanes load_f32(const float * x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
    static Lanes load_f16(const uint16_t * x) {
        const auto * from = (const __m128i *)x;
        return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
    }
    static __m256 wide(const __m128i * x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(x)), 16));
    }
    static Lanes load_bf16(const uint16_t * x) { return {wide((const __m128i *)x), wide((const __m128i *)x + 1)}; }
    static __m256 fold(Lanes x) { return _mm256_add_ps(x.low, x.high); }
};

} // namespace
} // namespace moegguf::kernels
