// A backend of ggml that a test installs as a plug-in: N_DEVICES GPUs named NAME0, NAME1, ... that compute nothing. With
// FAILS it logs an error, as CUDA does where the driver is too old.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <string>
#include <vector>

#ifndef NAME
#define NAME "STANDIN"
#endif
#ifndef N_DEVICES
#define N_DEVICES 1
#endif

namespace {

std::vector<ggml_backend_device> devices(N_DEVICES);
std::vector<std::string> names;

const char * device_name(ggml_backend_dev_t device) { return names[device - devices.data()].c_str(); }
const char * description(ggml_backend_dev_t) { return "a stand-in"; }
enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
void memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = size_t(8) << 30; }

const char * name(ggml_backend_reg_t) { return NAME; }
size_t count(ggml_backend_reg_t) { return N_DEVICES; }
ggml_backend_dev_t get(ggml_backend_reg_t, size_t i) { return &devices[i]; }

} // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
    static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {name, count, get, nullptr}, nullptr};
#ifdef FAILS
    GGML_LOG_ERROR("%s: failed to initialize CUDA: the driver is too old\n", __func__);
#endif
    for (int i = 0; i < N_DEVICES; i++) {
        names.push_back(NAME + std::to_string(i));
        devices[i].iface.get_name = device_name;
        devices[i].iface.get_description = description;
        devices[i].iface.get_type = type;
        devices[i].iface.get_memory = memory;
        devices[i].reg = &reg;
    }
    return &reg;
}
