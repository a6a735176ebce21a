// What a simulated kernel (compiled with sim.h) and the simulator (simulator.cpp) know of each other.
#pragma once
#include <cstdint>
#include <source_location>

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };

namespace sim {

using Place = std::source_location;

// Where the running thread stands. `wave_mask` has a bit for every lane that the thread's wave really has.
struct Here {
  uint3 threadIdx, blockIdx;
  dim3 blockDim, gridDim;
  int warpSize, lane;
  uint64_t wave_mask;
  char *dynamic_shared;
};
extern constinit thread_local Here here;

// Everything that lanes do together is one call: each lane of `mask` brings its operands, waits until all of them
// have come to the same place, and goes on after `operation` has run once on the operands of all. lanes[i] points
// at what lane i brought, or is null where lane i takes no part.
using Operation = void (*)(void *const *lanes);
void collective(const char *name, Operation operation, void *operands, uint64_t mask, Place place);

// __syncthreads: waits until every thread of the block is at this same place.
void barrier(Place place);

// Ends the launch with an error at `place`.
[[noreturn, gnu::format(printf, 2, 3)]] void fault(Place place, const char *format, ...);

// A kernel as its module exports it; `call` reads argument i through arguments[i].
enum Kind : int { Pointer, Integer, Floating, Other };
struct Parameter { int size; Kind kind; };
struct Kernel {
  void (*call)(void *const *arguments);
  int count;
  const Parameter *parameters;
};

}  // namespace sim
