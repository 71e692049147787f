// NCCL through files: each rank writes what it gives and reads what the others gave, as late as it may.
//
// A collective takes its inputs when it is called, since everything before it in its stream is then complete, and writes
// its result when something waits for it. Ranks that disagree about a communicator's next collective are a fault.

#include "fakecuda.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <vector>

using ncclResult_t = int;
using ncclDataType_t = int;
using ncclRedOp_t = int;
using ncclConfig_t = void;
enum { ncclSuccess = 0, ncclInvalidArgument = 4, ncclInvalidUsage = 5 };
enum { ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16 };
enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };
struct ncclUniqueId { char internal[128]; };
typedef struct ncclComm* ncclComm_t;

struct ncclComm {
  std::string directory;
  int rank, size, device;
  uint64_t number = 0;  // of the next collective
  bool broken = false;  // its ranks have called different collectives, and cannot go on
  std::map<int, uint64_t> sent, received;  // by peer
};
namespace {

const int PATIENCE_S = 60;

void put(const std::string& path, const std::string& content) {
  std::string unfinished = path + "~";
  std::ofstream(unfinished, std::ios::binary) << content;
  rename(unfinished.c_str(), path.c_str());
}
std::string take(const std::string& path) {  // waits for the file
  const int pause_us = 500;
  for (int tries = 0; access(path.c_str(), F_OK) != 0; tries++) {
    usleep(pause_us);
    if (tries > PATIENCE_S * 1000000 / pause_us) {
      fault("NCCL: a rank waits for another, which has not called the same collective: nobody has written " + path);
      abort();
    }
  }
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
std::string file_of(ncclComm* comm, uint64_t number, int rank) {
  return comm->directory + "/" + std::to_string(number) + "." + std::to_string(rank);
}

// Returns what each rank has put as number `number`; `what` describes the call, which must be the same on all. Nothing if
// it is not: NCCL would hang, or exchange something else.
std::vector<std::string> taken(ncclComm* comm, uint64_t number, const std::string& what) {
  std::vector<std::string> all;
  for (int rank = 0; rank < comm->size; rank++) {
    std::string content = take(file_of(comm, number, rank));
    std::string theirs = content.substr(0, content.find('\n'));
    if (theirs != what) {
      fault("NCCL: rank " + std::to_string(comm->rank) + " calls " + what + ", rank " + std::to_string(rank) +
            " of its group calls " + theirs);
      comm->broken = true;
      return {};
    }
    all.push_back(content.substr(theirs.size() + 1));
  }
  return all;
}
uint64_t give(ncclComm* comm, const std::string& what, const void* data, size_t bytes) {
  uint64_t number = comm->number++;
  put(file_of(comm, number, comm->rank), what + "\n" + std::string(static_cast<const char*>(data), bytes));
  return number;
}

size_t size_of(ncclDataType_t type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}
float from_half(uint16_t h) {
  int exponent = h >> 10 & 31;
  float value = exponent == 31 ? (h & 1023 ? NAN : INFINITY) : exponent ? ldexpf(1024 + (h & 1023), exponent - 25) : ldexpf(h & 1023, -24);
  return h & 0x8000 ? -value : value;
}
uint16_t to_half(float value) { _Float16 half = value; uint16_t bits; memcpy(&bits, &half, 2); return bits; }
double get(const char* at, ncclDataType_t type) {
  uint16_t h; float f; double d; int32_t i; int64_t l; uint32_t bits;
  switch (type) {
    case ncclInt8: return *reinterpret_cast<const int8_t*>(at);
    case ncclUint8: return *reinterpret_cast<const uint8_t*>(at);
    case ncclInt32: memcpy(&i, at, 4); return i;
    case ncclInt64: case ncclUint64: memcpy(&l, at, 8); return l;
    case ncclFloat16: memcpy(&h, at, 2); return from_half(h);
    case ncclBfloat16: memcpy(&h, at, 2); bits = uint32_t(h) << 16; memcpy(&f, &bits, 4); return f;
    case ncclFloat32: memcpy(&f, at, 4); return f;
    case ncclFloat64: memcpy(&d, at, 8); return d;
    default: fault("NCCL: a type that is not supported here"); abort();
  }
}
void set(char* at, double value, ncclDataType_t type) {
  uint16_t h; float f = float(value); int32_t i = int32_t(value); int64_t l = int64_t(value); uint32_t bits;
  switch (type) {
    case ncclInt8: *at = int8_t(value); break;
    case ncclUint8: *reinterpret_cast<uint8_t*>(at) = uint8_t(value); break;
    case ncclInt32: memcpy(at, &i, 4); break;
    case ncclInt64: case ncclUint64: memcpy(at, &l, 8); break;
    case ncclFloat16: h = to_half(f); memcpy(at, &h, 2); break;
    case ncclBfloat16: memcpy(&bits, &f, 4); bits += 0x7FFF + (bits >> 16 & 1); h = bits >> 16; memcpy(at, &h, 2); break;
    case ncclFloat32: memcpy(at, &f, 4); break;
    case ncclFloat64: memcpy(at, &value, 8); break;
    default: abort();
  }
}
void reduce(const std::vector<std::string>& all, size_t first, size_t count, ncclDataType_t type, int op, char* result) {
  size_t width = size_of(type);
  for (size_t i = 0; i < count; i++) {
    double total = get(&all[0][(first + i) * width], type);
    for (size_t rank = 1; rank < all.size(); rank++) {
      double value = get(&all[rank][(first + i) * width], type);
      total = op == ncclProd ? total * value : op == ncclMax ? std::max(total, value) : op == ncclMin ? std::min(total, value) : total + value;
    }
    set(result + i * width, op == ncclAvg ? total / all.size() : total, type);
  }
}

std::string numbers(size_t count, ncclDataType_t type) {
  return std::to_string(count) + " numbers of type " + std::to_string(type);
}

using Finish = std::function<void(const std::vector<std::string>& all)>;  // writes the result, given each rank's bytes

ncclResult_t collective(ncclComm* comm, const std::string& what, const void* from, size_t bytes_from, void* to,
                        size_t bytes_to, cudaStream_t on, Finish finish) {
  for (const void* pointer : {from, static_cast<const void*>(to)})
    if (pointer && kind_of(pointer) != DEVICE) {
      fault(what + " in memory that is not the device's");
      return ncclInvalidArgument;
    }
  if (current_device != comm->device)
    fault(what + " on device " + std::to_string(current_device) + ", its group is on " + std::to_string(comm->device));
  check_range(from, bytes_from, what.c_str());
  check_range(to, bytes_to, what.c_str());
  if (comm->broken) return ncclInvalidUsage;
  Stream* stream = stream_of(on);
  complete(stream);
  uint64_t number = give(comm, what, from, bytes_from);
  submit(stream, [=] {
    std::vector<std::string> all = taken(comm, number, what);
    if (to && !all.empty()) finish(all);
  });
  return ncclSuccess;
}

}  // namespace

API ncclResult_t ncclGetVersion(int* version) { *version = 22807; return ncclSuccess; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%s/nccl-%08x%08x", getenv("FAKECUDA_FILES"), random(), random());
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  mkdir(id.internal, 0700);
  *comm = new ncclComm{id.internal, rank, size, current_device};
  taken(*comm, give(*comm, "ncclCommInitRank", "", 0), "ncclCommInitRank");
  return ncclSuccess;
}
API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* result, ncclConfig_t*) {
  int mine[2] = {color, key};
  uint64_t number = give(comm, "ncclCommSplit", mine, sizeof mine);
  auto all = taken(comm, number, "ncclCommSplit");
  std::vector<std::pair<int, int>> members;  // by key, then rank
  for (int rank = 0; rank < comm->size; rank++) {
    int theirs[2];
    memcpy(theirs, all[rank].data(), sizeof theirs);
    if (theirs[0] == color) members.emplace_back(theirs[1], rank);
  }
  std::sort(members.begin(), members.end());
  *result = nullptr;
  if (color == -1) return ncclSuccess;
  int rank = 0;
  while (members[rank].second != comm->rank) rank++;
  std::string directory = comm->directory + "-" + std::to_string(number) + "-" + std::to_string(color);
  mkdir(directory.c_str(), 0700);
  *result = new ncclComm{directory, rank, int(members.size()), comm->device};
  return ncclSuccess;
}
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }  // others may still read its last files
API ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { *error = ncclSuccess; return ncclSuccess; }
API const char* ncclGetErrorString(ncclResult_t) { return "an error of the fake NCCL"; }
API const char* ncclGetLastError(ncclComm_t) { return ""; }
API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) { *handle = nullptr; return ncclSuccess; }
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
// A group changes nothing: what a call gives is written at once, and what it takes is awaited later.
API ncclResult_t ncclGroupStart() { return ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return ncclSuccess; }

API ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  std::string what = "ncclAllReduce of " + numbers(count, type) + " by operation " + std::to_string(op);
  size_t bytes = count * size_of(type);
  return collective(comm, what, from, bytes, to, bytes, stream, [=](auto& all) {
    reduce(all, 0, count, type, op, static_cast<char*>(to));
  });
}
API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  std::string what = "ncclReduceScatter of " + numbers(count, type);
  return collective(comm, what, from, bytes * comm->size, to, bytes, stream, [=](auto& all) {
    reduce(all, comm->rank * count, count, type, op, static_cast<char*>(to));
  });
}
API ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  std::string what = "ncclAllGather of " + numbers(count, type);
  return collective(comm, what, from, bytes, to, bytes * comm->size, stream, [=](auto& all) {
    for (int rank = 0; rank < comm->size; rank++)
      memcpy(static_cast<char*>(to) + rank * bytes, all[rank].data(), bytes);
  });
}
API ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  std::string what = "ncclBroadcast of " + numbers(count, type) + " from rank " + std::to_string(root);
  size_t bytes = count * size_of(type);
  bool gives = comm->rank == root;
  return collective(comm, what, gives ? from : nullptr, gives ? bytes : 0, to, bytes, stream, [=](auto& all) {
    memcpy(to, all[root].data(), bytes);
  });
}
API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

namespace {

std::string letter(ncclComm* comm, int from, int to, uint64_t number) {
  return comm->directory + "/from" + std::to_string(from) + "to" + std::to_string(to) + "." + std::to_string(number);
}

}  // namespace

API ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                          cudaStream_t on) {
  if (kind_of(from) != DEVICE) { fault("ncclSend of memory that is not the device's"); return ncclInvalidArgument; }
  complete(stream_of(on));
  std::string content(static_cast<const char*>(from), count * size_of(type));
  put(letter(comm, comm->rank, peer, comm->sent[peer]++), content);
  submit(stream_of(on));
  return ncclSuccess;
}
API ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t on) {
  if (kind_of(to) != DEVICE) { fault("ncclRecv into memory that is not the device's"); return ncclInvalidArgument; }
  std::string path = letter(comm, peer, comm->rank, comm->received[peer]++);
  size_t bytes = count * size_of(type);
  submit(stream_of(on), [=] {
    std::string content = take(path);
    if (content.size() != bytes)
      fault("ncclRecv expects " + std::to_string(bytes) + " bytes, and gets " + std::to_string(content.size()));
    memcpy(to, content.data(), std::min(bytes, content.size()));
  });
  return ncclSuccess;
}
