// link_device.cpp: a simulated ggml device for machines without a GPU. Copies to and from the device take as long as
// they would over a given link, in real time.
//
// The device's memory is ordinary RAM, but ggml treats it as a device's memory, so other code should not touch it.
// Nothing prevents such access. The device computes with the CPU backend. It uses as many threads as the CPU, or a
// different number, which makes it faster or slower. A copy between the device and the host takes the link's latency
// plus the copy's bytes divided by the link's bandwidth. Copies in one direction follow one another. A copy within the
// device takes the time of a memory copy.
//
// The device behaves like CUDA in these respects:
// - Each backend instance has its own stream on its own thread. Events let one stream wait for another.
// - A launch computes the graph as it is at that moment, or repeats an earlier launch (link_launch.h).
// - The caller waits for an asynchronous copy if the host memory of the copy is not pinned.
// - If memory cannot be pinned, the host buffer type returns ordinary memory.
//
// The device offers ranges of addresses that contain its own memory and pinned host memory (AllocRange in pool.h). A
// product that reads experts in such host memory takes at least as long as a copy of their bytes over the link at
// mapped_speed.
//
// Unlike with CUDA, the caller waits until a launch has been computed, unless the device is strict.
//
// A strict device does the worst that CUDA may do to its users:
// - Launches and asynchronous copies run later, in the order of their stream. The stream does nothing until a caller
//   waits for it, or until a launch is queued that is randomly chosen to begin immediately.
// - A copy to the device from unpinned host memory reads this memory immediately, and the caller does not wait.
// - Binding a quantised weight zeroes the padding after it. Kernels read the last row up to the end of this padding.
//   They return NaN if the padding has wrong bytes.
// - Fresh memory is filled with NaN, and so is memory that a copy under way writes. Freed memory becomes inaccessible.
// - A copy is done in two halves, the second half first, except for synchronous copies within the device.
// - Some errors are faults: for example a launch with ids that do not exist, a launch or copy that touches freed
//   memory, or a copy whose pinned source has changed before the copy ran. The device keeps the first fault, and
//   refuses launches from then on.
//
// The device touches only its own memory and the memory that it copies. It knows nothing about the store.
#include "api.h"
#include "link_launch.h"
#include "link_stream.h"
#include "link_strict.h"
#include "pool.h"
#include "testing.h"

#include "ggml-cpp.h"

#include <sys/mman.h>

#include <atomic>
#include <random>
#include <string_view>

namespace moegguf {
namespace {

// Speed at which kernels read host memory, as a share of the speed of copies. Mapped slots are worth a test on a card
// from this share on (step M5 of tools/gpu/short_run.sh).
constexpr double mapped_speed = 0.7;
constexpr size_t most_memory_bytes = (size_t)1 << 46; // size that a device without a limit reports

// A buffer that begins with the device's own memory. Host memory may follow.
struct Range {
    size_t most_bytes;   // largest size of the device's part, which is the offset of the host memory
    size_t device_bytes; // size of the device's part now
};

// The device

struct LinkDevice {
    LinkDevice(const moegguf_link & link, int index);

    bool take(size_t n) { // reserves n bytes; returns false if the device has too little free memory
        std::lock_guard<std::mutex> lock(mutex);
        const bool fits = n <= memory_bytes - used_bytes;
        used_bytes += fits ? n : 0;
        return fits;
    }

    void copy(LinkDirection & direction, void * to, const void * from, size_t n) {
        constexpr double reserve = 1.25; // memory copies begin a bit early, because their time varies
        if (strict) { memset(to, poison, n); }
        direction.transfer((double)n, reserve * n / copy_bytes_per_ns, [&] {
            const uint64_t start = now_ns();
            move(to, from, n);
            constexpr size_t least = 1 << 16; // smaller copies are too short to measure the speed
            if (n >= least) { copy_bytes_per_ns = copy_bytes_per_ns * 0.75 + 0.25 * n / (now_ns() - start + 1); }
        });
    }

    // Returns true if the n bytes of device memory at `there` are still allocated; otherwise records a fault. Always
    // returns true if the device is not strict.
    bool bears_copy(const void * there, size_t n) {
        const bool bears = !strict || allocated.contain(there, n);
        note(bears ? "" : "a copy reads or writes memory that is not there");
        return bears;
    }

    // Copies n bytes. A strict device copies the second half first, and waits a moment before each half.
    void move(void * to, const void * from, size_t n) {
        if (!strict) {
            memcpy(to, from, n);
            return;
        }
        const size_t half = n / 2;
        wait_a_moment();
        memcpy((char *)to + half, (const char *)from + half, n - half);
        wait_a_moment();
        memcpy(to, from, half);
    }

    uint32_t random() {
        std::lock_guard<std::mutex> lock(mutex);
        return (uint32_t)delays();
    }

    void wait_a_moment() {
        constexpr uint32_t longest_us = 100;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % longest_us));
    }

    // Stores `why` as the device's fault, unless the device already has one. Does nothing if `why` is empty.
    void note(const std::string & why) {
        std::lock_guard<std::mutex> lock(mutex);
        if (why.empty() || !fault.empty()) { return; }
        fault = why;
        GGML_LOG_ERROR("%s: %s\n", name.c_str(), why.c_str());
    }

    std::string first_fault() {
        std::lock_guard<std::mutex> lock(mutex);
        return fault;
    }

    const std::string name, host_memory_name, description;
    const size_t memory_bytes;
    const moegguf_pinned pins;
    const size_t most_buffer_bytes;
    const int n_threads; // number of compute threads; 0: the number that llama.cpp sets
    const bool strict;
    std::atomic<size_t> used_bytes{0};
    LinkDirection to_device, to_host;
    std::atomic<double> copy_bytes_per_ns{4}; // measured speed of copies within this machine's memory
    Ranges allocated, pinned;                 // the device's allocated memory; the pinned host memory
    std::atomic<uint64_t> n_launches{0}, n_replays{0}, n_copies{0}, n_copies_to_host{0}, n_launches_beside_copies{0};
    std::atomic<int> copies_under_way{0};
    std::mutex mutex; // guards the following three fields
    std::minstd_rand delays;
    std::string fault;
    std::map<const void *, Range> ranges; // key: address of the buffer
    ggml_backend_device device = {};
    ggml_backend_buffer_type memory = {}, host_memory = {};
};

LinkDevice & of(ggml_backend_dev_t device) { return *(LinkDevice *)device->context; }

// Memory of the device

void * map(size_t n) { // returns n bytes of fresh memory; nullptr: refused
    void * base = mmap(nullptr, n ? n : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? nullptr : base;
}

void unmap(void * base, size_t n) { munmap(base, n ? n : 1); }

// Frees the memory but keeps its addresses reserved, so that every later access fails.
void forbid(void * base, size_t n) {
    mmap(base, n ? n : 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void * address(const ggml_tensor * t, size_t offset) { return (uint8_t *)t->data + offset; }

LinkDevice & device_of(ggml_backend_buffer_t buffer) { return of(buffer->buft->device); }

bool on_device(const ggml_tensor * t, ggml_backend_buffer_type_t memory) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return buffer && buffer->buft == memory;
}

// Zeroes the padding after a tensor that is bound to memory. Does nothing for a view, or if the memory is for results
// of a graph.
void zero_padding(ggml_backend_buffer_t buffer, const ggml_tensor * t) {
    if (!t->view_src && buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        memset((char *)t->data + ggml_nbytes(t), 0, padded_bytes(t) - ggml_nbytes(t));
    }
}

Range & range_of(ggml_backend_buffer_t buffer) {
    std::lock_guard<std::mutex> lock(device_of(buffer).mutex);
    return device_of(buffer).ranges[buffer->context];
}

void free_memory(ggml_backend_buffer_t buffer) {
    LinkDevice & device = device_of(buffer);
    const Range range = range_of(buffer);
    if (range.most_bytes < buffer->size) { device.pinned.remove((uint8_t *)buffer->context + range.most_bytes); }
    device.allocated.remove(buffer->context);
    device.strict ? forbid(buffer->context, buffer->size) : unmap(buffer->context, buffer->size);
    device.used_bytes -= range.device_bytes;
}

void become_memory(ggml_backend_buffer_i & buffer) {
    buffer.free_buffer = free_memory;
    buffer.init_tensor = [](ggml_backend_buffer_t of, ggml_tensor * t) {
        if (device_of(of).strict) { zero_padding(of, t); }
        return GGML_STATUS_SUCCESS;
    };
    buffer.set_tensor = [](ggml_backend_buffer_t of, ggml_tensor * t, const void * data, size_t offset, size_t n) {
        device_of(of).copy(device_of(of).to_device, address(t, offset), data, n);
    };
    buffer.get_tensor = [](ggml_backend_buffer_t of, const ggml_tensor * t, void * data, size_t offset, size_t n) {
        device_of(of).copy(device_of(of).to_host, data, address(t, offset), n);
    };
    buffer.cpy_tensor = [](ggml_backend_buffer_t of, const ggml_tensor * from, ggml_tensor * to) {
        const bool here = on_device(from, of->buft);
        if (here) { // ggml copies other tensors through the host
            memcpy(to->data, from->data, ggml_nbytes(from));
        }
        return here;
    };
}

// Allocates a buffer of the device's own memory, followed by pinned host memory if host_bytes is above 0.
ggml_backend_buffer_t allocate(ggml_backend_dev_t of_memory, size_t device_bytes, size_t host_bytes) {
    LinkDevice & device = of(of_memory);
    if (device_bytes > device.most_buffer_bytes || !device.take(device_bytes)) { return nullptr; }
    const size_t size = device_bytes + host_bytes;
    void * base = map(size);
    if (!base) {
        device.used_bytes -= device_bytes;
        return nullptr;
    }
    if (device.strict) { memset(base, poison, size); }
    device.allocated.add(base, size);
    if (host_bytes > 0) { device.pinned.add((uint8_t *)base + device_bytes, host_bytes); }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(base, size);
    buffer->buft = &device.memory;
    range_of(buffer) = {device_bytes, device_bytes};
    become_memory(buffer->iface);
    return buffer;
}

bool resize_range(ggml_backend_buffer_t buffer, size_t device_bytes) {
    LinkDevice & device = device_of(buffer);
    size_t & now = range_of(buffer).device_bytes;
    if (device_bytes > now && !device.take(device_bytes - now)) { return false; }
    const auto [begin, end] = std::minmax({now, device_bytes});
    memset((uint8_t *)buffer->context + begin, device_bytes > now ? 0 : poison, end - begin);
    device.used_bytes -= device_bytes < now ? now - device_bytes : 0;
    now = device_bytes;
    return true;
}

// Returns the number of bytes of experts in host memory that a product reads. The ids must have been computed.
size_t bytes_in_host_memory(const LinkDevice & device, const ggml_tensor * product) {
    const ggml_tensor *w = product->src[0], *ids = product->src[2];
    size_t n = 0;
    for (int64_t i = 0; i < ggml_nelements(ids); i++) {
        const int64_t id = StrictRun::id_at(ids, i);
        n += device.pinned.contain((char *)w->data + id * w->nb[2], 1) ? w->ne[1] * w->nb[1] : 0;
    }
    return n;
}

// Returns true if the node multiplies by experts in a range.
bool multiplies_range(const LinkDevice & device, const ggml_tensor * node) {
    const ggml_tensor * w = node->op == GGML_OP_MUL_MAT_ID ? node->src[0] : nullptr;
    return w && device.pinned.contain((char *)w->data + (w->ne[2] - 1) * w->nb[2], 1);
}

// Pinned host memory: CPU memory whose address ranges are recorded in LinkDevice::pinned

ggml_backend_buffer_t allocate_pinned(ggml_backend_buffer_type_t buft, size_t size) {
    LinkDevice & device = of(buft->device);
    void * base = device.pins == MOEGGUF_PINNED_OWN ? map(size) : nullptr;
    if (!base) { return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size); }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(base, size);
    buffer->buft = buft;
    buffer->iface.free_buffer = [](ggml_backend_buffer_t pinned) {
        device_of(pinned).pinned.remove(pinned->context);
        unmap(pinned->context, pinned->size);
    };
    device.pinned.add(base, size);
    return buffer;
}

// Backend instances

struct Backend {
    LinkDevice & device;
    ggml_backend_ptr cpu; // used only by work in the queue, or while the queue is empty
    Launches launches;
    CommandQueue queue;
};

Backend & of(ggml_backend_t backend) { return *(Backend *)backend->context; }

void synchronize(ggml_backend_t backend) { of(backend).queue.mark().wait(); }

// Queues a copy in the backend's stream, and counts it. Does not wait for the copy.
void push_copy(Backend & backend, std::function<void()> copy) {
    LinkDevice & device = backend.device;
    device.n_copies += 1;
    device.copies_under_way += 1;
    backend.queue.push([&device, copy = std::move(copy)] {
        copy();
        device.copies_under_way -= 1;
    });
}

size_t digest(const void * data, size_t n) {
    return std::hash<std::string_view>()(std::string_view((const char *)data, n));
}

void set_async(ggml_backend_t backend, ggml_tensor * t, const void * data, size_t offset, size_t n) {
    LinkDevice & device = of(backend).device;
    void * to = address(t, offset);
    const auto copy = [&device, to, n](const void * from) {
        if (device.bears_copy(to, n)) { device.copy(device.to_device, to, from, n); }
    };
    if (!device.strict) {
        push_copy(of(backend), [copy, data] { copy(data); });
        if (!device.pinned.contain(data, n)) { synchronize(backend); }
    } else if (!device.pinned.contain(data, n)) { // the source is read now, and the device's memory is written later
        std::vector<uint8_t> staged((const uint8_t *)data, (const uint8_t *)data + n);
        push_copy(of(backend), [copy, staged = std::move(staged)] { copy(staged.data()); });
    } else {
        push_copy(of(backend), [copy, &device, data, n, before = digest(data, n)] {
            copy(data);
            device.note(digest(data, n) == before ? "" : "what was to be copied has changed before it was");
        });
    }
}

void get_async(ggml_backend_t backend, const ggml_tensor * t, void * data, size_t offset, size_t n) {
    LinkDevice & device = of(backend).device;
    const void * from = address(t, offset);
    device.n_copies_to_host += 1;
    push_copy(of(backend), [&device, data, from, n] {
        if (device.bears_copy(from, n)) { device.copy(device.to_host, data, from, n); }
    });
    if (!device.pinned.contain(data, n)) { synchronize(backend); }
}

void wait_in(Backend & backend, const CommandQueue::Point & point) {
    backend.queue.push([point] { point.wait(); });
}

// Queues a copy within the device, after the current work in the streams of source and destination. Returns false, and
// queues nothing, for any other copy.
bool copy_tensor_async(ggml_backend_t source, ggml_backend_t destination, const ggml_tensor * from, ggml_tensor * to) {
    ggml_backend_buffer_type_t memory = &of(destination).device.memory;
    if (source->device != destination->device || !on_device(from, memory) || !on_device(to, memory)) { return false; }
    if (source != destination) { wait_in(of(destination), of(source).queue.mark()); }
    LinkDevice & device = of(destination).device;
    push_copy(of(destination), [&device, to_data = to->data, from_data = from->data, n = ggml_nbytes(from)] {
        if (!device.bears_copy(to_data, n) || !device.bears_copy(from_data, n)) { return; }
        if (device.strict) { memset(to_data, poison, n); }
        device.move(to_data, from_data, n);
    });
    return true;
}

void run(Backend & backend, Launch & launch) {
    LinkDevice & device = backend.device;
    if (device.strict) {
        device.wait_a_moment();
        device.note(StrictRun(backend.cpu.get(), launch, device.allocated).run());
        return;
    }
    const auto compute = [&](int first, int end) {
        ggml_cgraph part = launch.part(first, end);
        if (end > first && ggml_backend_graph_compute(backend.cpu.get(), &part) != GGML_STATUS_SUCCESS) {
            device.note("the CPU could not compute a graph");
        }
    };
    int first = 0;
    for (int i = 0; i < launch.n_nodes(); i++) {
        if (!multiplies_range(device, launch.node(i))) { continue; }
        compute(first, i);
        first = i;
        if (const size_t n = bytes_in_host_memory(device, launch.node(i)); n > 0) {
            device.to_device.transfer(n / mapped_speed, INFINITY, [&] { compute(i, i + 1); });
            first = i + 1;
        }
    }
    compute(first, launch.n_nodes());
}

ggml_status compute(ggml_backend_t of_device, ggml_cgraph * graph) {
    Backend & backend = of(of_device);
    LinkDevice & device = backend.device;
    if (!device.first_fault().empty()) { return GGML_STATUS_FAILED; }
    if (graph->n_nodes == 0) { return GGML_STATUS_SUCCESS; }
    const uint64_t n_replays = backend.launches.n_replays();
    const std::shared_ptr<Launch> launch = backend.launches.launch(*graph);
    if (!launch) {
        device.note("a graph has the uid of one with another number of nodes");
        return GGML_STATUS_FAILED;
    }
    device.n_launches += 1;
    device.n_replays += backend.launches.n_replays() - n_replays;
    device.n_launches_beside_copies += device.copies_under_way > 0;
    if (device.strict) {
        const bool at_once = device.random() % 2;
        backend.queue.push([&backend, launch] { run(backend, *launch); }, at_once);
    } else { // computes on this thread, because handing the work to another thread would distort measured times
        synchronize(of_device);
        run(backend, *launch);
    }
    return GGML_STATUS_SUCCESS;
}

// Events: an event holds the point that was recorded last

struct Event {
    std::mutex mutex;
    CommandQueue::Point point;

    CommandQueue::Point recorded() {
        std::lock_guard<std::mutex> lock(mutex);
        return point;
    }
};

Event & of(ggml_backend_event_t event) { return *(Event *)event->context; }

// Functions of a device that ggml calls

void set_cpu_threads(ggml_backend_t cpu, int n) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    void * function = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    ((ggml_backend_set_n_threads_t)function)(cpu, n);
}

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

ggml_backend_i backend_interface() {
    ggml_backend_i backend = {};
    backend.get_name = [](ggml_backend_t of_device) { return of(of_device).device.name.c_str(); };
    backend.free = [](ggml_backend_t freed) {
        delete &of(freed);
        delete freed;
    };
    backend.set_tensor_async = set_async;
    backend.get_tensor_async = get_async;
    backend.cpy_tensor_async = copy_tensor_async;
    backend.synchronize = synchronize;
    backend.graph_compute = compute;
    backend.event_record = [](ggml_backend_t stream, ggml_backend_event_t event) {
        std::lock_guard<std::mutex> lock(of(event).mutex);
        of(event).point = of(stream).queue.mark();
    };
    backend.event_wait = [](ggml_backend_t stream, ggml_backend_event_t event) {
        wait_in(of(stream), of(event).recorded());
    };
    return backend;
}

ggml_backend_t new_backend(ggml_backend_dev_t device, const char *) {
    static uint8_t guid[] = {0x6d, 0x6f, 0x65, 0x67, 0x67, 0x75, 0x66, 0x2d, 0x6c, 0x69, 0x6e, 0x6b, 0, 0, 0, 1};
    ggml_backend_ptr cpu(ggml_backend_dev_init(cpu_device(), nullptr));
    if (!cpu) { return nullptr; }
    if (of(device).n_threads) { set_cpu_threads(cpu.get(), of(device).n_threads); }
    return new ggml_backend{&guid, backend_interface(), device,
                            new Backend{of(device), std::move(cpu), {}, CommandQueue(of(device).strict)}};
}

std::string describe(const moegguf_link & link) {
    char text[128];
    snprintf(text, sizeof(text), "the CPU behind a simulated link of %g GB/s, %g us", link.bytes_per_ns,
             link.latency_ns / 1e3);
    return text + (link.n_threads ? ", " + std::to_string(link.n_threads) + " threads" : std::string());
}

void get_memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    *total = of(device).memory_bytes;
    *free = *total - of(device).used_bytes;
}

// All devices so far. They are never destroyed, because ggml cannot remove a device.

struct Registry {
    std::mutex mutex;
    std::vector<std::unique_ptr<LinkDevice>> devices;
};

Registry & registry() {
    static Registry * all = new Registry; // never destroyed: backends may be freed after static objects
    return *all;
}

void set_n_threads(ggml_backend_t backend, int n) {
    if (of(backend).device.n_threads) { return; }
    of(backend).queue.push([cpu = of(backend).cpu.get(), n] { set_cpu_threads(cpu, n); });
}

ggml_backend_reg_t reg() {
    static ggml_backend_reg one = {};
    one.api_version = GGML_BACKEND_API_VERSION;
    one.iface.get_name = [](ggml_backend_reg_t) { return "LINK"; };
    one.iface.get_device_count = [](ggml_backend_reg_t) { return registry().devices.size(); };
    one.iface.get_device = [](ggml_backend_reg_t, size_t i) { return &registry().devices[i]->device; };
    one.iface.get_proc_address = [](ggml_backend_reg_t, const char * name) {
        const std::string_view wanted = name;
        return wanted == "ggml_backend_set_n_threads" ? (void *)set_n_threads
               : wanted == "moegguf_alloc_range"      ? (void *)(AllocRange)allocate
               : wanted == "moegguf_resize_range"     ? (void *)(ResizeRange)resize_range
                                                      : nullptr;
    };
    return &one;
}

ggml_backend_device_i device_interface() {
    ggml_backend_device_i device = {};
    device.get_name = [](ggml_backend_dev_t d) { return of(d).name.c_str(); };
    device.get_description = [](ggml_backend_dev_t d) { return of(d).description.c_str(); };
    device.get_memory = get_memory;
    device.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    device.get_props = [](ggml_backend_dev_t d, ggml_backend_dev_props * props) {
        props->name = of(d).name.c_str();
        props->description = of(d).description.c_str();
        props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
        get_memory(d, &props->memory_free, &props->memory_total);
        props->caps.async = props->caps.host_buffer = props->caps.events = true;
    };
    device.init_backend = new_backend;
    device.get_buffer_type = [](ggml_backend_dev_t d) { return &of(d).memory; };
    device.get_host_buffer_type = [](ggml_backend_dev_t d) {
        return of(d).pins == MOEGGUF_PINNED_FIRST ? &registry().devices[0]->host_memory : &of(d).host_memory;
    };
    device.supports_op = [](ggml_backend_dev_t d, const ggml_tensor * op) {
        const bool too_large = op->op == GGML_OP_MUL_MAT_ID && ggml_nbytes(op->src[0]) > of(d).most_buffer_bytes;
        return !too_large && ggml_backend_dev_supports_op(cpu_device(), op);
    };
    device.supports_buft = [](ggml_backend_dev_t d, ggml_backend_buffer_type_t buft) { return buft == &of(d).memory; };
    device.event_new = [](ggml_backend_dev_t d) { return new ggml_backend_event{d, new Event}; };
    device.event_free = [](ggml_backend_dev_t, ggml_backend_event_t event) {
        delete &of(event);
        delete event;
    };
    device.event_synchronize = [](ggml_backend_dev_t, ggml_backend_event_t event) { of(event).recorded().wait(); };
    return device;
}

LinkDevice::LinkDevice(const moegguf_link & link, int index)
    : name("LINK" + std::to_string(index)),
      host_memory_name(name + "_Host"),
      description(describe(link)),
      memory_bytes(link.memory_bytes ? link.memory_bytes : most_memory_bytes),
      pins((moegguf_pinned)link.pinned),
      most_buffer_bytes(link.most_buffer_bytes ? link.most_buffer_bytes : SIZE_MAX),
      n_threads(link.n_threads),
      strict(link.strict_seed != 0),
      to_device(link.bytes_per_ns, link.latency_ns),
      to_host(link.bytes_per_ns, link.latency_ns),
      delays(link.strict_seed) {
    device.context = this;
    device.reg = reg();
    device.iface = device_interface();
    memory.device = host_memory.device = &device;
    memory.iface.get_name = [](ggml_backend_buffer_type_t buft) { return of(buft->device).name.c_str(); };
    memory.iface.alloc_buffer = [](ggml_backend_buffer_type_t buft, size_t n) { return allocate(buft->device, n, 0); };
    memory.iface.get_alignment = ggml_backend_cpu_buffer_type()->iface.get_alignment;
    memory.iface.get_max_size = [](ggml_backend_buffer_type_t buft) { return of(buft->device).most_buffer_bytes; };
    memory.iface.get_alloc_size = [](ggml_backend_buffer_type_t buft, const ggml_tensor * t) {
        return of(buft->device).strict ? padded_bytes(t) : ggml_nbytes(t);
    };
    host_memory.iface.get_name = [](ggml_backend_buffer_type_t buft) {
        return of(buft->device).host_memory_name.c_str();
    };
    host_memory.iface.alloc_buffer = allocate_pinned;
    host_memory.iface.get_alignment = ggml_backend_cpu_buffer_type()->iface.get_alignment;
    host_memory.iface.is_host = [](ggml_backend_buffer_type_t) { return true; };
}

// Adds a device, and returns ggml's name for the device: LINK0, LINK1, ... Throws Error(INVALID).
const char * add_link_device(const moegguf_link & link) {
    if (!(link.bytes_per_ns > 0 && std::isfinite(link.bytes_per_ns) && link.latency_ns >= 0 &&
          std::isfinite(link.latency_ns))) {
        throw Error(MOEGGUF_INVALID, "a link has a bandwidth above zero, and a latency of zero or more");
    }
    if (link.n_threads < 0 || link.n_threads > GGML_MAX_N_THREADS) {
        throw Error(MOEGGUF_INVALID, "a device computes with 1 to 512 threads, or as many as it is told");
    }
    if (link.pinned < MOEGGUF_PINNED_NOT || link.pinned > MOEGGUF_PINNED_FIRST) {
        throw Error(MOEGGUF_INVALID, "host memory of a device is not pinned, its own, or the first one's");
    }
    if (!cpu_device()) { throw Error(MOEGGUF_INVALID, "ggml has no CPU device to compute with"); }
    Registry & all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.devices.push_back(std::make_unique<LinkDevice>(link, (int)all.devices.size()));
    LinkDevice & added = *all.devices.back();
    ggml_backend_register(added.device.reg);
    ggml_backend_device_register(&added.device);
    return added.name.c_str();
}

LinkDevice & link_named(const char * name) {
    Registry & all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = std::find_if(all.devices.begin(), all.devices.end(),
                                    [&](const std::unique_ptr<LinkDevice> & device) { return device->name == name; });
    if (found == all.devices.end()) { throw Error(MOEGGUF_INVALID, std::string("no simulated device is ") + name); }
    return **found;
}

void read_figures(LinkDevice & device, moegguf_link_figures & out) {
    out.launches = device.n_launches;
    out.replays = device.n_replays;
    out.copies = device.n_copies;
    out.copies_to_host = device.n_copies_to_host;
    out.launches_beside_copies = device.n_launches_beside_copies;
    snprintf(out.fault, sizeof(out.fault), "%s", device.first_fault().c_str());
}

} // namespace
} // namespace moegguf

using namespace moegguf;

int moegguf_link_add(const moegguf_link * link, const char ** name) {
    return guarded([&] { given(name) = add_link_device(given(link)); });
}

int moegguf_link_read(const char * name, moegguf_link_figures * out) {
    return guarded([&] { read_figures(link_named(&given(name)), given(out)); });
}
