// libcudart: memory, streams, events, copies and graphs.
//
// Device memory is host memory that nothing touches until a copy or device.py does, so a model of any size fits. Streams
// run behind, for two readers:
// - Another stream, and a kernel: an asynchronous copy is made when a later operation of its stream is computed, or when
//   another stream waits for it.
// - The host: it knows of nothing that it has not waited or asked for, and that is not LAG operations old. Until then
//   page-locked memory that is copied to holds NaN, and page-locked memory that is copied from must not change.
// What may not be called while a graph is captured is a fault.

#include "fakecuda.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

namespace {

int number_of(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

const uint64_t LAG = 1000;
const auto MOST = std::chrono::milliseconds(200);  // that an event is late for one who asks again and again

void (*on_wait)(const char* what, size_t bytes) = nullptr;
std::string& faults = *new std::string;  // a line each
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

const int DEVICES = number_of("FAKECUDA_DEVICES", 1);
std::recursive_mutex& lock = *new std::recursive_mutex;  // never destroyed: threads still call when the process ends
thread_local int current_device = 0;

cudaError_t failed(cudaError_t error) { return last_error = error; }
void waits(const char* what, size_t bytes) {
  if (on_wait) on_wait(what, bytes);
}
void fault(const std::string& what) {
  Guard guard(lock);
  fprintf(stderr, "fakecuda: %s\n", what.c_str());
  faults += what + "\n";
}

// ------------------------------------------------------------------------------------------------------------ memory

namespace {

struct Block { size_t bytes; Kind kind; int device; };
auto& blocks = *new std::map<uintptr_t, Block>;  // by address
size_t used[64];
bool made_contexts[64];

std::pair<const uintptr_t, Block>* block_of(const void* pointer) {
  auto next = blocks.upper_bound(uintptr_t(pointer));
  if (next == blocks.begin()) return nullptr;
  auto& block = *std::prev(next);
  return uintptr_t(pointer) < block.first + block.second.bytes ? &block : nullptr;
}
void* reserve(size_t bytes, Kind kind) {
  Guard guard(lock);
  made_contexts[current_device] = true;
  if (kind == DEVICE && used[current_device] + bytes > MEMORY) return nullptr;
  void* pointer = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pointer == MAP_FAILED) return nullptr;
  blocks[uintptr_t(pointer)] = {bytes ? bytes : 1, kind, current_device};
  if (kind == DEVICE) used[current_device] += bytes;
  return pointer;
}
bool release(void* pointer) {
  Guard guard(lock);
  auto found = blocks.find(uintptr_t(pointer));
  if (found == blocks.end()) return false;
  if (found->second.kind == DEVICE) used[found->second.device] -= found->second.bytes;
  munmap(pointer, found->second.bytes);
  blocks.erase(found);
  return true;
}

void fill(void* pointer, int value, size_t bytes) {
  const size_t page = 4096;
  if (value == 0 && bytes >= 4 * page) {  // whole pages go back to the system, which returns zeros
    uintptr_t begin = (uintptr_t(pointer) + page - 1) / page * page, end = (uintptr_t(pointer) + bytes) / page * page;
    memset(pointer, 0, begin - uintptr_t(pointer));
    madvise((void*)begin, end - begin, MADV_DONTNEED);
    memset((void*)end, 0, uintptr_t(pointer) + bytes - end);
  } else {
    memset(pointer, value, bytes);
  }
}

uint64_t checksum(const void* pointer, size_t bytes) {
  uint64_t sum = bytes, word;
  auto* at = static_cast<const char*>(pointer);
  for (size_t i = 0; i + 8 <= bytes; i += 8) memcpy(&word, at + i, 8), sum = (sum ^ word) * 0x9E3779B97F4A7C15ull + (sum >> 29);
  for (size_t i = bytes & ~size_t(7); i < bytes; i++) sum = sum * 31 + at[i];
  return sum;
}

// --------------------------------------------------------------------------------------------------- streams, events

}  // namespace

struct Graph { size_t nodes = 0; bool invalid = false; };

using Effects = std::deque<std::pair<uint64_t, std::function<void()>>>;  // by the number of the operation

struct Stream {
  uint64_t submitted = 0, completed = 0, known = 0;  // operations; known: to the host
  Effects queue, news;  // on the device, and on the host
  int device = 0, priority = 0;
  Graph* capture = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  unsigned long long capture_id = 0;
};

namespace {

struct Event {
  Stream* stream = nullptr;  // null: never recorded
  uint64_t number = 0;
  Graph* captured = nullptr;
  unsigned flags = 0;
  std::chrono::steady_clock::time_point time;
};

auto& default_streams = *new std::map<int, Stream>;  // by device
auto& streams = *new std::vector<Stream*>;

void run_until(Effects& effects, uint64_t number) {
  while (!effects.empty() && effects.front().first <= number) {
    auto run = std::move(effects.front().second);
    effects.pop_front();
    run();
  }
}

// Makes the effects of the first `number` operations on the device, whatever they wait for included.
void complete_until(Stream* stream, uint64_t number) {
  Guard guard(lock);
  run_until(stream->queue, number);
  stream->completed = std::max(stream->completed, number);
}

// Lets the host know that the first `number` operations are over.
void know_until(Stream* stream, uint64_t number) {
  Guard guard(lock);
  complete_until(stream, number);
  run_until(stream->news, number);
  stream->known = std::max(stream->known, number);
}
void know(Stream* stream) { know_until(stream, stream->submitted); }

void know_all() {
  Guard guard(lock);
  for (auto& entry : default_streams) know(&entry.second);
  for (Stream* stream : streams) know(stream);
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// Calls that wait, or allocate, break a capture, unless this thread has said otherwise.
bool breaks_capture(const char* what) {
  Guard guard(lock);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  for (Stream* stream : streams)
    if (stream->capture && stream->mode != cudaStreamCaptureModeRelaxed) {
      stream->capture->invalid = true;
      fault(std::string(what) + " while a graph is captured");
      return true;
    }
  return false;
}

}  // namespace

Kind kind_of(const void* pointer) {
  Guard guard(lock);
  auto* block = block_of(pointer);
  return block ? block->second.kind : PAGEABLE;
}
void check_range(const void* pointer, size_t bytes, const char* what) {
  Guard guard(lock);
  auto* block = block_of(pointer);
  if (block && uintptr_t(pointer) + bytes > block->first + block->second.bytes)
    fault(std::string(what) + ": " + std::to_string(bytes) + " bytes reach beyond the end of an allocation");
}
bool has_context(int device) { return made_contexts[device]; }
void make_context(int device) { made_contexts[device] = true; }

Stream* stream_of(cudaStream_t stream) {
  if (uintptr_t(stream) > 2) return reinterpret_cast<Stream*>(stream);
  Guard guard(lock);
  Stream& found = default_streams[current_device];
  found.device = current_device;
  return &found;
}

bool submit(Stream* stream, std::function<void()> effect, std::function<void()> news) {
  Guard guard(lock);
  made_contexts[stream->device] = true;
  if (stream->capture) { stream->capture->nodes++; return false; }
  stream->submitted++;
  if (effect) stream->queue.emplace_back(stream->submitted, std::move(effect));
  if (news) stream->news.emplace_back(stream->submitted, std::move(news));
  if (stream->submitted > LAG) know_until(stream, stream->submitted - LAG);
  return true;
}
void complete(Stream* stream) { complete_until(stream, stream->submitted); }

// ------------------------------------------------------------------------------------------------------------ copies

namespace {

bool moves = true;  // false: what is in device memory does not matter, and is neither copied nor filled

// A copy to page-locked memory of which the host does not know yet: its content is here, once it is made.
struct Arrival { size_t bytes; std::shared_ptr<std::string> content; };
auto& arrivals = *new std::map<char*, Arrival>;  // by target

// Lets page-locked memory have what has arrived there, which another copy reads. Returns whether anything was to arrive.
bool deliver(const void* from, size_t bytes) {
  auto begin = static_cast<const char*>(from);
  bool any = false;
  for (auto& [to, arrival] : arrivals)
    if (to < begin + bytes && begin < to + arrival.bytes) {
      memcpy(to, arrival.content->data(), arrival.content->size());
      any = true;
    }
  return any;
}

cudaError_t copy(void* to, const void* from, size_t bytes, Stream* stream, bool synchronous) {
  if (bytes == 0) return cudaSuccess;
  check_range(to, bytes, "the target of a copy"), check_range(from, bytes, "the source of a copy");
  Kind source = kind_of(from), target = kind_of(to);
  bool pageable = source == PAGEABLE || target == PAGEABLE;
  // https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html
  const char* reason = synchronous && !(source == DEVICE && target == DEVICE) ? "cudaMemcpy"
      : !pageable ? nullptr
      : target == PAGEABLE ? "copy to pageable memory"
      : bytes > (64 << 10) ? "copy from pageable memory, more than 64 KB"
                           : nullptr;
  if (reason) {
    if (breaks_capture(reason)) return failed(cudaErrorStreamCaptureUnsupported);
    if (submit(stream, [=] { memmove(to, from, bytes); })) know(stream);
    waits(reason, bytes);
  } else if (pageable) {  // staged: the source may change at once
    auto staged = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    submit(stream, [=] { memcpy(to, staged->data(), bytes); });
  } else if (target == PINNED) {
    memset(to, 0xFF, bytes);  // NaN: what a reader that does not wait may find
    auto content = std::make_shared<std::string>();
    auto target_at = static_cast<char*>(to);
    { Guard guard(lock); arrivals[target_at] = {bytes, content}; }
    auto keep = [=] { content->assign(static_cast<const char*>(from), bytes); };
    auto tell = [=] {
      memcpy(to, content->data(), bytes);
      auto found = arrivals.find(target_at);
      if (found != arrivals.end() && found->second.content == content) arrivals.erase(found);
    };
    submit(stream, keep, tell);
  } else {
    bool is_there = source == PINNED && !deliver(from, bytes);
    uint64_t before = is_there ? checksum(from, bytes) : 0;
    auto move = [=] {
      if (source == PINNED && !is_there) deliver(from, bytes);
      if (moves || source != target) memmove(to, from, bytes);
    };
    auto check = [=] {
      if (is_there && checksum(from, bytes) != before)
        fault("page-locked memory has changed before it was copied to the device, " + std::to_string(bytes) + " bytes");
    };
    submit(stream, move, check);
  }
  return cudaSuccess;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- for device.py

API void fake_on_wait(void (*callback)(const char*, size_t)) { on_wait = callback; }
API const char* fake_faults() { return faults.c_str(); }
API void fake_complete(cudaStream_t stream) { complete(stream_of(stream)); }  // what its next kernel may rely on
API void fake_moves(int value) { moves = value; }
API void fake_spoil(void* pointer, size_t bytes, cudaStream_t stream) {  // fresh memory: NaN, or -1, until it is written
  submit(stream_of(stream), [=] { memset(pointer, 0xFF, bytes); });
}

// ------------------------------------------------------------------------------------------------------------ memory

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (breaks_capture("cudaMalloc")) return failed(cudaErrorStreamCaptureUnsupported);
  *pointer = reserve(bytes, DEVICE);
  return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void* pointer) {
  if (breaks_capture("cudaFree")) return failed(cudaErrorStreamCaptureUnsupported);
  if (!pointer) return cudaSuccess;
  know_all();  // it waits; its caller holds the allocator's lock, so nobody is told
  return release(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (breaks_capture("cudaHostAlloc")) return failed(cudaErrorStreamCaptureUnsupported);
  *pointer = reserve(bytes, PINNED);
  return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFreeHost(void* pointer) {
  know_all();
  return !pointer || release(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = MEMORY, *free = MEMORY - used[current_device];
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* answer, const void* pointer) {
  Guard guard(lock);
  auto* block = block_of(pointer);
  memset(answer, 0, sizeof *answer);
  answer->device = -1;  // as CUDA answers for unregistered memory
  if (!block) return cudaSuccess;
  answer->type = block->second.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  answer->device = block->second.device;
  answer->devicePointer = const_cast<void*>(pointer);
  if (block->second.kind == PINNED) answer->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream_of(stream), false);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, stream_of(nullptr), true);
}
API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  check_range(pointer, bytes, "cudaMemset");
  submit(stream_of(stream), [=] { if (moves) fill(pointer, value, bytes); });
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* pointer, int value, size_t bytes) { return cudaMemsetAsync(pointer, value, bytes, nullptr); }

// ------------------------------------------------------------------------------------------------ streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  Guard guard(lock);
  Stream* made = new Stream;  // never freed: events refer to it
  made->device = current_device, made->priority = priority;
  streams.push_back(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (breaks_capture("cudaStreamSynchronize")) return failed(cudaErrorStreamCaptureUnsupported);
  Stream* which = stream_of(stream);
  know(which), waits("cudaStreamSynchronize");
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (breaks_capture("cudaStreamQuery")) return failed(cudaErrorStreamCaptureUnsupported);
  Stream* which = stream_of(stream);
  return which->known >= which->submitted ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t waited, unsigned) {
  Event* event = reinterpret_cast<Event*>(waited);
  Stream *which = stream_of(stream), *source = event->stream;
  uint64_t number = event->number;
  Guard guard(lock);
  if (event->captured && !which->capture) {  // the stream joins the capture
    which->capture = event->captured, which->mode = source->mode, which->capture_id = source->capture_id;
  }
  if (source) submit(which, [=] { complete_until(source, number); }, [=] { know_until(source, number); });
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Event* made = new Event;
  made->flags = flags;
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // waits in queues may refer to it
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t recorded, cudaStream_t stream, unsigned) {
  Guard guard(lock);
  Event* event = reinterpret_cast<Event*>(recorded);
  Stream* which = stream_of(stream);
  event->captured = which->capture;
  submit(which);
  event->stream = which, event->number = which->submitted, event->time = std::chrono::steady_clock::now();
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t queried) {
  Event* event = reinterpret_cast<Event*>(queried);
  if (event->captured && breaks_capture("cudaEventQuery")) return failed(cudaErrorStreamCaptureUnsupported);
  if (!event->stream || event->stream->known >= event->number) return cudaSuccess;
  if (std::chrono::steady_clock::now() - event->time < MOST) return cudaErrorNotReady;
  know_until(event->stream, event->number);
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t awaited) {
  Event* event = reinterpret_cast<Event*>(awaited);
  if (breaks_capture("cudaEventSynchronize")) return failed(cudaErrorStreamCaptureUnsupported);
  if (event->stream) know_until(event->stream, event->number);
  waits("cudaEventSynchronize");
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Event *a = reinterpret_cast<Event*>(start), *b = reinterpret_cast<Event*>(end);
  if (!a->stream || !b->stream || ((a->flags | b->flags) & cudaEventDisableTiming)) return failed(cudaErrorInvalidResourceHandle);
  if (cudaEventQuery(start) != cudaSuccess || cudaEventQuery(end) != cudaSuccess) return failed(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(b->time - a->time).count();
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  submit(stream_of(stream), [=] { function(data); });
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
  if (breaks_capture("cudaDeviceSynchronize")) return failed(cudaErrorStreamCaptureUnsupported);
  know_all(), waits("cudaDeviceSynchronize");
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "an error of the fake CUDA runtime";
  }
}

// ------------------------------------------------------------------------------------------------------------ graphs

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, thread_mode); return cudaSuccess; }
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  static std::atomic<unsigned long long> ids{1};
  Stream* which = stream_of(stream);
  if (uintptr_t(stream) <= 1 || which->capture) return failed(cudaErrorStreamCaptureUnsupported);
  Guard guard(lock);
  which->capture = new Graph, which->mode = mode, which->capture_id = ids++;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* result) {
  Guard guard(lock);
  Graph* graph = stream_of(stream)->capture;
  if (!graph) return failed(cudaErrorIllegalState);
  for (Stream* one : streams)
    if (one->capture == graph) one->capture = nullptr;
  *result = reinterpret_cast<cudaGraph_t>(graph);
  return graph->invalid ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                         size_t* count) {
  Stream* which = stream_of(stream);
  *status = which->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = which->capture_id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(which->capture);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) {
  submit(stream_of(stream));
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (!nodes) *count = reinterpret_cast<Graph*>(graph)->nodes;
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
