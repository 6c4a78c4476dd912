// kernels.h: products of activations with interleaved weights whose bits do not depend on how many rows are multiplied
// together, nor on which of these kernels do it.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

#define MOEGGUF_INLINE inline __attribute__((always_inline))

namespace moegguf::kernels {

struct Panels;

// A row of activations becomes blocks; rows that are multiplied together, a tile, lie block by block.
struct Kernel {
    int block_values;
    size_t block_bytes;
    int max_rows; // a tile has 1, 2, 4 and so on up to this number of rows

    // A row of n values into blocks that are `stride` bytes apart.
    void (*quantize)(const float * x, int64_t n, char * blocks, size_t stride);

    // A tile from rows that lie each by itself.
    void (*gather)(const char * const * rows, int n_rows, int64_t n, char * tile);

    // out[r][0, n_cols) = a tile of rows times weights. n_cols is a multiple of 8 if weights are interleaved.
    // row_bytes: bytes of n weights. soon: weights to prefetch while panels are multiplied; nullptr: none.
    void (*multiply)(const char * weights, size_t row_bytes, int64_t n_cols, const char * tile, int n_rows, int64_t n,
                     float * const * out, const char * soon);

    const Panels * panels; // multiplies more than max_rows rows with weights that are not interleaved
};

// Weights that are unpacked, in groups of columns, to be multiplied with many rows.
struct Panels {
    const Kernel * kernel; // row_bytes of its calls are block_bytes times the number of blocks
    size_t block_bytes;    // bytes of a column's block of kernel->block_values weights
    void (*unpack)(const char * weights, size_t row_bytes, int64_t n_cols, int64_t n, char * panel);
};

// out[r][0, n_cols) = n_rows rows of n floats times n_cols rows of weights, `stride` bytes apart.
using MultiplyFloats = void (*)(const char * weights, size_t stride, int64_t n_cols, const float * const * rows,
                                int n_rows, int64_t n, float * const * out);

// ---- attention: rows are queries, keys are cells of a cache that some of them see ----

constexpr int most_rows = 64, most_keys = 32; // size of a tile
constexpr int few_rows = 8;

// A score is factor * (query . key), soft-capped where cap is not 0: cap * tanh(factor * (query . key)).
struct AttentionScale {
    float factor, cap;
};

// Sums of each row: the greatest score, the sum of e^(score - max), and the sum of values times these, [n_rows][n].
struct AttentionSums {
    float *max, *sum, *values;
};

// A bit for each of 32 keys: whether a row sees the key, and whether the mask of a seen key is not 0.
struct SeenKeys {
    uint32_t seen, biased;
};

// Rows that are read soon, of n_bytes each.
struct RowsToPrefetch {
    const char * const * rows;
    int64_t n, n_bytes;
};

// Keys and values are rows of n floats, or of halves, one pointer each; n is a multiple of 16.
enum class CacheType { f32, f16 };

// Two ways with the same bits: of many rows, each has a lane, and a score is at [key][row], of n_lanes rows. Of few
// rows, each key has a lane, and a score is at [row][key], of most_keys keys. queries: [n][n_lanes] in both.
struct AttentionKernels {
    int lanes; // n_lanes is a multiple

    SeenKeys (*see)(const uint16_t * mask); // mask [32] of halves
    void (*q8_0_to_float)(const char * values, int64_t n, float * out);
    void (*f16_to_float)(const char * values, int64_t n, float * out);

    bool (*is_finite)(const char * values, int64_t n, CacheType type);

    // n_rows: a multiple of lanes. keys: [n_keys rounded up to 16][n]
    void (*score)(const float * queries, int n_lanes, int n_rows, const float * keys, int n_keys, int64_t n,
                  float * scores);
    // n_rows: at most few_rows. keys [most_keys]: halves
    void (*score_few)(const float * queries, int n_lanes, int n_rows, const char * const * keys, int n_keys, int64_t n,
                      const RowsToPrefetch & soon, float * scores);

    // Replaces scores by e^(score - max), and updates max and sum of each row. The bias has the shape of scores, with
    // -inf if a row does not see a key; nullptr: 0. rescale [n_rows]: factors for `values`.
    void (*soften)(float * scores, const float * bias, int n_lanes, int n_rows, int n_keys,
                   const AttentionScale & scale, const AttentionSums & sums, float * rescale);
    void (*soften_few)(float * scores, const float * bias, int n_rows, int n_keys, const AttentionScale & scale,
                       const AttentionSums & sums, float * rescale);

    // out [n_rows][n] = out * rescale + the keys' values times p, which is at [key * key_stride + row * row_stride].
    // keys [n_keys]: which of the values and of p.
    void (*mix)(const float * p, int key_stride, int row_stride, int n_rows, CacheType type,
                const char * const * values, int64_t n, const uint8_t * keys, int n_keys, const float * rescale,
                float * out);

    // The sums over two parts of the keys.
    void (*merge)(const AttentionSums & into, const AttentionSums & part, int n_rows, int64_t n);
};

// ---- by processor ----

struct Kernels {
    const Kernel * (*of_interleaved)(ggml_type type); // weights of 8 rows in the layout of upstream's repack.cpp
    const Kernel * (*of_plain)(ggml_type type);       // weights in the layout of a file
    MultiplyFloats (*of_floats)(ggml_type type);      // each nullptr for other types
    const AttentionKernels * attention;
};

extern const Kernels avx2;   // needs FMA and F16C
extern const Kernels avx512; // needs VNNI, too

// Returns the kernels for this processor. MOEGGUF_KERNELS=avx2 chooses AVX2 to compare. nullptr: upstream's kernels.
const Kernels * processor_kernels();

} // namespace moegguf::kernels
