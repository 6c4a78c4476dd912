// quantize.h: rows of activations as blocks of 8 bits with a scale, with the values that upstream's blocks have.
#pragma once

#include "kernels.h"
#include "types.h"

namespace moegguf::kernels {
namespace {

// 32 rounded values; returns the sums of successive pairs.
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

// A scale of 16 bits, as quantize_row_q8_0 has it.
template <class Isa, class T>
void quantize_block(const float * x, Row32 & row) {
    const float max = largest<Isa>(x, 32);
    row.d = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(max / 127.0f), _MM_FROUND_TO_NEAREST_INT)));
    row.minus = -T::template offset<Isa> * sum_of_pairs(round_32(x, max > 0 ? 127.0f / max : 0.0f, row.qs));
}

// The scale of quantize_row_q8_K, which may change the sign of values and scale together.
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
void quantize(const float * x, int64_t n, char * blocks, size_t stride) {
    for (int64_t i = 0; i < n; i += T::n_values, blocks += stride) {
        quantize_block<Isa, T>(x + i, *(typename T::Row *)blocks);
    }
}

} // namespace
} // namespace moegguf::kernels
