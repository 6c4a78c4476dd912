// grids.h: unpacks plain weights in blocks of 256 values whose codes come from tables (grids). An entry of upstream's
// grids has 8 or 4 successive values. Except for IQ1, these are absolute values, and their signs are separate bits. The
// indices for several columns are computed before the grids are read, so that reads rarely wait for an index.
#pragma once

#include "plain_types.h"

#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"

namespace moegguf::kernels {
namespace {

inline int32_t load_4(const void * from) {
    int32_t x;
    memcpy(&x, from, sizeof(x));
    return x;
}
inline float half_of(const void * from) { return half_at((const uint8_t *)from); }

// ---- signs ----

// Adds an eighth bit to the 7 bits in each byte, so that the number of set bits is even.
inline __m256i with_even_bits(__m256i sevens) {
    const __m256i odd = _mm256_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0, 0,
                                         -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    const __m256i low = _mm256_set1_epi8(15), high = _mm256_and_si256(_mm256_srli_epi16(sevens, 4), low);
    const __m256i a = _mm256_shuffle_epi8(odd, _mm256_and_si256(sevens, low)), b = _mm256_shuffle_epi8(odd, high);
    return _mm256_or_si256(sevens, _mm256_xor_si256(a, b));
}

// Returns the four groups of 7 bits in the lowest 28 bits of each 32-bit lane, one in each byte, with their eighth
// bits.
inline __m256i signs_of_28(__m256i x) {
    __m256i sevens = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
    for (int i = 1; i < 4; i++) {
        const __m256i moved = _mm256_slli_epi32(x, i);
        sevens = _mm256_or_si256(sevens, _mm256_and_si256(moved, _mm256_set1_epi32(0x7f << 8 * i)));
    }
    return with_even_bits(sevens);
}

// ---- scales ----

// Returns 16 scales, one for every 16 values. The lowest byte of each lane is the scale of 32 values, so each scale is
// written twice.
inline __m128i twice(__m256i lanes) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    const __m128i bytes = _mm_packus_epi16(words, words);
    return _mm_unpacklo_epi8(bytes, bytes);
}
inline __m128i doubled_plus_1(__m128i x) { return _mm_add_epi8(_mm_add_epi8(x, x), _mm_set1_epi8(1)); }

// Returns the nibbles of 8 bytes, the low nibble of each byte first.
inline __m128i nibbles_of_8(__m128i x) {
    return _mm_and_si128(_mm_unpacklo_epi8(x, _mm_srli_epi16(x, 4)), _mm_set1_epi8(15));
}

// ---- grids ----

// Moves four groups of n_bits (at most 4) from the low end of each lane to the four bytes of the lane.
template <int n_bits>
__m256i spread_groups(__m256i x) {
    constexpr int one = (1 << n_bits) - 1, two = (1 << 2 * n_bits) - 1;
    x = _mm256_or_si256(x, _mm256_slli_epi32(x, 16 - 2 * n_bits));
    x = _mm256_and_si256(x, _mm256_set1_epi32(two << 16 | two));
    x = _mm256_or_si256(x, _mm256_slli_epi32(x, 8 - n_bits));
    return _mm256_and_si256(x, _mm256_set1_epi8(one));
}

// Combines each of 32 low bytes with its high byte into a 16-bit index.
inline void join(const uint8_t * low, __m256i high, uint16_t * out) {
    const __m256i a = _mm256_unpacklo_epi8(load_32(low), high), b = _mm256_unpackhi_epi8(load_32(low), high);
    _mm256_store_si256((__m256i *)out, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_store_si256((__m256i *)(out + 16), _mm256_permute2x128_si256(a, b, 0x31));
}

template <class Index>
MOEGGUF_INLINE __m256i of_grid(const uint64_t * grid, const Index * i) {
    return _mm256_set_epi64x((int64_t)grid[i[3]], (int64_t)grid[i[2]], (int64_t)grid[i[1]], (int64_t)grid[i[0]]);
}
template <class Index>
MOEGGUF_INLINE __m256i of_grid(const uint32_t * grid, const Index * i) {
    return _mm256_set_epi32((int)grid[i[7]], (int)grid[i[6]], (int)grid[i[5]], (int)grid[i[4]], (int)grid[i[3]],
                            (int)grid[i[2]], (int)grid[i[1]], (int)grid[i[0]]);
}

// ---- types ----

struct PlainIq4Xs : Superblock<Signed, 32> {
    static constexpr int bytes = sizeof(block_iq4_xs);

    template <class Isa>
    static void unpack(const uint8_t * from, Unpacked & out) {
        const auto & x = *(const block_iq4_xs *)from;
        const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)kvalues_iq4nl));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) { out.codes[i] = _mm256_shuffle_epi8(values, nibbles_of(x.qs + 16 * i)); }
        const __m128i low = nibbles_of_8(_mm_cvtsi32_si128(load_4(x.scales_l)));
        const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
        const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(x.scales_h), shifts);
        const __m256i two = _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4);
        out.scales = _mm_sub_epi8(twice(_mm256_or_si256(_mm256_cvtepu8_epi32(low), two)), _mm_set1_epi8(32));
        out.d = half_of(&x.d);
    }
};

// The indices, signs and scales of a block. They are computed before its codes. Some types use only some of these
// fields.
struct Found {
    alignas(32) uint16_t index[64];
    alignas(32) uint32_t more[8]; // [i] for 32 values: signs, a number to add (IQ1_S), or four bytes to add (IQ1_M)
    __m128i scales;
};

// The base of types with grids. T is the derived type: T::prepare fills a Found, and T::codes returns 32 codes.
template <class T, class Codes, int scale_values_ = 16>
struct Grid : Superblock<Codes, scale_values_> {
    using Prepared = Found;

    template <class Isa>
    static void unpack(const uint8_t * from, const Found & found, Unpacked & out) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) { out.codes[i] = T::template codes<Isa>(from, found, i); }
        out.scales = found.scales;
        out.d = T::d(from);
    }
};

struct PlainIq3S : Grid<PlainIq3S, Unsigned<16, 4>> {
    static constexpr int bytes = sizeof(block_iq3_s);

    template <class Isa>
    static void prepare(const uint8_t * from, Found & out) {
        const auto & x = *(const block_iq3_s *)from;
        for (int i = 0; i < 2; i++) {
            join(x.qs + 32 * i, Isa::spread_bits((uint32_t)load_4(x.qh + 4 * i), 1), out.index + 32 * i);
        }
        const __m128i scales = nibbles_of_8(_mm_cvtsi32_si128(load_4(x.scales)));
        out.scales = doubled_plus_1(_mm_unpacklo_epi8(scales, scales));
    }
    template <class Isa>
    static __m256i codes(const uint8_t * from, const Found & found, int i) {
        const auto signs = (uint32_t)load_4(((const block_iq3_s *)from)->signs + 4 * i);
        return Isa::plus_or_minus(_mm256_set1_epi8(zero), of_grid(iq3s_grid, found.index + 8 * i), signs);
    }
    static float d(const uint8_t * from) { return half_at(from); }
};

// Unpacks signs and scales. Each lane has 28 bits for the signs of 32 values, and 4 bits for their scale.
inline void find_signs_and_scales(__m256i packed, Found & out) {
    _mm256_store_si256((__m256i *)out.more, signs_of_28(packed));
    out.scales = doubled_plus_1(twice(_mm256_srli_epi32(packed, 28)));
}

struct PlainIq3Xxs : Grid<PlainIq3Xxs, Signed, 32> {
    static constexpr int bytes = sizeof(block_iq3_xxs);

    template <class Isa>
    static void prepare(const uint8_t * from, Found & out) {
        find_signs_and_scales(load_32(((const block_iq3_xxs *)from)->qs + 64), out);
    }
    template <class Isa>
    static __m256i codes(const uint8_t * from, const Found & found, int i) {
        const __m256i sizes = of_grid(iq3xxs_grid, ((const block_iq3_xxs *)from)->qs + 8 * i);
        return Isa::plus_or_minus(__m256i{}, sizes, found.more[i]);
    }
    static float d(const uint8_t * from) { return 0.25f * half_at(from); }
};

struct PlainIq2Xxs : Grid<PlainIq2Xxs, Signed, 32> {
    static constexpr int bytes = sizeof(block_iq2_xxs);

    template <class Isa>
    static void prepare(const uint8_t * from, Found & out) {
        const auto * at = (const float *)((const block_iq2_xxs *)from)->qs;
        const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8), 0xdd));
        find_signs_and_scales(_mm256_permute4x64_epi64(odd, 0xd8), out);
    }
    template <class Isa>
    static __m256i codes(const uint8_t * from, const Found & found, int i) {
        const auto * index = (const uint8_t *)(((const block_iq2_xxs *)from)->qs + 4 * i);
        return Isa::plus_or_minus(__m256i{}, of_grid(iq2xxs_grid, index), found.more[i]);
    }
    static float d(const uint8_t * from) { return 0.125f * half_at(from); }
};

struct PlainIq2Xs : Grid<PlainIq2Xs, Signed> {
    static constexpr int bytes = sizeof(block_iq2_xs);

    template <class Isa>
    static void prepare(const uint8_t * from, Found & out) {
        const auto & x = *(const block_iq2_xs *)from;
        const __m256i a = load_32((const uint8_t *)x.qs), b = load_32((const uint8_t *)(x.qs + 16));
        _mm256_store_si256((__m256i *)out.index, _mm256_and_si256(a, _mm256_set1_epi16(511)));
        _mm256_store_si256((__m256i *)(out.index + 16), _mm256_and_si256(b, _mm256_set1_epi16(511)));
        const __m256i sevens = _mm256_packus_epi16(_mm256_srli_epi16(a, 9), _mm256_srli_epi16(b, 9));
        _mm256_store_si256((__m256i *)out.more, with_even_bits(_mm256_permute4x64_epi64(sevens, 0xd8)));
        out.scales = doubled_plus_1(nibbles_of_8(_mm_loadl_epi64((const __m128i *)x.scales)));
    }
    template <class Isa>
    static __m256i codes(const uint8_t *, const Found & found, int i) {
        return Isa::plus_or_minus(__m256i{}, of_grid(iq2xs_grid, found.index + 4 * i), found.more[i]);
    }
    static float d(const uint8_t * from) { return 0.125f * half_at(from); }
};

struct PlainIq2S : Grid<PlainIq2S, Signed> {
    static constexpr int bytes = sizeof(block_iq2_s);

    template <class Isa>
    static void prepare(const uint8_t * from, Found & out) {
        const auto & x = *(const block_iq2_s *)from;
        join(x.qs, spread_groups<2>(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x.qh))), out.index);
        out.scales = doubled_plus_1(nibbles_of_8(_mm_loadl_epi64((const __m128i *)x.scales)));
    }
    template <class Isa>
    static __m256i codes(const uint8_t * from, const Found & found, int i) {
        const auto signs = (uint32_t)load_4(((const block_iq2_s *)from)->qs + 32 + 4 * i);
        return Isa::plus_or_minus(__m256i{}, of_grid(iq2s_grid, found.index + 4 * i), signs);
    }
    static float d(const uint8_t * from) { return 0.125f * half_at(from); }
};

// Returns the codes of IQ1 weights. A grid value v is -1, 0 or 1, and the weight is v - 1/8 or v + 1/8. Its code is 8
// times the weight plus 9, which is never negative. `more`: each byte is 8 for v - 1/8, and 10 for v + 1/8.
inline __m256i eighths(__m256i values, __m256i more) {
    const __m256i times_8 = _mm256_and_si256(_mm256_slli_epi16(values, 3), _mm256_set1_epi8((char)0xf8));
    return _mm256_add_epi8(times_8, more);
}

struct PlainIq1S : Grid<PlainIq1S, Unsigned<9, 4>> {
    static constexpr int bytes = sizeof(block_iq1_s);

    template <class Isa>
    static void prepare(const uint8_t * from, Found & out) {
        const auto & x = *(const block_iq1_s *)from;
        const __m256i lanes = _mm256_cvtepi16_epi32(load_16((const uint8_t *)x.qh));
        join(x.qs, spread_groups<3>(_mm256_and_si256(lanes, _mm256_set1_epi32(0xfff))), out.index);
        const __m256i sign = _mm256_srai_epi32(lanes, 31); // 0 or -1 in each lane
        _mm256_store_si256((__m256i *)out.more, _mm256_add_epi32(_mm256_add_epi32(sign, sign), _mm256_set1_epi32(10)));
        out.scales = doubled_plus_1(twice(_mm256_and_si256(_mm256_srli_epi32(lanes, 12), _mm256_set1_epi32(7))));
    }
    template <class Isa>
    static __m256i codes(const uint8_t *, const Found & found, int i) {
        return eighths(of_grid(iq1s_grid, found.index + 4 * i), _mm256_set1_epi8((char)found.more[i]));
    }
    static float d(const uint8_t * from) { return 0.125f * half_at(from); }
};

struct PlainIq1M : Grid<PlainIq1M, Unsigned<9, 4>> {
    static constexpr int bytes = sizeof(block_iq1_m);

    template <class Isa>
    static void prepare(const uint8_t * from, Found & out) {
        const auto & x = *(const block_iq1_m *)from;
        const __m128i qh = load_16(x.qh), high = _mm_unpackhi_epi64(qh, qh);
        const __m256i nibbles = _mm256_set_m128i(nibbles_of_8(high), nibbles_of_8(qh));
        join(x.qs, _mm256_and_si256(nibbles, _mm256_set1_epi8(7)), out.index);
        const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(nibbles, 2), _mm256_set1_epi8(2)); // bytes: 0 or 2
        _mm256_store_si256((__m256i *)out.more, _mm256_sub_epi8(_mm256_set1_epi8(10), sign));
        // the lower 12 bits of each 16-bit word are scales
        const __m128i twelve = _mm_and_si128(_mm_loadl_epi64((const __m128i *)x.scales), _mm_set1_epi16(0xfff));
        const __m256i three = spread_groups<3>(_mm256_cvtepu16_epi32(twelve));
        out.scales = doubled_plus_1(_mm256_castsi256_si128(three));
    }
    template <class Isa>
    static __m256i codes(const uint8_t *, const Found & found, int i) {
        const __m256i bytes_of_4 = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i more = _mm256_shuffle_epi8(_mm256_set1_epi32((int)found.more[i]), bytes_of_4);
        return eighths(of_grid(iq1s_grid, found.index + 4 * i), more);
    }
    // Returns an eighth of the block's scale. The scale is a half float: the upper 4 bits of each of the four words in
    // `scales` hold 4 bits of it.
    static float d(const uint8_t * from) {
        const __m128i packed = _mm_loadl_epi64((const __m128i *)((const block_iq1_m *)from)->scales);
        const auto four = (uint64_t)_mm_cvtsi128_si64(_mm_srli_epi16(packed, 12));
        const auto half = (uint16_t)(four | four >> 12 | four >> 24 | four >> 36);
        return 0.125f * half_of(&half);
    }
};

} // namespace
} // namespace moegguf::kernels
