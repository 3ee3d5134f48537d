// Two passes over all records of a linear model with one output; compiled.py says what they give.
//
// Both read in 32 bits and sum up in 64, in an order that the number of records alone decides, and what a record adds is
// computed in the same way in every place.

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace {

using at::Tensor;
using Floats = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Floats::size();

constexpr double kLargestExponent = 700.0;  // exp of it is finite in 64 bits

void check(const Tensor& values, at::ScalarType type) {
  TORCH_CHECK(values.device().is_cpu() && values.scalar_type() == type && values.is_contiguous(),
              "compiled sums take contiguous CPU tensors of the types that compiled.py names.");
}

// Of one row after the other, or of four at once, which share what is loaded of the weights.
void weighted_sum(const float* row, const float* weights, const int64_t count, double* sum) {
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    total += static_cast<double>(row[i]) * static_cast<double>(weights[i]);
  }
  *sum = total;
}

void four_weighted_sums(const float* rows, const float* weights, const int64_t count, double* sums) {
  const float *one = rows, *two = one + count, *three = two + count, *four = three + count;
  double first = 0.0, second = 0.0, third = 0.0, fourth = 0.0;
#pragma omp simd reduction(+ : first, second, third, fourth)
  for (int64_t i = 0; i < count; ++i) {
    const double weight = static_cast<double>(weights[i]);
    first += static_cast<double>(one[i]) * weight;
    second += static_cast<double>(two[i]) * weight;
    third += static_cast<double>(three[i]) * weight;
    fourth += static_cast<double>(four[i]) * weight;
  }
  sums[0] = first, sums[1] = second, sums[2] = third, sums[3] = fourth;
}

// features [p, n], weights [n] float32 -> [p] float64.
Tensor weighted_sums(const Tensor& features, const Tensor& weights) {
  check(features, at::kFloat);
  check(weights, at::kFloat);
  const int64_t count = features.size(1);
  TORCH_CHECK(weights.size(0) == count, "there must be a weight for each record.");
  Tensor sums = weights.new_empty({features.size(0)}, at::kDouble);
  const float* from = features.const_data_ptr<float>();
  const float* by = weights.const_data_ptr<float>();
  double* into = sums.mutable_data_ptr<double>();
  int64_t row = 0;
  for (; row + 4 <= features.size(0); row += 4) {
    four_weighted_sums(from + row * count, by, count, into + row);
  }
  for (; row < features.size(0); ++row) {
    weighted_sum(from + row * count, by, count, into + row);
  }
  return sums;
}

// Sums up log(1 + exp(v)), cut off at log(most), as logarithms of products of several factors for each lane.
class Logistic {
 public:
  explicit Logistic(double bound, double most) : most_(most), most_factors_(kLargestExponent / bound) {}

  void add(Floats v, int64_t count) {
    std::array<float, kLanes> powers;
    Floats::blendv(v.exp(), Floats(0.0f), v.isnan()).store(powers.data());
    for (int64_t lane = 0; lane < count; ++lane) {
      const double factor = 1.0 + powers[lane];
      products_[lane] *= factor < most_ ? factor : most_;
    }
    if (++factors_ == most_factors_) {
      close();
    }
  }

  double total() {
    close();
    return total_;
  }

 private:
  void close() {
    for (double& product : products_) {
      total_ += std::log(product);
    }
    products_ = ones();
    factors_ = 0;
  }

  static std::array<double, kLanes> ones() {
    std::array<double, kLanes> values;
    values.fill(1.0);
    return values;
  }

  const double most_;
  const int64_t most_factors_;
  int64_t factors_ = 0;
  std::array<double, kLanes> products_ = ones();
  double total_ = 0.0;
};

// margins, slopes [n] float32, steps [k] float64 -> [k] float64.
Tensor logistic_losses(const Tensor& margins, const Tensor& slopes, const Tensor& steps, double bound, double most) {
  check(margins, at::kFloat);
  check(slopes, at::kFloat);
  check(steps, at::kDouble);
  const int64_t count = margins.numel();
  TORCH_CHECK(slopes.numel() == count, "there must be a slope for each margin.");
  Tensor sums = steps.new_empty(steps.sizes());
  const float* from = margins.const_data_ptr<float>();
  const float* along = slopes.const_data_ptr<float>();
  const double* by = steps.const_data_ptr<double>();
  double* into = sums.mutable_data_ptr<double>();
  for (int64_t candidate = 0; candidate < steps.numel(); ++candidate) {
    const Floats back(static_cast<float>(-by[candidate]));
    Logistic losses(bound, most);
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t some = std::min(kLanes, count - i);
      losses.add(at::vec::fmadd(back, Floats::loadu(along + i, some), Floats::loadu(from + i, some)), some);
    }
    into[candidate] = losses.total();
  }
  return sums;
}

}  // namespace

TORCH_LIBRARY(epsilonflow, library) {
  library.def("weighted_sums(Tensor features, Tensor weights) -> Tensor", weighted_sums);
  library.def("logistic_losses(Tensor margins, Tensor slopes, Tensor steps, float bound, float most) -> Tensor",
              logistic_losses);
}
