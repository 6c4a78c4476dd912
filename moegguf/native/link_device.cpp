#include "link_device.h"

#include "command_queue.h"
#include "layout.h"
#include "shared_bandwidth.h"
#include "strict_device.h"

#include "ggml-backend-impl.h" // devices are not public; patches/README.md lists what we lean on
#include "ggml-cpp.h"

#include <sys/mman.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace moegguf {
namespace {

constexpr size_t most_memory_bytes = (size_t)1 << 46; // what is reported where there is no limit

// The device

struct LinkDevice {
    LinkDevice(const moegguf_link & link, int index);

    bool take(size_t n); // false: it is full
    bool pinned(const void * data, size_t n);
    void copy(SharedBandwidth & direction, void * to, const void * from, size_t n);
    void move(void * to, const void * from, size_t n);
    void wait_a_moment();

    const std::string name, host_memory_name, description;
    const size_t memory_bytes;
    const moegguf_pinned pins;
    const size_t most_buffer_bytes;
    const int n_threads; // 0: as told
    const bool strict;
    std::atomic<size_t> used_bytes{0};
    SharedBandwidth to_device, to_host;
    std::atomic<double> copy_bytes_per_ns{4}; // of this machine's own memory
    std::mutex mutex;                         // of the two below
    std::map<const uint8_t *, size_t> pinned_ranges;
    std::minstd_rand delays;
    ggml_backend_device device = {};
    ggml_backend_buffer_type memory = {}, host_memory = {};
};

LinkDevice & of(ggml_backend_dev_t device) {
    return *(LinkDevice *)device->context;
}

bool LinkDevice::take(size_t n) {
    size_t used = used_bytes;
    while (n <= memory_bytes - used) {
        if (used_bytes.compare_exchange_weak(used, used + n)) {
            return true;
        }
    }
    return false;
}

// Whether a copy may go on after the call for it has returned.
bool LinkDevice::pinned(const void * data, size_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = pinned_ranges.upper_bound((const uint8_t *)data);
    return after != pinned_ranges.begin() && std::prev(after)->first + std::prev(after)->second >= (uint8_t *)data + n;
}

void LinkDevice::copy(SharedBandwidth & direction, void * to, const void * from, size_t n) {
    constexpr double reserve = 1.25; // its time varies, and early costs less than late
    direction.transfer((double)n, reserve * n / copy_bytes_per_ns, [&] {
        const uint64_t start = now_ns();
        move(to, from, n);
        constexpr size_t least = 1 << 16; // smaller ones say nothing of the speed
        if (n >= least) {
            copy_bytes_per_ns = copy_bytes_per_ns * 0.75 + 0.25 * n / (now_ns() - start + 1);
        }
    });
}

// Strict: the end comes before the beginning, and both some time later.
void LinkDevice::move(void * to, const void * from, size_t n) {
    const size_t half = strict ? n / 2 : 0;
    if (half) {
        wait_a_moment();
        memcpy((char *)to + half, (const char *)from + half, n - half);
        wait_a_moment();
    }
    memcpy(to, from, half ? half : n);
}

void LinkDevice::wait_a_moment() {
    constexpr uint32_t longest_us = 100;
    std::unique_lock<std::mutex> lock(mutex);
    const auto us = (uint32_t)delays() % longest_us;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(us));
}

// Memory of the device

void * map(size_t n) { // nullptr: there is none
    void * base = mmap(nullptr, n ? n : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? nullptr : base;
}

void unmap(void * base, size_t n) {
    munmap(base, n ? n : 1);
}

void * address(const ggml_tensor * t, size_t offset) {
    return (uint8_t *)t->data + offset;
}

LinkDevice & device_of(ggml_backend_buffer_t buffer) {
    return of(buffer->buft->device);
}

void free_memory(ggml_backend_buffer_t buffer) {
    unmap(buffer->context, buffer->size);
    device_of(buffer).used_bytes -= buffer->size;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t offset, size_t n) {
    LinkDevice & device = device_of(buffer);
    device.copy(device.to_device, address(t, offset), data, n);
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * t, void * data, size_t offset, size_t n) {
    LinkDevice & device = device_of(buffer);
    device.copy(device.to_host, data, address(t, offset), n);
}

bool on_device(const ggml_tensor * t, ggml_backend_buffer_type_t memory) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return buffer && buffer->buft == memory;
}

bool copy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * from, ggml_tensor * to) {
    if (!on_device(from, buffer->buft)) {
        return false; // through the host
    }
    memcpy(to->data, from->data, ggml_nbytes(from));
    return true;
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t) {
    if (device_of(buffer).strict) {
        zero_padding(buffer, t);
    }
    return GGML_STATUS_SUCCESS;
}

const char * memory_name(ggml_backend_buffer_type_t buft) {
    return of(buft->device).name.c_str();
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t buft, size_t size) {
    LinkDevice & device = of(buft->device);
    if (size > device.most_buffer_bytes || !device.take(size)) {
        return nullptr;
    }
    void * base = map(size);
    if (!base) {
        device.used_bytes -= size;
        return nullptr;
    }
    if (device.strict) {
        memset(base, 0xff, size); // as numbers of any type: NaN, or close to it
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(base, size);
    buffer->buft = buft;
    buffer->iface.free_buffer = free_memory;
    buffer->iface.init_tensor = init_tensor;
    buffer->iface.set_tensor = set_tensor;
    buffer->iface.get_tensor = get_tensor;
    buffer->iface.cpy_tensor = copy_tensor;
    return buffer;
}

size_t alignment_of(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

size_t bytes_of(ggml_backend_buffer_type_t buft, const ggml_tensor * t) {
    return of(buft->device).strict ? padded_bytes(t) : ggml_nbytes(t);
}

size_t most_bytes(ggml_backend_buffer_type_t buft) {
    return of(buft->device).most_buffer_bytes;
}

// Pinned memory of the host: the CPU's, with a note of where it lies; as in CUDA's backend

const char * host_memory_name(ggml_backend_buffer_type_t buft) {
    return of(buft->device).host_memory_name.c_str();
}

void free_pinned(ggml_backend_buffer_t buffer) {
    LinkDevice & device = of(buffer->buft->device);
    std::lock_guard<std::mutex> lock(device.mutex);
    device.pinned_ranges.erase((const uint8_t *)buffer->context);
    unmap(buffer->context, buffer->size);
}

ggml_backend_buffer_t allocate_pinned(ggml_backend_buffer_type_t buft, size_t size) {
    LinkDevice & device = of(buft->device);
    void * base = device.pins == MOEGGUF_PINNED_OWN ? map(size) : nullptr;
    if (!base) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(base, size);
    buffer->buft = buft;
    buffer->iface.free_buffer = free_pinned;
    std::lock_guard<std::mutex> lock(device.mutex);
    device.pinned_ranges[(const uint8_t *)base] = size;
    return buffer;
}

bool is_host(ggml_backend_buffer_type_t) {
    return true;
}

// Backend instances

struct Backend {
    LinkDevice & device;
    ggml_backend_ptr cpu;
    CommandQueue queue; // copies; computing waits for them
};

Backend & of(ggml_backend_t backend) {
    return *(Backend *)backend->context;
}

void synchronize(ggml_backend_t backend) {
    of(backend).queue.mark()->wait();
}

void copy_async(ggml_backend_t backend, SharedBandwidth & direction, void * to, const void * from, size_t n,
                const void * host) {
    LinkDevice & device = of(backend).device;
    of(backend).queue.push([&device, &direction, to, from, n] { device.copy(direction, to, from, n); });
    if (!device.pinned(host, n)) {
        synchronize(backend);
    }
}

void set_tensor_async(ggml_backend_t backend, ggml_tensor * t, const void * data, size_t offset, size_t n) {
    copy_async(backend, of(backend).device.to_device, address(t, offset), data, n, data);
}

void get_tensor_async(ggml_backend_t backend, const ggml_tensor * t, void * data, size_t offset, size_t n) {
    copy_async(backend, of(backend).device.to_host, data, address(t, offset), n, data);
}

void wait_in(Backend & backend, const std::shared_ptr<CommandQueue::Point> & point) {
    backend.queue.push([point] { point->wait(); });
}

// Within the device; behind what the source's stream has to do, and what the destination's has.
bool copy_tensor_async(ggml_backend_t source, ggml_backend_t destination, const ggml_tensor * from, ggml_tensor * to) {
    ggml_backend_buffer_type_t memory = &of(destination).device.memory;
    if (source->device != destination->device || !on_device(from, memory) || !on_device(to, memory)) {
        return false;
    }
    if (source != destination) {
        wait_in(of(destination), of(source).queue.mark());
    }
    LinkDevice & device = of(destination).device;
    of(destination).queue.push([&device, to_data = to->data, from_data = from->data, n = ggml_nbytes(from)] {
        device.move(to_data, from_data, n);
    });
    return true;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    synchronize(backend);
    LinkDevice & device = of(backend).device;
    ggml_backend_t cpu = of(backend).cpu.get();
    return device.strict ? compute_strictly(cpu, graph, &device.memory) : ggml_backend_graph_compute(cpu, graph);
}

// Events: the point that was recorded last

struct Event {
    std::mutex mutex;
    std::shared_ptr<CommandQueue::Point> point;

    std::shared_ptr<CommandQueue::Point> recorded() {
        std::lock_guard<std::mutex> lock(mutex);
        return point;
    }
};

Event & of(ggml_backend_event_t event) {
    return *(Event *)event->context;
}

void record(ggml_backend_t backend, ggml_backend_event_t event) {
    std::lock_guard<std::mutex> lock(of(event).mutex);
    of(event).point = of(backend).queue.mark();
}

void wait_for(ggml_backend_t backend, ggml_backend_event_t event) {
    if (const auto point = of(event).recorded()) {
        wait_in(of(backend), point);
    }
}

ggml_backend_event_t new_event(ggml_backend_dev_t device) {
    return new ggml_backend_event{device, new Event};
}

void free_event(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete &of(event);
    delete event;
}

void synchronize_event(ggml_backend_dev_t, ggml_backend_event_t event) {
    if (const auto point = of(event).recorded()) {
        point->wait();
    }
}

// What ggml asks a device

ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

ggml_guid_t guid() {
    static ggml_guid id = {0x6d, 0x6f, 0x65, 0x67, 0x67, 0x75, 0x66, 0x2d, 0x6c, 0x69, 0x6e, 0x6b, 0, 0, 0, 1};
    return &id;
}

const char * backend_name(ggml_backend_t backend) {
    return of(backend).device.name.c_str();
}

void free_backend(ggml_backend_t backend) {
    delete &of(backend);
    delete backend;
}

void set_cpu_threads(ggml_backend_t cpu, int n) {
    void * function =
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), "ggml_backend_set_n_threads");
    if (function) {
        ((ggml_backend_set_n_threads_t)function)(cpu, n);
    }
}

ggml_backend_t new_backend(ggml_backend_dev_t device, const char *) {
    ggml_backend_ptr cpu(ggml_backend_dev_init(cpu_device(), nullptr));
    if (!cpu) {
        return nullptr;
    }
    if (of(device).n_threads) {
        set_cpu_threads(cpu.get(), of(device).n_threads);
    }
    ggml_backend_i interface = {};
    interface.get_name = backend_name;
    interface.free = free_backend;
    interface.set_tensor_async = set_tensor_async;
    interface.get_tensor_async = get_tensor_async;
    interface.cpy_tensor_async = copy_tensor_async;
    interface.synchronize = synchronize;
    interface.graph_compute = compute;
    interface.event_record = record;
    interface.event_wait = wait_for;
    return new ggml_backend{guid(), interface, device,
                            new Backend{of(device), std::move(cpu), CommandQueue(of(device).strict)}};
}

const char * device_name(ggml_backend_dev_t device) {
    return of(device).name.c_str();
}

const char * description(ggml_backend_dev_t device) {
    return of(device).description.c_str();
}

std::string describe(const moegguf_link & link) {
    char text[128];
    snprintf(text, sizeof(text), "the CPU behind a simulated link of %g GB/s, %g us", link.bytes_per_ns,
             link.latency_ns / 1e3);
    return text + (link.n_threads ? ", " + std::to_string(link.n_threads) + " threads" : std::string());
}

void memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    *total = of(device).memory_bytes;
    *free = *total - of(device).used_bytes;
}

enum ggml_backend_dev_type type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void properties(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    props->name = device_name(device);
    props->description = description(device);
    props->type = type(device);
    memory(device, &props->memory_free, &props->memory_total);
    props->caps.async = props->caps.host_buffer = props->caps.events = true;
}

bool supports_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    if (op->op == GGML_OP_MUL_MAT_ID && ggml_nbytes(op->src[0]) > of(device).most_buffer_bytes) {
        return false;
    }
    return ggml_backend_dev_supports_op(cpu_device(), op);
}

bool supports_memory(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft) {
    return buft == &of(device).memory;
}

ggml_backend_buffer_type_t memory_type(ggml_backend_dev_t device) {
    return &of(device).memory;
}

// All devices so far. They stay: ggml forgets none.

struct Registry {
    std::mutex mutex;
    std::vector<std::unique_ptr<LinkDevice>> devices;
};

Registry & registry() {
    static Registry * all = new Registry; // backends may be freed after static objects
    return *all;
}

ggml_backend_buffer_type_t host_memory_type(ggml_backend_dev_t device) {
    LinkDevice & own = of(device);
    return own.pins == MOEGGUF_PINNED_FIRST ? &registry().devices[0]->host_memory : &own.host_memory;
}

void set_n_threads(ggml_backend_t backend, int n) {
    if (!of(backend).device.n_threads) {
        set_cpu_threads(of(backend).cpu.get(), n);
    }
}

ggml_backend_reg_t reg() {
    static ggml_backend_reg one = {};
    one.api_version = GGML_BACKEND_API_VERSION;
    one.iface.get_name = [](ggml_backend_reg_t) { return "LINK"; };
    one.iface.get_device_count = [](ggml_backend_reg_t) { return registry().devices.size(); };
    one.iface.get_device = [](ggml_backend_reg_t, size_t i) { return &registry().devices[i]->device; };
    one.iface.get_proc_address = [](ggml_backend_reg_t, const char * name) {
        return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *)set_n_threads : nullptr;
    };
    return &one;
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
    device.iface = ggml_backend_device_i{
        device_name, moegguf::description, moegguf::memory,   type,        properties,      new_backend,
        memory_type, host_memory_type,     nullptr,           supports_op, supports_memory, nullptr,
        new_event,   free_event,           synchronize_event,
    };
    memory.device = host_memory.device = &device;
    memory.iface = {memory_name, allocate, alignment_of, most_bytes, bytes_of, nullptr};
    host_memory.iface = {moegguf::host_memory_name, allocate_pinned, alignment_of, nullptr, nullptr, is_host};
}

} // namespace

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
    if (!cpu_device()) {
        throw Error(MOEGGUF_INVALID, "ggml has no CPU device to compute with");
    }
    Registry & all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.devices.push_back(std::make_unique<LinkDevice>(link, (int)all.devices.size()));
    LinkDevice & added = *all.devices.back();
    ggml_backend_register(added.device.reg);
    ggml_backend_device_register(&added.device);
    return added.name.c_str();
}

} // namespace moegguf
