#include "engine/cuda/transformer.h"

#include <algorithm>

#include "engine/base/strings.h"
#include "engine/comm/lane_tree.h"
#include "engine/cuda/gemm.h"
#include "engine/kernels/rope.h"

namespace ds4::cuda {
namespace {

constexpr int64_t kHeadRows = kMaxFewRows;  // rows of logits at once

int64_t MaxVisible(const LayerConfig& layer, int64_t max_pos) {
  return layer.compress_ratio == 0 ? 0 : (max_pos + 1) / layer.compress_ratio;
}

}  // namespace

DeviceTransformer::DeviceTransformer(const ModelConfig& config, const RankPlan& plan,
                                     const LaneLayout& lanes, const DeviceWeights& weights,
                                     const TransformerOptions& options, DeviceGroup* group,
                                     Stream* stream, int num_sms)
    : config_(config),
      plan_(plan),
      lanes_(lanes),
      weights_(weights),
      options_(options),
      group_(group),
      launch_{stream, num_sms, true},
      num_roots_(MostRoots(lanes)) {
  for (int r = 0; r < lanes.world_size(); ++r) {
    most_lanes_ = std::max(most_lanes_, lanes.num_lanes_of(r));
  }
  most_vocab_ = MostVocab(config, lanes);
}

int64_t VocabBegin(const ModelConfig& config, const LaneLayout& lanes, int r) {
  const int lane = r == lanes.world_size() ? config.num_lanes : lanes.begin[r];
  return config.vocab_size * lane / config.num_lanes;
}
int64_t MostVocab(const ModelConfig& config, const LaneLayout& lanes) {
  int64_t most = 0;
  for (int r = 0; r < lanes.world_size(); ++r) {
    most = std::max(most, VocabBegin(config, lanes, r + 1) - VocabBegin(config, lanes, r));
  }
  return most;
}

int MostRoots(const LaneLayout& lanes) {
  size_t most = 1;
  for (int r = 0; r < lanes.world_size(); ++r) {
    most = std::max(most, SubtreesOf(lanes.begin[r], lanes.begin[r + 1]).size());
  }
  return static_cast<int>(most);
}

AttentionParams DeviceTransformer::ParamsOf(const LayerConfig& layer) const {
  AttentionParams params;
  params.num_heads = static_cast<int>(plan_.heads.size());
  params.head_dim = static_cast<int>(config_.head_dim);
  params.rope_dim = static_cast<int>(config_.rope_dim);
  params.sliding_window = static_cast<int>(config_.sliding_window);
  params.ratio = static_cast<int>(layer.compress_ratio);
  params.overlap = layer.attention == AttentionKind::kCompressed;
  params.norm_eps = config_.norm_eps;
  params.kv_type = options_.kv_type;
  if (params.overlap) {
    params.index_heads = static_cast<int>(config_.num_index_heads);
    params.index_dim = static_cast<int>(config_.index_head_dim);
    params.index_top_k = static_cast<int>(config_.index_top_k);
  }
  return params;
}

HcParams DeviceTransformer::hc() const {
  return {static_cast<int>(config_.num_streams), static_cast<int>(config_.hidden_dim),
          config_.sinkhorn_iterations, config_.hc_eps, config_.norm_eps};
}

void DeviceTransformer::Plan(Workspace& space) {
  const int64_t few = few_rows_, many = many_rows_;
  const int64_t rows = std::max(few, many);
  const int64_t hidden = config_.hidden_dim;
  const int64_t streams = config_.num_streams;
  const int64_t pairs = config_.rope_dim / 2;
  const int64_t lanes = plan_.lanes.size();
  const int64_t used = config_.num_experts_used;
  const int64_t local_heads = plan_.heads.size();
  const int64_t lane_ffn = plan_.ffn.size() / lanes;
  const int64_t lane_low = plan_.groups.size() / lanes * config_.output_lora_rank;

  plain_frequencies_ = space.TakeArray<double>(pairs);
  yarn_frequencies_ = space.TakeArray<double>(pairs);
  vocab_lanes_ = space.TakeArray<int32_t>(kMaxVocabLanes + 1);
  plain_cos_ = space.TakeArray<float>(rows * pairs);
  plain_sin_ = space.TakeArray<float>(rows * pairs);
  yarn_cos_ = space.TakeArray<float>(rows * pairs);
  yarn_sin_ = space.TakeArray<float>(rows * pairs);
  streams_ = space.TakeArray<float>(rows * streams * hidden);
  partial_ = space.TakeArray<float>(PartialFloats(hc(), rows));
  mixes_ = space.TakeArray<float>(rows * kMixSlots);
  post_ = space.TakeArray<float>(rows * streams);
  comb_ = space.TakeArray<float>(rows * streams * streams);

  x_ = space.TakeActivation(few, many, PaddedCols(hidden));
  qr_ = space.TakeActivation(few, many, PaddedCols(config_.q_lora_rank));
  const int64_t group_cols = PaddedCols(config_.heads_per_group() * config_.head_dim);
  attended_ = space.TakeActivation(few, many, plan_.groups.size() * group_cols);
  lanes_in_ = space.TakeActivation(few, many, lanes * PaddedCols(lane_low));
  hidden_ = space.TakeActivation(few * used, many * used, lanes * PaddedCols(lane_ffn));
  shared_hidden_ = space.TakeActivation(few, many, lanes * PaddedCols(lane_ffn));
  head_rows_ = std::min<int64_t>(kHeadRows, rows);
  head_in_ = space.TakeActivation(head_rows_, 0, PaddedCols(hidden));

  q_low_ = space.TakeArray<float>(rows * config_.q_lora_rank);
  kv_ = space.TakeArray<float>(rows * config_.head_dim);
  comp_kv_ = space.TakeArray<float>(rows * 2 * config_.head_dim);
  comp_gate_ = space.TakeArray<float>(rows * 2 * config_.head_dim);
  index_kv_ = space.TakeArray<float>(rows * 2 * config_.index_head_dim);
  index_gate_ = space.TakeArray<float>(rows * 2 * config_.index_head_dim);
  index_weights_ = space.TakeArray<float>(rows * std::max<int64_t>(1, config_.num_index_heads));
  q_ = space.TakeArray<float>(rows * local_heads * config_.head_dim);
  index_q_ = space.TakeArray<float>(
      rows * std::max<int64_t>(1, config_.num_index_heads * config_.index_head_dim));
  router_logits_ = space.TakeArray<float>(rows * config_.num_experts);
  roots_ = space.TakeArray<float>(num_roots_ * rows * hidden);
  if (many > 0) pair_out_ = space.TakeArray<float>(many * used * hidden);
  logits_ = space.TakeArray<float>(head_rows_ * most_vocab_);
  const int head_rows = static_cast<int>(head_rows_);
  own_choice_ = space.Take(ChoiceMessageBytes(head_rows, most_lanes_));
  merged_choice_ = space.Take(ChoiceMessageBytes(head_rows, config_.num_lanes));
  greedy_scratch_ = space.Take(GreedyScratchBytes(head_rows));
  draw_scratch_ = space.Take(DrawScratchBytes(head_rows));

  router_shape_.num_experts = static_cast<int>(config_.num_experts);
  router_shape_.used = static_cast<int>(used);
  router_shape_.scale = config_.expert_weights_scale;
  routing_memory_ = space.Take(RoutingBytes(rows, router_shape_));
  router_scratch_ = space.Take(RouterScratchBytes(few, config_.num_experts, hidden));

  int64_t index_bytes = 0, attention_bytes = 0;
  for (const LayerConfig& layer : config_.layers) {
    const AttentionParams params = ParamsOf(layer);
    const int64_t visible = MaxVisible(layer, options_.max_context - 1);
    if (params.overlap) {
      index_bytes = std::max(index_bytes, IndexScratchBytes(params, rows, visible));
    }
    const int64_t keys =
        config_.sliding_window +
        (params.overlap ? std::min<int64_t>(visible, params.index_top_k) : visible);
    attention_bytes = std::max(attention_bytes, AttentionScratchBytes(params, few, keys));
  }
  index_scratch_ = space.Take(index_bytes);
  attention_scratch_ = space.Take(attention_bytes);
  picks_ = space.TakeArray<int32_t>(rows * std::max<int64_t>(1, config_.index_top_k));
  pick_count_ = space.TakeArray<int32_t>(rows);
}

void DeviceTransformer::PlanCaches(Workspace& space) {
  const int64_t kv_bytes = KvBytes(options_.kv_type);
  const int64_t slots = options_.slots;
  caches_.assign(config_.num_layers, {});
  const auto compressor = [&](const LayerConfig& layer, int64_t dim, CompressorCache& cache) {
    const bool overlap = layer.attention == AttentionKind::kCompressed;
    cache.dim = static_cast<int>(dim);
    cache.width = static_cast<int>(ModelConfig::CompressorWidth(layer.attention, dim));
    const int64_t pending = overlap ? 2 * layer.compress_ratio : layer.compress_ratio;
    // Longer batches leave only their last rows there.
    cache.ring = static_cast<int>(pending + std::min<int64_t>(options_.max_rows, kMaxFewRows) +
                                  kRewindSlack);
    cache.max_rows =
        static_cast<int>(std::max<int64_t>(1, options_.max_context / layer.compress_ratio));
    cache.values = space.TakeArray<float>(slots * cache.ring * cache.width);
    cache.scores = space.TakeArray<float>(slots * cache.ring * cache.width);
    cache.rows = space.Take(slots * cache.max_rows * dim * kv_bytes);
  };
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const LayerConfig& layer = config_.layers[i];
    LayerCache& cache = caches_[i];
    cache.ring = static_cast<int>(config_.sliding_window + options_.max_rows + kRewindSlack);
    cache.window = space.Take(slots * cache.ring * config_.head_dim * kv_bytes);
    if (layer.attention == AttentionKind::kSliding) continue;
    compressor(layer, config_.head_dim, cache.compressor);
    if (layer.attention == AttentionKind::kCompressed) {
      compressor(layer, config_.index_head_dim, cache.indexer);
    }
  }
}

namespace {

// Row counts of the two kinds of pass.
void PassSizes(const TransformerOptions& options, bool f32_weights, int64_t& few, int64_t& many) {
  // Weights in float32 have no tensor-core path; lanes are only kept by the few-row kernels.
  const bool one_path = f32_weights || options.deterministic;
  few = std::min<int64_t>(options.max_rows, kMaxFewRows);
  many = one_path ? 0 : options.max_rows;
}

}  // namespace

int64_t DeviceTransformer::ScratchBytes(const ModelConfig& config, const RankPlan& plan,
                                        const LaneLayout& lanes, const TransformerOptions& options,
                                        bool has_f32_weights) {
  const DeviceWeights none;
  DeviceTransformer sizes(config, plan, lanes, none, options, nullptr, nullptr, 1);
  PassSizes(options, has_f32_weights, sizes.few_rows_, sizes.many_rows_);
  Workspace space;
  sizes.Plan(space);
  return space.used();
}

int64_t DeviceTransformer::CacheBytes(const ModelConfig& config,
                                      const TransformerOptions& options) {
  const DeviceWeights none;
  const LaneLayout lanes;
  const RankPlan plan;
  DeviceTransformer sizes(config, plan, lanes, none, options, nullptr, nullptr, 1);
  Workspace space;
  sizes.PlanCaches(space);
  return space.used();
}

Result<std::unique_ptr<DeviceTransformer>> DeviceTransformer::Create(
    const ModelConfig& config, const RankPlan& plan, const LaneLayout& lanes,
    const DeviceWeights& weights, const TransformerOptions& options, DeviceGroup* group,
    Stream* stream, int num_sms) {
  const int64_t groups_per_lane = plan.groups.size() / plan.lanes.size();
  if (config.num_streams > kMaxDeviceStreams || config.num_experts_used > kMaxExpertsUsed ||
      config.num_lanes > kMaxVocabLanes) {
    return UnimplementedError(
        StrCat("the model has ", config.num_streams, " streams, ", config.num_experts_used,
               " experts a token and ", config.num_lanes, " lanes; this device engine takes ",
               kMaxDeviceStreams, ", ", kMaxExpertsUsed, " and ", kMaxVocabLanes, " at most"));
  }
  if (groups_per_lane > 1 && config.output_lora_rank % 32 != 0) {
    return UnimplementedError(StrCat("output rank ", config.output_lora_rank, " with ",
                                     groups_per_lane, " groups a lane: must be a multiple of 32"));
  }
  std::unique_ptr<DeviceTransformer> made(
      new DeviceTransformer(config, plan, lanes, weights, options, group, stream, num_sms));
  PassSizes(options, weights.has_f32_matrices, made->few_rows_, made->many_rows_);
  Workspace sizes;
  made->Plan(sizes);
  ASSIGN_OR_RETURN(made->memory_, DeviceBuffer::Allocate(sizes.used()));
  Workspace cache_sizes;
  made->PlanCaches(cache_sizes);
  ASSIGN_OR_RETURN(made->cache_memory_, DeviceBuffer::Allocate(cache_sizes.used()));
  Workspace space(made->memory_.data());
  made->Plan(space);
  Workspace cache_space(made->cache_memory_.data());
  made->PlanCaches(cache_space);

  const std::vector<double> plain = RopeFrequencies(config.rope_base, config.rope_dim);
  const std::vector<double> yarn =
      YarnFrequencies(config.compress_rope_base, config.rope_dim,
                      {config.yarn_factor, config.yarn_original_context, config.yarn_beta_fast,
                       config.yarn_beta_slow});
  std::vector<int32_t> vocab;
  for (int64_t lane = plan.lanes.begin; lane <= plan.lanes.end; ++lane) {
    vocab.push_back(
        static_cast<int32_t>(config.vocab_size * lane / config.num_lanes - plan.vocab.begin));
  }
  const auto bytes = [](const auto& v) { return static_cast<int64_t>(v.size() * sizeof(v[0])); };
  RETURN_IF_ERROR(stream->CopyToDevice(made->plain_frequencies_, plain.data(), bytes(plain)));
  RETURN_IF_ERROR(stream->CopyToDevice(made->yarn_frequencies_, yarn.data(), bytes(yarn)));
  RETURN_IF_ERROR(stream->CopyToDevice(made->vocab_lanes_, vocab.data(), bytes(vocab)));
  RETURN_IF_ERROR(stream->Synchronize());
  return made;
}

int DeviceTransformer::FormFor(const Pass& pass, const PackedMatrix& w) const {
  if (pass.many) return kFormBF16;
  const bool plain = w.dtype == DType::kF32 || w.dtype == DType::kF16 || w.dtype == DType::kBF16;
  return plain ? kFormF32 : kFormQ8;
}

ActivationView DeviceTransformer::View(const ActivationView& view, const Pass& pass, int rows,
                                       int forms) const {
  return WithForms(view, rows, pass.many ? kFormBF16 : forms);
}

void DeviceTransformer::Products(const Pass& pass, const std::vector<Product>& products) {
  std::vector<GemmJob> gemms;
  std::vector<ProductJob> jobs;
  for (const Product& p : products) {
    const int rows = pass.rows;
    const ActivationView x = WithForms(*p.x, rows, FormFor(pass, p.w));
    const ActivationView out =
        p.out == nullptr ? ActivationView{} : View(*p.out, pass, rows, p.out_forms);
    if (pass.many) {
      gemms.push_back({p.w, x, p.x_col, p.y, p.w.rows, out, p.out_col, false});
    } else {
      jobs.push_back({p.w, x, p.x_col, p.y, p.w.rows, out, p.out_col});
    }
  }
  if (pass.many) {
    LaunchGemm(launch_, gemms);
  } else {
    for (size_t i = 0; i < jobs.size(); i += kMaxProductJobs) {
      LaunchProducts(
          launch_, std::span(jobs).subspan(i, std::min<size_t>(kMaxProductJobs, jobs.size() - i)));
    }
  }
}

Status DeviceTransformer::EndSite(const Pass& pass, const HcMix& mix, const PlainMatrix& next_fn) {
  const int64_t count = int64_t{pass.rows} * config_.hidden_dim;
  // A pass of many rows has added its lanes already: one vector for each rank.
  if (lanes_.world_size() > 1) {
    const int64_t vectors = pass.many ? 1 : num_roots_;
    RETURN_IF_ERROR(
        group_->AllGather(launch_, roots_, vectors * count * static_cast<int64_t>(sizeof(float))));
  }
  RootSet set;
  set.num_lanes = config_.num_lanes;
  for (int r = 0; r < lanes_.world_size(); ++r) {
    const auto* data =
        lanes_.world_size() == 1 ? roots_ : reinterpret_cast<const float*>(group_->Gathered(r));
    if (pass.many) {
      // Whole ranks in rank order, as a tree of their own.
      set.data[set.count] = data;
      set.begin[set.count] = r;
      set.size[set.count] = 1;
      ++set.count;
      continue;
    }
    for (const LaneSubtree& tree : SubtreesOf(lanes_.begin[r], lanes_.begin[r + 1])) {
      set.data[set.count] = data;
      set.begin[set.count] = tree.begin;
      set.size[set.count] = tree.size;
      ++set.count;
      data += count;
    }
  }
  if (pass.many) {
    set.num_lanes = 1;
    while (set.num_lanes < set.count) set.num_lanes *= 2;
  }
  LaunchHcPost(launch_, hc(), pass.rows, set, mix, next_fn, streams_, partial_);
  return LaunchStatus();
}

Status DeviceTransformer::Attention(const Pass& pass, int64_t index, DeviceTrace* trace) {
  const LayerConfig& layer = config_.layers[index];
  const DeviceBlock& block = weights_.blocks[index];
  const DeviceAttention& w = block.attention;
  const AttentionParams params = ParamsOf(layer);
  const bool compressed = layer.attention != AttentionKind::kSliding;
  const bool csa = layer.attention == AttentionKind::kCompressed;
  const int rows = pass.rows;
  const HcMix mix{post_, comb_};

  int forms = FormFor(pass, w.q_a) | FormFor(pass, w.kv);
  if (compressed) forms |= FormFor(pass, w.compressor.kv) | FormFor(pass, w.compressor.gate);
  if (csa) {
    forms |= FormFor(pass, w.index_compressor.kv) | FormFor(pass, w.index_compressor.gate) |
             FormFor(pass, w.index_proj);
  }
  LaunchHcPre(launch_, hc(), rows, streams_, partial_, block.attn_hc, w.norm, mixes_,
              WithForms(x_, rows, forms));

  std::vector<Product> products = {{w.q_a, &x_, 0, q_low_, nullptr, 0, 0},
                                   {w.kv, &x_, 0, kv_, nullptr, 0, 0}};
  if (compressed) {
    products.push_back({w.compressor.kv, &x_, 0, comp_kv_, nullptr, 0, 0});
    products.push_back({w.compressor.gate, &x_, 0, comp_gate_, nullptr, 0, 0});
  }
  if (csa) {
    products.push_back({w.index_compressor.kv, &x_, 0, index_kv_, nullptr, 0, 0});
    products.push_back({w.index_compressor.gate, &x_, 0, index_gate_, nullptr, 0, 0});
    products.push_back({w.index_proj, &x_, 0, index_weights_, nullptr, 0, 0});
  }
  Products(pass, products);

  // The indexer has nothing to choose while everything visible fits.
  const int64_t visible = MaxVisible(layer, pass.max_pos);
  const bool choose = csa && (visible > config_.index_top_k || trace != nullptr);
  int qr_forms = FormFor(pass, w.q_b);
  if (choose) qr_forms |= FormFor(pass, w.index_q_b);
  const RopeView rope = compressed ? RopeView{yarn_cos_, yarn_sin_, yarn_frequencies_}
                                   : RopeView{plain_cos_, plain_sin_, plain_frequencies_};
  StoreKeys store;
  store.kv = kv_;
  store.kv_norm = w.kv_norm;
  if (compressed) {
    store.comp_kv = comp_kv_;
    store.comp_gate = comp_gate_;
    store.ape = w.compressor.ape;
    store.comp_norm = w.compressor.norm;
  }
  if (csa) {
    store.index_kv = index_kv_;
    store.index_gate = index_gate_;
    store.index_ape = w.index_compressor.ape;
    store.index_norm = w.index_compressor.norm;
  }
  const RowNorm norm = {q_low_,     config_.q_lora_rank, static_cast<int>(config_.q_lora_rank),
                        w.q_a_norm, config_.norm_eps,    WithForms(qr_, rows, qr_forms)};
  LaunchNormAndStore(launch_, params, pass.step, rows, rope, store, caches_[index], norm,
                     BalanceOf(hc(), rows, mixes_, mix));
  products = {{w.q_b, &qr_, 0, q_, nullptr, 0, 0}};
  if (choose) products.push_back({w.index_q_b, &qr_, 0, index_q_, nullptr, 0, 0});
  Products(pass, products);
  if (choose) {
    LaunchIndex(launch_, params, pass.step, rows, rope, index_q_, index_weights_,
                caches_[index].indexer, visible, index_scratch_, picks_, pick_count_);
  }

  int attended_forms = FormFor(pass, w.o_a);
  AttentionJob job;
  job.q = q_;
  job.sinks = w.sinks;
  job.picks = choose ? picks_ : nullptr;
  job.pick_count = choose ? pick_count_ : nullptr;
  job.max_keys =
      config_.sliding_window + (csa ? std::min<int64_t>(visible, config_.index_top_k) : visible);
  job.heads_per_group = static_cast<int>(config_.heads_per_group());
  job.scratch = attention_scratch_;
  job.out = View(attended_, pass, rows, attended_forms);
  const bool prefill_kernel = pass.many && options_.kv_type == KvType::kBF16 &&
                              (params.head_dim == 512 || params.head_dim == 256);
  if (prefill_kernel) {
    LaunchPrefillAttention(launch_, params, pass.step, rows, rope, job, caches_[index]);
  } else {
    LaunchAttention(launch_, params, pass.step, rows, rope, job, caches_[index]);
  }

  const int64_t group_cols = PaddedCols(config_.heads_per_group() * config_.head_dim);
  const int64_t groups_per_lane = plan_.groups.size() / plan_.lanes.size();
  const int64_t lane_cols = PaddedCols(groups_per_lane * config_.output_lora_rank);
  const int low_forms = FormFor(pass, w.o_b);
  products.clear();
  for (int64_t g = 0; g < plan_.groups.size(); ++g) {
    const int64_t out_col =
        g / groups_per_lane * lane_cols + g % groups_per_lane * config_.output_lora_rank;
    products.push_back(
        {w.o_a.At(g), &attended_, g * group_cols, nullptr, &lanes_in_, out_col, low_forms});
  }
  Products(pass, products);
  if (pass.many) {
    LaunchLaneGemm(launch_, w.o_b, WithForms(lanes_in_, rows, kFormBF16), roots_, false);
  } else {
    LaunchLaneProduct(launch_, w.o_b, WithForms(lanes_in_, rows, low_forms),
                      static_cast<int>(plan_.lanes.begin), roots_);
  }
  if (trace != nullptr && csa) {
    Stream& stream = *launch_.stream;
    auto& picks = trace->index_picks.emplace_back(rows * config_.index_top_k);
    auto& counts = trace->index_counts.emplace_back(rows);
    RETURN_IF_ERROR(stream.CopyToHost(picks.data(), picks_, picks.size() * sizeof(int32_t)));
    RETURN_IF_ERROR(stream.CopyToHost(counts.data(), pick_count_, counts.size() * sizeof(int32_t)));
    RETURN_IF_ERROR(stream.Synchronize());
  } else if (trace != nullptr) {
    trace->index_picks.emplace_back();
    trace->index_counts.emplace_back();
  }
  return EndSite(pass, mix, block.ffn_hc.fn);
}

Status DeviceTransformer::Experts(const Pass& pass, int64_t index, DeviceTrace* trace) {
  const LayerConfig& layer = config_.layers[index];
  const DeviceBlock& block = weights_.blocks[index];
  const DeviceMoe& w = block.moe;
  const int rows = pass.rows;
  const int used = static_cast<int>(config_.num_experts_used);
  const int lanes = static_cast<int>(plan_.lanes.size());
  const HcMix mix{post_, comb_};
  const bool last = index + 1 == config_.num_layers;
  const PlainMatrix& next_fn = last ? weights_.head_hc.fn : weights_.blocks[index + 1].attn_hc.fn;

  const int up_forms = FormFor(pass, w.gate) | FormFor(pass, w.shared_gate);
  LaunchHcPre(launch_, hc(), rows, streams_, partial_, block.ffn_hc, w.norm, mixes_,
              WithForms(x_, rows, up_forms | FormFor(pass, w.router)));
  RouterParams router = router_shape_;
  router.bias = w.bias;
  router.hash_ids = w.hash_ids;
  const Routing routing =
      MakeRouting(routing_memory_, std::max(few_rows_, many_rows_), router_shape_);
  const SinkhornJob balance = BalanceOf(hc(), rows, mixes_, mix);
  if (!pass.many && IsRouterType(w.router.dtype)) {
    LaunchRouter(launch_, router, w.router, WithForms(x_, rows, kFormF32), pass.step.token, routing,
                 router_scratch_, balance);
  } else {
    Products(pass, {{w.router, &x_, 0, router_logits_, nullptr, 0, 0}});
    LaunchRoute(launch_, router, router_logits_, pass.step.token, rows, routing, balance);
  }

  ExpertsUp up;
  up.gate = w.gate;
  up.up = w.up;
  up.shared_gate = w.shared_gate;
  up.shared_up = w.shared_up;
  up.x = WithForms(x_, rows, up_forms);
  up.lane_cols = plan_.ffn.size() / lanes;
  up.limit = layer.swiglu_limit;
  up.shared_limit = layer.shared_swiglu_limit;
  up.out = View(hidden_, pass, rows * used, FormFor(pass, w.down));
  up.shared_out = View(shared_hidden_, pass, rows, FormFor(pass, w.shared_down));
  ExpertsDown down;
  down.down = w.down;
  down.shared_down = w.shared_down;
  down.lanes = lanes;
  down.lane_begin = static_cast<int>(plan_.lanes.begin);
  down.hidden = up.out;
  down.shared_hidden = up.shared_out;
  down.roots = roots_;
  if (pass.many) {
    LaunchExpertsUpGemm(launch_, up, routing, used);
    LaunchLaneGemm(launch_, w.shared_down, up.shared_out, roots_, false);
    LaunchExpertsDownGemm(launch_, down, routing, used, rows, pair_out_, roots_);
  } else {
    LaunchExpertsUp(launch_, up, routing, used);
    LaunchExpertsDown(launch_, down, routing, used, rows);
  }
  if (trace != nullptr) {
    auto& ids = trace->expert_ids.emplace_back(rows * used);
    RETURN_IF_ERROR(
        launch_.stream->CopyToHost(ids.data(), routing.ids, ids.size() * sizeof(int32_t)));
    RETURN_IF_ERROR(launch_.stream->Synchronize());
  }
  return EndSite(pass, mix, next_fn);
}

Status DeviceTransformer::Forward(const StepRows& step, int rows, int64_t max_pos, bool many,
                                  DeviceTrace* trace) {
  const int64_t limit = many ? many_rows_ : few_rows_;
  if (rows < 1 || rows > limit) {
    return InternalError(StrCat("a pass of ", rows, " rows, at most ", limit));
  }
  const Pass pass{step, rows, max_pos, many};
  RopeTables rope;
  rope.count = 2;
  rope.pairs = static_cast<int>(config_.rope_dim / 2);
  rope.tables[0] = {plain_frequencies_, plain_cos_, plain_sin_};
  rope.tables[1] = {yarn_frequencies_, yarn_cos_, yarn_sin_};
  LaunchEmbed(launch_, hc(), step, rows, weights_.embedding_type, weights_.embedding,
              weights_.blocks.front().attn_hc.fn, streams_, partial_, rope);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    RETURN_IF_ERROR(Attention(pass, i, trace));
    RETURN_IF_ERROR(Experts(pass, i, trace));
    if (trace != nullptr) {
      auto& streams = trace->streams.emplace_back(rows * config_.num_streams * config_.hidden_dim);
      RETURN_IF_ERROR(
          launch_.stream->CopyToHost(streams.data(), streams_, streams.size() * sizeof(float)));
      RETURN_IF_ERROR(launch_.stream->Synchronize());
    }
  }
  return LaunchStatus();
}

Status DeviceTransformer::Logits(const int32_t* row_index, int count, int rows) {
  if (count < 1 || count > head_rows_) {
    return InternalError(StrCat("logits of ", count, " rows, at most ", head_rows_));
  }
  const Pass pass{{}, count, 0, false};
  const ActivationView in = WithForms(head_in_, count, FormFor(pass, weights_.head));
  LaunchHcHead(launch_, hc(), rows, row_index, streams_, partial_, weights_.head_hc, weights_.norm,
               in);
  const ProductJob job{weights_.head, in, 0, logits_, weights_.head.rows, {}, 0};
  LaunchProducts(launch_, {&job, 1});
  return LaunchStatus();
}

Status DeviceTransformer::Greedy(int count) {
  const int own_lanes = static_cast<int>(plan_.lanes.size());
  chosen_ = MakeChoiceMessage(own_choice_, count, most_lanes_);
  LaunchGreedy(launch_, logits_, weights_.head.rows, count, static_cast<int32_t>(plan_.vocab.begin),
               vocab_lanes_, own_lanes, chosen_.choice, chosen_.lane_max, chosen_.lane_sum,
               greedy_scratch_);
  if (lanes_.world_size() == 1) return LaunchStatus();
  RETURN_IF_ERROR(group_->AllGather(launch_, own_choice_, ChoiceMessageBytes(count, most_lanes_)));
  RankMessages ranks;
  ranks.world_size = lanes_.world_size();
  ranks.message_lanes = most_lanes_;
  for (int r = 0; r < lanes_.world_size(); ++r) {
    ranks.messages[r] = group_->Gathered(r);
    ranks.num_lanes[r] = lanes_.num_lanes_of(r);
  }
  chosen_ = MakeChoiceMessage(merged_choice_, count, config_.num_lanes);
  LaunchMergeChoices(launch_, count, ranks, chosen_);
  return LaunchStatus();
}

Status DeviceTransformer::Draw(int count, const DrawRow* params, const int32_t* pos) {
  VocabPieces vocab;
  vocab.count = lanes_.world_size();
  if (vocab.count > 1) {
    RETURN_IF_ERROR(group_->AllGather(launch_, logits_,
                                      count * most_vocab_ * static_cast<int64_t>(sizeof(float))));
  }
  for (int r = 0; r < vocab.count; ++r) {
    const int64_t begin = VocabBegin(config_, lanes_, r);
    const int64_t ids = VocabBegin(config_, lanes_, r + 1) - begin;
    const auto* logits =
        vocab.count == 1 ? logits_ : reinterpret_cast<const float*>(group_->Gathered(r));
    vocab.pieces[r] = {logits, ids, static_cast<int32_t>(begin), static_cast<int32_t>(ids)};
  }
  LaunchDraw(launch_, count, params, pos, vocab, chosen_.choice, draw_scratch_);
  return LaunchStatus();
}

void DeviceTransformer::Advance(int rows, const DecodeQueue& queue) {
  const int lanes =
      lanes_.world_size() == 1 ? static_cast<int>(plan_.lanes.size()) : config_.num_lanes;
  LaunchAdvance(launch_, rows, chosen_.choice, chosen_.lane_max, chosen_.lane_sum, lanes, queue);
}

Status DeviceTransformer::VisitState(
    int slot, int64_t n, const std::function<void(const void* host, int64_t bytes)>& visit) {
  std::vector<std::byte> host;
  const auto rows = [&](const void* base, int64_t stride, int64_t ring, int64_t begin, int64_t end,
                        int64_t bytes) -> Status {
    for (int64_t p = std::max<int64_t>(0, begin); p < end; ++p) {
      host.resize(bytes);
      const auto* from = static_cast<const std::byte*>(base) + (slot * stride + p % ring) * bytes;
      RETURN_IF_ERROR(launch_.stream->CopyToHost(host.data(), from, bytes));
      RETURN_IF_ERROR(launch_.stream->Synchronize());
      visit(host.data(), bytes);
    }
    return OkStatus();
  };
  const int64_t kv = KvBytes(options_.kv_type);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const LayerConfig& layer = config_.layers[i];
    const LayerCache& cache = caches_[i];
    RETURN_IF_ERROR(rows(cache.window, cache.ring, cache.ring, n - config_.sliding_window + 1, n,
                         config_.head_dim * kv));
    const auto compressor = [&](const CompressorCache& c) -> Status {
      const int64_t complete = n / layer.compress_ratio;
      RETURN_IF_ERROR(rows(c.rows, c.max_rows, c.max_rows, 0, complete, c.dim * kv));
      const int64_t first = layer.attention == AttentionKind::kCompressed ? complete - 1 : complete;
      const int64_t from = first * layer.compress_ratio;
      const int64_t bytes = c.width * static_cast<int64_t>(sizeof(float));
      RETURN_IF_ERROR(rows(c.values, c.ring, c.ring, from, n, bytes));
      return rows(c.scores, c.ring, c.ring, from, n, bytes);
    };
    if (layer.attention != AttentionKind::kSliding) {
      RETURN_IF_ERROR(compressor(cache.compressor));
    }
    if (layer.attention == AttentionKind::kCompressed) {
      RETURN_IF_ERROR(compressor(cache.indexer));
    }
  }
  return OkStatus();
}

}  // namespace ds4::cuda
