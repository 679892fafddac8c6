// Attention by itself, for its tests and for measurements; a model's steps run it from the
// executor.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"
#include "bindings.h"
#include "kv_cache.h"
#include "memory.h"
#include "thread_pool.h"
#include "tier.h"

namespace nb = nanobind;

namespace trimaran {
namespace {

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

// One layer's attention on all threads of a pool.
class AttentionStep {
 public:
  AttentionStep(const Tier& tier, AttentionArgs args, int threads, bool grouped)
      : tier_(tier), args_(args), pool_(threads) {
    plan_attention(args_, threads, grouped, plan_);
    workspace_ = Memory(plan_.workspace_floats * sizeof(float) + 64);
    args_.workspace = workspace_.as<float>();
    const std::size_t bytes = attention_scratch_bytes(args.heads, args.kv_heads, args.head_dim);
    for (int thread = 0; thread < threads; ++thread) scratch_.emplace_back(bytes);
  }

  void run() {
    pool_.run([](void* step, int thread) { static_cast<AttentionStep*>(step)->work(thread); },
              this);
  }

 private:
  void work(int thread) {
    const int threads = pool_.size();
    void* scratch = scratch_[thread].as<void>();
    tier_.write_kv(args_, args_.rows * thread / threads, args_.rows * (thread + 1) / threads);
    pool_.barrier().wait();
    const int units = static_cast<int>(plan_.units.size());
    for (int i = next_unit_++; i < units; i = next_unit_++)
      tier_.attention_unit(args_, plan_.units[i], plan_.slices.data(), scratch);
    pool_.barrier().wait();
    const int merges = static_cast<int>(plan_.merges.size());
    for (int i = next_merge_++; i < merges; i = next_merge_++)
      tier_.merge_unit(args_, plan_.merges[i], scratch);
  }

  const Tier& tier_;
  AttentionArgs args_;
  ThreadPool pool_;
  AttentionPlan plan_;
  Memory workspace_;
  std::vector<Memory> scratch_;
  std::atomic<int> next_unit_{0}, next_merge_{0};
};

void check(bool good, const char* message) {
  if (!good) throw std::invalid_argument(message);
}

// q [T, heads, head_dim], k and v [T, kv_heads, head_dim] are written to the pages
// k_cache [blocks, kv_heads, head_dim / 2, block_size, 2] and
// v_cache [blocks, kv_heads, block_size / 2, head_dim, 2] (bf16 bits), then attended to.
// The result goes to out [T, heads, head_dim], or to out_bf16 [T / 16, steps, 16, 64] bytes
// where that is given. With kv "int8" the caches are [blocks, kv_heads, 1, block_size, bytes]
// with a page's head_dim + 4 bytes a position, as 16-bit words.
void attend(const std::string& isa, int threads, Array<const float, 3> q,
            Array<const float, 3> k, Array<const float, 3> v, Array<std::uint16_t, 5> k_cache,
            Array<std::uint16_t, 5> v_cache, Array<const std::int32_t, 1> positions,
            Array<const std::int32_t, 1> slots, Array<const std::int32_t, 1> row_starts,
            Array<const std::int32_t, 1> contexts, Array<const std::int32_t, 2> block_tables,
            float scale, Array<float, 3> out, std::optional<Array<std::uint8_t, 4>> out_bf16,
            bool grouped, const std::string& kv, int window) {
  AttentionArgs args;
  check(window >= 0, "window must not be negative");
  args.window = window;
  args.kv = kv_from_name(kv);
  args.q = q.data();
  args.k = k.data();
  args.v = v.data();
  args.out = out.data();
  args.out_bf16 = out_bf16 ? out_bf16->data() : nullptr;
  args.k_cache = reinterpret_cast<std::uint8_t*>(k_cache.data());
  args.v_cache = reinterpret_cast<std::uint8_t*>(v_cache.data());
  args.rows = static_cast<int>(q.shape(0));
  args.sequences = static_cast<int>(contexts.size());
  args.heads = static_cast<int>(q.shape(1));
  args.kv_heads = static_cast<int>(k.shape(1));
  args.head_dim = static_cast<int>(q.shape(2));
  args.block_size = static_cast<int>(k_cache.shape(3));
  args.table_width = static_cast<int>(block_tables.shape(1));
  args.scale = scale;
  args.positions = positions.data();
  args.slots = slots.data();
  args.row_starts = row_starts.data();
  args.contexts = contexts.data();
  args.block_tables = block_tables.data();
  const char* error =
      kv_shape_error(args.heads, args.kv_heads, args.head_dim, args.block_size);
  check(error == nullptr, error);
  check(threads > 0, "threads must be at least 1");
  const std::size_t rows = q.shape(0);
  check(k.shape(0) == rows && v.size() == k.size() && out.size() == q.size() &&
            positions.size() == rows && slots.size() == rows,
        "q, k, v, out, positions and slots must have the same number of rows");
  check(row_starts.size() == contexts.size() + 1 && block_tables.shape(0) == contexts.size(),
        "row_starts, contexts and block_tables must have the same number of sequences");
  const std::size_t steps = (q.shape(1) * q.shape(2) + kStep - 1) / kStep;
  check(!out_bf16 || out_bf16->size() == round_up(rows, kRowPad) * steps * kStepBytes,
        "out_bf16 must have 64 bytes for every 32 elements of a row, in tiles of 16 rows");
  const std::size_t block_bytes =
      k.shape(1) * kv_page_bytes(args.kv, args.head_dim, args.block_size);
  args.block_stride = block_bytes;
  check(k_cache.size() == v_cache.size() && k.shape(2) == q.shape(2) &&
            k_cache.size() * sizeof(std::uint16_t) == k_cache.shape(0) * block_bytes,
        "the caches must have the heads and dimensions of k");
  const Tier& tier = find_tier(isa);
  nb::gil_scoped_release unlocked;
  AttentionStep(tier, args, threads, grouped).run();
}

// Groups as (members, first chunk, end), and how many chunks of each sequence they have.
using Groups = std::vector<std::tuple<std::vector<std::int32_t>, int, int>>;

std::pair<Groups, std::vector<int>> prefix_groups(Array<const std::int32_t, 1> positions,
                                                  Array<const std::int32_t, 1> row_starts,
                                                  Array<const std::int32_t, 2> block_tables,
                                                  int block_size, int most_rows) {
  AttentionArgs args;
  args.sequences = static_cast<int>(block_tables.shape(0));
  args.block_size = block_size;
  args.table_width = static_cast<int>(block_tables.shape(1));
  args.positions = positions.data();
  args.row_starts = row_starts.data();
  args.block_tables = block_tables.data();
  check(row_starts.size() == block_tables.shape(0) + 1,
        "row_starts and block_tables must have the same number of sequences");
  PrefixGroups found;
  found.find(args, most_rows);
  std::pair<Groups, std::vector<int>> result;
  for (const PrefixGroups::Group& group : found.groups()) {
    const auto members = found.members().begin();
    result.first.emplace_back(std::vector<std::int32_t>(members + group.member_begin,
                                                        members + group.member_end),
                              group.chunk_begin, group.chunk_end);
  }
  for (int s = 0; s < args.sequences; ++s) result.second.push_back(found.shared_chunks(s));
  return result;
}

void copy_block(Array<std::uint16_t, 5> cache, int source, int target) {
  const int blocks = static_cast<int>(cache.shape(0));
  check(source >= 0 && source < blocks && target >= 0 && target < blocks,
        "source and target must be blocks of the cache");
  const std::size_t bytes = cache.size() / cache.shape(0) * sizeof(std::uint16_t);
  copy_kv_block(reinterpret_cast<std::uint8_t*>(cache.data()), bytes, bytes, source, target);
}

}  // namespace

void bind_attention(nb::module_& module) {
  module.def("attend", &attend, nb::arg("isa"), nb::arg("threads"), nb::arg("q"), nb::arg("k"),
             nb::arg("v"), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("positions"),
             nb::arg("slots"), nb::arg("row_starts"), nb::arg("contexts"),
             nb::arg("block_tables"), nb::arg("scale"), nb::arg("out"),
             nb::arg("out_bf16") = nb::none(), nb::arg("grouped") = true,
             nb::arg("kv") = "bf16", nb::arg("window") = 0);
  module.def("prefix_groups", &prefix_groups, nb::arg("positions"), nb::arg("row_starts"),
             nb::arg("block_tables"), nb::arg("block_size"), nb::arg("most_rows"));
  module.def("copy_block", &copy_block, nb::arg("cache"), nb::arg("source"),
             nb::arg("target"));
}

}  // namespace trimaran
