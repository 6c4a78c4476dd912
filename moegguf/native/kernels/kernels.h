// kernels.h: kernels that multiply activations by weights, and compute attention. The bits of a row's result depend
// neither on the number of rows that are computed together nor on the instruction set (AVX2 or AVX-512).
//
// The files multiply.cpp and attention.cpp divide an operation among threads, and call the kernels for the processor.
// The files types.h (interleaved weights), plain_types.h and grids.h (weights in a file's layout) unpack weights. The
// file panels.h defines panels of unpacked weights for many rows, and tile.h multiplies by them. To add a weight type,
// see types.h and plain.h.
//
// To add an instruction set NAME:
// 1. Write isa_NAME.h with the operations of isa_avx2.h, and NAME.cpp like avx2.cpp.
// 2. Declare `extern const Kernels NAME` below, and add a case to `detect` in multiply.cpp.
// 3. Add NAME.cpp and its compiler options to moegguf/native/CMakeLists.txt.
//
// The headers that unpack weights use AVX2 directly. Support for a processor without AVX2 also needs other code there,
// and a different condition in moegguf/processor.py.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

#define MOEGGUF_INLINE inline __attribute__((always_inline))

namespace moegguf::kernels {

struct Panels;

// A kernel that multiplies activations by weights of one type. Each activation row is quantised into blocks. A tile
// holds rows that are multiplied together: the first block of every row, then the second block of every row, and so on.
struct Kernel {
    int block_values;
    size_t block_bytes;
    int max_rows; // a tile has 1, 2, 4, ... rows, up to this number

    // Quantises a row of n values into blocks that begin `stride` bytes apart.
    void (*quantize)(const float * x, int64_t n, char * blocks, size_t stride);

    // Copies quantised rows, which may be anywhere in memory, into one tile.
    void (*gather)(const char * const * rows, int n_rows, int64_t n, char * tile);

    // Multiplies a tile of rows by n_cols weight columns, and writes out[r][0, n_cols). n_cols is a multiple of 8 if
    // weights are interleaved. row_bytes: size in bytes of the n weights of a column. soon: weights to prefetch while a
    // panel is multiplied; nullptr: none.
    void (*multiply)(const char * weights, size_t row_bytes, int64_t n_cols, const char * tile, int n_rows, int64_t n,
                     float * const * out, const char * soon);

    const Panels * panels; // used for many rows; nullptr: weights are never unpacked into panels
};

// The method for multiplying many rows: a group of columns is unpacked once into a panel, which is then multiplied by
// all rows.
struct Panels {
    const Kernel * kernel; // multiplies panels; its row_bytes is block_bytes times the number of blocks
    size_t block_bytes;    // size in bytes of one column's block (kernel->block_values weights) in a panel
    void (*unpack)(const char * weights, size_t row_bytes, int64_t n_cols, int64_t n, char * panel);
    int least_rows; // fewest rows for which columns are unpacked
};

// A function that multiplies n_rows rows of n floats by n_cols weight columns, and writes out[r][0, n_cols). Columns
// begin `stride` bytes apart.
using MultiplyFloats = void (*)(const char * weights, size_t stride, int64_t n_cols, const float * const * rows,
                                int n_rows, int64_t n, float * const * out);

// ---- attention: rows are queries, keys are cells of a cache that some of the rows see ----

constexpr int most_rows = 256, most_keys = 32; // largest numbers of rows in a tile and of keys in a block
constexpr int few_rows = 8;

// The scale of scores. A score is factor * (query . key), or cap * tanh(factor * (query . key)) if cap is not 0.
struct AttentionScale {
    float factor, cap;
};

// Running sums of each row. max: the greatest score; sum: the sum of e^(score - max); values: the sum of the keys'
// values weighted by e^(score - max), [n_rows][n].
struct AttentionSums {
    float *max, *sum, *values;
};

// Two subsets of 32 keys, with one bit per key. `seen` contains the keys that a row sees. `biased` contains the seen
// keys whose value in the mask is not 0.
struct SeenKeys {
    uint32_t seen, biased;
};

// Rows of n_bytes that will be read soon. They are prefetched into the processor's cache.
struct RowsToPrefetch {
    const char * const * rows;
    int64_t n, n_bytes;
};

// The type of keys and values. Each is a row of n floats (f32) or half floats (f16) with its own pointer; n is a
// multiple of 16.
enum class CacheType { f32, f16 };

// The attention kernels. There are two variants, which produce identical bits. With many rows, each row has a vector
// lane, and scores are [key][n_lanes]. With few rows (score_few, soften_few), each key has a lane, and scores are
// [row][most_keys]. `queries` is [n][n_lanes] in both.
struct AttentionKernels {
    int lanes; // number of lanes of a vector; n_lanes is a multiple of this number

    SeenKeys (*see)(const uint16_t * mask); // mask [32]: half floats
    void (*q8_0_to_float)(const char * values, int64_t n, float * out);
    void (*f16_to_float)(const char * values, int64_t n, float * out);

    bool (*is_finite)(const char * values, int64_t n, CacheType type);

    // Multiplies queries by keys. n_rows: a multiple of `lanes`. keys: [n_keys, rounded up to 16][n].
    void (*score)(const float * queries, int n_lanes, int n_rows, const float * keys, int n_keys, int64_t n,
                  float * scores);
    // Multiplies at most few_rows queries by keys. keys [most_keys]: addresses of keys of half floats. soon: rows to
    // prefetch.
    void (*score_few)(const float * queries, int n_lanes, int n_rows, const char * const * keys, int n_keys, int64_t n,
                      const RowsToPrefetch & soon, float * scores);

    // Replaces scores with e^(score - max), and updates max and sum of each row. `bias` is added to the scores, and is
    // -inf if a row does not see a key; nullptr: no bias. Writes to `rescale` [n_rows] the factors for the earlier sums
    // of values.
    void (*soften)(float * scores, const float * bias, int n_lanes, int n_rows, int n_keys,
                   const AttentionScale & scale, const AttentionSums & sums, float * rescale);
    void (*soften_few)(float * scores, const float * bias, int n_rows, int n_keys, const AttentionScale & scale,
                       const AttentionSums & sums, float * rescale);

    // Computes out [n_rows][n] = out * rescale + the sum over keys of p * value. keys [n_keys]: indices of the keys in
    // `values` and `p`. In `p`, the weight of a key is at key * key_stride + row * row_stride.
    void (*mix)(const float * p, int key_stride, int row_stride, int n_rows, CacheType type,
                const char * const * values, int64_t n, const uint8_t * keys, int n_keys, const float * rescale,
                float * out);

    // Adds the sums over one part of the keys (`part`) to the sums over other keys (`into`).
    void (*merge)(const AttentionSums & into, const AttentionSums & part, int n_rows, int64_t n);
};

// ---- by processor ----

struct Kernels {
    const Kernel * (*of_interleaved)(ggml_type type); // weights of 8 interleaved rows, as in upstream's repack.cpp
    const Kernel * (*of_plain)(ggml_type type);       // weights in a file's layout
    // Float weights; all three functions return nullptr for other types.
    MultiplyFloats (*of_floats)(ggml_type type);
    const AttentionKernels * attention;
};

extern const Kernels avx2;   // needs AVX2, FMA and F16C
extern const Kernels avx512; // also needs AVX-512 (F, BW, DQ, VL) and VNNI

// Returns the kernels for this processor; nullptr: upstream's kernels are used. For comparisons, the environment
// variable MOEGGUF_KERNELS can select "avx2" or "upstream".
const Kernels * processor_kernels();

} // namespace moegguf::kernels
