// Tiles of rows by blocks of 16 outputs, over all inputs: accumulators stay in registers from the first input to the last.
//
// The loops: pieces of rows whose converted inputs fit the second-level cache; within, groups of blocks whose packed weights stay there
// while all rows of the piece pass; within, tiles of at most 8 rows. While the first tile of a group runs, the weights of the next group
// are fetched ahead, so that few rows run at the speed of memory.
#include "dense_kernels.h"

#include <cstdlib>

#include "vector.h"

namespace forkpoint {
namespace {

constexpr int max_tile_rows = 8;
constexpr int max_tile_blocks = 4;
constexpr int64_t piece_bytes = 768 << 10;

inline void prefetch(const char* address) { __builtin_prefetch(address, 0, 2); }

// How a step over the inputs reads weights and rows, for each dtype. `Input` is the form that rows are converted to.
template <class E>
struct OneByOne {
  using Element = E;
  using Input = float;
  static constexpr int64_t step_inputs = 1, step_bytes = 16 * sizeof(E);
  template <int Rows, int Blocks>
  static inline void step(const float* x, int64_t x_stride, const char* weights, int64_t block_bytes, Vector (&sums)[Rows][Blocks]) {
    Vector w[Blocks];
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; b++) w[b] = load(reinterpret_cast<const E*>(weights + b * block_bytes));
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      Vector input = broadcast(x[r * x_stride]);
#pragma GCC unroll 4
      for (int b = 0; b < Blocks; b++) sums[r][b] = multiply_add(input, w[b], sums[r][b]);
    }
  }
};
using Float32 = OneByOne<float>;
using Float16 = OneByOne<float16>;

struct Pair {
  Vector first, second;
};

#if defined(__AVX512F__)
inline Pair load_pair(const char* from) {
  __m512i bits = _mm512_loadu_si512(from);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000u))))}};
}
#elif defined(__AVX2__)
inline __m256 first_half(__m256i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)); }
inline __m256 second_half(__m256i bits) {
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000u))));
}
inline Pair load_pair(const char* from) {
  __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
  return {{first_half(low), first_half(high)}, {second_half(low), second_half(high)}};
}
#else
inline Pair load_pair(const char* from) {
  uint32_t bits[16];
  std::memcpy(bits, from, 64);
  return {each([&](int i) { return float_of(bits[i] << 16); }), each([&](int i) { return float_of(bits[i] & 0xffff0000u); })};
}
#endif

// Expanding bfloat16 costs one instruction for 16 weights, and then two fused products run in a cycle. Measured on Intel processors
// with both: twice the rate of their BF16 instruction.
struct Bfloat16 {
  using Element = bfloat16;
  using Input = float;
  static constexpr int64_t step_inputs = 2, step_bytes = 64;
  template <int Rows, int Blocks>
  static inline void step(const float* x, int64_t x_stride, const char* weights, int64_t block_bytes, Vector (&sums)[Rows][Blocks]) {
    Pair w[Blocks];
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; b++) w[b] = load_pair(weights + b * block_bytes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      Vector second = broadcast(x[r * x_stride + 1]);
#pragma GCC unroll 4
      for (int b = 0; b < Blocks; b++) sums[r][b] = multiply_add(second, w[b].second, sums[r][b]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      Vector first = broadcast(x[r * x_stride]);
#pragma GCC unroll 4
      for (int b = 0; b < Blocks; b++) sums[r][b] = multiply_add(first, w[b].first, sums[r][b]);
    }
  }
};

#if defined(__AVX512BF16__)
struct Bfloat16Pairs {
  using Element = bfloat16;
  using Input = bfloat16;
  static constexpr int64_t step_inputs = 2, step_bytes = 64;
  template <int Rows, int Blocks>
  static inline void step(const bfloat16* x, int64_t x_stride, const char* weights, int64_t block_bytes,
                          Vector (&sums)[Rows][Blocks]) {
    __m512bh w[Blocks];
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; b++) w[b] = (__m512bh)_mm512_loadu_si512(weights + b * block_bytes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * x_stride, 4);
      __m512bh input = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int b = 0; b < Blocks; b++) sums[r][b].value = _mm512_dpbf16_ps(sums[r][b].value, input, w[b]);
    }
  }
};
using ChosenBfloat16 = Bfloat16Pairs;
#else
using ChosenBfloat16 = Bfloat16;
#endif

// One thread's memory for converted rows; grows, and is kept for the next call.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  void* ensure(int64_t bytes) {
    if (bytes > bytes_) {
      std::free(memory_);
      memory_ = nullptr;
      bytes_ = (bytes + 4095) / 4096 * 4096;
      if (posix_memalign(&memory_, 64, size_t(bytes_)) != 0) std::abort();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};
thread_local Scratch scratch;

template <class T>
void convert_row(const T* from, T* to, int64_t count) {
  std::memcpy(to, from, size_t(count) * sizeof(T));
}
template <class T>
void convert_row(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(to + i, load(from + i));
  if (i < count) store_some(to + i, load_some(from + i, count - i), count - i);
}
inline void convert_row(const float* from, float* to, int64_t count) { std::memcpy(to, from, size_t(count) * sizeof(float)); }

// What a tile needs to know beside its rows.
struct Tile {
  const char* weights;  // of its first block
  const char* ahead;    // what to fetch meanwhile, laid out like weights
  int64_t block_bytes, steps;
  const void* bias;  // of its first output, or null
  int64_t outputs;   // that exist, at most 16 times its blocks
};

template <class Format, int Rows, int Blocks>
inline void finish(Vector (&sums)[Rows][Blocks], const Tile& tile, typename Format::Element* y, int64_t y_stride) {
  using Element = typename Format::Element;
  auto bias = static_cast<const Element*>(tile.bias);
  for (int b = 0; b < Blocks; b++) {
    int64_t left = tile.outputs - b * lanes;
    Vector add = !bias ? zero() : left >= lanes ? load(bias + b * lanes) : load_some(bias + b * lanes, left);
    for (int r = 0; r < Rows; r++) {
      Vector sum = bias ? sums[r][b] + add : sums[r][b];
      Element* to = y + r * y_stride + b * lanes;
      if (left >= lanes) store(to, sum);
      else store_some(to, sum, left);
    }
  }
}

template <class Format, int Rows, int Blocks>
void run_tile(const typename Format::Input* x, int64_t x_stride, const Tile& tile, typename Format::Element* y, int64_t y_stride) {
  Vector sums[Rows][Blocks];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; b++) sums[r][b] = zero();
  const char* weights = tile.weights;
  int64_t ahead = tile.ahead - tile.weights;
  for (int64_t s = 0; s < tile.steps; s++) {
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; b++) prefetch(weights + ahead + b * tile.block_bytes);
    Format::template step<Rows, Blocks>(x, x_stride, weights, tile.block_bytes, sums);
    x += Format::step_inputs;
    weights += Format::step_bytes;
  }
  finish<Format, Rows, Blocks>(sums, tile, y, y_stride);
}

template <class Format>
using RunTile = void (*)(const typename Format::Input*, int64_t, const Tile&, typename Format::Element*, int64_t);

#define FORKPOINT_TILES(ROWS) \
  {run_tile<Format, ROWS, 1>, run_tile<Format, ROWS, 2>, run_tile<Format, ROWS, 3>, run_tile<Format, ROWS, 4>}

template <class Format>
constexpr RunTile<Format> tiles[max_tile_rows][max_tile_blocks] = {
    FORKPOINT_TILES(1), FORKPOINT_TILES(2), FORKPOINT_TILES(3), FORKPOINT_TILES(4),
    FORKPOINT_TILES(5), FORKPOINT_TILES(6), FORKPOINT_TILES(7), FORKPOINT_TILES(8),
};

// Blocks side by side, so that accumulators, weights and one input fit the registers.
inline int64_t tile_blocks(int64_t tile_rows) { return tile_rows <= 6 ? 4 : 3; }

// Rows of the next tile: as even as can be.
inline int64_t next_rows(int64_t left) {
  int64_t tiles_left = (left + max_tile_rows - 1) / max_tile_rows;
  return (left + tiles_left - 1) / tiles_left;
}

template <class Format>
void run_piece(const Dense& dense, const typename Format::Input* x, int64_t x_stride, typename Format::Element* y,
               int64_t y_stride, int64_t rows, Slice slice) {
  using Element = typename Format::Element;
  int64_t steps = (dense.inputs + Format::step_inputs - 1) / Format::step_inputs, block_bytes = steps * Format::step_bytes;
  int64_t blocks = (dense.outputs + lanes - 1) / lanes, begin = slice.begin(blocks), end = slice.end(blocks);
  auto packed = static_cast<const char*>(dense.packed);
  int64_t width = tile_blocks(next_rows(rows));
  for (int64_t block = begin; block < end; block += width) {
    int64_t count = block + width <= end ? width : end - block, next = block + count;
    Tile tile{packed + block * block_bytes, packed + (next + count <= end ? next : block) * block_bytes, block_bytes, steps,
              dense.bias ? static_cast<const Element*>(dense.bias) + block * lanes : nullptr, dense.outputs - block * lanes};
    for (int64_t row = 0; row < rows;) {
      int64_t taken = next_rows(rows - row);
      tiles<Format>[taken - 1][count - 1](x + row * x_stride, x_stride, tile, y + row * y_stride + block * lanes, y_stride);
      tile.ahead = tile.weights;
      row += taken;
    }
  }
}

template <class Format>
void run(const Dense& dense, const void* x_, int64_t x_stride, void* y_, int64_t y_stride, int64_t rows, Slice slice) {
  using Element = typename Format::Element;
  using Input = typename Format::Input;
  auto x = static_cast<const Element*>(x_);
  auto y = static_cast<Element*>(y_);
  int64_t width = (dense.inputs + 15) / 16 * 16;
  int64_t piece = piece_bytes / (width * int64_t(sizeof(Input))) / max_tile_rows * max_tile_rows;
  if (piece < max_tile_rows) piece = max_tile_rows;
  for (int64_t row = 0; row < rows; row += piece) {
    int64_t taken = row + piece <= rows ? piece : rows - row;
    auto inputs = static_cast<Input*>(scratch.ensure(taken * width * int64_t(sizeof(Input))));
    for (int64_t r = 0; r < taken; r++) {
      convert_row(x + (row + r) * x_stride, inputs + r * width, dense.inputs);
      if (dense.inputs < width) inputs[r * width + dense.inputs] = Input{};
    }
    run_piece<Format>(dense, inputs, width, y + row * y_stride, y_stride, taken, slice);
  }
}

void dense_rows(const Dense& dense, const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t rows, Slice slice) {
  if (dense.dtype == Dtype::float32) run<Float32>(dense, x, x_stride, y, y_stride, rows, slice);
  else if (dense.dtype == Dtype::float16) run<Float16>(dense, x, x_stride, y, y_stride, rows, slice);
  else run<ChosenBfloat16>(dense, x, x_stride, y, y_stride, rows, slice);
}

}  // namespace

namespace FORKPOINT_ISA {
extern const DenseKernels dense_kernels = {dense_rows};
}

}  // namespace forkpoint
