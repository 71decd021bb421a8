// Stands for libcuda.so.1: the calls that dsv41chat.engine.kernels.driver makes, over host memory. It is as unhelpful as it may be:
// nothing on the stream happens before it is waited for, fresh memory holds garbage, a graph runs its nodes in the latest order that
// their dependencies allow, and every handle, address and thread's context is checked.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719 };

// As in cuda.h
typedef struct {
  void* func;
  unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void** kernelParams;
  void** extra;
  void* kern;
  void* ctx;
} CUDA_KERNEL_NODE_PARAMS_v2;

struct Function { std::string name; int count; };
struct Node { Function* function; unsigned grid[3], threads; std::vector<CUdeviceptr> values; std::vector<size_t> after; };
struct GraphState { std::vector<Node*> nodes; };

// Addresses of the device are no addresses of the host.
static const CUdeviceptr DEVICE = 1ull << 60;
static int the_context, the_stream;
static thread_local void* current;
static std::map<CUdeviceptr, size_t> memory;
static std::set<void*> pinned, graphs, executables, modules;
static std::vector<std::function<CUresult()>> stream;
static std::map<std::string, int> failing, calls;

static CUresult enter(const char* call, bool context = true) {
  calls[call]++;
  auto found = failing.find(call);
  if (found != failing.end()) { int result = found->second; failing.erase(found); return result; }
  return context && current != &the_context ? INVALID_CONTEXT : 0;
}
#define ENTER(...) if (CUresult entered = enter(__func__ __VA_OPT__(,) __VA_ARGS__)) return entered

static char* host(CUdeviceptr p, size_t n) {
  auto next = memory.upper_bound(p);
  if (next == memory.begin()) return nullptr;
  auto [start, size] = *--next;
  return p + n <= start + size ? (char*)(p - DEVICE) : nullptr;
}

// out = 31 * out + 1 * first + 2 * second ..., so that the order of two launches shows
static CUresult execute(const Node& node) {
  const size_t n = (size_t)node.grid[0] * node.grid[1] * node.grid[2] * node.threads;
  std::vector<uint32_t*> at;
  for (auto value : node.values) {
    at.push_back((uint32_t*)host(value, 4 * n));
    if (!at.back()) return ILLEGAL_ADDRESS;
  }
  for (size_t i = 0; i < n; i++) {
    uint32_t sum = 31 * at.back()[i];
    for (size_t j = 0; j + 1 < at.size(); j++) sum += (uint32_t)(j + 1) * at[j][i];
    at.back()[i] = sum;
  }
  return 0;
}

static CUresult execute(const std::vector<Node>& nodes) {
  std::vector<bool> done(nodes.size());
  for (size_t left = nodes.size(); left--;) {
    size_t pick = nodes.size();
    for (size_t i = 0; i < nodes.size(); i++) {
      bool ready = !done[i];
      for (size_t before : nodes[i].after) ready = ready && done[before];
      if (ready) pick = i;
    }
    done[pick] = true;
    if (CUresult result = execute(nodes[pick])) return result;
  }
  return 0;
}

static CUresult drain() {
  auto work = std::move(stream);
  stream.clear();
  for (auto& item : work) if (CUresult result = item()) return result;
  return 0;
}

extern "C" {
void fake_fail(const char* call, int result) { failing[call] = result; }
int fake_calls(const char* call) { return calls[call]; }
int fake_live(const char* kind) {
  const std::string k = kind;
  return k == "memory" ? memory.size() : k == "pinned" ? pinned.size() : k == "graphs" ? graphs.size() : k == "modules" ? modules.size() : executables.size();
}

CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
    : error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : error == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND"
    : error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
  return *text ? 0 : INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_VALUE ? "invalid argument" : error == INVALID_CONTEXT ? "invalid device context"
    : error == NOT_FOUND ? "named symbol not found" : error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
    : error == LAUNCH_FAILED ? "unspecified launch failure" : nullptr;
  return *text ? 0 : INVALID_VALUE;
}

CUresult cuInit(unsigned int flags) { ENTER(false); return flags ? INVALID_VALUE : 0; }
CUresult cuDeviceGet(int* device, int ordinal) { ENTER(false); *device = 7; return ordinal ? INVALID_VALUE : 0; }
CUresult cuDevicePrimaryCtxRetain(void** context, int device) { ENTER(false); *context = &the_context; return device == 7 ? 0 : INVALID_VALUE; }
CUresult cuCtxSetCurrent(void* context) { ENTER(false); current = context; return context == &the_context ? 0 : INVALID_CONTEXT; }
CUresult cuCtxSynchronize() { ENTER(); return drain(); }
CUresult cuStreamCreate(void** made, unsigned int flags) { ENTER(); *made = &the_stream; return flags == 1 ? 0 : INVALID_VALUE; }
CUresult cuStreamSynchronize(void* s) {
  ENTER();
  return s == &the_stream ? drain() : INVALID_HANDLE;
}

// An image is the names of its functions; the number after a name's last underscore is the number of its parameters.
CUresult cuModuleLoadData(void** module, const void* image) { ENTER(); *module = new std::string((const char*)image); modules.insert(*module); return 0; }
CUresult cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER();
  if (!modules.count(module)) return INVALID_HANDLE;
  if (((std::string*)module)->find(name) == std::string::npos) return NOT_FOUND;
  *function = new Function{name, atoi(strrchr(name, '_') + 1)};
  return 0;
}
CUresult cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  ENTER();
  if (index >= (size_t)((Function*)function)->count) return INVALID_VALUE;
  *offset = 8 * index, *size = 8;
  return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
  ENTER();
  if (!size) return INVALID_VALUE;
  void* p = aligned_alloc(256, (size + 255) / 256 * 256);
  memset(p, 0x7b, size);
  memory[*address = (CUdeviceptr)p + DEVICE] = size;
  return 0;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER();
  if (!memory.erase(address)) return INVALID_VALUE;
  free((void*)(address - DEVICE));
  return 0;
}
CUresult cuMemHostAlloc(void** p, size_t size, unsigned int flags) {
  ENTER();
  if (!size || flags) return INVALID_VALUE;
  memset(*p = malloc(size), 0x7b, size);
  pinned.insert(*p);
  return 0;
}
CUresult cuMemFreeHost(void* p) { ENTER(); if (!pinned.erase(p)) return INVALID_VALUE; free(p); return 0; }

static CUresult later(void* s, std::function<CUresult()> work) { if (s != &the_stream) return INVALID_HANDLE; stream.push_back(work); return 0; }
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char value, size_t n, void* s) {
  ENTER();
  return later(s, [=] { char* to = host(p, n); if (to) memset(to, value, n); return to ? 0 : ILLEGAL_ADDRESS; });
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t n, void* s) {
  ENTER();
  return later(s, [=] { char* p = host(to, n); if (p) memcpy(p, from, n); return p ? 0 : ILLEGAL_ADDRESS; });
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t n, void* s) {
  ENTER();
  return later(s, [=] { char* p = host(from, n); if (p) memcpy(to, p, n); return p ? 0 : ILLEGAL_ADDRESS; });
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, void* s) {
  ENTER();
  return later(s, [=] { char *p = host(to, n), *q = host(from, n); if (p && q) memcpy(p, q, n); return p && q ? 0 : ILLEGAL_ADDRESS; });
}

CUresult cuGraphCreate(void** graph, unsigned int flags) { ENTER(); graphs.insert(*graph = new GraphState); return flags ? INVALID_VALUE : 0; }
CUresult cuGraphAddKernelNode_v2(void** made, void* graph, void* const* before, size_t count, const CUDA_KERNEL_NODE_PARAMS_v2* p) {
  ENTER();
  if (!graphs.count(graph)) return INVALID_HANDLE;
  if (p->blockDimY != 1 || p->blockDimZ != 1 || p->sharedMemBytes || p->extra || p->kern || p->ctx) return INVALID_VALUE;
  if (!p->gridDimX || !p->gridDimY || !p->gridDimZ || !p->blockDimX || p->blockDimX > 1024) return INVALID_VALUE;
  auto& nodes = ((GraphState*)graph)->nodes;
  auto* node = new Node{(Function*)p->func, {p->gridDimX, p->gridDimY, p->gridDimZ}, p->blockDimX};
  for (int i = 0; i < node->function->count; i++) node->values.push_back(*(CUdeviceptr*)p->kernelParams[i]);
  std::set<void*> seen;
  for (size_t i = 0; i < count; i++) {
    size_t at = 0;
    while (at < nodes.size() && nodes[at] != before[i]) at++;
    if (at == nodes.size() || !seen.insert(before[i]).second) return INVALID_VALUE;
    node->after.push_back(at);
  }
  nodes.push_back(node);
  *made = node;
  return 0;
}
// One edge after another, from a place that lets the later node start early.
struct CUgraphEdgeData { unsigned char from_port, to_port, type, reserved[5]; };
CUresult cuGraphAddDependencies_v2(void* graph, void* const* from, void* const* to, const CUgraphEdgeData* data, size_t count) {
  ENTER();
  if (!graphs.count(graph)) return INVALID_HANDLE;
  if (data->from_port != 1 || data->to_port || data->type != 1 || count != 1) return INVALID_VALUE;
  auto& nodes = ((GraphState*)graph)->nodes;
  size_t a = 0, b = 0;
  while (a < nodes.size() && nodes[a] != *from) a++;
  while (b < nodes.size() && nodes[b] != *to) b++;
  if (a >= b || b == nodes.size()) return INVALID_VALUE;
  nodes[b]->after.push_back(a);
  return 0;
}
CUresult cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
  ENTER();
  if (!graphs.count(graph) || flags) return INVALID_VALUE;
  auto* copy = new std::vector<Node>;
  for (Node* node : ((GraphState*)graph)->nodes) copy->push_back(*node);
  executables.insert(*made = copy);
  return 0;
}
CUresult cuGraphLaunch(void* executable, void* s) {
  ENTER();
  if (!executables.count(executable)) return INVALID_HANDLE;
  auto nodes = *(std::vector<Node>*)executable;
  return later(s, [nodes] { return execute(nodes); });
}
CUresult cuGraphExecDestroy(void* executable) {
  ENTER();
  if (!executables.erase(executable)) return INVALID_HANDLE;
  delete (std::vector<Node>*)executable;
  return 0;
}
CUresult cuGraphDestroy(void* graph) {
  ENTER();
  if (!graphs.erase(graph)) return INVALID_HANDLE;
  for (Node* node : ((GraphState*)graph)->nodes) delete node;
  delete (GraphState*)graph;
  return 0;
}
}
