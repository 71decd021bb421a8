// Runs a Metal or CUDA kernel on a CPU: each thread of a group is a fibre, fibres run in turn, groups one after the other.
// A barrier or a SIMD operation is a rendezvous. Just enough of both languages for this repository's kernels.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif
// Declared here: the C++ header brings overloads that the kernel languages do not have.
extern "C" { float expf(float); float logf(float); float sqrtf(float); float fmaf(float, float, float); }

typedef unsigned int uint; typedef unsigned short ushort; typedef unsigned long ulong; typedef unsigned char uchar;
struct alignas(8) uint2 { uint x, y; };
struct alignas(16) uint4 { uint x, y, z, w; };
struct uint3 { uint x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
// Elements the bodies only cast pointers to.
struct bfloat16_t { uint16_t bits; };
struct float16_t { uint16_t bits; };

namespace shim {
// A pointer into Metal's other address space: it can be indexed, and cast to nothing.
template <class T> struct constant {
  explicit constant(void* p) : first((const T*)p) {}
  const T& operator[](ulong i) const { return first[i]; }
 private:
  const T* first;
};
const int MOST = 1024;
const size_t STACK = 128 << 10;
static void* stack[MOST];
enum : uint8_t { RUNS, WAITS, DONE };
static uint8_t state[MOST];
static int now, count, left, waiting;
static uint3 group;
static void (*body)();
static uint32_t slot[MOST][2], words[MOST][6];
static int parity[MOST];

#if defined(__x86_64__) || defined(__aarch64__)
static void* fibre_sp[MOST];
static void* scheduler_sp;
extern "C" __attribute__((visibility("hidden"))) void shim_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl shim_switch
shim_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi); movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
const int SAVED = 6;
#else
#if defined(__APPLE__)
asm(".text\n.globl _shim_switch\n_shim_switch:\n"
#else
asm(".text\n.globl shim_switch\nshim_switch:\n"
#endif
    "sub sp, sp, #160\n stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n"
    "stp d14, d15, [sp, #144]\n mov x9, sp\n str x9, [x0]\n mov sp, x1\n ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n"
    "ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n ldp d8, d9, [sp, #96]\n"
    "ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n add sp, sp, #160\n ret\n");
#endif
inline void change(int from, int to) { shim_switch(from < 0 ? &scheduler_sp : &fibre_sp[from], to < 0 ? scheduler_sp : fibre_sp[to]); }
static void enter();
inline void prepare(int i) {
  // Stacks lie at equal distances: tops at different lines of a page, or all of them share one set of the processor's cache.
  char* top = (char*)stack[i] + STACK - (i & 63) * 576;
#if defined(__x86_64__)
  void** sp = (void**)top - 2 - SAVED;
  memset(sp, 0, (SAVED + 2) * sizeof(void*));
  sp[SAVED] = (void*)enter;
  fibre_sp[i] = sp;
#else
  char* sp = top - 160;
  memset(sp, 0, 160);
  *(void**)(sp + 88) = (void*)enter;
  fibre_sp[i] = sp;
#endif
}
#else
static ucontext_t fibre_context[MOST], scheduler_context;
inline void change(int from, int to) {
  swapcontext(from < 0 ? &scheduler_context : &fibre_context[from], to < 0 ? &scheduler_context : &fibre_context[to]);
}
static void enter();
inline void prepare(int i) {
  getcontext(&fibre_context[i]);
  fibre_context[i].uc_stack.ss_sp = stack[i];
  fibre_context[i].uc_stack.ss_size = STACK;
  makecontext(&fibre_context[i], enter, 0);
}
#endif

// A round: each fibre that does not wait at a barrier, in order, as far as it comes by itself; the last one ends it.
inline void yield() {
  const int me = now;
  int next = me + 1;
  while (next < count && state[next] != RUNS) next++;
  if (next < count) now = next;
  change(me, next < count ? next : -1);
}
static void enter() { body(); state[now] = DONE; left--; for (;;) yield(); }

// Barriers are released at the end of a round, so that the lanes of a SIMD group stay in step.
inline void barrier() { state[now] = WAITS; waiting++; yield(); }

template <class T> inline T shuffle(T value, int from) {
  static_assert(sizeof(T) == 4, "shuffles take 32-bit values");
  const int me = now, p = parity[me] ^= 1;
  memcpy(&slot[me][p], &value, 4);
  yield();
  T out;
  memcpy(&out, &slot[(me & ~31) | (from & 31)][p], 4);
  return out;
}

inline void launch(void (*kernel)(), int x, int y, int z, int threads) {
  body = kernel;
  count = threads;
  for (int i = 0; i < threads; i++) if (!stack[i]) stack[i] = aligned_alloc(64, STACK);
  for (group.z = 0; group.z < (uint)z; group.z++)
    for (group.y = 0; group.y < (uint)y; group.y++)
      for (group.x = 0; group.x < (uint)x; group.x++) {
        for (int i = 0; i < threads; i++) { prepare(i); state[i] = RUNS; parity[i] = 0; }
        left = threads; waiting = 0;
        while (left) {
          for (now = 0; state[now] != RUNS;) now++;
          change(-1, now);
          if (waiting < left) continue;
          for (int i = 0; i < threads; i++) if (state[i] == WAITS) state[i] = RUNS;
          waiting = 0;
        }
      }
}
}  // namespace shim

#ifdef SHIM_METAL
#define thread
#define device
#define threadgroup
#define SHM static
typedef uint atomic_uint;
enum { memory_order_relaxed };
inline uint atomic_fetch_add_explicit(uint* p, uint v, int) { const uint old = *p; *p += v; return old; }
inline uint atomic_load_explicit(uint* p, int) { return *p; }
enum class mem_flags { mem_threadgroup, mem_device };
inline void threadgroup_barrier(mem_flags) { shim::barrier(); }
template <class T> inline T simd_shuffle_xor(T v, uint m) { return shim::shuffle(v, (shim::now & 31) ^ m); }
template <class T> inline T simd_shuffle(T v, uint i) { return shim::shuffle(v, i); }
template <class A, class B> inline A as_type(B b) { static_assert(sizeof(A) == sizeof(B)); A a; memcpy(&a, &b, sizeof a); return a; }
namespace precise {
inline float exp(float x) { return ::expf(x); }
inline float log(float x) { return ::logf(x); }
inline float sqrt(float x) { return ::sqrtf(x); }
}  // namespace precise
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
#endif

#ifdef SHIM_CUDA
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define threadIdx (uint3{(uint)shim::now, 0, 0})
#define blockIdx (shim::group)
inline uint atomicAdd(uint* p, uint v) { const uint old = *p; *p += v; return old; }
inline void __syncthreads() { shim::barrier(); }
inline void __syncwarp() { shim::yield(); }
template <class T> inline T __shfl_xor_sync(uint, T v, uint m) { return shim::shuffle(v, (shim::now & 31) ^ m); }
template <class T> inline T __shfl_sync(uint, T v, uint i) { return shim::shuffle(v, i); }
inline int __any_sync(uint mask, int v) {
  for (uint m = 16; m; m >>= 1) v |= __shfl_xor_sync(mask, v, m);
  return v;
}
inline float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __uint_as_float(uint v) { float f; memcpy(&f, &v, 4); return f; }
inline uint __float_as_uint(float f) { uint v; memcpy(&v, &f, 4); return v; }
inline uint __byte_perm(uint a, uint b, uint s) {
  const uint64_t v = (uint64_t)b << 32 | a;
  uint out = 0;
  for (int i = 0; i < 4; i++) out |= (uint)((v >> (8 * ((s >> 4 * i) & 7))) & 255) << 8 * i;
  return out;
}
namespace shim {
// Addresses of shared memory are 32 bits wide: they are counted from the first that is asked for.
static char* shared_base;
inline uint shared_at(void* p) { if (!shared_base) shared_base = (char*)p - (1 << 20); return (uint)((char*)p - shared_base); }
inline char* shared(uint at) { return shared_base + at; }
inline float bf16_up(uint h) { return __uint_as_float(h << 16); }
inline float half_up(uint h) {
  const uint m = h & 0x7fff;
  const float f = m < 0x400 ? m * 0x1p-24f : m < 0x7c00 ? __uint_as_float((m << 13) + 0x38000000) : __uint_as_float(0x7f800000 | m << 13);
  return h & 0x8000 ? -f : f;
}
// D = A x B + D for one SIMD group: A 16 x 16 and B 16 x 8, sums in fp32 by ascending k.
template <float (*up)(uint)> inline void product(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  const int me = now, base = me & ~31, lane = me & 31, g = lane >> 2, t = lane & 3;
  const uint mine[6] = {a0, a1, a2, a3, b0, b1};
  yield();
  memcpy(words[me], mine, sizeof mine);
  yield();
  float a[2][16], b[2][16];
  for (int i = 0; i < 2; i++) for (int high = 0; high < 2; high++) for (int pair = 0; pair < 4; pair++) {
    const uint x = words[base + g * 4 + pair][i + 2 * high], y = words[base + (2 * t + i) * 4 + pair][4 + high];
    const int k = 8 * high + 2 * pair;
    a[i][k] = up(x & 0xffff); a[i][k + 1] = up(x >> 16);
    b[i][k] = up(y & 0xffff); b[i][k + 1] = up(y >> 16);
  }
  for (int i = 0; i < 4; i++) for (int k = 0; k < 16; k++) c[i] += a[i >> 1][k] * b[i & 1][k];
}
inline void matrix(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) { product<bf16_up>(c, a0, a1, a2, a3, b0, b1); }
inline void matrix_half(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) { product<half_up>(c, a0, a1, a2, a3, b0, b1); }
}  // namespace shim
#endif
