"""Kernels by name."""

import re
from pathlib import Path

import pytest
from profiling.simulated import ADAM, GELU, GELU_BACKWARD, GEMM, NORM, SOFTMAX

import fusedmlp
from fusedmlp.profiling.kinds import KINDS, kind_of, short_name

COPY_KERNEL = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda()#3}::operator()() const::{lambda()#12}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul>, 4>"
    "(int, int)"
)
LAYER_NORM = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)"
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GEMM, "GEMM"),
        ("nvjet_hsh_192x192_64x4_2x1_v_bz_coopB_TNN", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16>(T::Params)", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false>(int)", "GEMM"),
        ("triton_tem_fused_addmm_0", "GEMM"),
        ("_linear_gelu_fwd_kernel", "GEMM+GELU"),
        ("_hopper_linear_gelu_fwd_kernel", "GEMM+GELU"),
        ("_dgelu_kernel", "GEMM+GELU"),
        ("_hopper_dgelu_kernel", "GEMM+GELU"),
        (GELU, "GELU"),
        (GELU_BACKWARD, "GELU"),
        ("_gelu_fwd_kernel", "GELU"),
        ("_dgelu_dbias_kernel", "GELU"),
        ("void fusedmlp::(anonymous namespace)::gelu_bwd_kernel<c10::BFloat16, false>(c10::BFloat16 const*)", "GELU"),
        ("triton_poi_fused_add_erf_mul_0", "GELU"),
        ("triton_poi_fused_add_mul_pow_tanh_3", "GELU"),
        ("triton_poi_fused_add_addmm_gelu_mul_0", "GELU"),
        ("triton_poi_fused_exp_mul_neg_pow_1", "GELU"),
        (SOFTMAX, "softmax"),
        ("_softmax_bwd_team_kernel", "softmax"),
        ("void (anonymous namespace)::softmax_fwd_row_kernel<float, 8, true>(float const*)", "softmax"),
        ("triton_per_fused_amax_div_exp_sub_sum_0", "softmax"),
        ("triton_red_fused__softmax_0", "softmax"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, at::native::"
         "(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*)", "loss"),
        ("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>()", "loss"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        (LAYER_NORM, "normalisation"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>()", "normalisation"),
        ("triton_per_fused_native_layer_norm_2", "normalisation"),
        (ADAM, "optimizer"),
        (NORM, "reduction"),
        ("_column_sum_kernel", "reduction"),
        ("void (anonymous namespace)::strip_sums_kernel<c10::BFloat16>(c10::BFloat16 const*)", "reduction"),
        ("triton_red_fused_sum_1", "reduction"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        (COPY_KERNEL, "copy"),
        ("triton_poi_fused__to_copy_0", "copy"),
        ("memset32", "copy"),
        ("_square_sums_kernel", "optimizer"),
        ("_clip_kernel", "optimizer"),
        ("_adamw_kernel", "optimizer"),
        ("void at::native::lpnorm_cleanup<c10::BFloat16, (at::native::NormType)1>(float const*)", "optimizer"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, bool)", "indexing"),
        ("void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<int>(int*)", "indexing"),
        ("void at::native::(anonymous namespace)::krn_partial_segment_offset<long>(long*)", "indexing"),
        ("void at::native::(anonymous namespace)::krn_partials_per_segment<long>(long*)", "indexing"),
        ("void at::native::(anonymous namespace)::compute_num_of_partial_segments<long>(long*)", "indexing"),
        ("void at::native::(anonymous namespace)::compute_grad_weight_atomic_accumulate<float>(float*)", "indexing"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(float*)", "indexing"),
        ("triton_poi_fused_embedding_0", "indexing"),
        ("void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out>(int)", "other"),
        ("triton_poi_fused_add_mul_0", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>()",
         "other"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ],
)  # fmt: skip
def test_kind(name, kind):
    assert kind_of(name) == kind
    assert kind in KINDS


def test_no_kernel_of_ours_is_unknown():
    folder = Path(fusedmlp.__file__).parent / "kernels"
    names = set()
    for file in folder.glob("*.py"):
        names |= set(re.findall(r"\ndef (_\w+_kernel)\(", file.read_text()))
    for file in folder.glob("csrc/*.cu"):
        names |= set(re.findall(r"\b(\w+_kernel)\(", file.read_text()))
    assert len(names) > 15
    names.remove("_sum_below_kernel")  # a probe of Triton's interpreter
    assert [name for name in sorted(names) if kind_of(name) == "other"] == []


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (GELU, "vectorized_elementwise_kernel [GeluCUDAKernelImpl]"),
        (ADAM, "multi_tensor_apply_kernel [FusedAdamMathFunctor]"),
        (NORM, "reduce_kernel [NormTwoOps]"),
        (SOFTMAX, "softmax_warp_forward"),
        (COPY_KERNEL, "unrolled_elementwise_kernel [direct_copy_kernel_cuda]"),
        (LAYER_NORM, "vectorized_layer_norm_kernel"),
        (GEMM, GEMM),
        ("triton_poi_fused_add_mul_0", "triton_poi_fused_add_mul_0"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("Memset (Device)", "Memset"),
        ("Memset (Unknown)", "Memset"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(T::Params)",
         "cutlass_80_wmma_tensorop_bf16_s161616gemm"),
        ("void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadata<(int)2>>(T1)",
         "multi_tensor_apply_kernel"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(int)", "splitKreduce_kernel"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<a, b>::Params)",
         "fmha_cutlassF_bf16_aligned_64x64_rf_sm80"),
    ],
)  # fmt: skip
def test_short_name(name, short):
    assert short_name(name) == short
