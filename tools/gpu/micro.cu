// micro.cu: measures single launches, copies, hand-offs and products on a card. Every line on stdout is one figure, as
// JSON: {"item": ..., "unit": ..., "value": ...}. Exit status 3: there is no card, or ggml has no device DEVICE.
//
//   micro copies                                  bandwidth from pinned memory
//   micro latency                                 the parts of the time for which a layer waits for experts
//   micro mapped DEVICE TYPE NE0 NE1 N K          products that read their experts in pinned host memory
//   micro offsets DEVICE TYPE NE0 NE1 N           products of one expert in slot 5 and in the last of N slots
//   micro strides DEVICE TYPE NE0 NE1 N K STRIDE  products of 512 tokens; experts adjacent, and STRIDE bytes apart
//
// `offsets` and `strides` also run on the CPU, so that a machine without a card can try them.
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int no_card = 3;
constexpr size_t ids_bytes = 32; // eight expert ids

void check(cudaError_t error) {
    if (error == cudaSuccess) { return; }
    fprintf(stderr, "%s\n", cudaGetErrorString(error));
    exit(error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ? no_card : 1);
}

void print(const std::string & item, const char * unit, double value) {
    printf("{\"item\": \"%s\", \"unit\": \"%s\", \"value\": %.4g}\n", item.c_str(), unit, value);
    fflush(stdout);
}

double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the median time of up to n runs in microseconds. After at least 3 runs, no run begins once a second is over.
double median_us(int n, const std::function<void()> & run) {
    for (int i = 0; i < 3; i++) { run(); } // the first runs allocate memory and load kernels
    std::vector<double> times;
    for (const double begin = now_us(); (int)times.size() < n && (times.size() < 3 || now_us() - begin < 1e6);) {
        const double start = now_us();
        run();
        times.push_back(now_us() - start);
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

struct Pinned {
    explicit Pinned(size_t n) { check(cudaMallocHost(&data, n)); }
    Pinned(const Pinned &) = delete;
    ~Pinned() { cudaFreeHost(data); }
    void * data = nullptr;
};

struct OnDevice {
    explicit OnDevice(size_t n) { check(cudaMalloc(&data, n)); }
    OnDevice(const OnDevice &) = delete;
    ~OnDevice() { cudaFree(data); }
    void * data = nullptr;
};

cudaStream_t new_stream() {
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

double copy_gb_per_s(size_t piece_bytes) {
    constexpr size_t total = 512 << 20;
    const Pinned from(total);
    const OnDevice to(total);
    cudaStream_t stream = new_stream();
    const size_t n = total / piece_bytes;
    const double us = median_us(10, [&] {
        for (size_t i = 0; i < n; i++) {
            char * target = (char *)to.data + i * piece_bytes;
            check(cudaMemcpyAsync(target, (char *)from.data + i * piece_bytes, piece_bytes, cudaMemcpyDefault, stream));
        }
        check(cudaStreamSynchronize(stream));
    });
    return n * piece_bytes / us / 1e3;
}

void copies() {
    for (const size_t piece : {900'000, 2'900'000, 30'000'000}) {
        print("from pinned memory, " + std::to_string(piece / 1000) + " kB each", "GB/s", copy_gb_per_s(piece));
    }
}

// Kernels with one thread each, like the smallest nodes of a graph.

__global__ void add_one(float * x) { *x += 1; }

__global__ void add_one_early(float * x) {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    *x += 1;
}

__global__ void raise_flag(volatile int * flag, const int * number) { *flag = *number; }

void launch_early(float * x, cudaStream_t stream) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = config.blockDim = dim3(1);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, add_one_early, x));
}

cudaGraphExec_t captured(cudaStream_t stream, const std::function<void()> & submit) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    submit();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

void stops(const std::string & when, cudaStream_t stream) {
    const OnDevice ids(ids_bytes);
    const Pinned pinned(ids_bytes);
    std::vector<char> pageable(ids_bytes);
    for (const bool is_pinned : {false, true}) {
        void * host = is_pinned ? pinned.data : pageable.data();
        const std::string memory = std::string(is_pinned ? "pinned" : "pageable") + " memory" + when;
        print("ids to " + memory + ", and wait", "us", median_us(2000, [&] {
                  check(cudaMemcpyAsync(host, ids.data, ids_bytes, cudaMemcpyDeviceToHost, stream));
                  check(cudaStreamSynchronize(stream));
              }));
        print("ids from " + memory + ", and wait", "us", median_us(2000, [&] {
                  check(cudaMemcpyAsync(ids.data, host, ids_bytes, cudaMemcpyHostToDevice, stream));
                  check(cudaStreamSynchronize(stream));
              }));
    }
}

// Measures how long waits for the device take while another stream copies to the device all the time.
void stops_behind_copies(cudaStream_t stream) {
    constexpr size_t piece = 16 << 20;
    const Pinned from(piece);
    const OnDevice to(piece);
    std::atomic<bool> ends = false;
    std::thread busy([&] {
        cudaStream_t copying = new_stream();
        while (!ends) {
            for (int i = 0; i < 8; i++) {
                check(cudaMemcpyAsync(to.data, from.data, piece, cudaMemcpyHostToDevice, copying));
            }
            check(cudaStreamSynchronize(copying));
        }
    });
    stops(" behind copies", stream);
    ends = true;
    busy.join();
}

void launches(cudaStream_t stream) {
    const OnDevice x(sizeof(float)), number(sizeof(int));
    const Pinned flag(sizeof(int));
    volatile int * seen = (volatile int *)flag.data;
    int next = 0;
    for (const int n : {1, 25, 50}) {
        cudaGraphExec_t exec = captured(stream, [&] {
            raise_flag<<<1, 1, 0, stream>>>((int *)flag.data, (int *)number.data);
            for (int i = 1; i < n; i++) { add_one<<<1, 1, 0, stream>>>((float *)x.data); }
        });
        std::vector<double> until_first;
        const double us = median_us(500, [&] {
            next++;
            check(cudaMemcpy(number.data, &next, sizeof(int), cudaMemcpyHostToDevice));
            const double start = now_us();
            check(cudaGraphLaunch(exec, stream));
            while (*seen != next) {}
            until_first.push_back(now_us() - start);
            check(cudaStreamSynchronize(stream));
        });
        std::nth_element(until_first.begin(), until_first.begin() + until_first.size() / 2, until_first.end());
        const std::string graph = "graph of " + std::to_string(n);
        print(graph + ", until its first kernel runs", "us", until_first[until_first.size() / 2]);
        print(graph + ", with a small copy and two waits", "us", us);
    }
}

void nodes(cudaStream_t stream) {
    constexpr int n = 200;
    const OnDevice a(ids_bytes), b(ids_bytes);
    float * x = (float *)a.data;
    const auto copy = [&] { check(cudaMemcpyAsync(b.data, a.data, ids_bytes, cudaMemcpyDeviceToDevice, stream)); };
    const std::vector<std::pair<const char *, std::function<void()>>> kinds = {
        {"kernel node", [&] { add_one<<<1, 1, 0, stream>>>(x); }},
        {"kernel node that is launched early", [&] { launch_early(x, stream); }},
        {"copy node", copy},
        {"copy node and kernel node in turn", [&] {
             copy();
             add_one<<<1, 1, 0, stream>>>(x);
         }},
    };
    for (const auto & kind : kinds) {
        cudaGraphExec_t exec = captured(stream, [&] {
            for (int i = 0; i < n; i++) { kind.second(); }
        });
        const double us = median_us(200, [&] {
            check(cudaGraphLaunch(exec, stream));
            check(cudaStreamSynchronize(stream));
        });
        print(kind.first, "us", us / n);
    }
}

// Measures the time to wake another thread and to be woken by that thread.
void hand_off() {
    std::mutex mutex;
    std::condition_variable changed;
    int turn = 0;
    constexpr int ends = -1;
    std::thread other([&] {
        for (std::unique_lock<std::mutex> lock(mutex);;) {
            changed.wait(lock, [&] { return turn != 0; });
            if (turn == ends) { return; }
            turn = 0;
            changed.notify_all();
        }
    });
    print("hand-off to a sleeping thread, and back", "us", median_us(2000, [&] {
              std::unique_lock<std::mutex> lock(mutex);
              turn = 1;
              changed.notify_all();
              changed.wait(lock, [&] { return turn == 0; });
          }));
    {
        const std::lock_guard<std::mutex> lock(mutex);
        turn = ends;
    }
    changed.notify_all();
    other.join();
}

void latency() {
    hand_off();
    cudaStream_t stream = new_stream();
    stops("", stream);
    stops_behind_copies(stream);
    launches(stream);
    nodes(stream);
}

// Products.

struct Experts {
    ggml_type type;
    int64_t ne0, ne1;
    int n;

    size_t bytes() const { return ggml_row_size(type, ne0) * ne1; }

    // Returns random weights of four experts, with which callers fill slots.
    std::vector<uint8_t> weights() const {
        constexpr int n_different = 4;
        std::mt19937 random(0);
        std::normal_distribution<float> normal(0, 0.02f);
        std::vector<uint8_t> made(n_different * bytes());
        std::vector<float> values(ne0 * ne1);
        for (int e = 0; e < n_different; e++) {
            std::generate(values.begin(), values.end(), [&] { return normal(random); });
            ggml_quantize_chunk(type, values.data(), made.data() + e * bytes(), 0, ne1, ne0, nullptr);
        }
        return made;
    }
};

// Products of the experts at `data`, which lie `stride` bytes apart in device memory or in pinned host memory.
class Products {
  public:
    Products(ggml_backend_t backend, const Experts & experts, size_t stride, ggml_backend_buffer_t buffer, void * data,
             const std::vector<std::vector<int32_t>> & ids_of_nodes, int n_tokens)
        : backend_(backend) {
        const size_t n_nodes = ids_of_nodes.size();
        context_.reset(ggml_init({ggml_tensor_overhead() * (3 * n_nodes + 8) + ggml_graph_overhead(), nullptr, true}));
        graph_ = ggml_new_graph(context_.get());
        ggml_tensor * w = ggml_new_tensor_3d(context_.get(), experts.type, experts.ne0, experts.ne1, experts.n);
        w->nb[2] = stride;
        w->nb[3] = stride * experts.n;
        w->buffer = buffer;
        w->data = data;
        const int64_t n_used = ids_of_nodes[0].size() / n_tokens;
        ggml_tensor * x = ggml_new_tensor_3d(context_.get(), GGML_TYPE_F32, experts.ne0, 1, n_tokens);
        std::vector<ggml_tensor *> ids;
        for (size_t i = 0; i < n_nodes; i++) {
            ids.push_back(ggml_new_tensor_2d(context_.get(), GGML_TYPE_I32, n_used, n_tokens));
            last_ = ggml_mul_mat_id(context_.get(), w, x, ids.back());
            ggml_build_forward_expand(graph_, last_);
        }
        buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend));
        if (!buffer_) { throw std::bad_alloc(); }
        std::vector<float> values(ggml_nelements(x));
        for (size_t i = 0; i < values.size(); i++) { values[i] = (float)((int)(i * 37 % 101) - 50) / 50; }
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
        for (size_t i = 0; i < n_nodes; i++) {
            ggml_backend_tensor_set(ids[i], ids_of_nodes[i].data(), 0, ggml_nbytes(ids[i]));
        }
    }

    void compute() {
        if (ggml_backend_graph_compute(backend_, graph_) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "the graph was not computed\n");
            exit(1);
        }
    }

    std::vector<float> result() {
        compute();
        std::vector<float> values(ggml_nelements(last_));
        ggml_backend_tensor_get(last_, values.data(), 0, ggml_nbytes(last_));
        return values;
    }

  private:
    ggml_backend_t backend_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_cgraph * graph_;
    ggml_tensor * last_ = nullptr;
};

// Memory of the backend for experts. All bytes that `write` has not written are zero.
struct Pool {
    Pool(ggml_backend_t backend, size_t n_bytes)
        : buffer(ggml_backend_alloc_buffer(backend, n_bytes + 4096)) {
        if (!buffer) { throw std::bad_alloc(); }
        ggml_backend_buffer_clear(buffer.get(), 0);
        context.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
        bytes = ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, n_bytes);
        ggml_backend_tensor_alloc(buffer.get(), bytes, ggml_backend_buffer_get_base(buffer.get()));
    }

    void write(size_t offset, const void * from, size_t n) { ggml_backend_tensor_set(bytes, from, offset, n); }

    ggml_backend_buffer_ptr buffer;
    ggml_context_ptr context;
    ggml_tensor * bytes;
};

std::vector<int32_t> in_turn(int n, int n_experts, int first) {
    std::vector<int32_t> ids(n);
    for (int i = 0; i < n; i++) { ids[i] = (first + i) % n_experts; }
    return ids;
}

// Measures products whose experts lie in device memory or in pinned host memory. Each run reads every expert, so that
// caches of the card cannot hold all of them.
void mapped(ggml_backend_t backend, const Experts & experts, int n_used) {
    const size_t expert_bytes = experts.bytes(), total = expert_bytes * experts.n;
    const std::vector<uint8_t> weights = experts.weights();
    Pool pool(backend, total);
    const Pinned pinned(total + 4096);
    memset(pinned.data, 0, total + 4096);
    for (int e = 0; e < experts.n; e++) {
        const uint8_t * from = weights.data() + e % 4 * expert_bytes;
        memcpy((char *)pinned.data + e * expert_bytes, from, expert_bytes);
        pool.write(e * expert_bytes, from, expert_bytes);
    }
    const std::string name = ggml_type_name(experts.type);
    const double copied = copy_gb_per_s(expert_bytes);
    print(name + " copied", "GB/s", copied);
    for (const int n_tokens : {1, 4}) {
        std::vector<std::vector<int32_t>> ids;
        for (int first = 0; first < experts.n; first += n_used * n_tokens) {
            ids.push_back(in_turn(n_used * n_tokens, experts.n, first));
        }
        void * on_device = ggml_backend_buffer_get_base(pool.buffer.get());
        Products there(backend, experts, expert_bytes, pool.buffer.get(), on_device, ids, n_tokens);
        Products here(backend, experts, expert_bytes, pool.buffer.get(), pinned.data, ids, n_tokens);
        const double gb_per_s = total / median_us(50, [&] { here.compute(); }) / 1e3;
        const std::string what = name + ", tokens: " + std::to_string(n_tokens);
        print(what + ", read in video memory", "GB/s", total / median_us(50, [&] { there.compute(); }) / 1e3);
        print(what + ", read in pinned memory", "GB/s", gb_per_s);
        print(what + ", pinned memory against copies", "share", gb_per_s / copied);
        print(what + ", bits are equal", "bool", here.result() == there.result());
    }
}

void offsets(ggml_backend_t backend, const Experts & experts) {
    const size_t expert_bytes = experts.bytes();
    const int first = std::min(5, experts.n - 1), last = experts.n - 1;
    Pool pool(backend, expert_bytes * experts.n);
    const std::vector<uint8_t> weights = experts.weights();
    for (const int slot : {first, last}) { pool.write(slot * expert_bytes, weights.data(), expert_bytes); }
    const std::string slots = std::string(ggml_type_name(experts.type)) + ", slots: " + std::to_string(experts.n);
    for (const int n_tokens : {1, 4, 33}) {
        const std::string what = slots + ", tokens: " + std::to_string(n_tokens);
        std::vector<std::vector<float>> results;
        for (const int slot : {first, last}) {
            const std::vector<std::vector<int32_t>> ids = {std::vector<int32_t>(n_tokens, slot)};
            void * data = ggml_backend_buffer_get_base(pool.buffer.get());
            Products products(backend, experts, expert_bytes, pool.buffer.get(), data, ids, n_tokens);
            results.push_back(products.result());
            if (slot == first) { print(what + ", a product", "us", median_us(50, [&] { products.compute(); })); }
        }
        const bool is_zero = std::all_of(results[0].begin(), results[0].end(), [](float value) { return value == 0; });
        print(what + ", bits are equal", "bool", !is_zero && results[0] == results[1]);
    }
}

double product_us(ggml_backend_t backend, const Experts & experts, size_t stride, const std::vector<int32_t> & ids,
                  int n_tokens) {
    Pool pool(backend, stride * experts.n);
    const std::vector<uint8_t> weights = experts.weights();
    for (int e = 0; e < experts.n; e++) {
        pool.write(e * stride, weights.data() + e % 4 * experts.bytes(), experts.bytes());
    }
    void * data = ggml_backend_buffer_get_base(pool.buffer.get());
    Products products(backend, experts, stride, pool.buffer.get(), data, {ids}, n_tokens);
    return median_us(50, [&] { products.compute(); });
}

void strides(ggml_backend_t backend, const Experts & experts, int n_used, size_t stride) {
    constexpr int n_tokens = 512;
    std::mt19937 random(0);
    std::vector<int32_t> ids, all = in_turn(experts.n, experts.n, 0);
    for (int token = 0; token < n_tokens; token++) {
        std::shuffle(all.begin(), all.end(), random);
        ids.insert(ids.end(), all.begin(), all.begin() + n_used);
    }
    const std::string what = std::string(ggml_type_name(experts.type)) + " " + std::to_string(experts.ne1) + "x" +
                             std::to_string(experts.n);
    const double together = product_us(backend, experts, experts.bytes(), ids, n_tokens);
    const double apart = product_us(backend, experts, stride, ids, n_tokens);
    print(what + ", together", "us", together);
    print(what + ", apart", "us", apart);
    print(what + ", apart against together", "ratio", apart / together);
}

ggml_type type_named(const std::string & name) {
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const char * known = ggml_type_name((ggml_type)type);
        if (known && name == known) { return (ggml_type)type; }
    }
    fprintf(stderr, "ggml has no type %s\n", name.c_str());
    exit(2);
}

} // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "copies") {
        copies();
    } else if (what == "latency") {
        latency();
    } else if (argc >= 7) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(argv[2]);
        if (!device) {
            fprintf(stderr, "ggml has no device %s\n", argv[2]);
            return no_card;
        }
        const ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
        const Experts experts = {type_named(argv[3]), atoll(argv[4]), atoll(argv[5]), atoi(argv[6])};
        if (what == "offsets") { offsets(backend.get(), experts); }
        if (what == "mapped" && argc == 8) { mapped(backend.get(), experts, atoi(argv[7])); }
        if (what == "strides" && argc == 9) {
            strides(backend.get(), experts, atoi(argv[7]), strtoull(argv[8], nullptr, 10));
        }
    } else {
        fprintf(stderr, "see the head of micro.cu\n");
        return 2;
    }
    return 0;
}
