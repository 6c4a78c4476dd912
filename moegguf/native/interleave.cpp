// interleave.cpp: converts rows of Q4_0 to the interleaved layout of the CPU kernels, with stores that bypass the
// processor's caches (SSE2). With ordinary stores, as in upstream's function, the processor reads each cache line of a
// slot before overwriting it, and drops lines that compute threads use. Stores that bypass the caches take about two
// thirds of the time. Reader threads call this code through Pool::write, which uses upstream's code for all other
// types.
#include "pool.h"

#include "ggml-backend.h"

#include <cstring>
#include <random>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace moegguf {
namespace {

#if defined(__SSE2__)

// A Q4_0 block has a 2-byte scale, and 32 4-bit quants in 16 bytes. An interleaved block combines one block from each
// of 8 rows: the scales, then the first 8 bytes of each row, then the second 8 bytes. Quants are converted from
// unsigned to signed.
constexpr int q4_0_rows = 8, q4_0_cols = 32, q4_0_bytes = 18;

void interleave_q4_0x8(uint8_t * out, const uint8_t * rows, int64_t n_rows, int64_t n_cols) {
    const int64_t n_blocks = n_cols / q4_0_cols, row_bytes = n_blocks * q4_0_bytes;
    const __m128i signs = _mm_set1_epi8((char)0x88);
    auto * to = (__m128i *)out;
    for (int64_t first = 0; first < n_rows; first += q4_0_rows, rows += q4_0_rows * row_bytes) {
        for (int64_t block = 0; block < n_blocks; block++) {
            const uint8_t * from = rows + block * q4_0_bytes;
            alignas(16) uint16_t scales[q4_0_rows];
            __m128i quants[q4_0_rows];
            for (int i = 0; i < q4_0_rows; i++) {
                memcpy(&scales[i], from + i * row_bytes, sizeof(scales[i]));
                const auto * bytes = (const __m128i *)(from + i * row_bytes + sizeof(scales[i]));
                quants[i] = _mm_xor_si128(_mm_loadu_si128(bytes), signs);
            }
            _mm_stream_si128(to++, _mm_load_si128((const __m128i *)scales));
            for (int i = 0; i < q4_0_rows; i += 2) {
                _mm_stream_si128(to++, _mm_unpacklo_epi64(quants[i], quants[i + 1]));
            }
            for (int i = 0; i < q4_0_rows; i += 2) {
                _mm_stream_si128(to++, _mm_unpackhi_epi64(quants[i], quants[i + 1]));
            }
        }
    }
    _mm_sfence(); // the bytes must be written before the slot is published
}

constexpr Interleave q4_0x8 = interleave_q4_0x8;

#else

constexpr Interleave q4_0x8 = nullptr;

#endif

// Returns true if `ours` and upstream's function lay out a few random rows identically. Returns false if `ours` is
// nullptr.
bool same(Interleave ours, const ggml_tensor & slot, int64_t n_rows) {
    if (!ours) { return false; }
    ggml_tensor piece = slot;
    piece.ne[1] = n_rows;
    piece.nb[2] = piece.nb[3] = piece.nb[1] * n_rows;
    const size_t n = ggml_nbytes(&piece);
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    std::vector<Line> theirs(n / sizeof(Line) + 1), out(theirs);
    std::vector<uint8_t> rows(n);
    std::minstd_rand random(1);
    for (uint8_t & byte : rows) { byte = (uint8_t)random(); }
    piece.data = theirs.data();
    ggml_backend_tensor_set(&piece, rows.data(), 0, n);
    ours(out[0].bytes, rows.data(), n_rows, piece.ne[0]);
    return memcmp(theirs.data(), out.data(), n) == 0;
}

} // namespace

Interleave find_interleave(const ggml_tensor & slot) {
    constexpr int64_t n_rows = 16; // no layout interleaves more rows than this in one group
    const bool fits = slot.type == GGML_TYPE_Q4_0 && slot.ne[1] % 8 == 0;
    return fits && same(q4_0x8, slot, n_rows) ? q4_0x8 : nullptr;
}

} // namespace moegguf
