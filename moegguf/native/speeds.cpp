// speeds.cpp: measures how fast the CPU and a device multiply by a model's experts, and how fast experts are copied to
// the device. It uses the pools and kernels of a store, but allocates its own pools and needs no open store.
#include "api.h"

#include <algorithm>
#include <functional>

namespace moegguf {
namespace {

// The largest number of tokens in a measured graph. Each token uses its own slots, so the graph reads each slot at most
// once.
constexpr int most_tokens = 1024;
constexpr int n_small_ops = 64; // number of nodes in the graph that measures the cost of a node
// The number of nodes that run before each measured stop. A layer has about this many nodes.
constexpr int n_part_ops = 25;
constexpr int least_runs = 3;
// No run starts after longest * `seconds`, even if there were fewer than least_runs.
constexpr int longest = 10;

// Repeats run() for about `seconds`, and normally at least least_runs times. Returns the time of an undisturbed run in
// ns: the lower quartile of all times.
double run_ns(double seconds, const std::function<void()> & run) {
    run(); // not measured: the first run allocates memory and compiles kernels
    std::vector<double> times;
    const uint64_t begin = now_ns(), least_ns = (uint64_t)(seconds * 1e9);
    const auto goes_on = [&] {
        const uint64_t past_ns = now_ns() - begin;
        return past_ns < least_ns || (times.size() < least_runs && past_ns < longest * least_ns);
    };
    while (times.empty() || goes_on()) {
        const uint64_t start = now_ns();
        run();
        times.push_back((double)(now_ns() - start));
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 4, times.end());
    return times[times.size() / 4];
}

// The layer whose experts are measured, and the bytes of its first expert, which fill every slot.
class Experts {
  public:
    Experts(const Layout & layout, int n_slots)
        : layout(layout),
          layers(layout, [](int) { return true; }),
          numbering(layout, layers, n_slots) {
        if (layout.shards.empty()) { // the layout has no files, so the weights are zeros
            for (const Matrix & m : layout.matrices) { bytes_.emplace_back(m.expert_bytes, 0); }
            return;
        }
        const Shards shards = open_shards(layout, layout.shards, /*direct =*/false);
        for (const Matrix & m : layout.matrices) {
            const ReadBuffer buffer(m.expert_bytes + 2 * Shard::alignment);
            uint64_t retries = 0;
            const uint8_t * data = shards[m.shard]->read(m.offset, m.expert_bytes, buffer, retries);
            bytes_.emplace_back(data, data + m.expert_bytes);
        }
    }

    int n_used() const { return layers.n_used_max; }
    int n_slots() const { return numbering.n_slots(); }
    int64_t n_embd() const { return layout.matrices[down_matrix()].ne1; }
    double expert_bytes() const {
        double n = 0;
        for (const Matrix & m : layout.matrices) { n += (double)m.expert_bytes; }
        return n;
    }

    Pool pool(const PoolMemory & memory) const { // allocates a pool, and fills every slot
        Pool pool(layout, layers, numbering, memory);
        for (size_t i = 0; i < layout.matrices.size(); i++) {
            for (int slot = 0; slot < n_slots(); slot++) {
                pool.write((int)i, slot, 0, layout.matrices[i].ne1, bytes_[i].data());
            }
        }
        return pool;
    }

    const Layout & layout;
    const LayerSet layers;
    const Numbering numbering;

  private:
    int down_matrix() const { return layout.layers[layout.matrices[0].il].matrix[MOEGGUF_DOWN]; }

    std::vector<std::vector<uint8_t>> bytes_;
};

// A graph that one backend computes. Its inputs and results are in the backend's memory.
class Graph {
  public:
    Graph(ggml_backend_t backend, size_t n_tensors) : backend_(backend) {
        const size_t n = ggml_tensor_overhead() * n_tensors + ggml_graph_overhead_custom(n_tensors, false);
        context_.reset(ggml_init({n, nullptr, /*no_alloc =*/true}));
        if (!context_) { throw Error(MOEGGUF_MEMORY, "no memory for a graph"); }
        graph_ = ggml_new_graph_custom(context_.get(), n_tensors, false);
    }

    ggml_context * context() const { return context_.get(); }
    void add(ggml_tensor * t) { ggml_build_forward_expand(graph_, t); }

    void allocate() {
        buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend_));
        if (!buffer_) { throw Error(MOEGGUF_MEMORY, "no memory for the tensors of a graph"); }
    }

    void compute() const {
        start();
        ggml_backend_synchronize(backend_);
    }

    void start() const {
        if (ggml_backend_graph_compute_async(backend_, graph_) != GGML_STATUS_SUCCESS) {
            throw Error(MOEGGUF_INVALID,
                        std::string(ggml_backend_name(backend_)) + " cannot compute this model's experts");
        }
    }

  private:
    ggml_backend_t backend_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_cgraph * graph_ = nullptr;
};

void set_all(ggml_tensor * t, float value) {
    const std::vector<float> values(ggml_nelements(t), value);
    ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
}

// Returns the mean time in ns that the backend needs for a small node: the addition of two vectors of n_embd floats.
double op_ns(ggml_backend_t backend, int64_t n_embd, double seconds) {
    Graph graph(backend, 2 * n_small_ops + 8);
    ggml_tensor * x = ggml_new_tensor_1d(graph.context(), GGML_TYPE_F32, n_embd);
    ggml_tensor * y = x;
    for (int i = 0; i < n_small_ops; i++) { y = ggml_add(graph.context(), y, x); }
    graph.add(y);
    graph.allocate();
    set_all(x, 1);
    return run_ns(seconds, [&] { graph.compute(); }) / n_small_ops;
}

// Returns the number of bytes of expert weights that the backend multiplies per ns, one token at a time. No two tokens
// of the graph use the same slot, so no token finds its weights in a cache because of the previous token.
double multiply_bytes_per_ns(ggml_backend_t backend, const Experts & experts, const Pool & pool, double node_ns,
                             double seconds) {
    const Layout & layout = experts.layout;
    const int n_tokens = std::clamp(experts.n_slots() / experts.n_used(), 1, most_tokens);
    const size_t n_matrices = layout.matrices.size();
    Graph graph(backend, 2 * n_tokens * n_matrices + n_matrices + n_tokens + 8);
    std::vector<ggml_tensor *> inputs, ids;
    for (const Matrix & m : layout.matrices) {
        // The down matrix has a different input for each chosen expert. The other matrices have one input for all
        // experts of a token.
        const int n_rows = m.kind == MOEGGUF_DOWN ? experts.n_used() : 1;
        inputs.push_back(ggml_new_tensor_3d(graph.context(), GGML_TYPE_F32, m.ne0, n_rows, 1));
    }
    for (int token = 0; token < n_tokens; token++) {
        ids.push_back(ggml_new_tensor_2d(graph.context(), GGML_TYPE_I32, experts.n_used(), 1));
        for (size_t i = 0; i < n_matrices; i++) {
            ggml_tensor * product = ggml_mul_mat_id(graph.context(), pool.tensor((int)i), inputs[i], ids.back());
            if (!ggml_backend_supports_op(backend, product)) { // ggml would abort at a node that it cannot compute
                throw Error(MOEGGUF_INVALID, std::string(ggml_backend_name(backend)) + " cannot multiply with " +
                                                 ggml_type_name(layout.matrices[i].type) + " experts");
            }
            graph.add(product);
        }
    }
    graph.allocate();
    for (ggml_tensor * x : inputs) { set_all(x, 1e-3f); }
    for (int token = 0; token < n_tokens; token++) {
        std::vector<int32_t> slots(experts.n_used());
        for (int i = 0; i < experts.n_used(); i++) { slots[i] = (token * experts.n_used() + i) % experts.n_slots(); }
        ggml_backend_tensor_set(ids[token], slots.data(), 0, slots.size() * sizeof(int32_t));
    }
    const double ns = run_ns(seconds, [&] { graph.compute(); });
    // The time of the nodes themselves, which is subtracted. It is limited to half of the total, because node_ns is
    // only an estimate.
    const double of_nodes_ns = std::min(node_ns * n_tokens * n_matrices, ns / 2);
    return experts.expert_bytes() * experts.n_used() * n_tokens / (ns - of_nodes_ns);
}

// Measures copies from RAM to the device, of one expert and of several experts together. Sets bytes_per_ns, and
// fixed_ns, the fixed time of a batch of copies. The copies go through the slots of both pools in turn.
void measure_copies(ggml_backend_t backend, const Experts & experts, const PoolMemory & memory, const Pool & to,
                    double seconds, double & bytes_per_ns, double & fixed_ns) {
    const Pool from = experts.pool(memory);
    int next = 0;
    const auto batch_ns = [&](int n_experts) {
        return run_ns(seconds, [&] {
            for (int i = 0; i < n_experts; i++, next = (next + 1) % experts.n_slots()) {
                for (size_t m = 0; m < experts.layout.matrices.size(); m++) {
                    const uint64_t n = to.end((int)m, next) - to.data((int)m, next);
                    to.write_bytes(backend, (int)m, next, n, from.data((int)m, next));
                }
            }
            ggml_backend_synchronize(backend);
        });
    };
    const int many = std::min(experts.n_slots(), std::max(2, experts.n_used()));
    const double one_ns = batch_ns(1), many_ns = many > 1 ? batch_ns(many) : 2 * one_ns;
    const double each_ns = std::max(many_ns - one_ns, many_ns / 2) / std::max(many - 1, 1);
    bytes_per_ns = experts.expert_bytes() / each_ns;
    fixed_ns = std::max(0.0, one_ns - each_ns);
}

// Measures how long the device's graph is interrupted between two parts. Sets stop_ns: the time in ns in which the host
// reads a layer's ids and writes them back. Sets cpu_layer_ns: the time in ns of the transfers for a layer whose
// experts run on the CPU. The estimated time of the graph's own nodes is subtracted from both.
void measure_stops(ggml_backend_t backend, const Experts & experts, double seconds, moegguf_speeds & out) {
    Graph graph(backend, n_part_ops + 8);
    const int n_used = experts.n_used();
    ggml_tensor * x = ggml_new_tensor_1d(graph.context(), GGML_TYPE_F32, experts.n_embd());
    ggml_tensor * ids = ggml_new_tensor_1d(graph.context(), GGML_TYPE_I32, n_used);
    ggml_tensor * chosen = ggml_new_tensor_2d(graph.context(), GGML_TYPE_F32, experts.n_embd(), n_used);
    ggml_tensor * y = x;
    for (int i = 0; i < n_part_ops; i++) { y = ggml_add(graph.context(), y, x); }
    graph.add(y);
    graph.allocate();
    set_all(x, 1);
    std::vector<int32_t> host_ids(n_used);
    std::vector<float> host_x(experts.n_embd()), host_chosen(experts.n_embd() * n_used);
    ggml_backend_tensor_set(ids, host_ids.data(), 0, ggml_nbytes(ids));
    const double stop_ns = run_ns(seconds, [&] {
        graph.compute();
        ggml_backend_tensor_get(ids, host_ids.data(), 0, ggml_nbytes(ids));
        ggml_backend_tensor_set(ids, host_ids.data(), 0, ggml_nbytes(ids));
    });
    const double layer_ns = run_ns(seconds, [&] {
        graph.compute();
        ggml_backend_tensor_get(y, host_x.data(), 0, ggml_nbytes(y));
        ggml_backend_tensor_get(ids, host_ids.data(), 0, ggml_nbytes(ids));
        ggml_backend_tensor_set(chosen, host_chosen.data(), 0, ggml_nbytes(chosen));
        ggml_backend_synchronize(backend);
    });
    out.stop_ns = std::max(0.0, stop_ns - n_part_ops * out.device_op_ns);
    out.cpu_layer_ns = std::max(0.0, layer_ns - n_part_ops * out.device_op_ns);
}

void measure_cpu(const Experts & experts, bool repack, int n_threads, double seconds, moegguf_speeds & out) {
    const PoolMemory memory = device_memory(nullptr, repack);
    const Pool pool = experts.pool(memory);
    const ggml_backend_ptr backend = make_backend(memory.device, n_threads);
    out.cpu_op_ns = op_ns(backend.get(), experts.n_embd(), seconds);
    out.cpu_bytes_per_ns = multiply_bytes_per_ns(backend.get(), experts, pool, out.cpu_op_ns, seconds);
}

void measure_device(const Experts & experts, const char * name, int n_threads, double seconds, moegguf_speeds & out) {
    const PoolMemory memory = device_memory(name, /*repack =*/false);
    const Pool pool = experts.pool(memory);
    const ggml_backend_ptr backend = make_backend(memory.device, n_threads);
    out.device_op_ns = op_ns(backend.get(), experts.n_embd(), seconds);
    out.device_bytes_per_ns = multiply_bytes_per_ns(backend.get(), experts, pool, out.device_op_ns, seconds);
    PoolMemory host = host_memory({memory.device});
    measure_copies(backend.get(), experts, host, pool, seconds, out.copy_bytes_per_ns, out.copy_ns);
    host.pinned = false;
    host.buft = ggml_backend_cpu_buffer_type();
    measure_copies(backend.get(), experts, host, pool, seconds, out.pageable_bytes_per_ns, out.pageable_ns);
    measure_stops(backend.get(), experts, seconds, out);
}

moegguf_speeds measure_speeds(const moegguf_config & config, int n_threads, double seconds) {
    if (n_threads < 1 || n_threads > GGML_MAX_N_THREADS || !(seconds > 0) || seconds > 60) {
        throw Error(
            MOEGGUF_INVALID,
            "speeds can be measured only with 1 to 512 threads, and for more than 0 and at most 60 seconds each");
    }
    if (config.n_devices != 1 || !config.devices) {
        throw Error(MOEGGUF_INVALID, "speeds can be measured only on one device, or on the CPU alone");
    }
    const moegguf_device & device = config.devices[0];
    const Layout layout(config);
    const Experts experts(layout, device.n_slots), of_cpu(layout, config.n_ram_slots);
    if (layout.n_moe_layers != 1 || std::min(experts.n_slots(), of_cpu.n_slots()) < experts.n_used()) {
        throw Error(MOEGGUF_INVALID,
                    "speeds can be measured only with one layer, and with slots for all experts that a token uses");
    }
    moegguf_speeds out = {};
    measure_cpu(of_cpu, config.flags & MOEGGUF_REPACK, n_threads, seconds, out);
    if (device.name) { measure_device(experts, device.name, n_threads, seconds, out); }
    return out;
}

} // namespace
} // namespace moegguf

using namespace moegguf;

int moegguf_measure_speeds(const moegguf_config * config, int32_t n_threads, double seconds, moegguf_speeds * speeds) {
    return guarded([&] { given(speeds) = measure_speeds(given(config), n_threads, seconds); });
}
