// rows.h: rows of activations as the kernels read them.
#pragma once

#include <cstdint>

namespace moegguf::kernels {

// 32 values with a scale.
struct Row32 {
    int8_t qs[32];
    int32_t minus; // their sum times -T::offset
    float d;
};

// 256 values with a scale, for weights with integer scales and minima.
struct RowMins {
    int8_t qs[256];
    int16_t sums[8]; // of each 32 values
    float d;
};

// 256 values with a scale, for weights with integer scales whose codes have an offset.
struct RowOffset {
    int8_t qs[256];
    int32_t minus[32]; // of each 8 values: their sum times -T::offset, as Isa::minus_8 has it
    float d;
};

} // namespace moegguf::kernels
