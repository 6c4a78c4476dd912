// mapped.h: slots whose ids the device itself looks up (placement "slots-mapped"; docs/gpu.md, "Mapped slots").
//
// The arenas of the device's slots and of the slots in RAM form one range of addresses for each kind of matrix
// (pool.h). The device's slots come first. A pool tensor covers both, so a slot id selects an expert in the device's
// memory or in RAM. A table in the device's memory holds the slot id of each expert. The graph of a layer copies the
// router's expert ids into a log in the device's memory, and looks the slot ids up in the table. So the scheduler does
// not stop at the layer.
//
// Between passes, the compute thread reads the log, counts the uses, and promotes experts: it copies them from RAM into
// slots on the device (Store::end_mapped). No supply takes part.
//
// During a pass, kernels may read every slot that the table names. So while graphs look up slot ids, the tier of the
// device's slots is still (Tier::still): requested and forecast prefetches get no slots there. Experts lose their slots
// there only to promoted experts, or at a layer where the scheduler stops. The table is then uploaded in the compute
// stream before the next mapped layer runs. It names an evicted expert's slot in RAM. It names the new expert's slot on
// the device only after the copy into that slot has ended.
//
// This applies while RAM holds every expert, in passes of at most most_tokens tokens that compute from slots. All other
// passes stop at each layer (acquire.cpp). If such a layer and a mapped layer are in one pass, the table is uploaded
// again before the mapped layer.
#pragma once

#include "supply.h"

namespace moegguf {

class Mapped {
  public:
    static constexpr int most_tokens = 16; // largest number of tokens of a layer that looks up slot ids on the device

    // A layer of the pass whose log has not been read.
    struct Passed {
        int il;
        int n_expert_used;
        int n_tokens;
    };

    // slots: the tier of the device's slots. The tier in RAM below it (slots.ram()) has a slot for every expert.
    // Allocates the table of slot ids and the log, and host copies of both. Throws Error(MEMORY).
    Mapped(const Layout & layout, Tier & slots);

    // Only the compute thread calls the following functions.
    bool on() const { return slots_.still; } // true: graphs that are built now look up slot ids on the device
    // Switches on() if the result of can_act() has changed. Takes the store's lock only in this case. `observed`: an
    // observer needs data that the log does not contain.
    void choose(Shared & shared, bool observed);

    // Returns the graph nodes that copy expert ids into the log, and look up slot ids. `name` becomes the name of the
    // node that writes the log.
    ggml_tensor * slot_ids(ggml_context * ctx, ggml_tensor * expert_ids, int il, const char * name) const;

    // Called before the scheduler starts the kernels of a layer. Returns true if the log still holds the ids of an
    // earlier pass, which would be overwritten: the caller reads the log first.
    bool overwrites(int il) const { return !passed_.empty() && il <= passed_.back().il; }
    void pass(const Passed & layer) { passed_.push_back(layer); }
    bool pending() const { return !passed_.empty(); } // true: the log holds ids that have not been read
    void drop_log() { passed_.clear(); }
    // Copies the log to the host, and calls body(layer, ids) for each layer of the pass.
    template <typename Body>
    void read_log(Body body) {
        copy_log();
        for (const Passed & layer : passed_) { body(layer, log_host_ + layout_.row_of[layer.il] * row_ids_); }
        passed_.clear();
    }

    // Called before an expert may be evicted: the table must be uploaded before the next mapped layer runs.
    void make_stale() { fresh_ = false; }
    // Uploads the table in the backend's stream if it is stale and has changed. nullptr: the stream is not known.
    void refresh(Shared & shared, ggml_backend_t backend);

    // Callers of the following functions hold the store's lock. Counts the look-ups and uses of a layer's event, and
    // notes the experts to promote. `number`: number of the pass.
    void count_uses(const Event & event, uint64_t number);
    // Assigns slots on the device to the noted experts, and queues their copies. Does nothing while earlier copies are
    // queued.
    void promote(Transfers & transfers, const LayerStep & now);

  private:
    void copy_log();
    // Returns the id of the slot from which kernels read an expert now.
    int32_t slot_of(int il, int expert) const;

    const Layout & layout_;
    Tier & slots_;
    Tier & ram_;
    const int row_ids_; // number of ids for which the log has space in each layer
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr memory_;    // device memory of the table and of the log
    ggml_tensor * table_ = nullptr;     // [n_moe_layers][n_expert_max] slot ids
    ggml_tensor * log_ = nullptr;       // [n_moe_layers][row_ids_] expert ids
    std::vector<ggml_tensor *> rows_;   // [n_moe_layers] the table of each layer, [n_expert][1]
    HostIds of_table_, of_log_;         // own the next two arrays, in pinned memory
    int32_t * table_host_ = nullptr;    // the table as it was last uploaded
    int32_t * log_host_ = nullptr;      // the log as it was last read
    ggml_backend_t backend_ = nullptr;  // backend that last ran a mapped layer; nullptr: not known
    bool fresh_ = false;                // true: no expert has been evicted since the table was uploaded
    std::vector<Passed> passed_;        // layers of the pass whose log has not been read
    std::vector<uint64_t> read_in_ram_; // [n_keys] number of the last pass that read the expert in RAM; 0: none
    std::vector<Want> wanted_;          // experts to promote
};

} // namespace moegguf
