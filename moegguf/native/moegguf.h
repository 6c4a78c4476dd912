// moegguf.h: the C ABI of the expert store.
//
// Memory map
//   A MoE GGUF holds, per layer il, the matrices ffn_{gate,up,down}_exps.weight (or gate_up and down),
//   each [ne0, ne1, n_expert] and contiguous per expert. The store keeps n_slots experts in fast memory:
//
//     arena of a kind   | slot 0 | slot 1 | ... | slot S-1 | guard |        one arena per matrix kind
//     slot stride       = the largest expert of that kind and the padding that kernels of the store's devices read
//                         after it, rounded up to a multiple of every block size used
//     pool tensor       = [ne0, ne1, count] over a layer's window of the arena, nb[2] = slot stride
//
//   When every expert has a slot ("resident"), layer il owns the window of its n_expert slots and slot ids
//   equal expert ids. Otherwise all layers share one window of all slots.
//
//   Each layer computes on one device, and each device has a tier of its own for its layers: arenas, residency and
//   numbering (tier.h). It may be filled from a tier in host memory, and have staging tensors for prompts
//   (staged_supply.cpp).
//
// Ordering
//   1. At a routing event the context (of the store, for a llama_context) unpins its earlier slots, pins the needed
//      experts that are there, and only then are victims chosen. A pinned slot keeps its expert, and so does one that
//      is being read.
//   2. A slot's chunk (one matrix) becomes READY, with a release store, after its bytes were written under the slot's
//      generation; every change of owner bumps the generation, and happens under the store's lock.
//   3. A compute thread multiplies from a slot only after its context has pinned it under the store's lock, and
//      after the thread itself has seen the chunk READY with an acquire load: in the kernel on the CPU, before it on
//      other devices. The pin keeps the slot's expert until the context's next routing event.
//      On devices with events the thread only sees that the copy was queued, and lets its stream wait for it.
//   4. A slot that fills another slot is pinned until the other slot has every matrix, or gives up.
//   5. A place in a staging tensor changes its expert only while it is not pinned and nothing is on its way there.
//
// Threads
//   compute thread(s): moegguf_eval, moegguf_abort, and in the CPU's MUL_MAT_ID the order of matrices (arrivals.cpp).
//                      They allocate nothing once warm. They take the store's lock briefly to pin slots or to wait
//                      for them, but not for a layer of a resident pool or for matrices that are there.
//   reader threads   : pread into read buffers, write into slots. Never call out.
//   copy threads     : one for each tier that is filled from RAM, staging tensors too. They copy from slots in RAM, and
//                      never call out.
//   predictor thread : takes the records of compute threads, predicts, requests prefetches under the store's lock.
//   event thread     : calls the listener's callbacks. The only thread that enters foreign code.
//   any thread       : everything else below, unless it says otherwise. Counters are read without the lock, so figures
//                      of an event under way may be of before and after it.
//
// One lock belongs to the store: residency, numbering, queues and policies are read and changed under it. Atomics of
// their own: a slot's READY bits, counters, and the switches (cancel, watch, listening).
//
// No exception crosses this boundary; calls return a moegguf_status and leave the reason in moegguf_last_error().
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOEGGUF_ABI_VERSION 27
#define MOEGGUF_MAX_KINDS 4
#define MOEGGUF_API __attribute__((visibility("default")))

enum moegguf_status {
    MOEGGUF_OK = 0,
    MOEGGUF_INVALID = 1,   // an argument breaks a rule
    MOEGGUF_MEMORY = 2,    // an allocation failed
    MOEGGUF_IO = 3,        // the file could not be read, or is not the file it was
    MOEGGUF_CANCELLED = 4, // moegguf_store_cancel
    MOEGGUF_FORKED = 5,    // called in a child process: the reader threads stayed behind
    MOEGGUF_ROUTING = 6,   // the router chose an expert that does not exist
    MOEGGUF_SLOTS = 7,     // one pass needs more experts of a layer than there are slots
    MOEGGUF_BROKEN = 8,    // the store's bookkeeping contradicts itself
};

enum moegguf_kind { MOEGGUF_GATE = 0, MOEGGUF_UP = 1, MOEGGUF_DOWN = 2, MOEGGUF_GATE_UP = 3 };

enum moegguf_flag {
    MOEGGUF_REPACK = 1 << 0,  // slots in the CPU's interleaved layout where its kernels support the type
    MOEGGUF_DIRECT = 1 << 1,  // O_DIRECT where the file system proves it reads the same bytes
    MOEGGUF_CHUNKED = 1 << 2, // a prefetch goes matrix by matrix, so that a miss waits for one at most
    MOEGGUF_PREEMPT = 1 << 3, // a routing event drops the prefetches of its layer that were not needed
    MOEGGUF_OVERLAP = 1 << 4, // a layer's computing begins before all of its matrices are there
    // A pass that chooses nearly all experts of a layer fetches experts of the next layer meanwhile, as many as fit. In
    // such passes, and where a pass's experts do not fit, experts of the layer that comes last are evicted first,
    // unless the policy's scores decide.
    MOEGGUF_SWEEP = 1 << 5,
    MOEGGUF_FILL = 1 << 6,         // when resident: read every expert in the background
    MOEGGUF_SIMULATE = 1 << 7,     // no file, no memory: transfers cost modelled time only
    MOEGGUF_STREAM = 1 << 8,       // a prompt's experts pass through a few slots, also where each could have its own
    MOEGGUF_DEMAND_FIRST = 1 << 9, // a layer's demands are read before all prefetches, else after earlier requests
};

// One expert tensor of the file. `offset` is absolute within its shard.
struct moegguf_matrix {
    const char * name;
    int32_t il;
    int32_t kind;
    int32_t type; // enum ggml_type
    int32_t n_expert;
    int64_t ne0;
    int64_t ne1;
    int32_t shard;
    int32_t padding_bytes; // zero bytes after each expert in a slot: moegguf_pad
    uint64_t offset;
    uint64_t expert_bytes;
};

// A device that computes layers, and its slots.
struct moegguf_device {
    const char * name; // ggml's; NULL is the CPU
    int32_t n_slots;
    int32_t through_ram;          // 1: misses here come through slots in RAM
    int32_t n_staging_tensors;    // tensors of a layer's full shape, for prompts; up to 2; 0: passes must fit the slots
    int32_t n_pass_slots;         // slots that a pass may need at once if it is not staged; 0: the slots of one token
    double sim_copy_bytes_per_ns; // simulation: the link from the tier below, 0 = free
    double sim_copy_latency_ns;   // simulation: per copy
};

struct moegguf_config {
    uint32_t abi;
    uint32_t flags;
    int32_t n_layer;
    int32_t n_matrices;
    int32_t n_shards;
    int32_t n_devices;
    int32_t n_readers;   // threads that read each copy of the shards
    int32_t n_ram_slots; // slots in host memory, below the slots of devices; 0: no such tier
    int32_t n_mirrors;   // copies of the shards on other drives
    const struct moegguf_matrix * matrices;
    const char * const * shard_paths;      // [1 + n_mirrors][n_shards], the model's own first
    const int32_t * n_expert_used;         // [n_layer], 0 where a layer has no experts
    const struct moegguf_device * devices; // [n_devices]
    const int32_t * device_of_layer;       // [n_layer] index of the device that computes it; NULL: the first one
    double sim_bytes_per_ns;               // simulation: bandwidth of the file's link, 0 = free
    double sim_latency_ns;                 // simulation: per transfer
};

// COMPUTE: the slots that layers compute with, of all devices together unless a call says something else. STAGING: the
// tensors of all devices in which prompts are staged. DEVICE + i: the slots of device i alone.
enum moegguf_tier { MOEGGUF_COMPUTE_TIER = 0, MOEGGUF_RAM_TIER = 1, MOEGGUF_STAGING_TIER = 2, MOEGGUF_DEVICE_TIER = 3 };

// Counters since the store was opened. They are incremented where the events happen. Reads and bytes are reads and
// bytes of the file.
struct moegguf_counters {
    uint64_t passes;
    uint64_t tokens; // tokens of all passes
    uint64_t routing_events;
    uint64_t bytes_missed;     // read because a pass needed them
    uint64_t bytes_prefetched; // read because of a prefetch request
    uint64_t reads;
    uint64_t read_retries;
    uint64_t read_errors;
    uint64_t stall_ns;  // compute threads waiting for bytes
    uint64_t hook_ns;   // time in the hook without the stall
    uint64_t read_ns;   // summed over readers: pread
    uint64_t upload_ns; // summed over readers: read buffer to slot, repacking included
    uint64_t prefetch_requested;
    uint64_t prefetch_started;
    uint64_t prefetch_useful;  // prefetched and then looked up before eviction, when all of it was there
    uint64_t prefetch_late;    // prefetched and then looked up when some of it was still to come
    uint64_t prefetch_dropped; // never started: stale, resident already, no free space
    uint64_t events_dropped;   // the listener was too slow
    uint64_t forecast_picks;   // native prediction: the most probable experts of a layer, up to a token's number
    uint64_t forecast_right;   // picks that the router chose
    uint64_t forecast_ns;      // time of the predictor thread
    // gauges
    uint64_t chunks_reading;
    uint64_t queue_needed;
    uint64_t queue_wanted;
    uint64_t sim_clock_ns;
};

// The counters of one tier since the store was opened; the fields from slots_used on are its present state. A lookup is
// one distinct (layer, expert) per pass: lookups = hits_ready + hits_late + misses. Each miss in a tier is one lookup
// in the tier below.
struct moegguf_tier_info {
    uint64_t lookups;
    uint64_t hits_ready; // every matrix was there
    uint64_t hits_late;  // a prefetch of the expert was queued or under way
    uint64_t misses;
    uint64_t evictions;
    uint64_t prefetch_wasted;  // prefetched and evicted unused
    uint64_t bytes_missed;     // bytes of demands that came into its slots, from the file or from other slots
    uint64_t bytes_prefetched; // bytes that came into its slots early
    uint64_t stall_ns;         // compute threads waiting; in RAM: while a matrix was still to be read from the file
    uint64_t stream_waits;     // waits for copies by the stream that computes, in place of a thread
    uint64_t copy_ns;          // time of the threads that copy into its slots
    uint64_t slots_used;
    uint64_t slots_pinned;
    uint64_t pool_bytes;
    uint64_t slot_bytes;        // one expert over all arenas
    uint64_t read_buffer_bytes; // read buffers of the whole store
    int32_t direct;             // shards read with O_DIRECT
    int32_t n_experts;          // experts of all layers
    int32_t n_repacked;         // matrices whose slots here are interleaved
    int32_t n_uncached;         // interleaved matrices that are written past the cache
    int32_t n_slots;
    int32_t n_slots_usable; // moegguf_store_resize changes it
    int32_t resident;       // every expert has a slot of its own
    int32_t pinned_memory;  // host memory that the device copies from by itself
    char device[64];        // the device that computes with its slots, or copies from them
    char note[192];         // the reason why its memory is not pinned; empty: it is, or need not be
};

// One copy of the shards, on a drive of its own. Each read goes to the copy that is expected to have it first.
struct moegguf_drive_info {
    uint64_t reads;
    uint64_t bytes;
    uint64_t bytes_per_s; // speed of all reads that were under way at once; 0: not measured yet
    int32_t dropped;      // it failed, and is not read any more
    char note[256];       // reason why it was dropped
};

enum moegguf_phase { MOEGGUF_PREFILL = 0, MOEGGUF_DECODE = 1 };

// A predictor by name, which the store itself computes, with its trained arrays. The error for an unknown name lists
// the names. Each predictor's file in moegguf/native/predictors lists the arrays that it needs.
enum moegguf_array_type { MOEGGUF_FLOAT32 = 0, MOEGGUF_INT8 = 1, MOEGGUF_UINT16 = 2, MOEGGUF_INT32 = 3 };

struct moegguf_array {
    const char * name;
    int32_t type; // enum moegguf_array_type
    uint64_t n;
    const void * data; // [n], used in place until another predictor is set
};

enum moegguf_predict_flag {
    MOEGGUF_PREDICT_ONCE = 1 << 0,         // a layer is predicted when it comes into the window, and not again
    MOEGGUF_PREDICT_LOCKSTEP = 1 << 1,     // acquire waits until everything was predicted: slow, and reproducible
    MOEGGUF_PREDICT_BY_PROXIMITY = 1 << 2, // fetches by probability times layer proximity; else the nearest layer first
};

struct moegguf_predictor {
    const char * name;
    int32_t n_arrays;
    uint32_t flags; // enum moegguf_predict_flag
    const struct moegguf_array * arrays;
    int32_t window;          // layers with experts ahead that are predicted
    int32_t most_prefetches; // experts started in a pass; 0: predictions only protect resident experts
    float waste_weight;      // cost of a prefetch in vain, as a share of the stall that a useful one saves; 0: no cost
};

// The sizes of slots. Every arena has a guard after its last slot.
struct moegguf_sizes {
    uint64_t stride_bytes[MOEGGUF_MAX_KINDS]; // distance of slots in the arena of a kind; 0: no such matrices
    uint64_t slot_bytes;                      // one expert over all arenas
    uint64_t pool_bytes;                      // all arenas, guards included
    uint64_t streams; // 1: on the CPU a pass may use more experts of a layer than there are slots
};

// Routing events to be replayed one after another. Their expert ids lie one after another, [n_tokens][n_expert_used]
// for each event.
struct moegguf_routing {
    int64_t n_events;
    int64_t n_ids;                 // ids of all events
    const int32_t * il;            // [n_events]
    const int32_t * n_tokens;      // [n_events]
    const int32_t * n_expert_used; // [n_events]
    const int32_t * expert_ids;    // [n_ids]
    const uint64_t * compute_ns;   // [n_events], modelled time that passes after each; NULL: none
};

// Tokens that are about to be evaluated, in this order. Pointers in events are valid during the callback only. Tokens
// of several sequences have all three arrays [n_tokens] after `tokens`, others have none.
struct moegguf_tokens_event {
    int32_t sequence; // number of the request; in a batch: of its first token
    int32_t phase;    // enum moegguf_phase; in a batch: MOEGGUF_DECODE if some of its tokens decode
    int32_t n_tokens;
    const int32_t * tokens;    // [n_tokens]
    const int32_t * sequences; // NULL: all tokens have `sequence`
    const int32_t * phases;    // NULL: all tokens have `phase`
    const int32_t * outputs;   // 1: the token gets logits; llama.cpp computes the last layer only for such tokens
};

// The choice of the router at one layer in one pass.
struct moegguf_routing_event {
    uint64_t pass;
    uint64_t time_ns;
    int32_t il;
    int32_t n_tokens;
    int32_t n_expert_used;
    int32_t sequence; // sequence of the announcement
    int32_t phase;
    int32_t first_token; // index of the pass's first token in its announcement; -1: never announced
    int32_t n_embd;
    const int32_t * expert_ids; // [n_tokens][n_expert_used]
    const float * weights;      // [n_tokens][n_expert_used], or NULL
    const float * inputs;       // [n_tokens][n_embd] vectors that entered the router, or NULL
    const int32_t * sequences;  // [n_tokens] as announced, NULL: all tokens have `sequence`
    const int32_t * phases;     // [n_tokens] as announced, NULL: all tokens have `phase`
};

enum moegguf_listen_flag {
    MOEGGUF_LISTEN_WEIGHTS = 1 << 0,
    MOEGGUF_LISTEN_INPUTS = 1 << 1,
    MOEGGUF_LISTEN_EVERYTHING = 1 << 2, // a compute thread waits for free space instead of dropping events
    MOEGGUF_LISTEN_LOCKSTEP = 1 << 3,   // acquire waits until every earlier event was delivered: slow, and reproducible
    MOEGGUF_LISTEN_LAZY = 1 << 4,       // many events at a time, some ms late: the listener's thread rarely wakes
};

struct moegguf_listener { // callbacks may be NULL: nothing is kept for them
    uint32_t flags;
    int32_t max_input_tokens; // passes with more tokens come without inputs
    void (*on_tokens)(void * user, const struct moegguf_tokens_event * event);
    void (*on_routing)(void * user, const struct moegguf_routing_event * event);
    void * user;
};

struct moegguf_failure {
    int32_t status; // enum moegguf_status
    char message[256];
};

// Speeds measured with the experts of one layer: of the CPU, of a device, and of copies to the device.
struct moegguf_speeds {
    double cpu_bytes_per_ns;    // experts that the CPU multiplies with, one token at a time
    double cpu_op_ns;           // time of each further node of a graph on the CPU
    double device_bytes_per_ns; // experts that the device multiplies with, one token at a time
    double device_op_ns;        // time of each further node of a graph on the device
    double copy_bytes_per_ns;   // copies of misses from slots in host memory to slots on the device
    double copy_ns;             // time of a layer's misses together, without their bytes
    double stop_ns;             // a stop at a layer: computing ends, ids are read and written
    double cpu_layer_ns;        // a layer whose experts the CPU multiplies with: activations go there and back
};

typedef struct moegguf_store moegguf_store;
typedef struct moegguf_kv_blocks moegguf_kv_blocks;

// Any thread may call a function unless its comment says otherwise. It returns an enum moegguf_status
// and leaves the reason of a failure in moegguf_last_error(). A NULL store or a NULL pointer is INVALID. A store in a
// child process is FORKED. A table is [n_layer][most experts of a layer], one row after another. n is the number of its
// entries; another n is INVALID.

// Returns MOEGGUF_ABI_VERSION of the library.
MOEGGUF_API uint32_t moegguf_abi_version(void);

// Returns the bits of remedies that MOEGGUF_SWITCHES can switch off (switches.h).
MOEGGUF_API uint32_t moegguf_switches(void);

// Returns why the last call of this thread failed, until its next call; empty after one that succeeded.
MOEGGUF_API const char * moegguf_last_error(void);

// Writes the sizes of a pool with n_slots slots for these matrices, in bytes, as a store lays its slots out. INVALID: a
// matrix has a kind or a type that does not exist.
MOEGGUF_API int moegguf_slot_sizes(const struct moegguf_matrix * matrices, int32_t n_matrices, int32_t n_slots,
                                   struct moegguf_sizes * sizes);

// Raises the padding of these matrices to the bytes that a device's memory (ggml's name; NULL: the CPU) has after each,
// because kernels read them. A device that ggml does not know has no padding.
MOEGGUF_API int moegguf_pad(const char * device, struct moegguf_matrix * matrices, int32_t n_matrices);

// Writes the number of slots, up to n_slots, that one pool of these matrices can have on a device (NULL: the CPU). The
// device's kernels and buffers have a largest size. INVALID: there is no such device.
MOEGGUF_API int moegguf_most_slots(const char * device, const struct moegguf_matrix * matrices, int32_t n_matrices,
                                   int32_t n_slots, int32_t * most);

// Returns the largest number of tokens in a pass that a device's kernels compute as if every expert were resident. The
// bits are then equal for any number of slots. device: ggml's name; NULL: the CPU, which has no limit.
MOEGGUF_API int32_t moegguf_slot_tokens(const char * device);

// Measures the speeds of the CPU, with n_ram_slots slots, and of the config's one device, with its n_slots. The slots
// have copies of the first expert of one layer, or zeros without shards (MOEGGUF_SIMULATE). If the device is the CPU,
// the device's figures are 0. Each figure takes about `seconds` (at most 60), with n_threads threads; nothing else
// should compute meanwhile. The slots are freed again. INVALID: the config has several devices or layers; MEMORY: a
// device refuses the slots.
MOEGGUF_API int moegguf_measure_speeds(const struct moegguf_config * config, int32_t n_threads, double seconds,
                                       struct moegguf_speeds * speeds);

// Opens a store: allocates its slots, opens its files and starts its threads. INVALID: the config contradicts itself or
// has another ABI, or a mirror differs from the model's own shards; MEMORY: a device refuses slots or the system a
// thread; IO: one of the model's own shards cannot be opened. A mirror that cannot be opened is dropped.
MOEGGUF_API int moegguf_store_open(const struct moegguf_config * config, moegguf_store ** store);

// Joins the store's threads and frees its slots. The llama_context and the models that use the store must be gone, and
// no other call may be under way. Does nothing for NULL and in a child process.
MOEGGUF_API void moegguf_store_close(moegguf_store * store);

// Returns the buffer type that reserves address space for the expert tensors of a model; NULL for NULL.
MOEGGUF_API ggml_backend_buffer_type_t moegguf_store_buft(moegguf_store * store);

// Writes the store's counters, without the lock.
MOEGGUF_API int moegguf_store_counters(moegguf_store * store, struct moegguf_counters * counters);

// Writes the counters and the state of one tier (enum moegguf_tier). INVALID: the store has no such tier.
MOEGGUF_API int moegguf_store_tier(moegguf_store * store, int32_t tier, struct moegguf_tier_info * info);

// Writes the reads of one copy of the shards: 0 is the model's own, mirrors follow. INVALID: there is no such copy, as
// in a simulation.
MOEGGUF_API int moegguf_store_drive(moegguf_store * store, int32_t index, struct moegguf_drive_info * info);

// Writes a table of the experts in a tier: 0 absent, 1 on its way, 2 there.
MOEGGUF_API int moegguf_store_residency(moegguf_store * store, int32_t tier, uint8_t * map, size_t n);

// Writes two tables: how often each expert was looked up, and how often it was given a slot, since the store was
// opened. Single tokens in a pool that holds every expert count only while moegguf_store_watch is on.
MOEGGUF_API int moegguf_store_activity(moegguf_store * store, uint32_t * uses, uint32_t * loads, size_t n);

// While on, layers whose experts are all there are not passed over: activity is complete, and these layers cost more.
MOEGGUF_API int moegguf_store_watch(moegguf_store * store, int on);

// A tier evicts by the policy of this name from now on. values [n]: numbers in place of the policy's own. INVALID:
// there is no such policy, or a value is out of range; the policy before stays.
MOEGGUF_API int moegguf_store_set_policy(moegguf_store * store, int32_t tier, const char * name, const float * values,
                                         size_t n);

// Returns the name of the policy with this index, NULL after the last one. Writes 1 to takes_forecast (NULL: nothing is
// written) if the policy makes use of moegguf_store_set_forecast.
MOEGGUF_API const char * moegguf_policy_name(int32_t index, int32_t * takes_forecast);

// Sets a table of scores that comes before the policy on every device: the lowest score goes first, and of equals the
// least recently used expert. NULL: the policy decides again.
MOEGGUF_API int moegguf_store_set_scores(moegguf_store * store, const float * scores, size_t n);

// Sets a table of the probabilities that experts are used when their layer comes next, for policies. known [n_layer]:
// not 0 for layers with probabilities. NULL: nothing is known. The store drops a layer's probabilities when the layer's
// router has chosen.
MOEGGUF_API int moegguf_store_set_forecast(moegguf_store * store, const float * probabilities, const uint8_t * known,
                                           size_t n);

// Starts a thread that predicts with this predictor and prefetches experts that pay. It predicts passes in which each
// of up to 64 sequences decodes one token. An expert's probability is the probability that any sequence uses it. If
// there are more than eight sequences, eight are predicted and each other one counts as their average. The arrays are
// used in place until the call for another predictor returns. NULL: no predictor. INVALID: an unknown name, a missing
// array, or a limit out of range; the earlier predictor stays.
MOEGGUF_API int moegguf_store_set_predictor(moegguf_store * store, const struct moegguf_predictor * predictor);

// Switches prefetching for the predictor's forecasts on or off. While it is off, forecasts only protect resident
// experts. It is on until switched off.
MOEGGUF_API int moegguf_store_prefetch(moegguf_store * store, int on);

// Writes the store's own forecast: a table of probabilities, and known [n_layer], 1 for layers that are predicted and
// not routed yet.
MOEGGUF_API int moegguf_store_forecast(moegguf_store * store, float * probabilities, uint8_t * known, size_t n);

// Requests experts (il[i], experts[i]) [n] early, in this order, after earlier requests. Unknown and resident experts
// are dropped and counted. warm: the experts fill free slots only, and replace earlier experts of this kind.
MOEGGUF_API int moegguf_store_want(moegguf_store * store, const int32_t * il, const int32_t * experts, size_t n,
                                   int warm);

// While it is on, free slots are not filled in the background, because something else needs the processor and the disk.
MOEGGUF_API int moegguf_store_pause_fill(moegguf_store * store, int on);

// Calls the listener's functions on the event thread from now on. NULL: stops, and returns after the last call.
MOEGGUF_API int moegguf_store_listen(moegguf_store * store, const struct moegguf_listener * listener);

// While on, passes under way and to come end as CANCELLED.
MOEGGUF_API int moegguf_store_cancel(moegguf_store * store, int on);

// Uses n_slots slots of a tier, up to the number that it was opened with, while no pass is under way. The memory of the
// other slots goes back to the system if it is pageable host memory. Elsewhere the pool is allocated anew; slots are
// emptied first if there is too little memory for both. COMPUTE shares n_slots out over the devices, without the CPU
// beside other devices. INVALID: the tier cannot have n_slots; MEMORY: the device refuses, and the slots are as before;
// IO: reads did not end in a minute.
MOEGGUF_API int moegguf_store_resize(moegguf_store * store, int32_t tier, int32_t n_slots);

// Waits until nothing is queued, being read or left to fill, and checks as moegguf_store_check does. CANCELLED: it
// takes longer than timeout_s seconds.
MOEGGUF_API int moegguf_store_drain(moegguf_store * store, double timeout_s);

// Verifies the bookkeeping of every slot: free + owned = usable, pins >= 0, a borrowed slot is pinned, maps agree both
// ways. BROKEN: the error names the rule and the values. Takes the lock for some microseconds per hundred slots.
MOEGGUF_API int moegguf_store_check(moegguf_store * store);

// Lets ns nanoseconds of compute time pass on the modelled clock. INVALID: the store is no simulation.
MOEGGUF_API int moegguf_store_sim_advance(moegguf_store * store, uint64_t ns);

// The context: a store serves one llama_context. The calls below come from the thread that computes.

// Acquires the experts of a routing event as the hook does, for simulations and tests: expert_ids and slot_ids are
// [n_tokens][n_expert_used]; inputs [n_tokens][n_embd] entered the router, NULL: unknown. Waits until every matrix is
// there. INVALID: a size out of range; else the status of the context's failure.
MOEGGUF_API int moegguf_context_acquire(moegguf_store * store, int32_t il, const int32_t * expert_ids,
                                        int32_t n_expert_used, int32_t n_tokens, const float * inputs, int32_t n_embd,
                                        int32_t * slot_ids);

// Acquires many routing events, one after another, until one fails. Writes how many are done, with the one that fails.
MOEGGUF_API int moegguf_context_replay(moegguf_store * store, const struct moegguf_routing * routing, int64_t * n_done);

// Forgets the tokens announced last, because other tokens come next. The first of them has this sequence and phase.
// Returns 1 if they have to be announced, and 0 while every expert has a slot and nothing listens or predicts. No lock;
// store: not NULL.
MOEGGUF_API int moegguf_context_awaits_tokens(moegguf_store * store, int32_t sequence, int32_t phase);

// Announces the tokens that are evaluated next, to the listener, the predictor and later routing events. INVALID: a
// phase is unknown, or some of the three arrays are missing.
MOEGGUF_API int moegguf_context_announce(moegguf_store * store, const struct moegguf_tokens_event * tokens);

// Returns 1 where no pass has failed and nothing is pinned, so that moegguf_context_failure, which takes the lock, need
// not be called. No lock; store: not NULL.
MOEGGUF_API int moegguf_context_is_clear(moegguf_store * store);

// Writes the reason why the last pass failed (status OK: it did not), and unpins its slots. clear: the next pass starts
// without a failure.
MOEGGUF_API int moegguf_context_failure(moegguf_store * store, struct moegguf_failure * failure, int clear);

// The callback for llama_context_params.cb_eval, with the store as user data. Returns, for ask, whether the scheduler
// has to stop at the node `t`, and acquires experts or waits for matrices when it has stopped there.
MOEGGUF_API bool moegguf_eval(struct ggml_tensor * t, bool ask, void * store);

// The callback for llama_context_params.abort_callback, with the store as user data. Returns true when the pass must
// end.
MOEGGUF_API bool moegguf_abort(void * store);

// The rest is called by the patched llama.cpp. These functions have no status.

// Notes which scheduler computes for the store's context, if the callback is moegguf_eval. If the device has events,
// the scheduler's streams then wait for copies to the device instead of the thread that computes.
MOEGGUF_API void moegguf_set_scheduler(ggml_backend_sched_eval_callback eval, void * store, ggml_backend_sched_t sched);

// Returns whether the graph of the last moegguf_set_scheduler call still finds experts where they are. If not, the
// caller builds a new graph and calls moegguf_set_scheduler for it. True for another callback.
MOEGGUF_API bool moegguf_keeps_graph(ggml_backend_sched_eval_callback eval, void * store);

// Returns true for a tensor whose experts a store keeps.
MOEGGUF_API bool moegguf_is_reserved(const struct ggml_tensor * w);

// Returns the buffer type for an adapter's matrices on `w`. If `w` is reserved, it is a type of the device that
// computes the layer; otherwise it is the type of `w` itself.
MOEGGUF_API ggml_backend_buffer_type_t moegguf_adapter_buft(const struct ggml_tensor * w);

// Returns the tensor to multiply with in place of `w`, by the router's ids. Depending on the number of tokens this is a
// pool tensor or a prompt's staging tensor. It is w itself when w is not reserved.
MOEGGUF_API struct ggml_tensor * moegguf_pool_tensor(struct ggml_tensor * w, const struct ggml_tensor * ids);

// Returns a node for a layer's slot ids if `w` is reserved. The hook stops at this node, acquires the experts and
// writes slot ids over the expert ids. The node keeps the router's weights and input in memory until then. NULL:
// multiply by expert_ids, because w is not reserved, or every expert of the layer is in a slot of its own.
MOEGGUF_API struct ggml_tensor * moegguf_slot_ids(struct ggml_context * ctx, const struct ggml_tensor * w,
                                                  struct ggml_tensor * expert_ids, struct ggml_tensor * weights,
                                                  struct ggml_tensor * input, int il);

// Returns a node with these ids for the multiplications. The hook waits at this node if kernels cannot wait.
MOEGGUF_API struct ggml_tensor * moegguf_ready_ids(struct ggml_context * ctx, struct ggml_tensor * slot_ids, int il);

// Moves nodes that do not depend on experts before nodes that do, within each layer that may have to wait for experts,
// so that they are computed meanwhile. Every node finds the memory that it reads as before.
MOEGGUF_API void moegguf_order_nodes(struct ggml_cgraph * graph);

// Copies n bytes of a sequence's state from an address of moegguf_kv_blocks_add to `to`. Returns false where `at` is no
// such address.
MOEGGUF_API bool moegguf_state_read(void * to, const void * at, size_t n);

// Notes that n bytes of the state belong at `offset` of a tensor. moegguf_kv_blocks_fill writes them. Returns false if
// `at` is no such address.
MOEGGUF_API bool moegguf_state_put(struct ggml_tensor * tensor, size_t offset, const void * at, size_t n);

// Blocks of KV cache that are read together. They need no store, and belong to one thread.

// A state of a sequence in a file, and the XXH3 digest (128 bits, canonical) of `prefix` and all of the state.
struct moegguf_kv_block {
    const char * path;
    uint64_t begin; // place of the state in the file
    uint64_t n_bytes;
    const void * prefix;
    size_t n_prefix;
    uint8_t digest[16];
};

// Returns an empty list of blocks; NULL: out of memory.
MOEGGUF_API moegguf_kv_blocks * moegguf_kv_blocks_open(void);

// Frees the list. Does nothing for NULL.
MOEGGUF_API void moegguf_kv_blocks_close(moegguf_kv_blocks * blocks);

// Adds a block, and writes an address at which moegguf_parts_state_read (memory_parts.h), called next on this thread,
// finds the state.
MOEGGUF_API int moegguf_kv_blocks_add(moegguf_kv_blocks * blocks, const struct moegguf_kv_block * block,
                                      const void ** state);

// Reads the blocks, and writes the parts that moegguf_state_put has noted into tensors. Writes the number of first
// blocks that have their digest; the parts of the others are zero then.
MOEGGUF_API int moegguf_kv_blocks_fill(moegguf_kv_blocks * blocks, int32_t * n_right);

#ifdef __cplusplus
}
#endif
