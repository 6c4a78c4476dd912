// types.h: unpacks each type of interleaved weights, in upstream's layouts. Each layout interleaves 8 rows, which are
// called columns here because they are columns of the result. A line has 64 bytes, 8 of each column.
//
// To add a type that upstream interleaves in groups of 8 rows and 8 bytes, write its struct here. Then add the type to
// `find` in panels.h, and its name to INTERLEAVED in tests/native/test_width_check.py.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moegguf::kernels {

// ---- activation rows, as the kernels read them ----

// An activation block: 32 values (int8) with a scale.
struct Row32 {
    int8_t qs[32];
    int32_t minus[1]; // sum of the values, times -T::offset
    float d;
};

// An activation block: 32 values with a scale, for weights with a scale for every 16 values.
struct Row16 {
    int8_t qs[32];
    int32_t minus[2]; // sum of each group of 16 values, times -T::offset
    float d;
};

// An activation block: 256 values (int8) with a scale, and the sums that weights with minima need.
struct RowMins {
    int8_t qs[256];
    int16_t sums[8]; // sum of each group of 32 values
    float d;
};

// An activation block: 256 values with a scale, for weights with integer scales whose codes have an offset.
struct RowOffset {
    int8_t qs[256];
    int32_t minus[32]; // sum of each group of 8 values, times -T::offset, in the form of Isa::minus_8
    float d;
};

namespace {

const int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t mxfp4_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}; // doubled values, plus 12

// The addresses of a part of a block, one for each group of 8 columns. `offset`: offset of the part in the block, in
// bytes.
template <class Isa>
struct Parts {
    const uint8_t * of[Isa::n_groups];

    Parts(const uint8_t * const (&blocks)[Isa::n_groups], int64_t offset) {
        for (int i = 0; i < Isa::n_groups; i++) { of[i] = blocks[i] + offset; }
    }
};

// ---- 32 values with a scale ----

// 4-bit weights with a scale for every 32 values. A block has a scale for each column, then two lines of nibbles:
// values 0-7 (low nibbles) and 16-23 (high nibbles), then 8-15 and 24-31.
template <int scale_bytes>
struct NibblesX8 {
    static constexpr int n_values = 32, n_interleaved = 8, bytes = 8 * scale_bytes + 128, n_parts = 1, n_scales = 1;
    static constexpr bool has_mins = false, adds_min = false, is_streamed = true;
    template <class Isa>
    static constexpr int read_bytes = Isa::n_groups * bytes;
    using Row = Row32;

    template <class Isa>
    static void nibbles(const uint8_t * const (&blocks)[Isa::n_groups], int flipped, typename Isa::I * w) {
        const Parts<Isa> qs(blocks, 8 * scale_bytes);
        for (int line = 0; line < 2; line++) {
            typename Isa::I raw[2];
            Isa::load_line(qs.of, line, raw[0], raw[1]);
            for (int i = 0; i < 2; i++) {
                const auto x = Isa::flip(raw[i], flipped);
                w[2 * line + i] = Isa::low_nibbles(x);
                w[2 * line + i + 4] = Isa::high_nibbles(x);
            }
        }
    }

    template <class Isa>
    static typename Isa::F scale(const uint8_t * const (&blocks)[Isa::n_groups], int) {
        return Isa::load_halves((const void * const(&)[Isa::n_groups])blocks);
    }
};

struct Q4_0x8 : NibblesX8<2> {
    static constexpr int n_dots = 8;
    template <class Isa>
    static constexpr int offset = 8;
    template <class Isa>
    static constexpr bool is_signed = false;

    // Flips bit 3 of each nibble, because nibbles in upstream's layout are signed.
    template <class Isa>
    static void codes(const uint8_t * const (&blocks)[Isa::n_groups], typename Isa::I * w) {
        nibbles<Isa>(blocks, 0x88, w);
    }
};

struct Iq4NlX8 : NibblesX8<2> {
    static constexpr int n_dots = 1;
    template <class Isa>
    static constexpr bool is_signed = Isa::signed_codes;
    template <class Isa>
    static constexpr int offset = is_signed<Isa> ? 0 : 128;

    template <class Isa>
    static void codes(const uint8_t * const (&blocks)[Isa::n_groups], typename Isa::I * w) {
        nibbles<Isa>(blocks, 0, w);
        for (int i = 0; i < 8; i++) { w[i] = Isa::flip(Isa::look_up(w[i], iq4_nl_values), is_signed<Isa> ? 0 : 0x80); }
    }
};

struct Mxfp4X8 : NibblesX8<1> {
    static constexpr int n_dots = 4;
    template <class Isa>
    static constexpr int offset = 12;
    template <class Isa>
    static constexpr bool is_signed = false;

    template <class Isa>
    static void codes(const uint8_t * const (&blocks)[Isa::n_groups], typename Isa::I * w) {
        nibbles<Isa>(blocks, 0, w);
        for (int i = 0; i < 8; i++) { w[i] = Isa::look_up(w[i], mxfp4_values); }
    }

    // Returns half of 2^(e - 127), because the values in mxfp4_values are doubled.
    template <class Isa>
    static typename Isa::F scale(const uint8_t * const (&blocks)[Isa::n_groups], int) {
        return Isa::half_powers(blocks);
    }
};

// ---- 256 values with integer scales: sub-blocks of 32 or 16 ----

// Scales and minima, unpacked to [sub-block][column]. A packed block has 12 bytes for each of its 8 sub-blocks: the
// 6-bit scales and minima of 8 columns.
template <class Isa>
struct Scales6 {
    alignas(64) uint8_t scales[8][Isa::n_cols], mins[8][Isa::n_cols];

    explicit Scales6(const Parts<Isa> & packed) {
        __m256i s[2 * Isa::n_groups], m[2 * Isa::n_groups];
        for (int i = 0; i < Isa::n_groups; i++) { unpack(packed.of[i], &s[2 * i], &m[2 * i]); }
        arrange(s, scales);
        arrange(m, mins);
    }

  private:
    // Unpacks scales into s and minima into m. s[0] and m[0] get sub-blocks 0, 1, 4 and 5; s[1] and m[1] get the
    // others. Each sub-block has 8 bytes.
    static void unpack(const uint8_t * packed, __m256i * s, __m256i * m) {
        const auto * from = (const __m256i *)packed;
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1), c = _mm256_loadu_si256(from + 2);
        // Each of low_s, low_m and high takes every third of the 24 words in a, b and c. The words of one result are in
        // different lanes, so blends can collect them.
        const __m256i low_s = _mm256_permutevar8x32_epi32(_mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x92), c, 0x24),
                                                          _mm256_setr_epi32(0, 3, 6, 1, 4, 7, 2, 5));
        const __m256i low_m = _mm256_permutevar8x32_epi32(_mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x24), c, 0x49),
                                                          _mm256_setr_epi32(1, 4, 7, 2, 5, 0, 3, 6));
        const __m256i high = _mm256_permutevar8x32_epi32(_mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x49), c, 0x92),
                                                         _mm256_setr_epi32(2, 5, 0, 3, 6, 1, 4, 7));
        const __m256i six = _mm256_set1_epi8(0x3f), four = _mm256_set1_epi8(0x0f), two = _mm256_set1_epi8(0x30);
        const __m256i s4 =
            _mm256_or_si256(_mm256_and_si256(high, four), _mm256_and_si256(_mm256_srli_epi16(low_s, 2), two));
        const __m256i m4 = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(high, 4), four),
                                           _mm256_and_si256(_mm256_srli_epi16(low_m, 2), two));
        const __m256i s0 = _mm256_and_si256(low_s, six), m0 = _mm256_and_si256(low_m, six);
        s[0] = _mm256_unpacklo_epi32(s0, s4), s[1] = _mm256_unpackhi_epi32(s0, s4);
        m[0] = _mm256_unpacklo_epi32(m0, m4), m[1] = _mm256_unpackhi_epi32(m0, m4);
    }

    static void arrange(const __m256i * x, uint8_t (*out)[Isa::n_cols]) {
        if constexpr (Isa::n_groups == 1) {
            for (int i = 0; i < 2; i++) {
                _mm_storeu_si128((__m128i *)out[2 * i], _mm256_castsi256_si128(x[i]));
                _mm_storeu_si128((__m128i *)out[2 * i + 4], _mm256_extracti128_si256(x[i], 1));
            }
        } else {
            for (int i = 0; i < 4; i++) {
                const __m256i a = x[i / 2], b = x[i / 2 + 2];
                const __m256i both = i % 2 ? _mm256_unpackhi_epi64(a, b) : _mm256_unpacklo_epi64(a, b);
                _mm_storeu_si128((__m128i *)out[i], _mm256_castsi256_si128(both));
                _mm_storeu_si128((__m128i *)out[i + 4], _mm256_extracti128_si256(both, 1));
            }
        }
    }
};

// Q4_K and Q5_K: 4 parts of 64 values, with a scale and a minimum for every 32 values. The low nibbles of a part are
// its first 32 values.
template <bool has_fifth_bit, int n_vectors_at_once>
struct Q45KX8 {
    static constexpr int n_values = 256, n_interleaved = 8, bytes = 32 + 96 + (has_fifth_bit ? 256 : 0) + 1024;
    static constexpr int n_vectors = n_vectors_at_once, n_steps = 32 / n_vectors, n_codes = 2;
    static constexpr int n_dots = 4, n_minus = 0, n_pairs = 4;
    static constexpr bool has_mins = true, is_streamed = true;
    template <class Isa>
    static constexpr bool is_wide = has_fifth_bit && !Isa::signed_codes;
    template <class Isa>
    static constexpr int read_bytes = Isa::n_groups * bytes;
    using Row = RowMins;

    // A step has n_vectors * 4 of the first 32 values of a part (i = 0), and as many of the other 32 values (i = 1).
    static constexpr int part(int step) { return step * n_vectors / 8; }
    static constexpr int first_value(int step, int i) { return part(step) * 64 + i * 32 + step * n_vectors % 8 * 4; }

    template <class Isa>
    struct Block {
        const uint8_t * const (&blocks)[Isa::n_groups];
        const Parts<Isa> qs, qh;
        const Scales6<Isa> packed;
        typename Isa::I raw[n_vectors], high[n_vectors];

        explicit Block(const uint8_t * const (&from)[Isa::n_groups])
            : blocks(from),
              qs(from, bytes - 1024),
              qh(from, 128),
              packed(Parts<Isa>(from, 32)) {}

        typename Isa::F scale() const { return Isa::load_halves((const void * const(&)[Isa::n_groups])blocks); }
        typename Isa::F min() const {
            const Parts<Isa> mins(blocks, 16);
            return Isa::load_halves((const void * const(&)[Isa::n_groups])mins.of);
        }
        typename Isa::I mins(int i) const { return Isa::pairs(packed.mins[2 * i], packed.mins[2 * i + 1]); }
        typename Isa::I scales(int step, int i) const { return Isa::scales(packed.scales[part(step) * 2 + i]); }
        template <int step>
        void load() {
            for (int i = 0; i < n_vectors / 2; i++) {
                Isa::load_line(qs.of, n_vectors / 2 * step + i, raw[2 * i], raw[2 * i + 1]);
                if constexpr (has_fifth_bit) {
                    Isa::load_line(qh.of, n_vectors / 2 * step % 4 + i, high[2 * i], high[2 * i + 1]);
                }
            }
        }
        template <int step, int i>
        void codes(typename Isa::I * w) const {
            for (int j = 0; j < n_vectors; j++) {
                w[j] = i ? Isa::high_nibbles(raw[j]) : Isa::low_nibbles(raw[j]);
                if constexpr (has_fifth_bit) {
                    w[j] = Isa::template add_high_bits<part(step) * 2 + i>(w[j], high[j], 1);
                }
            }
        }
    };
};

using Q4KX8 = Q45KX8<false, 4>;
// 32 values of Q5_K are multiplied before their sum is multiplied by their scale, because this sum needs 32 bits in any
// case. AVX2 multiplies 16 values, because it has few registers.
template <class Isa>
using Q5KX8 = Q45KX8<true, Isa::signed_codes ? 4 : 8>;

// Q6_K: for each half of a block (128 values), 64 bytes hold the low 4 bits of the values in nibbles, and 32 bytes hold
// their high 2 bits. Every 16 values share a signed scale.
struct Q6KX8 {
    static constexpr int n_values = 256, n_interleaved = 8, bytes = 16 + 128 + 1024 + 512;
    static constexpr int n_vectors = 4, n_steps = 8, n_codes = 2, n_dots = 2, offset = 32, n_minus = 2, n_pairs = 0;
    static constexpr bool has_mins = false, is_streamed = true;
    // One row of activations is multiplied faster with sums of 32 bits. Many rows are multiplied faster with sums of 16
    // bits.
    template <class Isa>
    static constexpr bool is_wide = !Isa::signed_codes && Isa::n_cols == 8;
    template <class Isa>
    static constexpr int read_bytes = Isa::n_groups * bytes;
    using Row = RowOffset;

    // Bit 2 of `step` selects the half, bit 1 the first or second 16 of 32 values, bit 0 the first or second 32 bytes.
    // `i` selects low or high nibbles.
    static constexpr int first_value(int step, int i) {
        return step / 4 * 128 + i * 64 + step % 2 * 32 + step / 2 % 2 * 16;
    }

    template <class Isa>
    struct Block {
        const uint8_t * const (&blocks)[Isa::n_groups];
        const Parts<Isa> ql, qh;
        typename Isa::I raw[4], high[4];

        explicit Block(const uint8_t * const (&from)[Isa::n_groups]) : blocks(from), ql(from, 144), qh(from, 1168) {}

        typename Isa::F scale() const { return Isa::load_halves((const void * const(&)[Isa::n_groups])blocks); }

        typename Isa::I scales(int step, int i) const {
            const Parts<Isa> scales(blocks, 16 + first_value(step, i) / 16 * 8);
            return Isa::template signed_scales<is_wide<Isa>>(scales.of);
        }
        template <int step>
        void load() {
            for (int i = 0; i < 2; i++) {
                Isa::load_line(ql.of, step / 4 * 8 + step % 2 * 4 + step / 2 % 2 * 2 + i, raw[2 * i], raw[2 * i + 1]);
                Isa::load_line(qh.of, step / 4 * 4 + step / 2 % 2 * 2 + i, high[2 * i], high[2 * i + 1]);
            }
        }
        template <int step, int i>
        void codes(typename Isa::I * w) const {
            for (int j = 0; j < 4; j++) {
                const auto low = i ? Isa::high_nibbles(raw[j]) : Isa::low_nibbles(raw[j]);
                w[j] = Isa::template add_high_bits<step % 2 * 2 + i * 4>(low, high[j], 3);
            }
        }
    };
};

} // namespace
} // namespace moegguf::kernels
