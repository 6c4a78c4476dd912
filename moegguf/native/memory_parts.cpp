// memory_parts.cpp: implements memory_parts.h: lists the parts of llama.cpp's memory classes.
//
// A class that is not listed is treated as a plain KV cache, whose cells can be removed after any position.
#include "memory_parts.h"

#include "llama-context.h"
#include "llama-io.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "moegguf.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

using namespace moegguf;

namespace {

struct Part {
    uint32_t kind;
    llama_memory_i * memory;
};

// Returns the memory as a llama_memory_hybrid_idx if its sparse attention has an indexer with its own cache.
// Corresponding cells have the same index in both caches. Returns nullptr for any other memory.
llama_memory_hybrid_idx * indexed(llama_memory_i & memory) {
    auto * found = dynamic_cast<llama_memory_hybrid_idx *>(&memory);
    return found && found->get_mem_idx() ? found : nullptr;
}

// Marks a sequence's pooled keys in an indexer as out of date from position p0 on, so that they are recomputed. Does
// nothing for a memory without pooled keys.
void note_change(llama_memory_i & memory, llama_seq_id seq, llama_pos p0) {
    const llama_memory_hybrid_idx * found = indexed(memory);
    if (found && found->get_kpool() > 0) { memory.seq_add(seq, p0, -1, 0); }
}

// Returns the parts of a memory, in the order in which write_parts() writes them; empty: the memory cannot be divided.
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

// Returns the parts of a memory whose kinds are in `kinds` (bits of memory_part); 0: the whole memory.
std::vector<llama_memory_i *> chosen(llama_memory_i & memory, uint32_t kinds) {
    if (kinds == 0) { return {&memory}; }
    std::vector<llama_memory_i *> found;
    for (const Part & part : parts_of(memory)) {
        if (part.kind & kinds) { found.push_back(part.memory); }
    }
    return found;
}

// Reads a sequence's cells into the attention's cache and the indexer's cache, at the same indices in both. After a
// failure, clears the sequence in both caches and rethrows the error.
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

// Writes the parts `kinds` of a sequence's state; 0: the whole state.
void write_parts(llama_memory_i & memory, uint32_t kinds, llama_io_write_i & io, llama_seq_id seq) {
    for (llama_memory_i * part : chosen(memory, kinds)) { part->state_write(io, seq, 0); }
}

// Reads the parts of a sequence's state that write_parts() has written. For a memory with an indexer, part_cells must
// not be combined with other bits. Throws if the state does not fit the memory.
void read_parts(llama_memory_i & memory, uint32_t kinds, llama_io_read_i & io, llama_seq_id seq) {
    llama_memory_hybrid_idx * with_indexer = indexed(memory);
    if ((kinds & part_cells) && with_indexer) {
        read_indexed(*with_indexer, io, seq);
        note_change(memory, seq, 0);
        return;
    }
    for (llama_memory_i * part : chosen(memory, kinds)) { part->state_read(io, seq, 0); }
}

// Counts the bytes of a state without writing anything.
class Counter : public llama_io_write_i {
  public:
    void write(const void *, size_t n) override { n_ += n; }
    void write_tensor(ggml_tensor *, size_t, size_t n) override { n_ += n; }
    size_t n_bytes() override { return n_; }

  private:
    size_t n_ = 0;
};

// Writes a state to a block of n bytes. Throws if the state is longer.
class Writer : public llama_io_write_i {
  public:
    Writer(void * to, size_t n) : to_((uint8_t *)to), n_left_(n) {}

    void write(const void * from, size_t n) override { memcpy(take(n), from, n); }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t n) override {
        ggml_backend_tensor_get(tensor, take(n), offset, n);
    }
    size_t n_bytes() override { return n_written_; }

  private:
    uint8_t * take(size_t n) {
        if (n > n_left_) { throw std::runtime_error("a state is longer than its memory"); }
        uint8_t * at = to_ + n_written_;
        n_written_ += n;
        n_left_ -= n;
        return at;
    }

    uint8_t * to_;
    size_t n_left_, n_written_ = 0;
};

// Reads a state from memory. Tensors are written at the end by set_tensors(), after the whole state has been read
// without an error.
class Reader : public llama_io_read_i {
  public:
    Reader(const void * at, size_t n) : at_((const uint8_t *)at), n_left_(n) {}

    void read(void * to, size_t n) override {
        const uint8_t * from = take(n);
        if (!moegguf_state_read(to, from, n)) { memcpy(to, from, n); }
    }
    void read_tensor(ggml_tensor * tensor, size_t offset, size_t n) override {
        const uint8_t * from = take(n);
        tensors_.push_back({tensor, offset, n, from});
    }
    size_t n_bytes() override { return n_read_; }

    void set_tensors() const {
        for (const Bytes & bytes : tensors_) {
            if (!moegguf_state_put(bytes.tensor, bytes.offset, bytes.from, bytes.n)) {
                ggml_backend_tensor_set(bytes.tensor, bytes.from, bytes.offset, bytes.n);
            }
        }
    }

  private:
    struct Bytes {
        ggml_tensor * tensor;
        size_t offset, n;
        const uint8_t * from;
    };

    const uint8_t * take(size_t n) {
        if (n > n_left_) { throw std::runtime_error("a state ends early"); }
        const uint8_t * at = at_ + n_read_;
        n_read_ += n;
        n_left_ -= n;
        return at;
    }

    const uint8_t * at_;
    size_t n_left_, n_read_ = 0;
    std::vector<Bytes> tensors_;
};

// Calls a function. Returns false if the function throws, as llama.cpp does if a state does not belong to this memory.
template <typename F>
bool succeeds(F call) {
    try {
        call();
        return true;
    } catch (const std::exception &) { return false; }
}

} // namespace

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

void moegguf_parts_seq_cp(llama_context * context, uint32_t parts, llama_seq_id from, llama_seq_id to, llama_pos p0,
                          llama_pos p1) {
    llama_memory_i & memory = *llama_get_memory(context);
    for (llama_memory_i * part : chosen(memory, parts)) { part->seq_cp(from, to, p0, p1); }
    note_change(memory, from, 0);
    note_change(memory, to, 0);
    // Copies cells to another stream now. llama.cpp would copy them only before the next pass, and overwrite a state
    // that was read into the sequence until then.
    if (!context->get_cparams().kv_unified) { context->memory_update(false); }
}

void moegguf_parts_share_stream(llama_memory_t memory, llama_seq_id seq, llama_seq_id with) {
    for (const Part & part : parts_of(*memory)) {
        if (auto * cache = dynamic_cast<llama_kv_cache *>(part.memory)) { cache->share_stream(seq, with); }
    }
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

size_t moegguf_parts_state_bytes(llama_context * context, uint32_t parts, llama_seq_id seq) {
    Counter counter;
    const bool done = succeeds([&] { write_parts(*llama_get_memory(context), parts, counter, seq); });
    return done ? counter.n_bytes() : 0;
}

bool moegguf_parts_state_write(llama_context * context, uint32_t parts, llama_seq_id seq, void * to, size_t n) {
    llama_synchronize(context);
    Writer writer(to, n);
    const bool done = succeeds([&] { write_parts(*llama_get_memory(context), parts, writer, seq); });
    return done && writer.n_bytes() == n;
}

bool moegguf_parts_state_read(llama_context * context, uint32_t parts, llama_seq_id seq, const void * at, size_t n) {
    llama_synchronize(context);
    Reader reader(at, n);
    const bool done = succeeds([&] { read_parts(*llama_get_memory(context), parts, reader, seq); });
    if (done) { reader.set_tensors(); }
    return done;
}

} // extern "C"
