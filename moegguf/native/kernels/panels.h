// panels.h: panels, which hold unpacked weights in groups of Isa::n_cols columns, block by block. Weights that are
// multiplied by many activation rows are unpacked once, into a panel. plain.h unpacks weights in a file's layout, and
// this file unpacks interleaved weights.
#pragma once

#include "kernels.h"
#include "tile.h"
#include "types.h"

#include <type_traits>

namespace moegguf::kernels {
namespace {

// A panel of weights with one or two scales for every 32 values. A block has 8 vectors of codes, one of scales (or
// two), and one of minima if the type has them.
template <class Isa, class T>
struct ScaledPanel {
    static constexpr int n_values = 32, n_dots = T::n_dots, n_scales = T::n_scales;
    static constexpr int bytes = Isa::n_cols * (32 + 4 * n_scales + (T::adds_min ? 4 : 0));
    static constexpr bool has_mins = false, adds_min = T::adds_min, is_streamed = false;
    template <class>
    static constexpr int read_bytes = Isa::n_cols * T::bytes / T::n_interleaved / T::n_parts;
    template <class>
    static constexpr bool is_signed = T::template is_signed<Isa>;
    using Row = typename T::Row;
    using From = const uint8_t * const (&)[Isa::n_groups];

    template <class>
    static void codes(From block, typename Isa::I * w) {
        for (int i = 0; i < 8; i++) { w[i] = Isa::load_codes(block[0] + i * sizeof(*w)); }
    }
    template <class>
    static typename Isa::F scale(From block, int i) {
        return Isa::load((const float *)(block[0] + (32 + 4 * i) * Isa::n_cols));
    }
    template <class>
    static typename Isa::F min(From block) {
        return Isa::load((const float *)(block[0] + 36 * Isa::n_cols));
    }
};

// A panel of weights in blocks of 256 values with integer scales. A block has 64 vectors of codes, 16 of scales, and
// one of d. If the type has minima, vectors of pairs of minima follow, and then a vector of their factors.
template <class Isa, class T>
struct SuperblockPanel {
    static constexpr int n_values = 256, n_steps = T::n_steps, n_codes = T::n_codes, n_vectors = T::n_vectors;
    static constexpr int n_dots = T::n_dots, n_pairs = T::n_pairs, n_minus = T::n_minus;
    static constexpr int scales_at = 256 * Isa::n_cols, d_at = scales_at + 64 * Isa::n_cols;
    static constexpr int mins_at = d_at + 4 * Isa::n_cols, min_at = mins_at + 4 * n_pairs * Isa::n_cols;
    static constexpr bool has_mins = T::has_mins, is_streamed = false;
    template <class>
    static constexpr bool is_wide = T::template is_wide<Isa>;
    template <class>
    static constexpr int read_bytes = Isa::n_cols * T::bytes / T::n_interleaved;
    static constexpr int bytes = has_mins ? min_at + 4 * Isa::n_cols : mins_at;
    using Row = typename T::Row;

    static constexpr int first_value(int step, int i) { return T::first_value(step, i); }

    template <class>
    struct Block {
        using I = typename Isa::I;
        using F = typename Isa::F;
        const uint8_t * const from;

        explicit Block(const uint8_t * const (&groups)[Isa::n_groups]) : from(groups[0]) {}

        F scale() const { return Isa::load((const float *)(from + d_at)); }
        F min() const { return Isa::load((const float *)(from + min_at)); }
        I mins(int i) const { return Isa::load_codes(from + mins_at + i * sizeof(I)); }
        I scales(int step, int i) const { return Isa::load_codes(from + scales_at + (2 * step + i) * sizeof(I)); }
        template <int>
        void load() {}
        template <int step, int i>
        void codes(I * w) const {
            for (int j = 0; j < n_vectors; j++) {
                w[j] = Isa::load_codes(from + ((step * n_codes + i) * n_vectors + j) * sizeof(I));
            }
        }
    };
};

template <class Isa, class T>
using Panel = std::conditional_t<T::n_values == 32, ScaledPanel<Isa, T>, SuperblockPanel<Isa, T>>;

template <class Isa, class T>
constexpr Kernel panel_kernel = {T::n_values,      sizeof(typename T::Row),          Isa::max_rows,
                                 quantize<Isa, T>, Tile<Isa, Panel<Isa, T>>::gather, Tile<Isa, Panel<Isa, T>>::multiply,
                                 nullptr};

// ---- interleaved weights ----

// The fewest rows for which unpacking interleaved weights takes less time than it saves.
constexpr int least_unpacked_rows = 12;

// Unpacks one step of a block into a panel, and then all later steps.
template <class Isa, class T, int step = 0>
MOEGGUF_INLINE void unpack_steps(typename T::template Block<Isa> & block, uint8_t * out) {
    using P = SuperblockPanel<Isa, T>;
    using I = typename Isa::I;
    const auto unpack = [&block, out](auto half) __attribute__((always_inline)) {
        constexpr int i = decltype(half)::value, n_vectors = T::n_vectors;
        I w[n_vectors];
        block.template codes<step, i>(w);
        for (int j = 0; j < n_vectors; j++) {
            Isa::store_codes(out + ((step * T::n_codes + i) * n_vectors + j) * sizeof(I), w[j]);
        }
        Isa::store_codes(out + P::scales_at + (2 * step + i) * sizeof(I), block.scales(step, i));
    };
    block.template load<step>();
    unpack(std::integral_constant<int, 0>());
    unpack(std::integral_constant<int, 1>());
    if constexpr (step + 1 < T::n_steps) { unpack_steps<Isa, T, step + 1>(block, out); }
}

template <class Isa, class T>
MOEGGUF_INLINE void unpack_block(const uint8_t * const (&blocks)[Isa::n_groups], uint8_t * out) {
    using P = Panel<Isa, T>;
    using I = typename Isa::I;
    if constexpr (T::n_values == 32) {
        I w[8];
        T::template codes<Isa>(blocks, w);
        for (int i = 0; i < 8; i++) { Isa::store_codes(out + i * sizeof(I), w[i]); }
        Isa::store((float *)(out + 32 * Isa::n_cols), T::template scale<Isa>(blocks, 0));
    } else {
        typename T::template Block<Isa> block(blocks);
        unpack_steps<Isa, T>(block, out);
        Isa::store((float *)(out + P::d_at), block.scale());
        if constexpr (T::has_mins) {
            for (int i = 0; i < T::n_pairs; i++) { Isa::store_codes(out + P::mins_at + i * sizeof(I), block.mins(i)); }
            Isa::store((float *)(out + P::min_at), block.min());
        }
    }
}

template <class Isa, class T>
void unpack_interleaved(const char * weights, size_t row_bytes, int64_t n_cols, int64_t n, char * panel) {
    static_assert(Isa::n_groups == 1);
    auto * out = (uint8_t *)panel;
    for (int64_t col = 0; col < n_cols; col += Isa::n_cols) {
        const uint8_t * const group[] = {(const uint8_t *)weights + col * row_bytes};
        for (int64_t b = 0; b < n / T::n_values; b++, out += Panel<Isa, T>::bytes) {
            unpack_block<Isa, T>(Parts<Isa>(group, b * T::bytes).of, out);
        }
    }
}

template <class Isa, class T>
constexpr Panels interleaved_panels = {&panel_kernel<Isa, T>, Panel<Isa, T>::bytes / Isa::n_cols,
                                       unpack_interleaved<Isa, T>, least_unpacked_rows};

template <class Isa, class T>
constexpr const Panels * find_panels() {
    if constexpr (Isa::unpacks_interleaved) { return &interleaved_panels<Isa, T>; }
    return nullptr;
}

template <class Isa, class T>
constexpr Kernel kernel = {T::n_values,          sizeof(typename T::Row), Isa::max_rows,        quantize<Isa, T>,
                           Tile<Isa, T>::gather, Tile<Isa, T>::multiply,  find_panels<Isa, T>()};

template <class Isa>
const Kernel * find(ggml_type type) {
    return type == GGML_TYPE_Q4_0     ? &kernel<Isa, Q4_0x8>
           : type == GGML_TYPE_IQ4_NL ? &kernel<Isa, Iq4NlX8>
           : type == GGML_TYPE_MXFP4  ? &kernel<Isa, Mxfp4X8>
           : type == GGML_TYPE_Q4_K   ? &kernel<Isa, Q4KX8>
           : type == GGML_TYPE_Q5_K   ? &kernel<Isa, Q5KX8<Isa>>
           : type == GGML_TYPE_Q6_K   ? &kernel<Isa, Q6KX8>
                                      : nullptr;
}

} // namespace
} // namespace moegguf::kernels
