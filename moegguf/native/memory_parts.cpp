// memory_parts.cpp: which classes of llama.cpp are the parts of which memory.
//
// A class of memory that is not listed here counts as cells that can be cut: a plain cache of keys and values.
#include "memory_parts.h"

#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <vector>

using namespace moegguf;

namespace {

struct Part {
    uint32_t kind;
    llama_memory_i * memory;
};

// Returns a memory whose indexer has a cache of its own, with cells where the attention's cells lie; nullptr: another
// one.
llama_memory_hybrid_idx * indexed(llama_memory_i & memory) {
    auto * found = dynamic_cast<llama_memory_hybrid_idx *>(&memory);
    return found && found->get_mem_idx() ? found : nullptr;
}

// Notes that cells of a sequence have changed from p0 on: what an indexer has pooled of them is computed again.
void note_change(llama_memory_i & memory, llama_seq_id seq, llama_pos p0) {
    const llama_memory_hybrid_idx * found = indexed(memory);
    if (found && found->get_kpool() > 0) { memory.seq_add(seq, p0, -1, 0); }
}

// Returns the parts of a memory in the order of its own states; none where it cannot be cut.
std::vector<Part> parts_of(llama_memory_i & memory) {
    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(&memory)) {
        return {{part_cells, iswa->get_base()}, {part_window, iswa->get_swa()}};
    }
    if (auto * dsa = dynamic_cast<llama_kv_cache_dsa_iswa *>(&memory)) {
        return {{part_cells, dsa->get_dsa()}, {part_window, dsa->get_swa()}};
    }
    if (auto * both = dynamic_cast<llama_memory_hybrid_iswa *>(&memory)) {
        llama_kv_cache_iswa * iswa = both->get_mem_attn();
        return {{part_cells, iswa->get_base()}, {part_window, iswa->get_swa()}, {part_recurrent, both->get_mem_recr()}};
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(&memory)) {
        std::vector<Part> parts = {{part_cells, hybrid->get_mem_attn()}};
        if (llama_memory_hybrid_idx * found = indexed(*hybrid)) { parts.push_back({part_cells, found->get_mem_idx()}); }
        parts.push_back({part_recurrent, hybrid->get_mem_recr()});
        return parts;
    }
    if (dynamic_cast<llama_kv_cache_dsv4 *>(&memory) || dynamic_cast<llama_memory_recurrent *>(&memory)) { return {}; }
    return {{part_cells, &memory}};
}

// Returns those parts of a memory that a set has: the memory itself for the empty set.
std::vector<llama_memory_i *> chosen(llama_memory_i & memory, uint32_t kinds) {
    if (kinds == 0) { return {&memory}; }
    std::vector<llama_memory_i *> found;
    for (const Part & part : parts_of(memory)) {
        if (part.kind & kinds) { found.push_back(part.memory); }
    }
    return found;
}

// Reads cells of a model with an indexer, whose cache takes the attention's places.
void read_indexed(llama_memory_hybrid_idx & memory, llama_io_read_i & io, llama_seq_id seq) {
    llama_kv_cache::slot_info_vec_t places;
    try {
        memory.get_mem_attn()->state_read_sinfo(io, seq, 0, &places, nullptr);
        memory.get_mem_idx()->state_read_sinfo(io, seq, 0, nullptr, &places);
    } catch (...) {
        memory.get_mem_attn()->state_clear(seq);
        memory.get_mem_idx()->state_clear(seq);
        throw;
    }
}

} // namespace

namespace moegguf {

void write_parts(llama_memory_i & memory, llama_io_write_i & io, llama_seq_id seq, llama_state_seq_flags flags) {
    const uint32_t kinds = flags >> part_shift;
    flags &= (1u << part_shift) - 1;
    for (llama_memory_i * part : chosen(memory, kinds)) { part->state_write(io, seq, flags); }
}

void read_parts(llama_memory_i & memory, llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags) {
    const uint32_t kinds = flags >> part_shift;
    flags &= (1u << part_shift) - 1;
    llama_memory_hybrid_idx * with_indexer = indexed(memory);
    if ((kinds & part_cells) && with_indexer) {
        read_indexed(*with_indexer, io, seq);
        note_change(memory, seq, 0);
        return;
    }
    for (llama_memory_i * part : chosen(memory, kinds)) { part->state_read(io, seq, flags); }
}

} // namespace moegguf

extern "C" {

uint32_t moegguf_memory_parts(llama_memory_t memory) {
    uint32_t kinds = 0;
    for (const Part & part : parts_of(*memory)) { kinds |= part.kind; }
    return kinds;
}

bool moegguf_parts_seq_rm(llama_memory_t memory, uint32_t parts, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    bool done = true;
    for (llama_memory_i * part : chosen(*memory, parts)) { done = part->seq_rm(seq, p0, p1) && done; }
    note_change(*memory, seq, p0);
    return done;
}

void moegguf_parts_seq_cp(llama_memory_t memory, uint32_t parts, llama_seq_id from, llama_seq_id to, llama_pos p0,
                          llama_pos p1) {
    for (llama_memory_i * part : chosen(*memory, parts)) { part->seq_cp(from, to, p0, p1); }
    note_change(*memory, from, 0);
    note_change(*memory, to, 0);
}

llama_pos moegguf_parts_seq_pos_min(llama_memory_t memory, uint32_t parts, llama_seq_id seq) {
    llama_pos first = -1;
    for (llama_memory_i * part : chosen(*memory, parts)) { first = std::max(first, part->seq_pos_min(seq)); }
    return first;
}

llama_pos moegguf_parts_seq_pos_max(llama_memory_t memory, uint32_t parts, llama_seq_id seq) {
    llama_pos last = INT32_MAX;
    for (llama_memory_i * part : chosen(*memory, parts)) { last = std::min(last, part->seq_pos_max(seq)); }
    return last == INT32_MAX ? -1 : last;
}

} // extern "C"
