// Threads of one kernel call. A kernel is given its Slice of the work and never knows who else runs.
#pragma once
#include <omp.h>

#include <cstdint>

namespace forkpoint {

struct Slice {
  int thread = 0;
  int threads = 1;

  // This thread's half-open range of `count` items.
  int64_t begin(int64_t count) const { return count * thread / threads; }
  int64_t end(int64_t count) const { return count * (thread + 1) / threads; }
};

// Runs body(Slice) on `threads` threads, and in place for one.
template <class Body>
static inline void parallel(int threads, Body body) {
  if (threads <= 1) {
    body(Slice{});
    return;
  }
#pragma omp parallel num_threads(threads)
  body(Slice{omp_get_thread_num(), omp_get_num_threads()});
}

// Waits for all threads of the surrounding parallel().
static inline void barrier() {
#pragma omp barrier
}

}  // namespace forkpoint
