// pool.cpp: implements pool.h: allocates arenas, binds pool tensors to them and writes experts into slots.
#include "pool.h"

#include "files.h"
#include "os.h"
#include "switches.h"

#include "ggml-cpu.h"
#include "ggml-impl.h" // declares ggml_set_op_params()

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace moegguf {
ggml_context_ptr tensor_context(size_t n_tensors) {
    ggml_init_params params = {ggml_tensor_overhead() * (n_tensors + 8), nullptr, /*no_alloc =*/true};
    ggml_context_ptr context(ggml_init(params));
    if (!context) { throw Error(MOEGGUF_MEMORY, "no memory for the descriptions of tensors"); }
    return context;
}

namespace {

// Returns the buffer type that interleaves a matrix's rows for the device's kernels; nullptr: the matrix keeps the
// file's layout.
ggml_backend_buffer_type_t interleaved_buft(ggml_backend_dev_t device, ggml_type type, int64_t ne0, int64_t ne1,
                                            int n_slots) {
    // Tries the buffer types that llama.cpp tries before the plain one, in the same order (make_cpu_buft_list in
    // src/llama-model.cpp).
    auto extra_bufts = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    for (auto * at = extra_bufts ? extra_bufts(device) : nullptr; at && *at; at++) {
        ggml_backend_buffer_type_t buft = *at;
        ggml_context_ptr ctx = tensor_context(4);
        ggml_tensor * w = ggml_new_tensor_3d(ctx.get(), type, ne0, ne1, n_slots);
        ggml_tensor * x = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, ne0, 1, 1);
        ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 1);
        ggml_tensor * op = ggml_mul_mat_id(ctx.get(), w, x, ids);
        // The distance between slots is computed from the file's bytes. So a matrix that has a different size in this
        // buffer type keeps the file's layout.
        const bool same_size = ggml_backend_buft_get_alloc_size(buft, w) == ggml_nbytes(w);
        ggml_backend_buffer_ptr probe(ggml_backend_buft_alloc_buffer(buft, 0));
        w->buffer = probe.get();
        if (probe && same_size && ggml_backend_dev_supports_op(device, op)) { return buft; }
    }
    return nullptr;
}

bool is_of(ggml_backend_dev_t device, std::initializer_list<const char *> backends) {
    const char * name = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
    return std::any_of(backends.begin(), backends.end(), [&](const char * of) { return strcmp(name, of) == 0; });
}

// Returns true if a device has a host buffer type whose memory it copies from directly (pinned memory). The type may
// belong to the backend's first device. Memory that CUDA, ROCm or MUSA has pinned is pinned for all of the backend's
// devices. For a second Vulkan device, host memory of the first one is ordinary memory.
bool pins(ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(device);
    return buft && (ggml_backend_buft_get_device(buft) == device || is_of(device, {"CUDA", "ROCm", "MUSA"}));
}

// Returns the largest number of bytes that one buffer of a device can have. Returns UINT64_MAX for Vulkan, whose figure
// is only its preferred size; its supports_op() checks the true limit.
uint64_t most_buffer_bytes(ggml_backend_dev_t device) {
    return is_of(device, {"Vulkan"}) ? UINT64_MAX
                                     : ggml_backend_buft_get_max_size(ggml_backend_dev_buffer_type(device));
}

// Allocates a buffer of n bytes for weights; nullptr: the device refused.
ggml_backend_buffer_ptr allocate_weights(ggml_backend_buffer_type_t buft, uint64_t n) {
    ggml_backend_buffer_ptr memory(os().alloc_buffer(buft, n));
    if (memory) { ggml_backend_buffer_set_usage(memory.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS); }
    return memory;
}

void attach(ggml_tensor * t, ggml_backend_buffer_t buffer, void * address) {
    t->buffer = nullptr;
    t->data = nullptr;
    if (ggml_backend_tensor_alloc(buffer, t, address) != GGML_STATUS_SUCCESS) {
        throw Error(MOEGGUF_MEMORY, std::string("the device cannot describe '") + t->name + "'");
    }
}

// Returns the number of bytes that a buffer type adds after a matrix. Kernels read these bytes.
uint64_t padding_of(ggml_backend_buffer_type_t buft, const ggml_tensor * matrix) {
    return ggml_backend_buft_get_alloc_size(buft, matrix) - ggml_nbytes(matrix);
}

bool multiplies(ggml_backend_dev_t device, const moegguf_matrix & m, int n_slots, uint64_t stride) {
    ggml_context_ptr ctx = tensor_context(4);
    ggml_tensor * w = ggml_new_tensor_3d(ctx.get(), (ggml_type)m.type, m.ne0, m.ne1, n_slots);
    w->nb[2] = stride;
    w->nb[3] = stride * n_slots;
    ggml_tensor * x = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, m.ne0, 1, 1);
    ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 1);
    return ggml_backend_dev_supports_op(device, ggml_mul_mat_id(ctx.get(), w, x, ids));
}

// Returns true if the device's kernels can address every slot of an arena. Except on the CPU, kernels hold the offset
// of a slot, counted in blocks of the type, in a signed 32-bit number.
bool begins_within_32_bits(ggml_backend_dev_t device, ggml_type type, uint64_t arena_bytes) {
    return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU ||
           arena_bytes / ggml_type_size(type) <= INT32_MAX;
}

// Returns true if CPU kernels for this buffer type can call a function of the store that chooses the next expert.
// Exactly two kernels can do this, because arrivals.patch changes them: the plain one (nullptr), and the one for
// interleaved weights (CPU_REPACK).
bool kernel_asks_for_order(ggml_backend_buffer_type_t interleaved) {
    return !interleaved || strcmp(ggml_backend_buft_name(interleaved), "CPU_REPACK") == 0;
}

} // namespace

bool cpu_kernels_ask_for_order(const moegguf_matrix * matrices, int n) {
    ggml_backend_dev_t cpu = find_device(nullptr);
    // The previous matrix; a matrix with the same type and shape needs no second check.
    const moegguf_matrix * last = nullptr;
    for (const moegguf_matrix * m = matrices; m < matrices + n; m++) {
        const bool as_last = last && last->type == m->type && last->ne0 == m->ne0 && last->ne1 == m->ne1;
        if (!as_last && !kernel_asks_for_order(interleaved_buft(cpu, (ggml_type)m->type, m->ne0, m->ne1, 1))) {
            return false;
        }
        last = m;
    }
    return true;
}

uint64_t piece_bytes(const Matrix & m) {
    // The largest piece whose read buffer fits into two huge pages of 2 MiB, and the number of rows in a group.
    constexpr uint64_t target = (4 << 20) - 2 * Shard::alignment, group = 64;
    const uint64_t row_bytes = m.expert_bytes / m.ne1;
    return std::max<uint64_t>(1, target / (row_bytes * group)) * row_bytes * group;
}

ggml_backend_dev_t find_device(const char * name) {
    ggml_backend_dev_t device =
        name ? ggml_backend_dev_by_name(name) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device) { return device; }
    std::string names;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        names += (i ? ", " : "") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    throw Error(MOEGGUF_INVALID, std::string("there is no ggml device named '") + (name ? name : "CPU") +
                                     "'; the devices are: " + names);
}

ggml_backend_ptr make_backend(ggml_backend_dev_t device, int n_threads) {
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw Error(MOEGGUF_MEMORY, std::string(ggml_backend_dev_name(device)) + " could not create a backend");
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    void * function = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (function) { ((ggml_backend_set_n_threads_t)function)(backend.get(), n_threads); }
    return backend;
}

bool maps(const char * name) {
    ggml_backend_dev_t device = name ? ggml_backend_dev_by_name(name) : nullptr;
    ggml_backend_reg_t reg = device ? ggml_backend_dev_backend_reg(device) : nullptr;
    return reg && ggml_backend_reg_get_proc_address(reg, "moegguf_alloc_range") &&
           ggml_backend_reg_get_proc_address(reg, "moegguf_resize_range");
}

PoolMemory device_memory(const char * name, bool repack) {
    PoolMemory memory;
    memory.device = find_device(name);
    memory.buft = ggml_backend_dev_buffer_type(memory.device);
    memory.repack = repack;
    return memory;
}

PoolMemory host_memory(const std::vector<ggml_backend_dev_t> & devices) {
    const auto first = std::find_if(devices.begin(), devices.end(), pins);
    PoolMemory memory;
    memory.pinned = first != devices.end();
    memory.device = memory.pinned ? *first : devices[0];
    memory.buft = memory.pinned ? ggml_backend_dev_host_buffer_type(*first) : ggml_backend_cpu_buffer_type();
    std::string without;
    for (ggml_backend_dev_t device : devices) {
        const bool same = memory.pinned && pins(device) && ggml_backend_dev_host_buffer_type(device) == memory.buft;
        without += same ? "" : (without.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(device));
    }
    if (!memory.pinned) {
        memory.note = without + " offers no pinned memory: slots in RAM are pageable";
    } else if (!without.empty()) {
        memory.note = "slots in RAM are pinned for " + std::string(ggml_backend_dev_name(memory.device)) +
                      ", and pageable for " + without;
    }
    return memory;
}

void pad(ggml_backend_dev_t device, moegguf_matrix * matrices, int n) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device);
    // The previous matrix; a matrix with the same type and row length gets the same padding.
    const moegguf_matrix * last = nullptr;
    int32_t bytes = 0;
    for (moegguf_matrix * m = matrices; m < matrices + n; m++) {
        if (!is_matrix(*m)) {
            throw Error(MOEGGUF_INVALID, "a matrix must have a known type, and a width that this type allows");
        }
        if (!last || last->type != m->type || last->ne0 != m->ne0) {
            ggml_context_ptr ctx = tensor_context(1);
            bytes = (int32_t)padding_of(buft, ggml_new_tensor_2d(ctx.get(), (ggml_type)m->type, m->ne0, m->ne1));
        }
        last = m;
        m->padding_bytes = std::max(m->padding_bytes, bytes);
    }
}

bool packs_slots(ggml_backend_dev_t device) {
    return is_on(Remedy::one_arena) && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

int most_slots(ggml_backend_dev_t device, const moegguf_matrix * matrices, int n, int n_slots, bool packed) {
    const Strides strides = strides_for(matrices, n, packed);
    const uint64_t largest = most_buffer_bytes(device);
    // The previous matrix; a matrix with the same type, kind and row length has the same limit.
    const moegguf_matrix * last = nullptr;
    for (const moegguf_matrix * m = matrices; m < matrices + n; m++) {
        const bool as_last = last && last->type == m->type && last->kind == m->kind && last->ne0 == m->ne0;
        last = m;
        const int arena = strides.arena((moegguf_kind)m->kind);
        const uint64_t stride = strides.of_arena[arena];
        if (as_last || !multiplies(device, *m, 1, stride)) { continue; }
        const auto fits = [&](int slots) {
            const uint64_t bytes = strides.arena_bytes(arena, slots);
            return bytes <= largest && begins_within_32_bits(device, (ggml_type)m->type, bytes) &&
                   multiplies(device, *m, slots, stride);
        };
        int least = 1, most = n_slots; // the result is in [least, most]
        while (least < most) {
            const int middle = least + (most - least + 1) / 2;
            fits(middle) ? least = middle : most = middle - 1;
        }
        n_slots = std::min(n_slots, most);
    }
    return n_slots;
}

Pool::Pool(const Layout & layout, const LayerSet & layers, const Numbering & numbering, const PoolMemory & memory)
    : memory_(memory),
      strides_(layers.strides),
      host_(ggml_backend_buft_is_host(memory.buft)) {
    const size_t n = layout.matrices.size();
    context_ = tensor_context(2 * n);
    interleaved_.assign(n, nullptr);
    for (size_t i = 0; memory.repack && i < n; i++) {
        const Matrix & m = layout.matrices[i];
        if (layers.has[m.il]) {
            interleaved_[i] = interleaved_buft(memory_.device, m.type, m.ne0, m.ne1, numbering.window(m.il).n_slots);
        }
    }
    for (const Matrix & m : layout.matrices) {
        arena_.push_back(strides_.arena(m.kind));
        place_.push_back(strides_.packed ? m.place : 0);
    }
    allocate(layout, layers, numbering.n_slots());
    tensors_.assign(n, nullptr);
    slot_.assign(n, nullptr);
    for (size_t i = 0; i < n; i++) {
        const Matrix & m = layout.matrices[i];
        padding_.push_back(interleaved_[i] ? 0 : m.padding_bytes);
        if (layers.has[m.il]) { make_tensor(m, (int)i, numbering.window(m.il)); }
    }
    for (const Arena & arena : arenas_) { // clears device memory after the tensors are bound, as in reallocate()
        if (arena.memory && !host_) { ggml_backend_buffer_clear(arena.memory.get(), 0); }
    }
    if (kernels_ask_for_order()) {
        n_ids_ = layout.n_expert_max;
        // The anchor is a dummy weight (cpu_anchor()). It is in plain memory, because interleaved memory can hold only
        // weights for multiplications.
        cpu_anchor_ = ggml_new_tensor_1d(context_.get(), GGML_TYPE_I32, 1);
        ggml_set_name(cpu_anchor_, "cpu_anchor");
        // Allocates memory only for the anchor, because every other tensor of the context already has memory.
        anchor_memory_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), memory_.buft));
        if (!anchor_memory_) { throw Error(MOEGGUF_MEMORY, "no memory for a tensor of four bytes"); }
        ggml_backend_buffer_set_usage(anchor_memory_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    if (!numbering.resident()) { share_all_slots(numbering.n_slots()); }
}

void Pool::allocate(const Layout & layout, const LayerSet & layers, int n_slots) {
    ggml_backend_buffer_type_t plain = memory_.buft;
    for (int a = 0; a < MOEGGUF_MAX_KINDS; a++) {
        ggml_backend_buffer_type_t buft = plain;
        bool used = false;
        for (size_t i = 0; i < layout.matrices.size(); i++) {
            used = used || (arena_[i] == a && layers.has[layout.matrices[i].il]);
            if (arena_[i] == a && interleaved_[i]) { buft = interleaved_[i]; }
        }
        if (!used) { continue; }
        Arena & arena = arenas_[a];
        const uint64_t n = strides_.arena_bytes(a, n_slots);
        if (memory_.n_others > 0) {
            allocate_range(a, n);
            continue;
        }
        arena.memory = allocate_weights(buft, n);
        if (!arena.memory && memory_.pinned) { arena.memory = allocate_weights(ggml_backend_cpu_buffer_type(), n); }
        if (!arena.memory) {
            throw Error(MOEGGUF_MEMORY, std::string(ggml_backend_dev_name(memory_.device)) + " refused " +
                                            std::to_string(n >> 20) + " MiB for expert slots");
        }
        arena.base = (uint8_t *)ggml_backend_buffer_get_base(arena.memory.get());
        if (memory_.pinned && ggml_backend_buffer_get_type(arena.memory.get()) != memory_.buft) {
            memory_.pinned = false; // this code or the backend has allocated pageable memory instead
            memory_.note = std::string(ggml_backend_dev_name(memory_.device)) +
                           " was refused pinned memory: slots in RAM are pageable, and copies from them slower";
        }
        if (buft != plain) {
            arena.alias.reset(ggml_backend_cpu_buffer_from_ptr(arena.base, n));
            ggml_backend_buffer_set_usage(arena.alias.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        }
    }
}

// Allocates a range, or finds the place of the device's slots in the owner's range. The CPU writes the owner's slots
// through the arena's alias.
void Pool::allocate_range(int a, uint64_t n_bytes) {
    Arena & arena = arenas_[a];
    if (memory_.owner) {
        n_in_range_ = memory_.owner->memory_.n_others;
        arena.base = (uint8_t *)ggml_backend_buffer_get_base(memory_.owner->arenas_[a].memory.get());
        return;
    }
    const uint64_t device_bytes = strides_.of_arena[a] * memory_.n_others;
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(memory_.device);
    const auto alloc = (AllocRange)ggml_backend_reg_get_proc_address(reg, "moegguf_alloc_range");
    arena.memory.reset(alloc(memory_.device, device_bytes, n_bytes));
    if (!arena.memory) {
        throw Error(MOEGGUF_MEMORY, std::string(ggml_backend_dev_name(memory_.device)) + " refused a range of " +
                                        std::to_string(device_bytes >> 20) + " MiB of its memory and " +
                                        std::to_string(n_bytes >> 20) + " MiB of RAM for expert slots");
    }
    ggml_backend_buffer_set_usage(arena.memory.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(arena.memory.get(), 0);
    arena.base = (uint8_t *)ggml_backend_buffer_get_base(arena.memory.get()) + device_bytes;
    arena.alias.reset(ggml_backend_cpu_buffer_from_ptr(arena.base, n_bytes));
}

bool Pool::resize_ranges(int n_slots) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(memory_.device);
    const auto resize = (ResizeRange)ggml_backend_reg_get_proc_address(reg, "moegguf_resize_range");
    for (int a = 0; a < MOEGGUF_MAX_KINDS; a++) {
        ggml_backend_buffer_t range = memory_.owner->arenas_[a].memory.get();
        if (range && !resize(range, strides_.of_arena[a] * n_slots)) { return false; }
    }
    n_in_range_ = n_slots;
    return true;
}

void Pool::make_tensor(const Matrix & m, int matrix, Window window) {
    Arena & arena = arenas_[arena_[matrix]];
    const Arena & memory = memory_.owner ? memory_.owner->arenas_[arena_[matrix]] : arena;
    const bool by_alias = arena.alias && !interleaved_[matrix];
    ggml_backend_buffer_t buffer = (by_alias ? arena.alias : memory.memory).get();
    uint8_t * const first = arena.base + place_[matrix];

    ggml_tensor * pool = ggml_new_tensor_3d(context_.get(), m.type, m.ne0, m.ne1, window.n_slots);
    pool->nb[2] = stride(matrix);
    pool->nb[3] = pool->nb[2] * window.n_slots;
    ggml_format_name(pool, "pool.%s", m.name.c_str());
    ggml_tensor * slot = ggml_new_tensor_3d(context_.get(), m.type, m.ne0, m.ne1, 1);
    attach(pool, buffer, first + window.first_slot * stride(matrix));
    attach(slot, buffer, first);
    if (!interleaved_[matrix] && padding_of(memory_.buft, slot) > padding_[matrix]) {
        throw Error(MOEGGUF_INVALID, "slots of '" + m.name + "' lack the padding that " +
                                         ggml_backend_dev_name(memory_.device) + " reads (moegguf_pad)");
    }
    tensors_[matrix] = pool;
    slot_[matrix] = slot;
}

bool Pool::kernels_ask_for_order() const {
    return ggml_backend_dev_type(memory_.device) == GGML_BACKEND_DEVICE_TYPE_CPU &&
           std::all_of(interleaved_.begin(), interleaved_.end(), kernel_asks_for_order);
}

void Pool::set_op_params(int matrix, const void * pointer) {
    if (tensors_[matrix]) { ggml_set_op_params(tensors_[matrix], &pointer, sizeof(pointer)); }
}

void Pool::share_all_slots(int n_slots) {
    for (size_t i = 0; i < tensors_.size(); i++) {
        if (!tensors_[i]) { continue; }
        tensors_[i]->data = data((int)i, 0);
        show(tensors_[i], n_slots);
    }
}

void Pool::show(ggml_tensor * pool, int n_slots) const {
    pool->ne[2] = std::max(n_slots + (memory_.owner ? memory_.n_others : 0), n_ids_);
    pool->nb[3] = pool->nb[2] * pool->ne[2];
}

// When a tensor is bound, the backend may write past the tensor's end, where other slots are: CUDA sets the padding to
// zero. Buffer operations wait for these writes, but backend streams do not. So the arena is cleared and the slots are
// copied only after rebind(), by buffer operations.
bool Pool::reallocate(int n_slots, bool keep) {
    if (memory_.owner) { return resize_ranges(n_slots); }
    for (int a = 0; a < MOEGGUF_MAX_KINDS; a++) {
        Arena & arena = arenas_[a];
        if (!arena.base) { continue; }
        if (!keep) { arena.memory.reset(); }
        ggml_backend_buffer_ptr memory = allocate_weights(memory_.buft, strides_.arena_bytes(a, n_slots));
        if (!memory) { return false; }
        std::swap(arena.memory, memory);
        arena.base = (uint8_t *)ggml_backend_buffer_get_base(arena.memory.get());
        rebind(a, n_slots);
        ggml_backend_buffer_clear(arena.memory.get(), 0);
        if (memory) { copy_slots(a, memory.get(), arena.memory.get()); }
    }
    return true;
}

// Copies the contents of all slots that exist in both buffers. Each slot is copied on its own, as a tensor of one row
// of bytes: a whole arena may be longer than the longest row that a backend can copy.
void Pool::copy_slots(int arena, ggml_backend_buffer_t from, ggml_backend_buffer_t to) const {
    const int64_t stride = (int64_t)strides_.of_arena[arena];
    const uint64_t bytes = std::min(ggml_backend_buffer_get_size(from), ggml_backend_buffer_get_size(to));
    const int n = int((bytes - Strides::guard_bytes) / stride);
    ggml_context_ptr context = tensor_context(2);
    ggml_tensor * ends[] = {ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, stride),
                            ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, stride)};
    ggml_backend_buffer_t buffers[] = {from, to};
    for (int s = 0; s < n; s++) {
        for (int i = 0; i < 2; i++) {
            ends[i]->buffer = buffers[i];
            ends[i]->data = (uint8_t *)ggml_backend_buffer_get_base(buffers[i]) + s * stride;
        }
        ggml_backend_tensor_copy(ends[0], ends[1]);
    }
}

// Binds all tensors of an arena to the arena's new memory. Each layer's tensor then covers all n_slots slots.
void Pool::rebind(int arena, int n_slots) {
    for (size_t i = 0; i < tensors_.size(); i++) {
        if (arena_[i] != arena || !tensors_[i]) { continue; }
        show(tensors_[i], n_slots);
        for (ggml_tensor * t : {tensors_[i], slot_[i]}) { attach(t, arenas_[arena].memory.get(), data((int)i, 0)); }
    }
}

void Pool::write(int matrix, int slot, int64_t row, int64_t n_rows, const void * data) const {
    // A view of some rows of the slot. If the matrix is interleaved, the view's field `extra` makes the backend
    // interleave the rows.
    ggml_tensor piece = *slot_[matrix];
    piece.ne[1] = n_rows;
    piece.nb[2] = piece.nb[1] * n_rows;
    piece.nb[3] = piece.nb[2];
    piece.data = this->data(matrix, slot) + row * piece.nb[1];
    ggml_backend_tensor_set(&piece, data, 0, ggml_nbytes(&piece));
    if (padding_[matrix] && row + n_rows == slot_[matrix]->ne[1]) {
        ggml_tensor bytes = view(matrix, slot, end(matrix, slot) - this->data(matrix, slot));
        const std::vector<uint8_t> zeros(padding_[matrix]);
        ggml_backend_tensor_set(&bytes, zeros.data(), bytes.ne[0] - zeros.size(), zeros.size());
    }
}

uint8_t * Pool::data(int matrix, int slot) const {
    return arenas_[arena_[matrix]].base + slot * stride(matrix) + place_[matrix];
}

uint8_t * Pool::end(int matrix, int slot) const {
    return data(matrix, slot) + ggml_nbytes(slot_[matrix]) + padding_[matrix];
}

void Pool::write_bytes(ggml_backend_t backend, int matrix, int slot, uint64_t n, const void * data) const {
    ggml_tensor bytes = view(matrix, slot, n);
    os().copy_to_device(backend, &bytes, data, 0, n);
}

void Pool::copy_bytes(ggml_backend_t backend, int matrix, int slot, uint64_t n, const Pool & from,
                      int from_slot) const {
    ggml_tensor source = from.view(matrix, from_slot, n), bytes = view(matrix, slot, n);
    if (host_) {
        memcpy(bytes.data, source.data, n); // both pools have the same layout
    } else {
        ggml_backend_tensor_copy_async(backend, backend, &source, &bytes);
    }
}

// Returns n bytes as a tensor of one row, beginning with the first byte of a matrix in a slot. For an interleaved
// matrix it returns the matrix in its own type, and n must be the size of the matrix.
ggml_tensor Pool::view(int matrix, int slot, uint64_t n) const {
    ggml_tensor bytes = *slot_[matrix];
    bytes.data = data(matrix, slot);
    if (!interleaved_[matrix]) {
        bytes.type = GGML_TYPE_I8;
        const int64_t ne[] = {(int64_t)n, 1, 1, 1};
        const size_t nb[] = {1, n, n, n};
        std::copy(std::begin(ne), std::end(ne), bytes.ne);
        std::copy(std::begin(nb), std::end(nb), bytes.nb);
    }
    return bytes;
}

void Pool::release(int first, int last) const {
    if (!host_ || memory_.pinned || first >= last) { // only pageable host memory can be returned to the system
        return;
    }
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    for (int a = 0; a < MOEGGUF_MAX_KINDS; a++) {
        const uint64_t begin = ((uint64_t)arenas_[a].base + first * strides_.of_arena[a] + page - 1) / page * page;
        const uint64_t end = ((uint64_t)arenas_[a].base + last * strides_.of_arena[a]) / page * page;
        if (arenas_[a].base && begin < end) { madvise((void *)begin, end - begin, MADV_DONTNEED); }
    }
}

uint64_t Pool::bytes() const {
    if (memory_.owner) { return strides_.slot_bytes() * n_in_range_; }
    uint64_t n = 0;
    for (const Arena & arena : arenas_) { n += arena.memory ? ggml_backend_buffer_get_size(arena.memory.get()) : 0; }
    return n - strides_.slot_bytes() * memory_.n_others; // the pool of the device counts the other slots of a range
}

} // namespace moegguf
