// What a build with CUDA calls by cuDNN's names: convolutions, BatchNorm, recurrent layers.
#pragma once
#include <ATen/native/RNN.h>
#include <torch/csrc/autograd/autograd.h>

#include "kernels.h"

namespace stand_in {
inline Tensor convolution(const char* name, const Tensor& x, const Tensor& w, const Maybe& bias, IntArrayRef padding, IntArrayRef output_padding,
                          IntArrayRef stride, IntArrayRef dilation, bool transposed, int64_t groups) {
  Call call(name);
  auto x_ = call.in(x), w_ = call.in(w), b_ = call.in(bias);
  call.same_device();
  call.start();
  return call.fresh(at::convolution(x_, w_, b_, stride, padding, dilation, transposed, output_padding, groups));
}
inline Tensor cudnn_convolution(const Tensor& x, const Tensor& w, IntArrayRef padding, IntArrayRef stride, IntArrayRef dilation, int64_t groups, bool, bool, bool) {
  return convolution("aten::cudnn_convolution", x, w, {}, padding, std::vector<int64_t>(padding.size(), 0), stride, dilation, false, groups);
}
inline Tensor cudnn_convolution_transpose(const Tensor& x, const Tensor& w, IntArrayRef padding, IntArrayRef output_padding, IntArrayRef stride,
                                          IntArrayRef dilation, int64_t groups, bool, bool, bool) {
  return convolution("aten::cudnn_convolution_transpose", x, w, {}, padding, output_padding, stride, dilation, true, groups);
}
inline Tensor depthwise(const Tensor& x, const Tensor& w, IntArrayRef, const Maybe& bias, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  return convolution("aten::_conv_depthwise", x, w, bias, padding, std::vector<int64_t>(padding.size(), 0), stride, dilation, false, x.size(1));
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(const Tensor& x, const Tensor& w, const Maybe& b, const Maybe& mean, const Maybe& variance,
                                                                   bool training, double momentum, double eps) {
  Call call("aten::cudnn_batch_norm");
  auto x_ = call.in(x), w_ = call.in(w), b_ = call.in(b);
  auto mean_ = mean ? call.in(*mean, training) : Tensor(), variance_ = variance ? call.in(*variance, training) : Tensor();
  call.same_device();
  call.start();
  auto [y, m, v] = at::native_batch_norm(x_, w_, b_, mean_, variance_, training, momentum, eps);
  auto reserve = at::empty({training ? (x.numel() + 7) / 8 : 0}, x.options().dtype(at::kByte));
  return {call.fresh(y), call.fresh(m), call.fresh(v), reserve};
}
inline std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(const Tensor& x, const Tensor& dy, const Tensor& w, const Maybe& mean, const Maybe& variance,
                                                                    const Maybe& save_mean, const Maybe& save_variance, double eps, const Tensor& reserve) {
  Call call("aten::cudnn_batch_norm_backward");
  auto x_ = call.in(x), dy_ = call.in(dy), w_ = call.in(w), mean_ = call.in(mean), variance_ = call.in(variance);
  auto m_ = call.in(save_mean), v_ = call.in(save_variance);
  call.in(reserve);
  call.same_device();
  call.start();
  auto [dx, dw, db] = at::native_batch_norm_backward(dy_, x_, w_, mean_, variance_, m_, v_, true, eps, {true, true, true});
  return {call.fresh(dx), call.fresh(dw), call.fresh(db)};
}

// One call computes all layers of a recurrent network; backward computes forward again.
struct Recurrent {
  int64_t mode, layers, stride;
  bool batch_first, training, bidirectional, packed;
  double dropout;
  IntArrayRef sizes;
};
inline std::vector<Tensor> run_recurrent(const Recurrent& how, const Tensor& x, at::TensorList w, const Tensor& h, const Tensor& c) {
  bool lstm = how.mode == 2, bias = how.stride == 4;
  Tensor y, hy, cy;
  if (how.packed) {
    auto sizes = at::tensor(how.sizes, at::kLong);
    if (lstm) std::tie(y, hy, cy) = at::lstm(x, sizes, {h, c}, w, bias, how.layers, 0.0, how.training, how.bidirectional);
    else if (how.mode == 3) std::tie(y, hy) = at::gru(x, sizes, h, w, bias, how.layers, 0.0, how.training, how.bidirectional);
    else if (how.mode == 1) std::tie(y, hy) = at::rnn_tanh(x, sizes, h, w, bias, how.layers, 0.0, how.training, how.bidirectional);
    else std::tie(y, hy) = at::rnn_relu(x, sizes, h, w, bias, how.layers, 0.0, how.training, how.bidirectional);
  } else {
    if (lstm) std::tie(y, hy, cy) = at::lstm(x, {h, c}, w, bias, how.layers, 0.0, how.training, how.bidirectional, how.batch_first);
    else if (how.mode == 3) std::tie(y, hy) = at::gru(x, h, w, bias, how.layers, 0.0, how.training, how.bidirectional, how.batch_first);
    else if (how.mode == 1) std::tie(y, hy) = at::rnn_tanh(x, h, w, bias, how.layers, 0.0, how.training, how.bidirectional, how.batch_first);
    else std::tie(y, hy) = at::rnn_relu(x, h, w, bias, how.layers, 0.0, how.training, how.bidirectional, how.batch_first);
  }
  return lstm ? std::vector<Tensor>{y, hy, cy} : std::vector<Tensor>{y, hy};
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> cudnn_rnn(
    const Tensor& x, at::TensorList weight, int64_t stride, const Maybe& buffer, const Tensor& h, const Maybe& c, int64_t mode, int64_t, int64_t projected,
    int64_t layers, bool batch_first, double dropout, bool training, bool bidirectional, IntArrayRef sizes, const Maybe& state) {
  TORCH_CHECK(!projected && (!training || dropout == 0), "the stand-in has no recurrent layers with projections, or with dropout");
  Call call("aten::_cudnn_rnn");
  std::vector<Tensor> w_;
  for (auto& w : weight) w_.push_back(call.in(w));
  auto x_ = call.in(x), h_ = call.in(h), c_ = call.in(c);
  if (buffer) call.in(*buffer);
  call.same_device();
  call.start();
  Recurrent how{mode, layers, stride, batch_first, training, bidirectional, !sizes.empty(), dropout, sizes};
  at::NoGradGuard no_grad;
  auto made = run_recurrent(how, x_, w_, h_, c_);
  auto reserve = at::empty({training ? std::max<int64_t>(1, x.numel()) : 0}, x.options().dtype(at::kByte));
  auto flat = buffer && buffer->defined() ? *buffer : at::empty({0}, x.options());
  auto cy = made.size() > 2 ? call.fresh(made[2]) : at::empty({0}, x.options());
  return {call.fresh(made[0]), call.fresh(made[1]), cy, reserve, flat};
}
inline std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> cudnn_rnn_backward(
    const Tensor& x, at::TensorList weight, int64_t stride, const Tensor& buffer, const Tensor& h, const Maybe& c, const Tensor& y, const Maybe& dy, const Maybe& dhy,
    const Maybe& dcy, int64_t mode, int64_t, int64_t, int64_t layers, bool batch_first, double dropout, bool training, bool bidirectional, IntArrayRef sizes,
    const Maybe& state, const Tensor& reserve, std::array<bool, 4> mask) {
  Call call("aten::_cudnn_rnn_backward");
  auto leaf = [](Tensor t) { return t.defined() ? t.detach().requires_grad_() : t; };
  std::vector<Tensor> w_, inputs;
  for (auto& w : weight) w_.push_back(leaf(call.in(w)));
  auto x_ = leaf(call.in(x)), h_ = leaf(call.in(h)), c_ = leaf(call.in(c));
  Tensor pulled[] = {call.in(dy), call.in(dhy), call.in(dcy)};
  call.in(y);
  call.in(reserve);
  call.same_device();
  call.start();
  Recurrent how{mode, layers, stride, batch_first, training, bidirectional, !sizes.empty(), dropout, sizes};
  std::vector<Tensor> found, outputs, gradients;
  inputs = {x_, h_};
  if (c_.defined()) inputs.push_back(c_);
  inputs.insert(inputs.end(), w_.begin(), w_.end());
  {
    // Kernels run below autograd; this one needs it.
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    c10::impl::ForceDispatchKeyGuard with_autograd(keys);
    at::AutoGradMode grad(true);
    auto made = run_recurrent(how, x_, w_, h_, c_);
    for (size_t i = 0; i < made.size(); i++)
      if (pulled[i].defined()) { outputs.push_back(made[i]); gradients.push_back(pulled[i]); }
    found = torch::autograd::grad(outputs, inputs, gradients, false, false, true);
  }
  std::vector<Tensor> dw;
  size_t skip = c_.defined() ? 3 : 2;
  auto or_zero = [&](size_t i) { return call.fresh(found[i].defined() ? found[i] : at::zeros_like(inputs[i])); };
  for (size_t i = skip; i < inputs.size(); i++) dw.push_back(mask[3] ? or_zero(i) : Tensor());
  return {mask[0] ? or_zero(0) : Tensor(), mask[1] ? or_zero(1) : Tensor(), mask[2] && c_.defined() ? or_zero(2) : Tensor(), dw};
}
// All weights in one piece of memory, of which each becomes a view, as cuDNN wants them.
inline Tensor flatten_weights(at::TensorList weight, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool) {
  int64_t total = 0;
  for (auto& w : weight) total += w.numel();
  auto flat = at::empty({total}, weight[0].options());
  int64_t at0 = 0;
  for (auto& w : weight) {
    auto part = flat.narrow(0, at0, w.numel()).view(w.sizes());
    part.copy_(w);
    Tensor target = w;
    target.set_(part);
    at0 += w.numel();
  }
  return flat;
}

// torch's way from nn.LSTM and its like to the one call, above autograd.
inline std::tuple<Tensor, Tensor, Tensor> layers_at_once(int64_t mode, const Tensor& x, const Maybe& sizes, const Tensor& h, const Maybe& c, at::TensorList weight,
                                                         bool bias, int64_t layers, double dropout, bool training, bool bidirectional, bool batch_first) {
  std::vector<int64_t> lengths;
  if (sizes) lengths.assign(sizes->data_ptr<int64_t>(), sizes->data_ptr<int64_t>() + sizes->numel());
  auto found = at::_cudnn_rnn(x, weight, bias ? 4 : 2, {}, h, c, mode, h.size(2), 0, layers, batch_first, dropout, training, bidirectional, lengths, {});
  return {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
}
template <int64_t MODE>
void plain(Tensor& y, Tensor& hy, const Tensor& x, const Tensor& h, at::TensorList w, bool bias, int64_t layers, double dropout, bool training, bool both, bool first) {
  std::tie(y, hy, std::ignore) = layers_at_once(MODE, x, {}, h, {}, w, bias, layers, dropout, training, both, first);
}
template <int64_t MODE>
void packed(Tensor& y, Tensor& hy, const Tensor& x, const Tensor& sizes, const Tensor& h, at::TensorList w, bool bias, int64_t layers, double dropout, bool training, bool both) {
  std::tie(y, hy, std::ignore) = layers_at_once(MODE, x, sizes, h, {}, w, bias, layers, dropout, training, both, false);
}
inline void plain_lstm(Tensor& y, Tensor& hy, Tensor& cy, const Tensor& x, at::TensorList h, at::TensorList w, bool bias, int64_t layers, double dropout, bool training,
                       bool both, bool first) {
  std::tie(y, hy, cy) = layers_at_once(2, x, {}, h[0], h[1], w, bias, layers, dropout, training, both, first);
}
inline void packed_lstm(Tensor& y, Tensor& hy, Tensor& cy, const Tensor& x, const Tensor& sizes, at::TensorList h, at::TensorList w, bool bias, int64_t layers,
                        double dropout, bool training, bool both) {
  std::tie(y, hy, cy) = layers_at_once(2, x, sizes, h[0], h[1], w, bias, layers, dropout, training, both, false);
}
}  // namespace stand_in

namespace at::native {
REGISTER_CUDA_DISPATCH(rnn_relu_cudnn_stub, &stand_in::plain<0>)
REGISTER_CUDA_DISPATCH(rnn_tanh_cudnn_stub, &stand_in::plain<1>)
REGISTER_CUDA_DISPATCH(gru_cudnn_stub, &stand_in::plain<3>)
REGISTER_CUDA_DISPATCH(lstm_cudnn_stub, &stand_in::plain_lstm)
REGISTER_CUDA_DISPATCH(rnn_relu_packed_cudnn_stub, &stand_in::packed<0>)
REGISTER_CUDA_DISPATCH(rnn_tanh_packed_cudnn_stub, &stand_in::packed<1>)
REGISTER_CUDA_DISPATCH(gru_packed_cudnn_stub, &stand_in::packed<3>)
REGISTER_CUDA_DISPATCH(lstm_packed_cudnn_stub, &stand_in::packed_lstm)
}  // namespace at::native
