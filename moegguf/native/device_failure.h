// device_failure.h: one line about a device that does not answer any more, before its backend ends the process.
//
// ggml's backends call ggml_abort() then, from any thread, and expect no return. Who started the process finds the line
// on its stderr (moegguf/serving/worker_process.py), and goes on without the device.
// It writes one line and changes nothing of a store.
#pragma once

namespace moegguf {

void report_device_failures(); // from now on; any thread, any number of times

} // namespace moegguf
