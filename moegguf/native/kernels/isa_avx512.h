// isa_avx512.h: operations on 16 columns of weights at once, or on 8, with AVX-512 and VNNI. A lane is a column; a
// vector of codes has four successive values of each column. GCC and Clang provide the operators + - * / | for vectors.
#pragma once

#include "isa_avx2.h"

namespace moegguf::kernels {
namespace {

struct Columns16 {
    static constexpr int n_cols = 16, n_groups = 2, max_rows = 16;
    // false: interleaved weights are unpacked for each tile of up to 16 rows
    static constexpr bool unpacks_interleaved = false;
    using I = __m512i;
    using F = __m512;

    static F broadcast(float x) { return _mm512_set1_ps(x); }
    static I broadcast(const void * four_bytes) {
        int32_t x;
        memcpy(&x, four_bytes, sizeof(x));
        return _mm512_set1_epi32(x);
    }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }

    // Stores the first n results.
    static void store(float * out, F x, int n) { _mm512_mask_storeu_ps(out, (__mmask16)((1 << n) - 1), x); }

    static I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static I high_nibbles(I x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
    static I flip(I x, int mask) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)mask)); }
    static I look_up(I nibbles, const int8_t * table) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), nibbles);
    }
    // Adds one or two bits of each byte of x, starting at bit `shift`, to the nibbles, as bits 4 and 5. `bits` is 1 for
    // one bit, and 3 for two bits.
    template <int shift>
    static I add_high_bits(I nibbles, I x, int bits) {
        const I moved = shift <= 4 ? _mm512_slli_epi16(x, 4 - shift) : _mm512_srli_epi16(x, shift - 4);
        constexpr int a_or_b_and_c = 0xf8;
        return _mm512_ternarylogic_epi32(nibbles, moved, _mm512_set1_epi8((char)(bits << 4)), a_or_b_and_c);
    }

    // Loads line i of two groups of 8 interleaved columns. A line has 8 bytes of each column: `first` gets the first
    // four, `last` the last four.
    static void load_line(const uint8_t * const (&groups)[2], int i, I & first, I & last) {
        const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const I odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        const I a = _mm512_loadu_si512(groups[0] + 64 * i), b = _mm512_loadu_si512(groups[1] + 64 * i);
        first = _mm512_permutex2var_epi32(a, even, b);
        last = _mm512_permutex2var_epi32(a, odd, b);
    }

    static F load_halves(const void * const (&groups)[2]) {
        const __m128i a = _mm_loadu_si128((const __m128i *)groups[0]), b = _mm_loadu_si128((const __m128i *)groups[1]);
        return _mm512_cvtph_ps(_mm256_set_m128i(b, a));
    }
    static F half_powers(const uint8_t * const (&groups)[2]) { // 2^(e - 128) for each byte e
        const I e = _mm512_cvtepu8_epi32(_mm_set_epi64x(load_8(groups[1]), load_8(groups[0])));
        const I normal = _mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(-1)), 23);
        const __mmask16 small = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
        return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x00200000), e));
    }
    static int64_t load_8(const void * from) {
        int64_t x;
        memcpy(&x, from, sizeof(x));
        return x;
    }

    // The following two functions return scales in the form that scaled_sum needs: in the lower 16 bits of each lane,
    // with zeros above.
    static I scales(const uint8_t * of_columns) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)of_columns));
    }
    template <bool>
    static I signed_scales(const uint8_t * const (&groups)[2]) {
        const __m128i x = _mm_set_epi64x(load_8(groups[1]), load_8(groups[0]));
        return _mm512_and_si512(_mm512_cvtepi8_epi32(x), _mm512_set1_epi32(0xffff));
    }
    // Interleaves two arrays with a byte for each column. Each column's lane then holds two 16-bit numbers: one from
    // the first and one from the second sub-block.
    static I pairs(const uint8_t * first, const uint8_t * second) {
        const __m128i a = _mm_loadu_si128((const __m128i *)first), b = _mm_loadu_si128((const __m128i *)second);
        return _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
    }
    static I add_pairs(I sum, I a, I b) { return _mm512_dpwssd_epi32(sum, a, b); }
    static I add_fours(I sum, I a, I b) { return _mm512_dpbusd_epi32(sum, a, b); }
    static I add(I a, I b) { return _mm512_add_epi32(a, b); }
    static I multiply(I a, I b) { return _mm512_mullo_epi32(a, b); }

    // ---- for plain.h ----

    static I load_codes(const uint8_t * x) { return _mm512_loadu_si512(x); }
    static void store_codes(uint8_t * out, I x) { _mm512_storeu_si512(out, x); }
    template <class At>
    static MOEGGUF_INLINE I load_lanes(At at, int i) {
        const auto part = [at](int column) { return _mm_loadu_si128((const __m128i *)at(column)); };
        const I x = _mm512_inserti32x4(_mm512_castsi128_si512(part(i)), part(i + 4), 1);
        return _mm512_inserti32x4(_mm512_inserti32x4(x, part(i + 8), 2), part(i + 12), 3);
    }
    static F gather_halves(const uint8_t * const * columns, int64_t at) {
        const __m256 a = Avx2::gather_halves(columns, at), b = Avx2::gather_halves(columns + 8, at);
        return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
    }
    static F gather_ue4m3(const uint8_t * const * columns, int64_t at, int i) {
        const __m256 a = Avx2::gather_ue4m3(columns, at, i), b = Avx2::gather_ue4m3(columns + 8, at, i);
        return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
    }
    template <bool is_wide>
    static I scale_of(I x, int i) {
        const I byte = _mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * i), 24);
        return is_wide ? byte : _mm512_and_si512(byte, _mm512_set1_epi32(0xffff));
    }
    static I even_bytes(I x) { return _mm512_and_si512(x, _mm512_set1_epi16(0xff)); }
    static I odd_bytes(I x) { return _mm512_srli_epi16(x, 8); }
    static __m256i spread_bits(uint32_t bits, char value) { return _mm256_maskz_set1_epi8(bits, value); }
    static __m256i plus_or_minus(__m256i x, __m256i sizes, uint32_t minus) {
        return _mm256_mask_sub_epi8(_mm256_add_epi8(x, sizes), minus, x, sizes);
    }

    // ---- for attention.h ----

    static F load(const float * x) { return _mm512_loadu_ps(x); }
    static void store(float * out, F x) { _mm512_storeu_ps(out, x); }
    static F load_f16_row(const uint16_t * x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
    static F broadcast_f16(const char * x) { return _mm512_set1_ps(_cvtsh_ss((uint8_t)x[0] | (uint8_t)x[1] << 8)); }
    static I load_i8(const char * x) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F abs(F x) { return _mm512_abs_ps(x); }
    static F with_sign(F size, F x) { return _mm512_or_ps(size, _mm512_and_ps(_mm512_set1_ps(-0.0f), x)); }
    static F times_power(F x, F shifted) {
        return _mm512_castsi512_ps(
            _mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
    }
    static F zero_where_less(F x, F a, F b) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x); }
    static F add_or_masked(F x, F bias) {
        const __mmask16 masked = _mm512_cmp_ps_mask(bias, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ);
        return _mm512_mask_mov_ps(_mm512_add_ps(x, bias), masked, bias);
    }
    static F first_lanes(F x, int n) { return _mm512_mask_mov_ps(_mm512_set1_ps(-3e38f), (1 << n) - 1, x); }
    static float first(F x) { return _mm512_cvtss_f32(x); }
    static float greatest(F x) { return _mm512_reduce_max_ps(x); }
    static SeenKeys see(const uint16_t * mask) {
        const I m = _mm512_loadu_si512(mask);
        const uint32_t seen = _mm512_cmpneq_epi16_mask(m, _mm512_set1_epi16((short)0xfc00));
        return {seen, seen & _mm512_test_epi16_mask(m, m)};
    }
    // Loads 16 bytes of each of four rows, which begin `stride` elements apart.
    static MOEGGUF_INLINE I load_parts(const uint16_t * row, int64_t stride) {
        const auto part = [row, stride](int i) { return _mm_load_si128((const __m128i *)(row + i * stride)); };
        const I x = _mm512_inserti32x4(_mm512_castsi128_si512(part(0)), part(1), 1);
        return _mm512_inserti32x4(_mm512_inserti32x4(x, part(2), 2), part(3), 3);
    }
    static I low_16(I a, I b) { return _mm512_unpacklo_epi16(a, b); }
    static I high_16(I a, I b) { return _mm512_unpackhi_epi16(a, b); }
    static I low_32(I a, I b) { return _mm512_unpacklo_epi32(a, b); }
    static I high_32(I a, I b) { return _mm512_unpackhi_epi32(a, b); }
    static I low_64(I a, I b) { return _mm512_unpacklo_epi64(a, b); }
    static I high_64(I a, I b) { return _mm512_unpackhi_epi64(a, b); }
    static void store(uint16_t * out, I x) { _mm512_store_si512(out, x); }

    // ---- 16 lanes of floats, for floats in tile.h ----

    static constexpr int float_cols = 4, float_rows = 4;
    using Lanes = __m512;
    static Lanes fma_lanes(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
    static Lanes load_f32(const float * x) { return _mm512_loadu_ps(x); }
    static Lanes load_f16(const uint16_t * x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
    static Lanes load_bf16(const uint16_t * x) {
        const I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static __m256 fold(Lanes x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
};

// Operations on 8 columns: AVX2, but with VNNI's instructions for sums of products, and with scales in the form that
// Vnni::scaled_sum needs.
struct Columns8 : Avx2 {
    static void load_line(const uint8_t * const (&groups)[1], int i, I & first, I & last) {
        const I even = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), odd = _mm256_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15);
        const auto * line = (const I *)(groups[0] + 64 * i);
        const I a = _mm256_loadu_si256(line), b = _mm256_loadu_si256(line + 1);
        first = _mm256_permutex2var_epi32(a, even, b);
        last = _mm256_permutex2var_epi32(a, odd, b);
    }
    static I scales(const uint8_t * of_columns) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)of_columns));
    }
    template <bool>
    static I signed_scales(const uint8_t * const (&groups)[1]) { // returns scales in the form that wide_sum needs
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)groups[0]));
    }
    static I add_pairs(I sum, I a, I b) { return _mm256_dpwssd_epi32(sum, a, b); }
    static I add_fours(I sum, I a, I b) { return _mm256_dpbusd_epi32(sum, a, b); }
    static I add(I a, I b) { return _mm256_add_epi32(a, b); }
    static I multiply(I a, I b) { return _mm256_mullo_epi32(a, b); }
    template <bool is_signed>
    static I fours(I w, I x) { // signed codes use AVX2: memory, not computation, limits the speed
        return is_signed ? Avx2::fours<true>(w, x) : add_fours(I{}, w, x);
    }
    static __m256i spread_bits(uint32_t bits, char value) { return _mm256_maskz_set1_epi8(bits, value); }
    static __m256i plus_or_minus(__m256i x, __m256i sizes, uint32_t minus) {
        return _mm256_mask_sub_epi8(_mm256_add_epi8(x, sizes), minus, x, sizes);
    }
};

template <class Width>
struct Vnni : Width {
    static constexpr bool signed_codes = false; // 8-bit codes are multiplied as unsigned ones, with an offset
    using I = typename Width::I;

    // Returns sum + scale * (w . x) for 16 values of each column, exactly. Partial sums of 4 * n_dots products fit into
    // 16 bits, and dpwssd multiplies them by the scale.
    template <int n_dots, int n_minus>
    static I scaled_sum(I sum, const I * w, const int8_t * x, const int32_t * minus, I scale) {
        static_assert(n_minus == 0 || n_dots * n_minus == 4);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i += n_dots) {
            I part = n_minus > 0 ? Width::broadcast(minus + i / n_dots) : I{};
#pragma GCC unroll 4
            for (int j = i; j < i + n_dots; j++) { part = Width::add_fours(part, w[j], Width::broadcast(x + 4 * j)); }
            sum = Width::add_pairs(sum, part, scale);
        }
        return sum;
    }

    // Returns sum + w . x. With a single activation row, two chains of additions take less time than one, because each
    // addition waits for the one before it.
    template <int n_vectors>
    static I add_products(I sum, const I * w, const int8_t * x) {
        constexpr int n_chains = Width::n_cols == 8 ? 2 : 1;
        I chains[2] = {sum};
#pragma GCC unroll 8
        for (int i = 0; i < n_vectors; i++) {
            I & chain = chains[i % n_chains];
            chain = Width::add_fours(chain, w[i], Width::broadcast(x + 4 * i));
        }
        return n_chains > 1 ? Width::add(chains[0], chains[1]) : chains[0];
    }

    // Returns sum + scale * (w . x) for products whose partial sums do not fit into 16 bits.
    template <int n_vectors, int n_minus>
    static I wide_sum(I sum, const I * w, const int8_t * x, const int32_t * minus, I scale) {
        I part = {};
        if constexpr (n_minus > 0) { part = Width::broadcast(minus); }
        if constexpr (n_minus > 1) { part = Width::add(part, Width::broadcast(minus + 1)); }
        return Width::add(sum, Width::multiply(add_products<n_vectors>(part, w, x), scale));
    }

    // Returns w . x for 4 * n_vectors values of each column, minus the offset times the sum of x.
    template <int n_vectors, int, bool>
    static I sum_of(const I * w, const int8_t * x, const int32_t * minus) {
        return add_products<n_vectors>(Width::broadcast(minus), w, x);
    }

    // Returns the sum of each group of 8 values, times -offset, as a 32-bit number. `pairs` has 16 sums of two
    // successive values.
    static __m256i minus_8(__m256i pairs, int offset) {
        const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16((short)-offset));
        return _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xb1));
    }
    static __m256i minus_16(__m256i pairs, int offset) {
        const __m256i eights = minus_8(pairs, offset);
        return _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
    }
};

struct Avx512 : Vnni<Columns16> {
    using OneRow = Vnni<Columns8>; // 8 columns: one stream of weights is read faster than two
};

} // namespace
} // namespace moegguf::kernels
