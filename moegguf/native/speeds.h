// speeds.h: how fast a machine is with a model's experts, measured with the pools, copies and kernels that a store
// uses.
//
// It allocates and frees pools of its own. Knows no store that is open.
#pragma once

#include "moegguf.h"

namespace moegguf {

// See moegguf_measure_speeds. Throws Error.
moegguf_speeds measure_speeds(const moegguf_config & config, int n_threads, double seconds);

} // namespace moegguf
