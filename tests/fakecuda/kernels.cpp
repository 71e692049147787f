// libcudart's devices and kernels, what torch and Triton call in the driver, and cuBLAS: launches are checked and counted.

#include "fakecuda.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <vector>

// ----------------------------------------------------------------------------------------------------------- devices

API cudaError_t cudaGetDeviceCount(int* count) { *count = DEVICES; return cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= DEVICES) return failed(cudaErrorInvalidDevice);
  current_device = device, make_context(device);
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { *value = attribute(which); return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= DEVICES) return failed(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->uuid.bytes[0] = char(device + 1);
  p->totalGlobalMem = MEMORY, p->sharedMemPerBlock = 49152, p->regsPerBlock = 65536, p->warpSize = 32;
  p->maxThreadsPerBlock = 1024, p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7FFFFFFF, p->maxGridSize[1] = p->maxGridSize[2] = 65535, p->totalConstMem = 65536;
  p->major = 9, p->minor = 0, p->textureAlignment = 512, p->multiProcessorCount = 132, p->pciBusID = 1 + device;
  p->concurrentKernels = p->unifiedAddressing = p->cooperativeLaunch = p->canMapHostMemory = p->memoryPoolsSupported = 1;
  p->asyncEngineCount = 3, p->memoryBusWidth = 5120, p->l2CacheSize = 50 << 20, p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1, p->sharedMemPerMultiprocessor = 233472, p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = 232448, p->maxBlocksPerMultiProcessor = 32, p->reservedSharedMemPerBlock = 1024;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0, *greatest = -5; return cudaSuccess; }

// ----------------------------------------------------------------------------------------------------------- kernels

namespace {

thread_local size_t launches = 0;

// Kernels of Triton and CUTLASS have no function on the host: any address names them.
void* any_kernel() { static char kernel; return &kernel; }

cudaError_t launch(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7FFFFFFF || grid.y > 65535 || grid.z > 65535 || shared > 232448)
    return failed(cudaErrorInvalidConfiguration);
  launches++;
  submit(stream_of(stream));
  return cudaSuccess;
}

}  // namespace

API size_t fake_launches() { return launches; }  // for device.py

int attribute(int which) {
  switch (which) {  // an H100 SXM
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxGridDimX: return 0x7FFFFFFF;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrStreamPrioritiesSupported: return 1;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
  }
}

API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
namespace { struct Call { dim3 grid, block; size_t shared; cudaStream_t stream; }; thread_local std::vector<Call> calls; }
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  calls.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Call call = calls.back();
  calls.pop_back();
  *grid = call.grid, *block = call.block, *shared = call.shared, *static_cast<cudaStream_t*>(stream) = call.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) { *kernel = (cudaKernel_t)host; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launch(grid, block, shared, stream);
}
API cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launch(grid, block, shared, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void**) {
  return launch(c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->ptxVersion = a->binaryVersion = 90, a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// --------------------------------------------------------------------------------------------- the driver, for Triton

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) { *version = CUDART_VERSION; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* count) { *count = DEVICES; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) { *value = attribute(which); return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0, *active = has_context(device);
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  make_context(device), *context = reinterpret_cast<CUcontext>(uintptr_t(device) + 1);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) { *context = reinterpret_cast<CUcontext>(uintptr_t(current_device) + 1); return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext context) { current_device = int(uintptr_t(context)) - 1; return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult, const char** text) { *text = "an error of the fake CUDA driver"; return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* answer, CUpointer_attribute, CUdeviceptr pointer) {
  if (kind_of((void*)pointer) == PAGEABLE) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<CUdeviceptr*>(answer) = pointer;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* module, const void*) { *module = reinterpret_cast<CUmodule>(1); return CUDA_SUCCESS; }
API CUresult cuModuleLoad(CUmodule* module, const char*) { *module = reinterpret_cast<CUmodule>(1); return CUDA_SUCCESS; }
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { *function = CUfunction(any_kernel()); return CUDA_SUCCESS; }
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuLaunchKernel(CUfunction, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream stream, void**, void**) {
  return CUresult(launch({gx, gy, gz}, {bx, by, bz}, shared, stream));
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction, void**, void**) {
  return CUresult(launch({c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ},
                         c->sharedMemBytes, c->hStream));
}

// ------------------------------------------------- cuBLAS: no-ops; of their arguments only those used here are declared

namespace { struct Handle { cudaStream_t stream = nullptr; int math = 0, pointers = 0; }; }
API int cublasCreate_v2(Handle** handle) { *handle = new Handle; return 0; }
API int cublasDestroy_v2(Handle* handle) { delete handle; return 0; }
API int cublasSetStream_v2(Handle* handle, cudaStream_t stream) { handle->stream = stream; return 0; }
API int cublasSetWorkspace_v2(Handle*) { return 0; }
API int cublasSetMathMode(Handle* handle, int mode) { handle->math = mode; return 0; }
API int cublasGetMathMode(Handle* handle, int* mode) { *mode = handle->math; return 0; }
API int cublasSetPointerMode_v2(Handle* handle, int mode) { handle->pointers = mode; return 0; }
API int cublasGetPointerMode_v2(Handle* handle, int* mode) { *mode = handle->pointers; return 0; }
#define PRODUCT(name) API int name(Handle* handle) { submit(stream_of(handle->stream)); return 0; }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)
// Descriptors are cuBLASLt's own, which need no device. An algorithm is 64 bytes, then come its workspace and its state.
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* found) {
  memset(result, 0, 64 + 8 + 4), *found = 1;
  return 0;
}
API int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, size_t, cudaStream_t stream) {
  submit(stream_of(stream));
  return 0;
}

// ----------------------------------------------------------- NCCL, through files of a directory that all ranks share

