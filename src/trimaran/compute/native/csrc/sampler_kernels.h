// The sampler's passes over a whole vocabulary. Included by each tier inside its own
// compilation unit; sums run in 16 lanes whatever the width of a vector, and nothing is
// fused, so all tiers give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"
#include "sampler.h"

namespace trimaran::TRIMARAN_TIER {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// Compiler vectors of the tier's width; unaligned in memory.
typedef float Floats __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef std::int32_t Ints __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef std::uint32_t Bits __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef float HalfFloats __attribute__((vector_size(2 * kWidth), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(4 * kWidth), aligned(8), may_alias));

constexpr int kVectors = kScanLanes / kWidth;  // vectors in 16 lanes

static inline Floats floats_at(const float* p) { return *reinterpret_cast<const Floats*>(p); }
static inline Floats spread(float value) { return value - Floats{}; }

// A bit for each lane of a comparison that holds.
static inline unsigned lanes_set(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#else
  unsigned bits = 0;
  for (int lane = 0; lane < kWidth; ++lane) bits |= (mask[lane] & 1u) << lane;
  return bits;
#endif
}

static bool scan_row(const float* row, int vocab, float* maxima) {
  const Floats none = spread(-__builtin_inff());
  Ints bad = {};
  for (int start = 0; start < vocab; start += kScanSpan, maxima += kScanLanes) {
    Floats top[kVectors];
    for (int v = 0; v < kVectors; ++v) top[v] = none;
    const int end = vocab - start < kScanSpan ? vocab - start : kScanSpan;
    const float* span = row + start;
    int i = 0;
    for (; i + kScanLanes <= end; i += kScanLanes)
      for (int v = 0; v < kVectors; ++v) {
        const Floats x = floats_at(span + i + v * kWidth);
        bad |= x != x;
        top[v] = x > top[v] ? x : top[v];
      }
    std::memcpy(maxima, top, sizeof top);
    for (; i < end; ++i) {
      bad[0] |= span[i] != span[i] ? -1 : 0;
      float& best = maxima[i % kScanLanes];
      if (span[i] > best) best = span[i];
    }
  }
  std::int32_t any = 0;
  for (int lane = 0; lane < kWidth; ++lane) any |= bad[lane];
  return any == 0;
}

static int collect_tokens(const float* row, int vocab, const float* maxima, float bound,
                          int room, Candidate* candidates) {
  const Floats limit = spread(bound);
  int count = 0;
  for (int start = 0; start < vocab; start += kScanSpan, maxima += kScanLanes) {
    std::int32_t any = 0;
    for (int lane = 0; lane < kScanLanes; ++lane) any |= maxima[lane] >= bound;
    if (any == 0) continue;
    const int end = vocab - start < kScanSpan ? vocab : start + kScanSpan;
    int id = start;
    for (; id + kWidth <= end; id += kWidth) {
      unsigned found = lanes_set(floats_at(row + id) >= limit);
      for (; found != 0 && count < room; found &= found - 1) {
        const int token = id + __builtin_ctz(found);
        candidates[count++] = {row[token], 0.0f, token};
      }
      if (count == room) return count;
    }
    for (; id < end; ++id) {
      if (row[id] < bound) continue;
      if (count == room) return count;
      candidates[count++] = {row[id], 0.0f, id};
    }
  }
  return count;
}

static inline Floats weight_of(Floats logit, const WeightScale& scale) {
  const Floats least = spread(-1e30f);  // keeps -inf * low from being NaN
  Floats below = logit - scale.peak;
  below = below > least ? below : least;
  const Floats x = below * scale.high + below * scale.low;
  const Floats shifted = x + kRoundMagic;  // its low bits are round(x)
  const Floats part = x - (shifted - kRoundMagic);
  Floats p = spread(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = p * part + kExp2[i];
  Bits power;
  std::memcpy(&power, &shifted, sizeof power);
  power = (power << 23) + 0x3f800000u;
  Floats factor;
  std::memcpy(&factor, &power, sizeof factor);
  return x >= -126.0f ? p * factor : Floats{};
}

static void weigh_logits(const float* logits, int count, const WeightScale& scale,
                         float* weights) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth)
    *reinterpret_cast<Floats*>(weights + i) = weight_of(floats_at(logits + i), scale);
  if (i == count) return;
  float last[kWidth] = {};
  std::memcpy(last, logits + i, (count - i) * sizeof *last);
  const Floats rest = weight_of(floats_at(last), scale);
  std::memcpy(weights + i, &rest, (count - i) * sizeof *last);
}

// The sum of one mass block, of which `logits` has all kMassBlock entries.
static double block_mass(const float* logits, int first_id, const Cut& cut,
                         const WeightScale& scale) {
  constexpr int kHalf = kWidth / 2;
  constexpr int kSums = kScanLanes / kHalf;
  const Floats limit = spread(cut.logit);
  Ints id;
  for (int lane = 0; lane < kWidth; ++lane) id[lane] = first_id + lane;
  Doubles sums[kSums] = {};
  float weights[kScanLanes];
  for (int i = 0; i < kMassBlock; i += kScanLanes) {
    for (int v = 0; v < kVectors; ++v, id += kWidth) {
      const Floats x = floats_at(logits + i + v * kWidth);
      const Ints kept = (x > limit) | ((x == limit) & (id <= cut.id));
      const Floats weight = kept ? weight_of(x, scale) : Floats{};
      std::memcpy(weights + v * kWidth, &weight, sizeof weight);
    }
    for (int s = 0; s < kSums; ++s)
      sums[s] += __builtin_convertvector(
          *reinterpret_cast<const HalfFloats*>(weights + s * kHalf), Doubles);
  }
  double lanes[kScanLanes];
  std::memcpy(lanes, sums, sizeof lanes);
  for (int half = kScanLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

static void block_masses(const float* row, int vocab, const Cut& cut, const WeightScale& scale,
                         double* masses) {
  int start = 0;
  for (; start + kMassBlock <= vocab; start += kMassBlock)
    *masses++ = block_mass(row + start, start, cut, scale);
  if (start == vocab) return;
  float last[kMassBlock];
  for (int i = 0; i < kMassBlock; ++i)
    last[i] = start + i < vocab ? row[start + i] : -__builtin_inff();
  *masses = block_mass(last, start, cut, scale);
}

static int rank_before(const float* row, int vocab, std::int32_t token) {
  const Floats limit = spread(row[token]);
  Ints count = {}, id;
  for (int lane = 0; lane < kWidth; ++lane) id[lane] = lane;
  int i = 0;
  for (; i + kWidth <= vocab; i += kWidth, id += kWidth) {
    const Floats x = floats_at(row + i);
    count -= (x > limit) | ((x == limit) & (id < token));
  }
  int total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += count[lane];
  for (; i < vocab; ++i) total += row[i] > row[token] || (row[i] == row[token] && i < token);
  return total;
}

constexpr SamplerKernels kSamplerKernels = {scan_row, collect_tokens, weigh_logits, block_masses,
                                            rank_before};

}  // namespace trimaran::TRIMARAN_TIER
