// plain_types.h: unpacks each weight type that is stored row by row, as in a file. plain.h explains how to add a type.
#pragma once

#include "isa_avx2.h"
#include "types.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moegguf::kernels {

// ---- activation rows ----

// An activation block: 32 values with a scale, for weights with minima.
struct RowSum {
    int8_t qs[32];
    float sum, d; // sum: sum of the values, times d
};

// An activation block: 256 values with a scale, for weights with an integer scale for every 16 or 32 values.
struct RowPlain {
    int8_t qs[256];
    // Sum of each group of 16 values: first the even groups, then the odd groups. If a scale covers 32 values, each
    // even group has the sum of 32 values, and the sums of the odd groups are 0.
    int16_t sums[16];
    // Sum of each group of 16 values, times -T::offset, in the form of Isa::minus_16 (AVX2: two 16-bit numbers). If a
    // scale covers 32 values, each even element is for a group of 32 values, and the odd elements are not used.
    int32_t minus[16];
    float d;
};

namespace {

inline float half_at(const uint8_t * from) {
    uint16_t x;
    memcpy(&x, from, sizeof(x));
    return _cvtsh_ss(x);
}

inline __m128i load_16(const uint8_t * from) { return _mm_loadu_si128((const __m128i *)from); }
inline __m256i load_32(const uint8_t * from) { return _mm256_loadu_si256((const __m256i *)from); }

// ---- codes ----

// Codes from -127 to 127. With AVX2, they are multiplied as signed codes. With VNNI, which adds products in 32 bits,
// they are multiplied as unsigned codes with the offset 128.
struct Signed {
    static constexpr bool has_sign = true;
    static constexpr int n_dots = 1, zero = 0;
    template <class>
    static constexpr bool is_wide = true;
    template <class Isa>
    static constexpr bool is_signed = Isa::signed_codes;
    template <class Isa>
    static constexpr int offset = is_signed<Isa> ? 0 : 128;
    template <class Isa>
    static typename Isa::I to_multiply(typename Isa::I x) {
        return is_signed<Isa> ? x : Isa::flip(x, 0x80);
    }
};

// Codes that are never negative. The code `zero_` stands for the value 0. fit: number of vectors whose products can be
// added in 16 bits.
template <int zero_, int fit>
struct Unsigned {
    static constexpr bool has_sign = false;
    static constexpr int n_dots = fit, zero = zero_;
    template <class Isa>
    static constexpr bool is_wide = !Isa::signed_codes && fit < 4; // sums of 16 products may need 32 bits
    template <class Isa>
    static constexpr bool is_signed = false;
    template <class Isa>
    static constexpr int offset = zero_;
    template <class Isa>
    static typename Isa::I to_multiply(typename Isa::I x) {
        return x;
    }
};

// ---- 32 values with a scale ----

// The base of types with n_parts_ * 32 values in a block, which begins with its scale: a half float, unless the type
// has its own scales(). If `adds_min`, another half float follows, which is added to every value. The codes of a part
// have part_bytes_.
template <class Codes, int n_parts_ = 1, int part_bytes_ = 0>
struct Scaled : Codes {
    static constexpr int n_values = 32, n_interleaved = 1, n_scales = 1, n_parts = n_parts_, part_bytes = part_bytes_;
    static constexpr bool has_mins = false, adds_min = false;
    using Row = Row32;

    // Returns a scale of the block at offset `at` in each column. The last argument is the index of the scale in the
    // block, which types with one scale for each block ignore.
    template <class Isa>
    static typename Isa::F scales(const uint8_t * const * columns, int64_t at, int) {
        return Isa::gather_halves(columns, at);
    }
};

template <class Codes>
struct ScaledWithMin : Scaled<Codes> {
    static constexpr bool adds_min = true;
    using Row = RowSum;
};

// Returns the 16 low nibbles of 16 bytes, then the 16 high nibbles.
inline __m256i nibbles_of(const uint8_t * from) {
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i moved = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(load_16(from)), shifts);
    return _mm256_and_si256(moved, _mm256_set1_epi8(15));
}

template <class Isa>
__m256i five_bits(const uint8_t * high, const uint8_t * nibbles) {
    uint32_t bits;
    memcpy(&bits, high, sizeof(bits));
    return _mm256_or_si256(nibbles_of(nibbles), Isa::spread_bits(bits, 16));
}

struct PlainQ8_0 : Scaled<Signed> {
    static constexpr int bytes = 34;
    template <class Isa>
    static __m256i codes(const uint8_t * block) {
        return load_32(block + 2);
    }
};

struct PlainQ5_0 : Scaled<Unsigned<16, 4>> {
    static constexpr int bytes = 22;
    template <class Isa>
    static __m256i codes(const uint8_t * block) {
        return five_bits<Isa>(block + 2, block + 6);
    }
};

struct PlainQ5_1 : ScaledWithMin<Unsigned<0, 4>> {
    static constexpr int bytes = 24;
    template <class Isa>
    static __m256i codes(const uint8_t * block) {
        return five_bits<Isa>(block + 4, block + 8);
    }
};

struct PlainQ4_1 : ScaledWithMin<Unsigned<0, 8>> {
    static constexpr int bytes = 20;
    template <class Isa>
    static __m256i codes(const uint8_t * block) {
        return nibbles_of(block + 4);
    }
};

struct PlainQ4_0 : Scaled<Unsigned<8, 8>> {
    static constexpr int bytes = 18;
    template <class Isa>
    static __m256i codes(const uint8_t * block) {
        return nibbles_of(block + 2);
    }
};

struct PlainIq4Nl : Scaled<Signed> {
    static constexpr int bytes = 18;
    template <class Isa>
    static __m256i codes(const uint8_t * block) {
        return Avx2::look_up(nibbles_of(block + 2), iq4_nl_values);
    }
};

struct PlainMxfp4 : Scaled<Unsigned<12, 4>> {
    static constexpr int bytes = 17;
    template <class Isa>
    static __m256i codes(const uint8_t * block) {
        return Avx2::look_up(nibbles_of(block + 1), mxfp4_values);
    }
    template <class Isa>
    static typename Isa::F scales(const uint8_t * const * columns, int64_t at, int) {
        uint8_t powers[Isa::n_cols];
        for (int i = 0; i < Isa::n_cols; i++) { powers[i] = columns[i][at]; }
        const uint8_t * groups[Isa::n_groups];
        for (int i = 0; i < Isa::n_groups; i++) { groups[i] = powers + 8 * i; }
        return Isa::half_powers(groups);
    }
};

// Q1_0: a bit for each value. The values are 1 and -1.
struct PlainQ1_0 : Scaled<Unsigned<1, 8>, 4, 4> {
    static constexpr int bytes = 18;
    template <class Isa>
    static __m256i codes(const uint8_t * part) {
        uint32_t bits;
        memcpy(&bits, part + 2, sizeof(bits));
        return Isa::spread_bits(bits, 2);
    }
};

// Q2_0: each byte has the 2-bit codes of 4 successive values.
struct PlainQ2_0 : Scaled<Unsigned<1, 8>, 2, 8> {
    static constexpr int bytes = 18;
    template <class Isa>
    static __m256i codes(const uint8_t * part) {
        const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(part + 2)));
        const __m256i two = _mm256_or_si256(x, _mm256_slli_epi32(x, 12));
        return _mm256_and_si256(_mm256_or_si256(two, _mm256_slli_epi32(two, 6)), _mm256_set1_epi8(3));
    }
};

// NVFP4: a block of 64 values begins with 4 scales, one for every 16 values: unsigned floats with 4 bits of exponent
// and 3 bits of mantissa. The low nibbles of 8 bytes are the first 8 of 16 values.
struct PlainNvfp4 : Scaled<Unsigned<12, 4>, 2, 16> {
    static constexpr int bytes = 36, n_scales = 2;
    using Row = Row16;

    template <class Isa>
    static __m256i codes(const uint8_t * part) {
        const __m128i x = load_16(part + 4), low = _mm_set1_epi8(15), high = _mm_and_si128(_mm_srli_epi16(x, 4), low);
        const __m128i nibbles = _mm_and_si128(x, low);
        const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi64(nibbles, high), _mm_unpacklo_epi64(nibbles, high));
        return Avx2::look_up(both, mxfp4_values);
    }
    template <class Isa>
    static typename Isa::F scales(const uint8_t * const * columns, int64_t at, int i) {
        return Isa::gather_ue4m3(columns, at, i);
    }
};

// ---- 256 values with integer scales ----

// The base of types with blocks of 256 values. scale_values_: number of values per scale: 16 or 32.
template <class Codes, int scale_values_ = 16>
struct Superblock : Codes {
    struct Prepared {}; // empty in this base; types derived from Grid (grids.h) find indices first, and then codes
    static constexpr int n_values = 256, n_interleaved = 1, n_parts = 1, scale_values = scale_values_;
    static constexpr int n_steps = 8, n_codes = 32 / scale_values, n_vectors = scale_values / 4;
    static constexpr int n_pairs = 128 / scale_values, n_minus = Codes::has_sign || Codes::zero != 0;
    static constexpr bool has_mins = false, has_scales = true;
    using Row = RowPlain;

    static constexpr int first_value(int step, int i) { return 32 * step + 16 * i; }
};

template <class Codes, int scale_values_ = 16>
struct SuperblockWithMins : Superblock<Codes, scale_values_> {
    static constexpr bool has_mins = true;
};

// An unpacked block of one column. Scales and minima are signed bytes, one for every 16 values.
struct Unpacked {
    __m256i codes[8];
    __m128i scales, mins;
    float d, min; // factor of the scales, and factor of the minima
};

// Unpacks 2-bit codes. Each half of 128 values has 32 bytes: bits 0 and 1 are the first 32 values, bits 2 and 3 the
// next 32, and so on.
inline void two_bits(const uint8_t * from, __m256i * out) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __m256i x = load_32(from + 32 * half);
#pragma GCC unroll 8
        for (int i = 0; i < 4; i++) {
            out[4 * half + i] = _mm256_and_si256(_mm256_srli_epi16(x, 2 * i), _mm256_set1_epi8(3));
        }
    }
}

struct PlainQ2K : SuperblockWithMins<Unsigned<0, 4>> {
    static constexpr int bytes = 84;
    template <class Isa>
    static void unpack(const uint8_t * block, Unpacked & out) {
        two_bits(block + 16, out.codes);
        const __m128i both = load_16(block), low = _mm_set1_epi8(15);
        out.scales = _mm_and_si128(both, low);
        out.mins = _mm_and_si128(_mm_srli_epi16(both, 4), low);
        out.d = half_at(block + 80);
        out.min = half_at(block + 82);
    }
};

// The base of types with the values -1, 0 and 1, and without scales for parts of a block.
struct Ternary : Superblock<Unsigned<1, 4>> {
    static constexpr bool has_scales = false;
};

struct PlainTq2_0 : Ternary {
    static constexpr int bytes = 66;
    template <class Isa>
    static void unpack(const uint8_t * block, Unpacked & out) {
        two_bits(block, out.codes);
        out.scales = _mm_set1_epi8(1);
        out.d = half_at(block + 64);
    }
};

// TQ1_0: a byte has up to 5 digits to base 3, the first one in the byte's highest part. The i-th digit of each byte
// comes before the digits i + 1 of all bytes, separately for the first 32 bytes, the next 16 and the last 4.
struct PlainTq1_0 : Ternary {
    static constexpr int bytes = 54;
    template <class Isa>
    static void unpack(const uint8_t * block, Unpacked & out) {
        const auto powers = [](int a, int b) { return _mm256_set_m128i(_mm_set1_epi8(b), _mm_set1_epi8(a)); };
        const __m256i first = load_32(block), next = _mm256_broadcastsi128_si256(load_16(block + 32));
        int32_t last;
        memcpy(&last, block + 48, sizeof(last));
        const int of_digit[] = {1, 3, 9, 27, 81};
#pragma GCC unroll 8
        for (int i = 0; i < 5; i++) { out.codes[i] = digits(first, powers(of_digit[i], of_digit[i])); }
        out.codes[5] = digits(next, powers(1, 3));
        out.codes[6] = digits(next, powers(9, 27));
        const __m128i of_last = _mm_setr_epi8(1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27);
        out.codes[7] = digits(_mm256_set_m128i(_mm_set1_epi32(last), _mm256_castsi256_si128(next)),
                              _mm256_set_m128i(of_last, _mm_set1_epi8(81)));
        out.scales = _mm_set1_epi8(1);
        out.d = half_at(block + 52);
    }

  private:
    // Returns the highest digit to base 3 of each byte times its power, which is the power of 3 that moves a digit to
    // the byte's highest part.
    static __m256i digits(__m256i x, __m256i powers) {
        const __m256i zero = {}, three = _mm256_set1_epi16(3);
        // The upper byte of each 16-bit number is used. Its product keeps only the 8 lowest bits.
        const __m256i a = _mm256_mullo_epi16(_mm256_unpacklo_epi8(zero, x), _mm256_unpacklo_epi8(powers, zero));
        const __m256i b = _mm256_mullo_epi16(_mm256_unpackhi_epi8(zero, x), _mm256_unpackhi_epi8(powers, zero));
        return _mm256_packus_epi16(_mm256_mulhi_epu16(a, three), _mm256_mulhi_epu16(b, three));
    }
};

// Q3_K: 2-bit codes, and the third bit of each value in 32 more bytes: bit 0 belongs to the first 32 values, and so on.
// Scales have 6 bits: 4 in the nibbles of 8 bytes, and 2 in 4 bytes. Each scale is stored with an offset of 32.
struct PlainQ3K : Superblock<Unsigned<4, 4>> {
    static constexpr int bytes = 110;
    template <class Isa>
    static void unpack(const uint8_t * block, Unpacked & out) {
        two_bits(block + 32, out.codes);
        const __m256i high = load_32(block);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i moved = i < 2 ? _mm256_slli_epi16(high, 2 - i) : _mm256_srli_epi16(high, i - 2);
            out.codes[i] = _mm256_or_si256(out.codes[i], _mm256_and_si256(moved, _mm256_set1_epi8(4)));
        }
        const __m128i low = _mm_loadl_epi64((const __m128i *)(block + 96));
        const __m128i four = _mm_and_si128(_mm_unpacklo_epi64(low, _mm_srli_epi16(low, 4)), _mm_set1_epi8(15));
        int32_t others;
        memcpy(&others, block + 104, sizeof(others));
        const __m128i two =
            _mm_and_si128(_mm_srlv_epi32(_mm_set1_epi32(others), _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
        out.scales = _mm_sub_epi8(_mm_or_si128(four, _mm_slli_epi16(two, 4)), _mm_set1_epi8(32));
        out.d = half_at(block + 108);
    }
};

// Q4_K and Q5_K: 12 bytes hold a 6-bit scale and a 6-bit minimum for every 32 values. In a part of 64 values, the low
// nibbles are the first 32 values.
template <bool has_fifth_bit>
struct PlainQ45K : SuperblockWithMins<Unsigned<0, has_fifth_bit ? 2 : 4>, 32> {
    static constexpr int bytes = has_fifth_bit ? 176 : 144;
    template <class Isa>
    static void unpack(const uint8_t * block, Unpacked & out) {
#pragma GCC unroll 8
        for (int i = 0; i < 4; i++) {
            const __m256i x = load_32(block + bytes - 128 + 32 * i);
            out.codes[2 * i] = Avx2::low_nibbles(x), out.codes[2 * i + 1] = Avx2::high_nibbles(x);
        }
#pragma GCC unroll 8
        for (int i = 0; i < (has_fifth_bit ? 8 : 0); i++) {
            const __m256i x = load_32(block + 16);
            const __m256i moved = i < 4 ? _mm256_slli_epi16(x, 4 - i) : _mm256_srli_epi16(x, i - 4);
            out.codes[i] = _mm256_or_si256(out.codes[i], _mm256_and_si256(moved, _mm256_set1_epi8(16)));
        }
        uint32_t s, m, high;
        memcpy(&s, block + 4, 4), memcpy(&m, block + 8, 4), memcpy(&high, block + 12, 4);
        const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
        const __m128i all =
            _mm_setr_epi32(s & six, (high & four) | (s >> 2 & two), m & six, (high >> 4 & four) | (m >> 2 & two));
        out.scales = _mm_unpacklo_epi8(all, all), out.mins = _mm_unpackhi_epi8(all, all);
        out.d = half_at(block);
        out.min = half_at(block + 2);
    }
};

// Q6_K: each half of 128 values has 4 bits of each value in the nibbles of 64 bytes, and 2 bits of each value in 32
// bytes.
struct PlainQ6K : Superblock<Unsigned<32, 2>> {
    static constexpr int bytes = 210;
    template <class Isa>
    static void unpack(const uint8_t * block, Unpacked & out) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i low = load_32(block + i / 4 * 64 + i % 2 * 32), high = load_32(block + 128 + i / 4 * 32);
            const __m256i nibbles = i % 4 < 2 ? Avx2::low_nibbles(low) : Avx2::high_nibbles(low);
            const int shift = 2 * (i % 4);
            const __m256i moved = shift < 4 ? _mm256_slli_epi16(high, 4 - shift) : _mm256_srli_epi16(high, shift - 4);
            out.codes[i] = _mm256_or_si256(nibbles, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
        }
        out.scales = load_16(block + 192);
        out.d = half_at(block + 208);
    }
};

} // namespace
} // namespace moegguf::kernels
