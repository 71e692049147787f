// A CUDA runtime without a GPU: what its files share. README.md says what it is for.

#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

extern const int DEVICES;           // FAKECUDA_DEVICES
constexpr size_t MEMORY = size_t(80) << 30;  // of each

extern std::recursive_mutex& lock;
using Guard = std::lock_guard<std::recursive_mutex>;
extern thread_local int current_device;

// Reports that the host waits, to device.py. Never while `lock` is held: this calls Python, whose own lock others may hold.
void waits(const char* what, size_t bytes = 0);
void fault(const std::string& what);  // reports what must not happen

enum Kind { PAGEABLE, PINNED, DEVICE };
Kind kind_of(const void* pointer);
void check_range(const void* pointer, size_t bytes, const char* what);

// A stream runs behind: its effects are made when something waits for them, and its news when the host knows of them.
// Handles that torch passes for the default stream become that of the current device.
struct Stream;
Stream* stream_of(cudaStream_t stream);
// False: it becomes a node of a graph instead.
bool submit(Stream* stream, std::function<void()> effect = nullptr, std::function<void()> news = nullptr);
void complete(Stream* stream);

cudaError_t failed(cudaError_t error);  // records it for cudaGetLastError
bool has_context(int device);
void make_context(int device);
int attribute(int which);  // of a device, CUDA's number
