// link_device.h: a ggml device behind a link in real time, for machines without one.
//
// Its memory lies in RAM, but nobody else may touch it: ggml takes it for a device's. It computes as the CPU backend
// does, with as many threads or a number of its own, which makes it faster or slower than the CPU. A copy between it
// and the host takes the link's latency, and then its bytes over the bandwidth, which all copies under way in that
// direction share; within the device it takes what memory takes. As on CUDA, each backend instance has a stream of its
// own, events connect streams, a copy from or to memory that is not pinned keeps the caller waiting, and where memory
// cannot be pinned the host buffer type gives ordinary memory.
//
// Strict, it is as hard on its users as CUDA may be: binding a quantised tensor zeroes the padding behind it; kernels
// read rows up to that padding's end, and give NaN where they meet what they should not (strict_device.h); fresh memory
// is full of NaN; copies come in pieces of any order, and a stream does nothing before somebody waits for it.
//
// It may touch its own memory and what it is told to copy. Knows no store.
#pragma once

#include "moegguf.h"

namespace moegguf {

// Known to ggml from now on, until the process ends. The name is ggml's: LINK0, LINK1, ... Throws Error(INVALID).
const char * add_link_device(const moegguf_link & link);

} // namespace moegguf
