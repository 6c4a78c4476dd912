// moegguf.h: the C ABI of the expert store.
//
// Memory map
//   An MoE GGUF holds, per layer il, some of the matrices ffn_{gate,up,gate_up,down}_exps.weight, each
//   [ne0, ne1, n_expert] and contiguous per expert. The store keeps n_slots experts in fast memory:
//
//     arena of a kind   | slot 0 | slot 1 | ... | slot S-1 | guard |        one arena per matrix kind
//     slot stride       = the size of the largest matrix of that kind, with the padding that kernels of the store's
//                         devices read after it, rounded up to a multiple of 64 bytes and of the block sizes of that
//                         kind's types
//     pool tensor       = [ne0, ne1, count] over a layer's window of the arena, nb[2] = slot stride
//
//   With the remedy one_arena (switches.h), slots on devices and in RAM below them are packed instead: one arena, in
//   which the matrices of an expert lie one after another.
//
//   A tier is a set of slots for some layers (tier.h). A tier is "resident" if slot ids are equal to expert ids, which
//   is true of two kinds of tiers:
//   - The tier was opened with a slot for each of its experts and was never shrunk. Each of its layers has its own
//     window of n_expert slots.
//   - The tier consists of staging tensors for prompts (staged_supply.cpp). Each tensor is a window with a place for
//     every expert of a layer, and layers use the tensors in turn.
//   In any other tier, all layers share one window of all slots.
//
//   An entry of moegguf_config::devices names a device and its number of slots. Each layer belongs to one entry, and
//   each entry has its own tier for its layers. A device may have several entries, so that layers with small experts
//   have small slots. A tier may be filled from slots in host memory. The entries of a device may share staging
//   tensors.
//
// Ordering
//   1. At a routing event, the store's context unpins the slots of the previous event, and pins the slots of needed
//      experts that are present. For a streamed layer, the context leaves some slots unpinned for the stream. Only
//      then are victims chosen. Slots into which copies are still under way are unpinned later. A slot that is pinned
//      or being filled keeps its expert.
//   2. A matrix in a slot becomes READY, with a release operation, after its bytes have been written. The slot's
//      generation increases whenever the slot is assigned or vacated, which happens only under the store's lock.
//   3. A compute thread multiplies by a matrix in a slot only after two steps:
//      - Its context has pinned the slot under the store's lock. The pin lasts at least until the context's next event.
//      - The thread itself has seen that the matrix is READY, with an acquire load. With MOEGGUF_OVERLAP, CPU kernels
//        that can choose the order of their matrices do this load themselves. Otherwise the load comes before the
//        kernel.
//      There are five exceptions:
//      - While every expert of the layer's tier is present in its own slot, the thread needs neither step.
//      - If the device looks up slot ids itself, the thread needs neither step (mapped.h).
//      - If copies fill the slots of a device with events, the thread only needs to see that the copy was submitted.
//        Its stream then waits for the copy. For a copy into a staging tensor, the thread itself waits.
//      - For streamed experts, an acquire load of the stream's own record replaces the load of READY.
//      - A failed pass may compute with any slot, because its results are not used.
//   4. A slot from which another slot is filled stays pinned until the other slot is complete or has been vacated.
//   5. A place in a staging tensor changes its expert only while it is not pinned and no copy into it is under way.
//
// Threads
//   compute thread(s): moegguf_eval, moegguf_abort, and the order of experts in the CPU's MUL_MAT_ID (arrivals.cpp).
//                      They take the store's lock at a routing event, to wait for absent matrices, to advance
//                      and end streams, to finish staged layers, and to record failures. If every expert of a layer's
//                      tier is present in its own slot and nothing observes the layer's events, they take the lock
//                      only to unpin the slots of an earlier layer, or after a failure.
//   reader threads   : read with pread into read buffers, and write into slots.
//   copy threads     : one for each tier that is filled from RAM (including staging tensors). They copy from slots in
//                      RAM, or from other slots on the same device.
//   row thread       : reads rows of tables that are not in the page cache, for compute threads (row_tables.h).
//   predictor thread : takes records from compute threads, predicts, and requests prefetches under the store's lock.
//   event thread     : calls the listener's callbacks, which may call the functions below. No other thread of the
//                      store calls application code.
//   other threads    : need no store. One thread fills KV cache blocks (kv_blocks.cpp). While a model loads, tasks read
//                      and convert weights (loading.h). An idle OpenMP team makes compute threads spin only briefly
//                      (class ShortSpins in threads.h).
//   any thread       : may call all other functions below, unless a comment says otherwise. Counters change without
//                      the lock, so during an event some counters may be more up to date than others.
//
// "The store's lock" guards residency, numbering, queues and policies. A slot's READY bits, counters, and the switches
// (cancel, watch, listening) are atomics instead.
//
// No exception crosses this boundary. Functions that can fail return a moegguf_status, unless a comment says otherwise,
// and moegguf_last_error() returns the reason.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOEGGUF_ABI_VERSION 32
#define MOEGGUF_MAX_KINDS 4
#define MOEGGUF_API __attribute__((visibility("default")))

enum moegguf_status {
    MOEGGUF_OK = 0,
    MOEGGUF_INVALID = 1, // an argument is missing or invalid
    MOEGGUF_MEMORY = 2,  // memory or a thread was refused
    // A file could not be opened, a read or copy failed, a file was written to after it was opened, or reads did not
    // end in time.
    MOEGGUF_IO = 3,
    MOEGGUF_CANCELLED = 4, // the store was cancelled, or a time limit has passed
    MOEGGUF_FORKED = 5,    // the call came from a child process, where the store's threads do not exist
    MOEGGUF_ROUTING = 6,   // a router chose an expert that its layer does not have, or the layer has no experts
    MOEGGUF_SLOTS = 7,     // a pass needs more slots for one layer than exist or become free
    MOEGGUF_BROKEN = 8,    // the store's bookkeeping is inconsistent, or a graph is out of date
};

enum moegguf_kind { MOEGGUF_GATE = 0, MOEGGUF_UP = 1, MOEGGUF_DOWN = 2, MOEGGUF_GATE_UP = 3 };

enum moegguf_flag {
    // Slots on the CPU are repacked where the CPU kernels support it: rows of a matrix are interleaved, so that a
    // kernel multiplies by several rows at once.
    MOEGGUF_REPACK = 1 << 0,
    MOEGGUF_DIRECT = 1 << 1,  // shards are read with O_DIRECT if a test read with it returns the right bytes
    MOEGGUF_CHUNKED = 1 << 2, // prefetches are read matrix by matrix, so that a demand waits for at most one matrix
    // A routing event drops its layer's requested prefetches that have no slot yet, and the layer's queued prefetches
    // into slots that are not pinned. Forecasts that have no slot yet stay. Events in resident tiers, and events whose
    // experts are staged, drop nothing.
    MOEGGUF_PREEMPT = 1 << 3,
    MOEGGUF_OVERLAP = 1 << 4, // a layer may start running before all of its matrices have arrived
    // If several tokens choose nearly all experts of a layer (a sweep), experts of the next layer are prefetched into
    // the slots that the layer does not need. This does not happen if the layer's experts are staged.
    //
    // A pass of several tokens is also treated as a sweep if the previous pass also had several tokens and used more
    // experts than there are slots. In a sweep, experts of the layer that is needed last are evicted first, unless the
    // policy's scores decide.
    MOEGGUF_SWEEP = 1 << 5,
    MOEGGUF_FILL = 1 << 6,     // tiers that have a slot for each of their experts are filled in the background
    MOEGGUF_SIMULATE = 1 << 7, // nothing is read, and slots have no memory: transfers only take virtual time
    // Absent experts that several tokens choose are streamed through a few of the CPU's slots, even if all of them
    // would fit.
    MOEGGUF_STREAM = 1 << 8,
    MOEGGUF_DEMAND_FIRST = 1 << 9, // demands are read before prefetches; otherwise after requests and forecasts
};

// A tensor in the model's files: the matrices of one kind for all experts of a layer. `offset`: position of the
// tensor's first byte in its shard.
struct moegguf_matrix {
    const char * name;
    int32_t il;
    int32_t kind;
    int32_t type; // enum ggml_type
    int32_t n_expert;
    int64_t ne0;
    int64_t ne1;
    int32_t shard;
    int32_t padding_bytes; // number of zero bytes after each expert in a slot (moegguf_pad)
    uint64_t offset;
    uint64_t expert_bytes;
};

// A tensor that stays in the model's files, such as token embeddings. A pass reads only the rows of its tokens.
// `offset`: position of the tensor's first byte in its shard.
struct moegguf_row_table {
    const char * name;
    int32_t shard;
    uint64_t offset;
};

// A device that runs layers, and its slots.
struct moegguf_device {
    const char * name; // ggml's name of the device; NULL: the CPU
    int32_t n_slots;
    // 1: missing experts are copied from slots in RAM, if the store has such slots; 0: they are read from the file.
    int32_t through_ram;
    // Number of staging tensors for prompts, each with a place for every expert of a layer: 0, 1 or 2. All entries of a
    // device with the same number share these tensors.
    int32_t n_staging_tensors;
    // Number of slots that a layer may need at once in a pass that is not staged; moegguf_store_resize refuses fewer.
    // The store raises it to the number of experts that one token uses in a layer, if it is lower, and limits it to
    // n_slots.
    int32_t n_pass_slots;
    // 1: the device looks up slot ids itself, and reads experts without a slot on the device from slots in RAM
    // (mapped.h). The store must have only this device and a slot in RAM for every expert, and moegguf_maps must return
    // 1 for the device.
    int32_t maps;
    double sim_copy_bytes_per_ns; // simulation: bandwidth of copies from RAM into the slots; 0: copies take no time
    double sim_copy_latency_ns;   // simulation: latency of each copy
};

struct moegguf_config {
    uint32_t abi;
    uint32_t flags;
    int32_t n_layer;
    int32_t n_matrices;
    int32_t n_shards;
    int32_t n_devices;
    int32_t n_readers;   // number of reader threads for each copy of the shards; at most 64 run in total
    int32_t n_ram_slots; // number of slots in host memory from which device slots are filled; 0: none
    int32_t n_mirrors;   // number of copies of the shards on other drives
    int32_t n_row_tables;
    const struct moegguf_matrix * matrices;
    const struct moegguf_row_table * row_tables; // [n_row_tables]
    const char * const * shard_paths;            // [1 + n_mirrors][n_shards]; first the model's own shards
    const int32_t * n_expert_used;         // [n_layer] number of experts that a token uses; 0: the layer has no experts
    const struct moegguf_device * devices; // [n_devices]
    const int32_t * device_of_layer;       // [n_layer] index of the device that runs the layer; NULL: 0 for all
    double sim_bytes_per_ns;               // simulation: bandwidth of reads from the file; 0: reads take no time
    double sim_latency_ns;                 // simulation: latency of each read
};

// COMPUTE: the slots of the devices that run layers, all devices together unless a function's comment says otherwise.
// RAM: the slots in host memory from which device slots are filled. STAGING: the staging tensors of all devices, for
// prompts. DEVICE + i: the slots of device i alone.
enum moegguf_tier { MOEGGUF_COMPUTE_TIER = 0, MOEGGUF_RAM_TIER = 1, MOEGGUF_STAGING_TIER = 2, MOEGGUF_DEVICE_TIER = 3 };

// Counters since the store was opened. Unless a field's comment says otherwise, fields about reads and bytes count
// transfers from the file into slots, not copies between slots.
struct moegguf_counters {
    uint64_t passes;
    uint64_t tokens; // number of tokens in all passes
    uint64_t routing_events;
    uint64_t bytes_missed;     // number of bytes read because a layer waited for them
    uint64_t bytes_prefetched; // number of bytes read for prefetches and to fill free slots
    uint64_t reads;
    uint64_t read_retries;
    uint64_t read_errors; // failed reads, and failed copies between slots
    uint64_t stall_ns;    // time compute threads spent waiting for experts or for slots
    uint64_t hook_ns;     // time spent in routing events, excluding waits for experts and for slots
    uint64_t read_ns;     // time spent reading the file, summed over reader threads
    uint64_t upload_ns;   // time spent writing into slots, including copies to devices, summed over threads
    uint64_t prefetch_requested;
    uint64_t prefetch_started;
    uint64_t prefetch_useful;  // prefetched experts that were complete when a pass first needed them
    uint64_t prefetch_late;    // prefetched experts that were not yet complete when a pass first needed them
    uint64_t prefetch_dropped; // requested prefetches that never got a slot, for example because they came too late
    uint64_t events_dropped;   // events that were dropped because the listener was too slow, or memory ran out
    // Number of experts that the native predictor ranked best: n_expert_used per layer and sequence.
    uint64_t forecast_picks;
    uint64_t forecast_right;  // number of forecast_picks that the router chose
    uint64_t forecast_ns;     // time spent predicting
    uint64_t forecast_scored; // routing events whose graph computed the scores of later layers' routers
    uint64_t mapped_events;   // routing events for which the device looked up the slot ids itself
    // The following fields are gauges: current values, not sums.
    uint64_t chunks_reading; // transfers under way, including copies between slots
    uint64_t queue_needed;
    uint64_t queue_wanted;
    uint64_t sim_clock_ns;
};

// Counters of a tier, or of several tiers together, since the store was opened. The fields from slots_used on describe
// the current state.
//
// Each expert that a pass uses in a layer is looked up once: lookups = hits_ready + hits_late + misses. If every expert
// of a layer has its own slot, the store may not know which experts are used. Each choice of the router then counts as
// a different expert, up to the layer's number of experts. An expert that is missing on a device is also looked up in
// RAM, unless other slots on the device hold it.
struct moegguf_tier_info {
    uint64_t lookups;
    uint64_t hits_ready; // look-ups of experts whose matrices were all present
    uint64_t hits_late;  // look-ups of experts that had a slot, but not yet every matrix
    uint64_t misses;
    uint64_t evictions;
    uint64_t prefetch_wasted; // prefetched experts that lost their slot before they were used
    // Number of bytes transferred into the tier's slots on demand, from the file or from other slots.
    uint64_t bytes_missed;
    // Number of bytes transferred into the tier's slots for prefetches and to fill free slots.
    uint64_t bytes_prefetched;
    // Time compute threads spent waiting for this tier's experts; RAM: only the part during which bytes still had to
    // arrive from the file.
    uint64_t stall_ns;
    uint64_t stream_waits; // number of times that the compute stream, instead of a thread, waited for copies
    uint64_t copy_ns;      // time spent copying into the tier's slots
    uint64_t slots_used;
    uint64_t slots_pinned;
    uint64_t pool_bytes;
    uint64_t slot_bytes; // size in bytes of one slot, summed over the arenas; mean of several tiers
    int32_t direct;      // 1: all shards in use are read with O_DIRECT
    int32_t n_experts;   // number of the model's experts in all layers
    int32_t n_slots;
    int32_t n_slots_usable; // number of slots that may be used; moegguf_store_resize changes this number
    int32_t resident;       // 1: each expert of the tier has its own slot; staging tensors: always 1
    int32_t pinned_memory;  // 1: pinned host memory, from which the device copies directly
    char device[64];        // names of the devices that compute with the slots; RAM: device that copies from them
    char note[192];         // reason why the memory is not pinned for all devices; empty: it is pinned, or need not be
};

// Statistics of one copy of the shards, which may be on its own drive. Each read goes to the copy that is expected to
// finish it first.
struct moegguf_drive_info {
    uint64_t reads;
    uint64_t bytes;
    uint64_t bytes_per_s; // estimated read speed of the drive, summed over concurrent reads; 0: not measured yet
    int32_t dropped;      // 1: the copy could not be opened or read, and is no longer used
    char note[256];       // reason why the copy was dropped; empty: it is in use
};

enum moegguf_phase { MOEGGUF_PREFILL = 0, MOEGGUF_DECODE = 1 };

// The following types describe a predictor that the store itself runs: its name and its trained arrays. The class of
// each predictor in moegguf/native/predictors reads its arrays by name. The error for an unknown predictor lists the
// names of all predictors.
enum moegguf_array_type { MOEGGUF_FLOAT32 = 0, MOEGGUF_INT8 = 1, MOEGGUF_UINT16 = 2, MOEGGUF_INT32 = 3 };

struct moegguf_array {
    const char * name;
    int32_t type; // enum moegguf_array_type
    uint64_t n;
    const void * data; // [n]; must stay valid until the predictor is replaced or removed
};

enum moegguf_predict_flag {
    MOEGGUF_PREDICT_ONCE = 1 << 0,     // each layer is predicted once per pass, as soon as `window` includes it
    MOEGGUF_PREDICT_LOCKSTEP = 1 << 1, // routing events wait for all earlier predictions: slow, but reproducible
    // Prefetches are ordered by probability times proximity; otherwise, the nearest layer comes first.
    MOEGGUF_PREDICT_BY_PROXIMITY = 1 << 2,
};

struct moegguf_predictor {
    const char * name;
    int32_t n_arrays;
    uint32_t flags; // enum moegguf_predict_flag
    const struct moegguf_array * arrays;
    int32_t window;          // number of MoE layers to predict ahead
    int32_t most_prefetches; // largest number of prefetches per pass; 0: forecasts only protect experts in slots
    float waste_weight;      // cost of a useless prefetch, as a share of the stall that a useful one saves; 0: no cost
};

// Slot and pool sizes. Every arena has guard bytes after its last slot.
struct moegguf_sizes {
    // Distance between slots in the arena of each kind; 0: there is no such arena. If slots are packed (the remedy
    // one_arena), the first arena holds all kinds.
    uint64_t stride_bytes[MOEGGUF_MAX_KINDS];
    uint64_t slot_bytes; // size of one slot, summed over all arenas
    uint64_t pool_bytes; // size of all arenas, including guard bytes
    // 1: the CPU kernels can stream experts, so a pass of several tokens may use more experts of a layer than there are
    // slots.
    uint64_t streams;
};

// Routing events for moegguf_context_replay. `expert_ids` contains the ids of all events, one event after another, each
// [n_tokens][n_expert_used].
struct moegguf_routing {
    int64_t n_events;
    int64_t n_ids;                 // number of ids in all events
    const int32_t * il;            // [n_events]
    const int32_t * n_tokens;      // [n_events]
    const int32_t * n_expert_used; // [n_events]
    const int32_t * expert_ids;    // [n_ids]
    const uint64_t * compute_ns;   // [n_events] virtual time in ns that passes after each event; NULL: none
};

// Announced tokens, which will be evaluated next, in this order. Pointers in an event are valid only during the
// callback. For a batch of several sequences, all three arrays after `tokens` have n_tokens entries. Otherwise all
// three are NULL.
struct moegguf_tokens_event {
    int32_t sequence; // number of the request; in a batch: the request of the first token
    int32_t phase;    // enum moegguf_phase; in a batch: MOEGGUF_DECODE if any of the tokens is being decoded
    int32_t n_tokens;
    const int32_t * tokens;    // [n_tokens]
    const int32_t * sequences; // NULL: all tokens have `sequence`
    const int32_t * phases;    // NULL: all tokens have `phase`
    // [n_tokens] 1: the token's logits are needed; the last layer is computed only for such tokens.
    const int32_t * outputs;
};

// A router's choice at one layer in one pass.
struct moegguf_routing_event {
    uint64_t pass;
    uint64_t time_ns;
    int32_t il;
    int32_t n_tokens;
    int32_t n_expert_used;
    int32_t sequence; // `sequence` of the announced tokens
    int32_t phase;
    int32_t first_token; // index of the pass's first token among the announced tokens; -1: not all were announced
    int32_t n_embd;
    const int32_t * expert_ids; // [n_tokens][n_expert_used]
    const float * weights;      // [n_tokens][n_expert_used], or NULL
    const float * inputs;       // [n_tokens][n_embd] vectors that entered the router, or NULL
    const int32_t * sequences;  // [n_tokens] sequence of each token; NULL: all tokens have `sequence`
    const int32_t * phases;     // [n_tokens] phase of each token; NULL: all tokens have `phase`
};

enum moegguf_listen_flag {
    MOEGGUF_LISTEN_WEIGHTS = 1 << 0,
    MOEGGUF_LISTEN_INPUTS = 1 << 1,
    MOEGGUF_LISTEN_EVERYTHING = 1 << 2, // a compute thread waits for free space instead of dropping events
    MOEGGUF_LISTEN_LOCKSTEP = 1 << 3, // routing events wait for the delivery of earlier events: slow, but reproducible
    // The listener's thread wakes rarely: events are delivered in groups, up to 100 ms late.
    MOEGGUF_LISTEN_LAZY = 1 << 4,
};

struct moegguf_listener { // a callback may be NULL: its events are then not recorded
    uint32_t flags;
    int32_t max_input_tokens; // events with more tokens have no inputs
    void (*on_tokens)(void * user, const struct moegguf_tokens_event * event);
    void (*on_routing)(void * user, const struct moegguf_routing_event * event);
    void * user;
};

struct moegguf_failure {
    int32_t status; // enum moegguf_status
    char message[256];
};

// Measured speeds of the CPU, of a device, and of copies to the device. The measurement uses the experts of one layer.
struct moegguf_speeds {
    double cpu_bytes_per_ns;    // speed of expert multiplications on the CPU, for one token
    double cpu_op_ns;           // mean time of a small node in a graph on the CPU
    double device_bytes_per_ns; // speed of expert multiplications on the device, for one token
    double device_op_ns;        // mean time of a small node in a graph on the device
    double copy_bytes_per_ns;   // speed of copies from slots in host memory to slots on the device
    double copy_ns;             // fixed overhead of a batch of copies, in addition to the time for the bytes
    double stop_ns;      // extra time of a stop at a layer: the device finishes, then the host reads and writes ids
    double cpu_layer_ns; // extra time of a layer on the CPU: activations are copied to the CPU and back
    // The figures of copies if the slots in host memory are not pinned.
    double pageable_bytes_per_ns;
    double pageable_ns;
};

typedef struct moegguf_store moegguf_store;
typedef struct moegguf_kv_blocks moegguf_kv_blocks;

// Any thread may call the functions below unless a comment says otherwise. Functions that return int return an enum
// moegguf_status, except moegguf_context_awaits_tokens and moegguf_context_is_clear. After a failure,
// moegguf_last_error() returns the reason. INVALID: a required pointer is NULL. FORKED: the store was opened in a
// parent process.
//
// A table has the shape [n_layer][largest number of experts in a layer]. The argument n must be the number of its
// entries; otherwise the status is INVALID.

// Returns the library's MOEGGUF_ABI_VERSION.
MOEGGUF_API uint32_t moegguf_abi_version(void);

// Returns the bits of all remedies that the environment variable MOEGGUF_SWITCHES can switch on or off (switches.h).
MOEGGUF_API uint32_t moegguf_switches(void);

// Returns the bits of the remedies that are on.
MOEGGUF_API uint32_t moegguf_switched_on(void);

// Returns the reason for the failure of this thread's last call that returned a moegguf_status; empty if that call
// succeeded. The text is valid until the thread's next such call.
MOEGGUF_API const char * moegguf_last_error(void);

// Writes the sizes, in bytes, of a pool with n_slots slots for these matrices. on_device: 1: the pool is on a device
// other than the CPU, or fills slots on such a device. INVALID: a number is negative, or a matrix has a layer, a kind
// or a type that does not exist.
MOEGGUF_API int moegguf_slot_sizes(const struct moegguf_matrix * matrices, int32_t n_matrices, int32_t n_slots,
                                   int32_t on_device, struct moegguf_sizes * sizes);

// Raises padding_bytes of these matrices to the number of bytes that a device's kernels read after each expert. device:
// ggml's name. Does nothing for NULL (the CPU) or for a device that ggml does not know. INVALID: a matrix has an
// unknown type or an unsuitable shape.
MOEGGUF_API int moegguf_pad(const char * device, struct moegguf_matrix * matrices, int32_t n_matrices);

// Writes the largest number of slots, from 1 to n_slots, that one pool of these matrices can have on a device (NULL:
// the CPU). The limits are the device's largest buffer, the largest tensor by which its kernels can multiply, and
// 32-bit offsets in kernels. INVALID: ggml does not know the device, or n_matrices or n_slots is below 1.
MOEGGUF_API int moegguf_most_slots(const char * device, const struct moegguf_matrix * matrices, int32_t n_matrices,
                                   int32_t n_slots, int32_t * most);

// Returns the largest number of tokens in a pass for which a device's kernels compute with slots exactly as they do if
// every expert is resident. Passes of up to this number of tokens have bit-identical results for any number of slots.
// device: ggml's name; NULL: the CPU, which has no limit.
MOEGGUF_API int32_t moegguf_slot_tokens(const char * device);

// Returns 1 if a device's backend offers ranges of addresses that contain its own memory and pinned host memory
// (AllocRange in pool.h); otherwise 0. device: ggml's name; NULL: the CPU.
MOEGGUF_API int32_t moegguf_maps(const char * device);

// Measures the speeds of the CPU with n_ram_slots slots, and of the config's only device with its n_slots slots. The
// slots hold copies of the first expert of the config's only MoE layer, or zeros if there are no shards. If the
// device's name is NULL (the CPU), the device's fields are 0.
//
// Each measurement normally takes about `seconds` (at most 60) on n_threads threads; nothing else should be running
// meanwhile. The slots are freed at the end. INVALID: for example, the config has several devices or MoE layers;
// MEMORY: a device refuses the slots; IO: a shard cannot be read.
MOEGGUF_API int moegguf_measure_speeds(const struct moegguf_config * config, int32_t n_threads, double seconds,
                                       struct moegguf_speeds * speeds);

// Opens a store: allocates its slots, opens its files and starts its threads. A mirror that cannot be opened is
// dropped. INVALID: the config is inconsistent or has a different ABI version, or a mirror differs from the model's own
// shards; MEMORY: memory or a thread was refused; IO: one of the model's own shards cannot be opened.
MOEGGUF_API int moegguf_store_open(const struct moegguf_config * config, moegguf_store ** store);

// Joins the store's threads and frees its slots. The llama_context and the models that use the store must already be
// freed, and no other call may be under way. Does nothing for NULL and in a child process.
MOEGGUF_API void moegguf_store_close(moegguf_store * store);

// Returns the buffer type that reserves address space for the expert tensors of a model; NULL for NULL.
MOEGGUF_API ggml_backend_buffer_type_t moegguf_store_buft(moegguf_store * store);

// Returns the buffer type that reserves address space for the model's row tables; NULL for NULL. The CPU computes
// GET_ROWS from such a tensor by reading the rows from the file.
MOEGGUF_API ggml_backend_buffer_type_t moegguf_store_row_buft(moegguf_store * store);

// Writes the store's counters. Does not take the store's lock.
MOEGGUF_API int moegguf_store_counters(moegguf_store * store, struct moegguf_counters * counters);

// Writes the counters and the state of the slots that `tier` (enum moegguf_tier) selects. INVALID: the store has no
// slots in RAM, or no device of this number. Without staging tensors, STAGING has 0 slots.
MOEGGUF_API int moegguf_store_tier(moegguf_store * store, int32_t tier, struct moegguf_tier_info * info);

// Writes the statistics of one copy of the shards. Index 0 is the model's own copy, mirrors follow. INVALID: there is
// no such copy; a simulation has none.
MOEGGUF_API int moegguf_store_drive(moegguf_store * store, int32_t index, struct moegguf_drive_info * info);

// Writes a table with the state of each expert in a tier: 0 absent, 1 has a slot but is not complete, 2 complete.
MOEGGUF_API int moegguf_store_residency(moegguf_store * store, int32_t tier, uint8_t * map, size_t n);

// Writes two tables of counts since the store was opened, for the compute tiers: how often each expert was looked up,
// and how often it got a slot. In a tier whose experts are all complete in their own slots, look-ups are counted only
// while moegguf_store_watch is on or there is a listener.
MOEGGUF_API int moegguf_store_activity(moegguf_store * store, uint32_t * uses, uint32_t * loads, size_t n);

// Switches watching on or off. While watching is on, the store also handles routing events of layers whose experts are
// all in their own slots. Every use is then counted, but these layers take more time.
MOEGGUF_API int moegguf_store_watch(moegguf_store * store, int on);

// Sets the eviction policy of a tier by name. INVALID: there is no such tier or policy; the earlier policy stays in
// effect.
MOEGGUF_API int moegguf_store_set_policy(moegguf_store * store, int32_t tier, const char * name);

// Returns the name of the policy with this index; NULL after the last one. Writes 1 to takes_forecast if the policy
// uses forecasts (moegguf_store_set_forecast), otherwise 0. takes_forecast may be NULL.
MOEGGUF_API const char * moegguf_policy_name(int32_t index, int32_t * takes_forecast);

// Sets a table of scores that replaces the policy on every device: the expert with the lowest score is evicted first;
// among equal scores, the least recently used expert. NULL: the policy decides again.
MOEGGUF_API int moegguf_store_set_scores(moegguf_store * store, const float * scores, size_t n);

// Sets a forecast for policies: a table of the probabilities that experts will be used the next time their layer is
// computed. known [n_layer]: not 0 for layers with probabilities. NULL: removes the forecast. The store drops a layer's
// probabilities when the layer's router has chosen.
MOEGGUF_API int moegguf_store_set_forecast(moegguf_store * store, const float * probabilities, const uint8_t * known,
                                           size_t n);

// Starts a thread that predicts with this predictor, and prefetches experts if that probably saves time. The thread
// predicts passes in which each of up to 64 sequences decodes one token. An expert's probability is the probability
// that any sequence uses the expert. If there are more than eight sequences, only eight are predicted, and each other
// sequence is treated as an average predicted one.
//
// The arrays must stay valid until a later call that replaces or removes the predictor has returned. NULL: removes the
// predictor. INVALID: an unknown name, a missing or unsuitable array, or a limit out of range; the earlier predictor
// stays in effect.
MOEGGUF_API int moegguf_store_set_predictor(moegguf_store * store, const struct moegguf_predictor * predictor);

// Switches prefetching for the predictor's forecasts on or off. While prefetching is off, forecasts only protect
// experts in slots from eviction. Prefetching is initially on.
MOEGGUF_API int moegguf_store_prefetch(moegguf_store * store, int on);

// Writes a table with the forecast of the store's own predictor, and known [n_layer]. known is 1 for layers with a
// forecast whose router has not chosen yet.
MOEGGUF_API int moegguf_store_forecast(moegguf_store * store, float * probabilities, uint8_t * known, size_t n);

// Requests prefetches of n experts (il[i], experts[i]), in this order, after earlier requests. Requests for experts
// that do not exist or already have a slot, and requests beyond 4096 waiting ones, are dropped and counted as
// prefetch_dropped. If warm is 1, the experts only fill free slots, replace earlier warm requests, and are not counted.
MOEGGUF_API int moegguf_store_want(moegguf_store * store, const int32_t * il, const int32_t * experts, size_t n,
                                   int warm);

// Pauses the filling of free slots in the background while `on` is 1, so that other work can use the processor and the
// disk.
MOEGGUF_API int moegguf_store_pause_fill(moegguf_store * store, int on);

// Calls the listener's functions on the event thread from now on. NULL: stops listening, and returns after the last
// callback.
MOEGGUF_API int moegguf_store_listen(moegguf_store * store, const struct moegguf_listener * listener);

// Cancels the running pass and all later passes until a call with `on` = 0. Cancelled passes end with the status
// CANCELLED.
MOEGGUF_API int moegguf_store_cancel(moegguf_store * store, int on);

// Changes the number of slots that a tier uses, up to the number with which it was opened. No pass may be under way.
// Pageable host memory of unused slots is returned to the system. Any other pool is reallocated. If a smaller pool does
// not fit into memory alongside the old one, the slots are emptied first, and the tier may get fewer than n_slots.
// INVALID: the tier cannot have n_slots, or `tier` selects the slots of several devices; MEMORY: the device refuses a
// larger pool (the slots are then unchanged), or it refuses every pool (no slot is then left); IO: reads did not end
// within a minute.
MOEGGUF_API int moegguf_store_resize(moegguf_store * store, int32_t tier, int32_t n_slots);

// Waits until no transfer is queued or under way and the background fill has ended. Then checks the bookkeeping like
// moegguf_store_check. CANCELLED: the wait would take longer than timeout_s seconds.
MOEGGUF_API int moegguf_store_drain(moegguf_store * store, double timeout_s);

// Verifies the bookkeeping of every slot: free + owned = usable, pins >= 0, slots from which others are filled are
// pinned, maps and slots match. BROKEN: the error names the broken rule and the values. Holds the lock for a few
// microseconds per hundred slots.
MOEGGUF_API int moegguf_store_check(moegguf_store * store);

// Advances virtual time by ns nanoseconds of compute time. INVALID: the store is not a simulation.
MOEGGUF_API int moegguf_store_sim_advance(moegguf_store * store, uint64_t ns);

// Functions of the context. A store serves one llama_context. Only the thread that runs passes may call the functions
// of this section.

// Acquires the experts of a routing event as the hook does, for simulations and tests. Waits until every matrix has
// arrived. expert_ids and slot_ids are [n_tokens][n_expert_used]. If a simulation streams the experts, their expert ids
// are written instead. inputs [n_tokens][n_embd]: the router's inputs; NULL: unknown. INVALID: a size is out of range.
// After a failure of the pass, returns the status of this failure.
MOEGGUF_API int moegguf_context_acquire(moegguf_store * store, int32_t il, const int32_t * expert_ids,
                                        int32_t n_expert_used, int32_t n_tokens, const float * inputs, int32_t n_embd,
                                        int32_t * slot_ids);

// Acquires the experts of many routing events, one after another, until one fails. Writes the number of handled events
// to n_done, including the failed one.
MOEGGUF_API int moegguf_context_replay(moegguf_store * store, const struct moegguf_routing * routing, int64_t * n_done);

// Discards the last announced tokens, unless slots are mapped. The next tokens belong to this sequence and phase,
// unless they are announced. Returns 1 if the next tokens have to be announced, and 0 while every expert is complete in
// its own slot and there is no listener. Takes no lock. store must not be NULL.
MOEGGUF_API int moegguf_context_awaits_tokens(moegguf_store * store, int32_t sequence, int32_t phase);

// Announces the tokens that will be evaluated next. The listener receives them, and so does the predictor unless every
// tier is resident. Later routing events refer to them. INVALID: a phase is unknown, or only some of the three arrays
// are set.
MOEGGUF_API int moegguf_context_announce(moegguf_store * store, const struct moegguf_tokens_event * tokens);

// Returns 1 if no failure is recorded or pending and nothing is pinned: moegguf_context_failure, which takes the lock,
// would then do nothing. Takes no lock. store must not be NULL.
MOEGGUF_API int moegguf_context_is_clear(moegguf_store * store);

// Writes the reason why the last pass failed; status OK: it did not fail. If `clear` is not 0, also forgets the failure
// and unpins the pass's slots. The next pass can then start.
MOEGGUF_API int moegguf_context_failure(moegguf_store * store, struct moegguf_failure * failure, int clear);

// The callback for llama_context_params.cb_eval, with the store as user data. If `ask` is true, returns true if the
// scheduler has to stop at the node `t`. If `ask` is false, the scheduler has stopped there, and the callback acquires
// experts or waits for matrices.
MOEGGUF_API bool moegguf_eval(struct ggml_tensor * t, bool ask, void * store);

// The callback for llama_context_params.abort_callback, with the store as user data. Returns true when the pass must
// end.
MOEGGUF_API bool moegguf_abort(void * store);

// Only the patched llama.cpp calls the functions of this section. They return no status.

// Stores the scheduler that runs the graphs of the store's context; does nothing if the callback is not moegguf_eval.
// On a device with events, the scheduler's streams then wait for copies to the device, instead of the compute thread.
MOEGGUF_API void moegguf_set_scheduler(ggml_backend_sched_eval_callback eval, void * store, ggml_backend_sched_t sched);

// Returns true if the graph of the last moegguf_set_scheduler call still uses the right ids for each layer's experts,
// and still computes the scores that the predictor uses. If false, the caller builds a new graph and calls
// moegguf_set_scheduler for it. Returns true if `eval` is not moegguf_eval.
MOEGGUF_API bool moegguf_keeps_graph(ggml_backend_sched_eval_callback eval, void * store);

// Returns true if a store holds the experts of this tensor, or reads its rows from the file.
MOEGGUF_API bool moegguf_is_reserved(const struct ggml_tensor * w);

// Returns the buffer type for the matrices of an adapter (LoRA) on the weight `w`. If a store holds the experts of `w`,
// this is a buffer type of the device that runs the layer. Otherwise it is the buffer type of `w`.
MOEGGUF_API ggml_backend_buffer_type_t moegguf_adapter_buft(const struct ggml_tensor * w);

// Returns the tensor that replaces `w` in the multiplication by experts. If a store holds the experts of `w`, this is
// the pool tensor of `w`, or its staging tensor if there are many tokens. Otherwise it is `w` itself. Only the number
// of tokens is read from `ids`.
MOEGGUF_API struct ggml_tensor * moegguf_pool_tensor(struct ggml_tensor * w, const struct ggml_tensor * ids);

// Returns a graph node for a layer's slot ids, if a store holds the experts of `w`. The hook stops at this node,
// acquires the experts, and overwrites the expert ids with slot ids. The node keeps the router's weights and input in
// memory until then. router: the layer's router; NULL: the router is not one matrix. The graphs of earlier layers
// multiply by this router if the predictor uses its scores. Returns NULL if the graph selects matrices by expert_ids.
// This is the case if no store holds `w`. While Remedy::shared_ids is on, it is also the case if every expert of the
// layer's tier is complete in its own slot and nothing observes its events.
MOEGGUF_API struct ggml_tensor * moegguf_slot_ids(struct ggml_context * ctx, const struct ggml_tensor * w,
                                                  struct ggml_tensor * expert_ids, struct ggml_tensor * weights,
                                                  struct ggml_tensor * input, struct ggml_tensor * router, int il);

// Returns a graph node that is a view of slot_ids, for the multiplications. If kernels cannot wait for matrices, the
// hook waits at this node for the gate and up matrices.
MOEGGUF_API struct ggml_tensor * moegguf_ready_ids(struct ggml_context * ctx, struct ggml_tensor * slot_ids, int il);

// Reorders the nodes of each layer that may have to wait for experts. Nodes that do not depend on experts are moved
// before the others, so that they are computed while experts arrive. The new order does not change the values that a
// node reads.
MOEGGUF_API void moegguf_order_nodes(struct ggml_cgraph * graph);

// Copies to `to` n bytes of the state of the block that this thread added last, from the block's file. `at`: the
// address from moegguf_kv_blocks_add, or an address inside that state. Returns false for any other address. A failed
// read yields zeros.
MOEGGUF_API bool moegguf_state_read(void * to, const void * at, size_t n);

// Records that n bytes of the state at `at` belong at `offset` of a tensor. These bytes are written before
// moegguf_kv_blocks_fill returns. Returns false if `at` is not inside the state of the block that this thread added
// last.
MOEGGUF_API bool moegguf_state_put(struct ggml_tensor * tensor, size_t offset, const void * at, size_t n);

// A list of KV cache blocks that are read together. The list needs no store, and only one thread may call its
// functions.

// A saved state of a sequence in a file. `digest` is the XXH3 digest (128 bits, canonical) of `prefix` followed by the
// state.
struct moegguf_kv_block {
    const char * path;
    uint64_t begin; // offset of the state in the file
    uint64_t n_bytes;
    const void * prefix;
    size_t n_prefix;
    uint8_t digest[16];
};

// Returns an empty list of blocks; NULL: out of memory.
MOEGGUF_API moegguf_kv_blocks * moegguf_kv_blocks_open(void);

// Frees the list. Does nothing for NULL.
MOEGGUF_API void moegguf_kv_blocks_close(moegguf_kv_blocks * blocks);

// Adds a block to the list. Writes an address for moegguf_parts_state_read (memory_parts.h), which the same thread has
// to call next.
MOEGGUF_API int moegguf_kv_blocks_add(moegguf_kv_blocks * blocks, const struct moegguf_kv_block * block,
                                      const void ** state);

// Reads all blocks, and writes the parts that moegguf_state_put has recorded into their tensors. Writes to n_right the
// number of blocks before the first one that could not be read or has a different digest. The parts of every unreadable
// or different block are set to zero.
MOEGGUF_API int moegguf_kv_blocks_fill(moegguf_kv_blocks * blocks, int32_t * n_right);

#ifdef __cplusplus
}
#endif
