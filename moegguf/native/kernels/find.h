// find.h: the kernels of all layouts for one set of instructions.
#pragma once

#include "quantize.h"
#include "tile.h"

namespace moegguf::kernels {
namespace {

template <class Isa, class T>
constexpr Kernel kernel = {T::n_values,      sizeof(typename T::Row), Isa::max_rows,
                           quantize<Isa, T>, Tile<Isa, T>::gather,    Tile<Isa, T>::multiply};

template <class Isa>
const Kernel * find(Layout layout) {
    switch (layout) {
        case Layout::q4_0x8:
            return &kernel<Isa, Q4_0x8>;
        case Layout::iq4_nlx8:
            return &kernel<Isa, Iq4NlX8>;
        case Layout::mxfp4x8:
            return &kernel<Isa, Mxfp4X8>;
        case Layout::q4_kx8:
            return &kernel<Isa, Q4KX8>;
        case Layout::q5_kx8:
            return &kernel<Isa, Q5KX8>;
        case Layout::q6_kx8:
            return &kernel<Isa, Q6KX8>;
    }
    return nullptr;
}

} // namespace
} // namespace moegguf::kernels
