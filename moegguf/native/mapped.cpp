// mapped.cpp: implements mapped.h. This includes the table and the log in the device's memory, and the promotion of
// experts.
#include "mapped.h"

#include "copies.h"

namespace moegguf {
namespace {

// An expert evicts another one only if kernels have read it in RAM twice within this number of passes, because a
// promoted expert crosses the link a second time.
constexpr uint64_t promotion_window = 64;

} // namespace

Mapped::Mapped(const Layout & layout, Tier & slots)
    : layout_(layout),
      slots_(slots),
      ram_(*slots.ram()),
      row_ids_(slots.layers.n_used_max * most_tokens),
      context_(tensor_context(layout.n_moe_layers + 2)),
      read_in_ram_(layout.n_keys(), 0) {
    ggml_backend_dev_t device = slots.pool()->memory().device;
    table_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_I32, layout.n_expert_max, layout.n_moe_layers);
    log_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_I32, row_ids_, layout.n_moe_layers);
    memory_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), ggml_backend_dev_buffer_type(device)));
    if (!memory_) { throw Error(MOEGGUF_MEMORY, "the device has no memory for the table of slot ids"); }
    ggml_backend_buffer_set_usage(memory_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS); // keeps the nodes on the device
    ggml_backend_buffer_clear(memory_.get(), 0);
    for (int il : layout.moe_layers) {
        const size_t offset = (size_t)layout.row_of[il] * layout.n_expert_max * sizeof(int32_t);
        rows_.push_back(ggml_view_2d(context_.get(), table_, 1, layout.layers[il].n_expert, sizeof(int32_t), offset));
        ggml_backend_view_init(rows_.back());
    }
    table_host_ = of_table_.space(device, ggml_nelements(table_));
    log_host_ = of_log_.space(device, ggml_nelements(log_));
    std::fill_n(table_host_, ggml_nelements(table_), 0);
    passed_.reserve(layout.n_moe_layers);
    wanted_.reserve((size_t)layout.n_moe_layers * row_ids_);
}

void Mapped::choose(Shared & shared, bool observed) {
    const bool can_act = ram_.numbering.resident() && ram_.residency.all_ready() && !observed;
    if (can_act == slots_.still) { return; }
    Lock lock(shared.mutex); // a reader thread reads the flag before it evicts an expert
    slots_.still = can_act;
}

ggml_tensor * Mapped::slot_ids(ggml_context * ctx, ggml_tensor * expert_ids, int il, const char * name) const {
    const int64_t n_used = expert_ids->ne[0], n_tokens = expert_ids->ne[1];
    const int row = layout_.row_of[il];
    const size_t row_bytes = n_used * sizeof(int32_t), offset = (size_t)row * row_ids_ * sizeof(int32_t);
    ggml_tensor * ids = ggml_cpy(ctx, expert_ids, ggml_view_2d(ctx, log_, n_used, n_tokens, row_bytes, offset));
    ggml_set_name(ids, name);
    ggml_tensor * flat = ggml_reshape_1d(ctx, ids, n_used * n_tokens);
    ggml_set_name(flat, "mapped_ids"); // ggml's own name for the view would begin with `name`
    ggml_tensor * slots = ggml_get_rows(ctx, rows_[row], flat);
    return ggml_reshape_2d(ctx, slots, n_used, n_tokens);
}

int32_t Mapped::slot_of(int il, int expert) const {
    const int s = slots_.residency.find(il, expert);
    if (s >= 0 && slots_.residency.complete(s)) { return s; }
    return slots_.residency.n_slots() + ram_.numbering.own_slot(il, expert);
}

void Mapped::refresh(Shared & shared, ggml_backend_t backend) {
    backend_ = backend;
    if (fresh_) { return; }
    bool changed = false;
    {
        Lock lock(shared.mutex);
        for (int il : layout_.moe_layers) {
            int32_t * row = table_host_ + (size_t)layout_.row_of[il] * layout_.n_expert_max;
            for (int expert = 0; expert < layout_.layers[il].n_expert; expert++) {
                const int32_t slot = slot_of(il, expert);
                changed = changed || row[expert] != slot;
                row[expert] = slot;
            }
        }
    }
    fresh_ = true;
    if (!changed) { return; }
    backend ? ggml_backend_tensor_set_async(backend, table_, table_host_, 0, ggml_nbytes(table_))
            : ggml_backend_tensor_set(table_, table_host_, 0, ggml_nbytes(table_));
}

void Mapped::copy_log() {
    if (!backend_) { return ggml_backend_tensor_get(log_, log_host_, 0, ggml_nbytes(log_)); }
    ggml_backend_tensor_get_async(backend_, log_, log_host_, 0, ggml_nbytes(log_));
    ggml_backend_synchronize(backend_);
}

void Mapped::count_uses(const Event & event, uint64_t number) {
    const int il = event.il;
    const int32_t * row = table_host_ + (size_t)layout_.row_of[il] * layout_.n_expert_max;
    slots_.residency.on_routed(il);
    slots_.residency.on_routing(il, event.ids, event.n_expert_used, event.n_tokens);
    LookUps in_slots(slots_), in_ram(ram_);
    for (int expert : event.experts) {
        const bool was_on_device = row[expert] < slots_.residency.n_slots();
        in_slots.add(il, expert, was_on_device);
        const int s = slots_.residency.find(il, expert);
        if (s >= 0) { // the expert becomes the most recently used one, and the policy counts a use
            slots_.pin(s);
            slots_.unpin(s);
        }
        if (was_on_device) { continue; }
        in_ram.add(il, expert, true);
        uint64_t & last = read_in_ram_[layout_.key(il, expert)];
        const bool again = last > 0 && number - last <= promotion_window;
        if (s < 0 && (again || slots_.residency.has_free())) { wanted_.push_back({il, expert}); }
        last = number;
    }
}

void Mapped::promote(Transfers & transfers, const LayerStep & now) {
    fresh_ = false; // copies may have ended, even if no expert is promoted now
    if (!slots_.copies->idle()) { wanted_.clear(); }
    for (const Want & want : wanted_) {
        const int s = slots_.assign(want.il, want.expert, now);
        if (s < 0) { continue; }
        slots_.borrow(s, ram_, ram_.residency.find(want.il, want.expert), true);
        transfers.copy(slots_, s, false);
    }
    wanted_.clear();
}

} // namespace moegguf
