#include "dense.h"

#include <nanobind/nanobind.h>

#include "dense_kernels.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nb = nanobind;

namespace forkpoint {
namespace {

constexpr int64_t lanes = 16;

int64_t step_of(Dtype dtype) { return dtype == Dtype::bfloat16 ? 2 : 1; }

// Where W[output, input] lies in the packed form.
struct Place {
  int64_t step, steps;
  Place(int64_t inputs, Dtype dtype) : step(step_of(dtype)), steps((inputs + step - 1) / step) {}
  int64_t of(int64_t output, int64_t input) const {
    return ((output / lanes * steps + input / step) * lanes + output % lanes) * step + input % step;
  }
};

// Bits only: elements are moved as unsigned numbers of their size.
template <class Bits>
void pack_bits(const Bits* plain, Bits* packed, int64_t inputs, int64_t outputs, Dtype dtype, Slice slice) {
  Place place(inputs, dtype);
  int64_t blocks = (outputs + lanes - 1) / lanes, width = place.steps * place.step;
  for (int64_t block = slice.begin(blocks); block < slice.end(blocks); block++)
    for (int64_t output = block * lanes; output < (block + 1) * lanes; output++)
      for (int64_t input = 0; input < width; input++)
        packed[place.of(output, input)] = output < outputs && input < inputs ? plain[output * inputs + input] : Bits(0);
}

template <class Bits>
void read_output(const Bits* packed, int64_t output, Bits* plain, int64_t inputs, const Place& place) {
  if (place.step == 1) {
    const Bits* from = packed + place.of(output, 0);
    for (int64_t input = 0; input < inputs; input++) plain[input] = from[input * lanes];
    return;
  }
  const Bits* from = packed + place.of(output, 0);
  int64_t input = 0;
  for (; input + 2 <= inputs; input += 2, from += 2 * lanes) std::memcpy(plain + input, from, 2 * sizeof(Bits));
  if (input < inputs) plain[input] = *from;
}

template <class Bits>
void unpack_bits(const Bits* packed, Bits* plain, int64_t inputs, int64_t outputs, Dtype dtype, Slice slice) {
  Place place(inputs, dtype);
  for (int64_t output = slice.begin(outputs); output < slice.end(outputs); output++)
    read_output(packed, output, plain + output * inputs, inputs, place);
}

template <class Bits>
void embed_bits(const Dense& dense, const int64_t* ids, Bits* y, int64_t y_stride, int64_t rows, Slice slice) {
  Place place(dense.inputs, dense.dtype);
  for (int64_t row = slice.begin(rows); row < slice.end(rows); row++)
    read_output(static_cast<const Bits*>(dense.packed), ids[row], y + row * y_stride, dense.inputs, place);
}

}  // namespace

int64_t packed_elements(int64_t inputs, int64_t outputs, Dtype dtype) {
  int64_t step = step_of(dtype);
  return (outputs + lanes - 1) / lanes * lanes * ((inputs + step - 1) / step * step);
}

void pack(const void* plain, void* packed, int64_t inputs, int64_t outputs, Dtype dtype, Slice slice) {
  if (dtype == Dtype::float32)
    pack_bits(static_cast<const uint32_t*>(plain), static_cast<uint32_t*>(packed), inputs, outputs, dtype, slice);
  else
    pack_bits(static_cast<const uint16_t*>(plain), static_cast<uint16_t*>(packed), inputs, outputs, dtype, slice);
}

void unpack(const void* packed, void* plain, int64_t inputs, int64_t outputs, Dtype dtype, Slice slice) {
  if (dtype == Dtype::float32)
    unpack_bits(static_cast<const uint32_t*>(packed), static_cast<uint32_t*>(plain), inputs, outputs, dtype, slice);
  else
    unpack_bits(static_cast<const uint16_t*>(packed), static_cast<uint16_t*>(plain), inputs, outputs, dtype, slice);
}

void dense(const Dense& dense, const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t rows, Slice slice) {
  chosen_dense_kernels().dense(dense, x, x_stride, y, y_stride, rows, slice);
}

void packed_embedding(const Dense& dense, const int64_t* ids, void* y, int64_t y_stride, int64_t rows, Slice slice) {
  if (dense.dtype == Dtype::float32) embed_bits(dense, ids, static_cast<uint32_t*>(y), y_stride, rows, slice);
  else embed_bits(dense, ids, static_cast<uint16_t*>(y), y_stride, rows, slice);
}

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Asks for pages of 2 MiB, before the first write: few rows read all weights, and then address translation costs.
void advise_large_pages(uintptr_t address, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 4096;
  uintptr_t begin = (address + page - 1) / page * page, end = (address + uintptr_t(bytes)) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)address, (void)bytes;
#endif
}

}  // namespace

void register_dense(nb::module_& m) {
  m.def("packed_elements", [](int64_t inputs, int64_t outputs, int dtype) { return packed_elements(inputs, outputs, Dtype(dtype)); });
  m.def("advise_large_pages", &advise_large_pages, nb::arg("address"), nb::arg("bytes"));
  m.def("pack", [](uintptr_t plain, uintptr_t packed, int64_t inputs, int64_t outputs, int dtype, int threads) {
    nb::gil_scoped_release released;
    parallel(threads, [&](Slice slice) { pack(at<void>(plain), at<void>(packed), inputs, outputs, Dtype(dtype), slice); });
  });
  m.def("unpack", [](uintptr_t packed, uintptr_t plain, int64_t inputs, int64_t outputs, int dtype, int threads) {
    nb::gil_scoped_release released;
    parallel(threads, [&](Slice slice) { unpack(at<void>(packed), at<void>(plain), inputs, outputs, Dtype(dtype), slice); });
  });
  m.def("dense", [](uintptr_t x, int64_t x_stride, uintptr_t packed, uintptr_t bias, uintptr_t y, int64_t y_stride, int64_t rows,
                    int64_t inputs, int64_t outputs, int dtype, int threads) {
    nb::gil_scoped_release released;
    Dense weights{at<void>(packed), at<void>(bias), inputs, outputs, Dtype(dtype)};
    parallel(threads, [&](Slice slice) { dense(weights, at<void>(x), x_stride, at<void>(y), y_stride, rows, slice); });
  });
  m.def("packed_embedding", [](uintptr_t ids, uintptr_t packed, uintptr_t y, int64_t y_stride, int64_t rows, int64_t inputs,
                               int64_t outputs, int dtype, int threads) {
    nb::gil_scoped_release released;
    Dense weights{at<void>(packed), nullptr, inputs, outputs, Dtype(dtype)};
    parallel(threads, [&](Slice slice) { packed_embedding(weights, at<int64_t>(ids), at<void>(y), y_stride, rows, slice); });
  });
}

}  // namespace forkpoint
