// layout.h: where each expert lies in the file and in the pool's numbering. Plain data, no I/O.
#pragma once

#include "moegguf.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace moegguf {

// A typed failure inside the library; the C ABI turns it into its status.
struct Error : std::runtime_error {
    Error(moegguf_status status, const std::string & what) : std::runtime_error(what), status(status) {}
    moegguf_status status;
};

struct Matrix {
    std::string name;
    int il = 0;
    moegguf_kind kind = MOEGGUF_GATE;
    ggml_type type = GGML_TYPE_F32;
    int n_expert = 0;
    int64_t ne0 = 0;
    int64_t ne1 = 0;
    int shard = 0;
    uint64_t offset = 0;
    uint64_t expert_bytes = 0;
};

struct Layer {
    int n_expert = 0; // 0: no experts here
    int n_expert_used = 0;
    int matrix[MOEGGUF_MAX_KINDS] = {-1, -1, -1, -1}; // index into matrices
    uint8_t chunks = 0;                               // bit per kind present
    int first_slot = 0;                               // this layer's window of the arenas
    int n_slots = 0;
    uint64_t expert_bytes = 0; // over all kinds
};

struct Layout {
    std::vector<Matrix> matrices;
    std::vector<Layer> layers;
    std::vector<std::string> shards;
    int n_expert_max = 0;
    int n_experts = 0; // over all layers
    int n_moe_layers = 0;
    int token_cycle = 0; // slots one token touches
    uint64_t stride[MOEGGUF_MAX_KINDS] = {};
    int n_slots = 0;
    bool resident = false;

    // Throws Error(INVALID) on any inconsistency.
    explicit Layout(const moegguf_config & config);

    uint64_t slot_bytes() const;
    int key(int il, int expert) const { return il * n_expert_max + expert; }

  private:
    void add(const moegguf_matrix & m);
    void number_slots();
};

} // namespace moegguf
