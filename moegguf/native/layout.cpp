// layout.cpp: implements layout.h: checks the matrices of a config and computes strides.
#include "layout.h"

#include <numeric>

namespace moegguf {
namespace {

[[noreturn]] void invalid(const std::string & what) { throw Error(MOEGGUF_INVALID, what); }

// Upper limits, far above the values of any known model. They are low enough that the total number of experts' matrices
// fits into an int.
constexpr int max_layers = 4096, max_experts = 65536;
constexpr int64_t max_width = INT32_MAX;

// Returns the offset in the file at which the matrix's last expert ends, in bytes; 0: no file is that long, or
// expert_bytes does not match the type and shape.
uint64_t end_in_file(const moegguf_matrix & m) {
    uint64_t expert = 0, all = 0, end = 0;
    const bool overflows =
        __builtin_mul_overflow((uint64_t)ggml_row_size((ggml_type)m.type, m.ne0), (uint64_t)m.ne1, &expert) ||
        __builtin_mul_overflow(expert, (uint64_t)m.n_expert, &all) || __builtin_add_overflow(m.offset, all, &end);
    return overflows || expert != m.expert_bytes || end > INT64_MAX ? 0 : end;
}

uint64_t round_up(uint64_t n, uint64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

} // namespace

bool is_matrix(const moegguf_matrix & m) {
    const auto is_width = [](int64_t n) { return n > 0 && n <= max_width; };
    return m.type >= 0 && m.type < GGML_TYPE_COUNT && is_width(m.ne0) && is_width(m.ne1) &&
           ggml_blck_size((ggml_type)m.type) > 0 && m.ne0 % ggml_blck_size((ggml_type)m.type) == 0;
}

uint64_t Strides::add(moegguf_kind kind, ggml_type type, uint64_t bytes, uint64_t place) {
    constexpr uint64_t alignment = 256; // matrices in a packed slot begin at multiples of this number of bytes
    const int a = arena(kind);
    const uint64_t end = packed ? place + round_up(bytes, alignment) : bytes;
    unit_[a] = std::lcm(unit_[a], (uint64_t)ggml_type_size(type));
    of_arena[a] = round_up(std::max(of_arena[a], end), unit_[a]);
    return end;
}

Strides strides_for(const moegguf_matrix * matrices, int n, bool packed) {
    Strides strides;
    strides.packed = packed;
    std::vector<uint64_t> places; // [il] place of the layer's next matrix
    for (int i = 0; i < n; i++) {
        const moegguf_matrix & m = matrices[i];
        if (m.il < 0 || m.il >= max_layers || m.kind < 0 || m.kind >= MOEGGUF_MAX_KINDS || m.type < 0 ||
            m.type >= GGML_TYPE_COUNT || ggml_type_size((ggml_type)m.type) == 0) {
            invalid("matrix '" + std::string(m.name ? m.name : "?") +
                    "' has a layer, kind or type that does not exist");
        }
        places.resize(std::max(places.size(), (size_t)m.il + 1));
        uint64_t & place = places[m.il];
        place = strides.add((moegguf_kind)m.kind, (ggml_type)m.type, m.expert_bytes + m.padding_bytes, place);
    }
    return strides;
}

uint64_t Strides::slot_bytes() const { return std::accumulate(of_arena, of_arena + MOEGGUF_MAX_KINDS, uint64_t(0)); }

uint64_t Strides::pool_bytes(int n_slots) const {
    uint64_t bytes = 0;
    for (int a = 0; a < MOEGGUF_MAX_KINDS; a++) { bytes += of_arena[a] > 0 ? arena_bytes(a, n_slots) : 0; }
    return bytes;
}

Layout::Layout(const moegguf_config & config) {
    if (config.n_layer <= 0 || config.n_layer > max_layers || config.n_matrices <= 0 || !config.matrices ||
        !config.n_expert_used) {
        invalid(
            "a store needs 1 to 4096 layers, expert matrices, and the number of experts that a token uses in each "
            "layer");
    }
    const bool needs_files = !(config.flags & MOEGGUF_SIMULATE);
    if (config.n_shards < 0 || (needs_files && config.n_shards == 0) || (config.n_shards > 0 && !config.shard_paths)) {
        invalid("a store needs the files that contain its experts");
    }
    if (config.n_mirrors < 0) {
        invalid("the number of mirrors must be 0 or more, not " + std::to_string(config.n_mirrors));
    }
    layers.resize(config.n_layer);
    const char * const * path = config.shard_paths;
    for (int i = 0; i < config.n_shards; i++) { shards.emplace_back(*path++); }
    for (int i = 0; i < config.n_mirrors; i++) {
        mirrors.emplace_back(path, path + config.n_shards);
        path += config.n_shards;
    }
    for (int i = 0; i < config.n_matrices; i++) { add(config.matrices[i]); }
    for (const Layer & layer : layers) {
        Strides packed;
        packed.packed = true;
        uint64_t place = 0;
        for (uint8_t kinds = layer.chunks; kinds; kinds &= kinds - 1) {
            Matrix & m = matrices[layer.matrix[__builtin_ctz(kinds)]];
            m.place = place;
            place = packed.add(m.kind, m.type, m.expert_bytes + m.padding_bytes, place);
        }
    }
    row_of.assign(config.n_layer, -1);
    for (int il = 0; il < config.n_layer; il++) {
        Layer & layer = layers[il];
        if (layer.n_expert == 0) { continue; }
        row_of[il] = n_moe_layers;
        moe_layers.push_back(il);
        layer.n_expert_used = config.n_expert_used[il];
        if (layer.n_expert_used <= 0 || layer.n_expert_used > layer.n_expert) {
            invalid("layer " + std::to_string(il) +
                    " must use at least one expert per token, and no more experts than it has");
        }
        n_experts += layer.n_expert;
        n_moe_layers += 1;
        n_expert_max = std::max(n_expert_max, layer.n_expert);
    }
}

void Layout::add(const moegguf_matrix & m) {
    const std::string name = m.name ? m.name : "?";
    if (m.il < 0 || m.il >= (int)layers.size() || m.kind < 0 || m.kind >= MOEGGUF_MAX_KINDS || m.n_expert <= 0 ||
        m.n_expert > max_experts || m.padding_bytes < 0) {
        invalid("matrix '" + name + "' has a field out of range");
    }
    if (!is_matrix(m) || end_in_file(m) == 0) {
        invalid("matrix '" + name +
                "' must have a known type, the size that follows from its type and shape, and an end below 2^63 bytes");
    }
    if (!shards.empty() && (m.shard < 0 || m.shard >= (int)shards.size())) {
        invalid("matrix '" + name + "' is in a shard that does not exist");
    }
    Layer & layer = layers[m.il];
    if (layer.matrix[m.kind] >= 0 || (layer.n_expert != 0 && layer.n_expert != m.n_expert)) {
        invalid("matrix '" + name +
                "' is the second matrix of its kind in the layer, or has another number of experts than the others");
    }
    layer.matrix[m.kind] = (int)matrices.size();
    layer.chunks |= 1 << m.kind;
    layer.n_expert = m.n_expert;
    matrices.push_back({name, m.il, (moegguf_kind)m.kind, (ggml_type)m.type, m.ne0, m.ne1, m.shard, m.offset,
                        m.expert_bytes, (uint64_t)m.padding_bytes, 0});
}

void LayerSet::add(int il, const Layout & layout) {
    const Layer & layer = layout.layers[il];
    for (uint8_t kinds = layer.chunks; kinds; kinds &= kinds - 1) {
        const Matrix & m = layout.matrices[layer.matrix[__builtin_ctz(kinds)]];
        strides.add(m.kind, m.type, m.expert_bytes + m.padding_bytes, m.place);
    }
    has[il] = 1;
    moe_layers.push_back(il);
    n_experts += layer.n_expert;
    n_chunks += layer.n_expert * __builtin_popcount(layer.chunks);
    token_cycle += layer.n_expert_used;
    n_used_max = std::max(n_used_max, layer.n_expert_used);
}

} // namespace moegguf
