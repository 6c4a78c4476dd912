// interleave.cpp: converts rows of Q4_0, Q4_K, Q5_K and Q6_K from the file's layout to the interleaved layout of the
// CPU kernels, exactly as upstream's repack.cpp does. For the K types, upstream reads and writes the scales byte by
// byte, which takes four to eight times as long. The stores here bypass the processor's caches. With ordinary stores,
// the processor reads each cache line of a slot before overwriting it, and drops lines that compute threads use.
// Upstream's code converts all other types, and these types on processors without SSE2.
#include "multiply.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace moegguf::kernels {

#if defined(__SSE2__)

namespace {

// An interleaved block combines one block from each of 8 rows. The quants of a row are in groups of 8 bytes.
constexpr int n_rows = 8;

__m128i load(const uint8_t * from) { return _mm_loadu_si128((const __m128i *)from); }

// The memory of an interleaved block. Its address is a multiple of 16.
class Out {
  public:
    explicit Out(void * begin) : next_((__m128i *)begin) {}

    void put(__m128i bytes) { _mm_stream_si128(next_++, bytes); }

    // Writes n bytes of each row, in groups of 8 bytes. The first groups of all rows come first, then the second
    // groups, and so on. `from` points to these bytes of the first row. n is a multiple of 16. flipped: bits that are
    // inverted.
    void put_groups(const uint8_t * from, int64_t row_bytes, int n, __m128i flipped = _mm_setzero_si128()) {
        for (const uint8_t * end = from + n; from < end; from += sizeof(__m128i)) {
            __m128i rows[n_rows];
            for (int i = 0; i < n_rows; i++) { rows[i] = _mm_xor_si128(load(from + i * row_bytes), flipped); }
            for (int i = 0; i < n_rows; i += 2) { put(_mm_unpacklo_epi64(rows[i], rows[i + 1])); }
            for (int i = 0; i < n_rows; i += 2) { put(_mm_unpackhi_epi64(rows[i], rows[i + 1])); }
        }
    }

    // Writes one 16-bit number of each row.
    void put_halves(const uint8_t * from, int64_t row_bytes) {
        alignas(16) uint16_t halves[n_rows];
        for (int i = 0; i < n_rows; i++) { memcpy(&halves[i], from + i * row_bytes, sizeof(halves[i])); }
        put(_mm_load_si128((const __m128i *)halves));
    }

  private:
    __m128i * next_;
};

// 16 bytes of each row, transposed: pair k contains byte 2k of all rows, then byte 2k + 1 of all rows.
struct Columns {
    Columns(const uint8_t * from, int64_t row_bytes) {
        __m128i rows[n_rows];
        for (int i = 0; i < n_rows; i++) { rows[i] = load(from + i * row_bytes); }
        __m128i fours[4]; // bytes from the rows i and i + 4, which alternate
        for (int high = 0; high < 2; high++) {
            for (int i = 0; i < 4; i++) {
                fours[i] = high ? _mm_unpackhi_epi8(rows[i], rows[i + 4]) : _mm_unpacklo_epi8(rows[i], rows[i + 4]);
            }
            const __m128i even_low = _mm_unpacklo_epi8(fours[0], fours[2]);
            const __m128i even_high = _mm_unpackhi_epi8(fours[0], fours[2]);
            const __m128i odd_low = _mm_unpacklo_epi8(fours[1], fours[3]);
            const __m128i odd_high = _mm_unpackhi_epi8(fours[1], fours[3]);
            __m128i * pair = pairs + high * 4;
            pair[0] = _mm_unpacklo_epi8(even_low, odd_low);
            pair[1] = _mm_unpackhi_epi8(even_low, odd_low);
            pair[2] = _mm_unpacklo_epi8(even_high, odd_high);
            pair[3] = _mm_unpackhi_epi8(even_high, odd_high);
        }
    }

    // Returns the 16-bit number of each row whose bytes are in pair k.
    __m128i halves(int k) const { return _mm_unpacklo_epi8(pairs[k], _mm_srli_si128(pairs[k], 8)); }

    __m128i pairs[8];
};

// Writes the beginning of an interleaved block of Q4_K or Q5_K: d, dmin, and the 6-bit scales and minima of 8
// sub-blocks. `from` points to the same fields of the first row's block.
//
// A row has 12 bytes of scales. Byte i of the first four has the scale of sub-block i, and in its upper two bits, bits
// of the scale of sub-block i + 4. The next four bytes have minima in the same way. Byte i of the last four has the
// lower four bits of the scale and the minimum of sub-block i + 4. An interleaved block has 12 bytes for each
// sub-block, in which rows take the places of sub-blocks.
void put_k_scales(Out & out, const uint8_t * from, int64_t row_bytes) {
    constexpr uint64_t ones = 0x0101010101010101;
    const Columns columns(from, row_bytes);
    out.put(columns.halves(0));
    out.put(columns.halves(1));
    alignas(16) uint64_t of_byte[12]; // byte i of the scales, of all rows
    for (int i = 0; i < 6; i++) { _mm_store_si128((__m128i *)&of_byte[2 * i], columns.pairs[2 + i]); }
    alignas(16) uint8_t packed[96];
    for (int i = 0; i < 8; i++) {
        const uint64_t scale_bits = of_byte[i % 4], min_bits = of_byte[4 + i % 4], low_bits = of_byte[8 + i % 4];
        uint64_t scales = scale_bits & (63 * ones), minima = min_bits & (63 * ones);
        if (i >= 4) {
            scales = ((scale_bits & (192 * ones)) >> 2) | (low_bits & (15 * ones));
            minima = ((min_bits & (192 * ones)) >> 2) | ((low_bits >> 4) & (15 * ones));
        }
        // Each 32-bit number has a byte of four rows. The first four rows are in the lower half.
        const uint32_t words[] = {
            uint32_t(scales | (((scales >> 32) & (48 * ones)) << 2)),
            uint32_t(minima | (((minima >> 32) & (48 * ones)) << 2)),
            uint32_t(((scales >> 32) & (15 * ones)) | (((minima >> 32) & (15 * ones)) << 4)),
        };
        memcpy(packed + i * sizeof(words), words, sizeof(words));
    }
    for (size_t i = 0; i < sizeof(packed); i += sizeof(__m128i)) { out.put(_mm_load_si128((__m128i *)(packed + i))); }
}

// Each of the following functions writes one interleaved block. `from` is the block of the first row.

void put_q4_0(Out & out, const uint8_t * from, int64_t row_bytes) {
    out.put_halves(from, row_bytes);
    out.put_groups(from + 2, row_bytes, 16, _mm_set1_epi8((char)0x88)); // quants become signed
}

void put_q4_k(Out & out, const uint8_t * from, int64_t row_bytes) {
    put_k_scales(out, from, row_bytes);
    out.put_groups(from + 16, row_bytes, 128);
}

void put_q5_k(Out & out, const uint8_t * from, int64_t row_bytes) {
    put_k_scales(out, from, row_bytes);
    out.put_groups(from + 16, row_bytes, 32); // the fifth bits
    out.put_groups(from + 48, row_bytes, 128);
}

void put_q6_k(Out & out, const uint8_t * from, int64_t row_bytes) {
    out.put_halves(from + 208, row_bytes);
    for (__m128i pair : Columns(from + 192, row_bytes).pairs) { out.put(pair); }
    out.put_groups(from, row_bytes, 128);
    out.put_groups(from + 128, row_bytes, 64); // the fifth and sixth bits
}

using PutBlock = void (*)(Out & out, const uint8_t * from, int64_t row_bytes);

template <PutBlock put>
void convert(const ggml_tensor & tensor, const uint8_t * rows) {
    const int64_t row_bytes = (int64_t)ggml_row_size(tensor.type, tensor.ne[0]);
    const int64_t block_bytes = (int64_t)ggml_type_size(tensor.type);
    Out out(tensor.data);
    for (int64_t first = 0; first < ggml_nrows(&tensor); first += n_rows, rows += n_rows * row_bytes) {
        for (int64_t at = 0; at < row_bytes; at += block_bytes) { put(out, rows + at, row_bytes); }
    }
}

using Convert = void (*)(const ggml_tensor & tensor, const uint8_t * rows);

Convert conversion_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0:
            return convert<put_q4_0>;
        case GGML_TYPE_Q4_K:
            return convert<put_q4_k>;
        case GGML_TYPE_Q5_K:
            return convert<put_q5_k>;
        case GGML_TYPE_Q6_K:
            return convert<put_q6_k>;
        default:
            return nullptr;
    }
}

} // namespace

bool interleave(const ggml_tensor * tensor, const void * rows) {
    const Convert convert = conversion_of(tensor->type);
    const bool is_aligned = (uintptr_t)tensor->data % sizeof(__m128i) == 0;
    if (!convert || !is_aligned || tensor->ne[1] % n_rows != 0) { return false; }
    convert(*tensor, (const uint8_t *)rows);
    _mm_sfence(); // the bytes must be written before a slot is published
    return true;
}

#else

bool interleave(const ggml_tensor *, const void *) { return false; }

#endif

} // namespace moegguf::kernels
