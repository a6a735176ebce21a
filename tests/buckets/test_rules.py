import re

import pytest

from kernelbook import ROOT
from kernelbook.buckets import rules


def written(tmp_path, text):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("bucket, names", {
    "GEMM": ["grouped_gemm_float", "reduce_splits", "q4_gemm", "prefill_gemm_bf16", "void rq_q4_gemv_mr<2, 16>(float*)",
             "void mul_mat_q<(ggml_type)2, (int)128, (bool)0>(char const*)", "quantize_q8_1(float const*, void*)",
             "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>(int)",
             "q4_explicit_fma", "prefill_wgmma", "packed_wgmma", "quantize_activations",
             "sm90_xmma_gemm_bf16bf16_bf16f32", "void gemv2T_kernel_val<int, int, float>(int)"],
    "GDN": ["conv_and_gates", "sequential", "chunk_factors", "chunk_scan", "gated_delta_net",
            "void gated_delta_net_cuda<128>(float const*)", "ssm_conv_long_token_f32",
            "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "recompute_w_u_fwd_kernel", "chunk_fwd_kernel_o",
            "chunk_local_cumsum_scalar_kernel", "l2norm_fwd_kernel", "void l2_norm_f32<32>(float const*)"],
    "attention": ["prefill", "decode", "merge_partitions", "quantize_kv", "void flash_attn_ext_f16<256, 256>(int)",
                  "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int> > >(int)",
                  "rope_multi<1>", "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>(int)", "soft_max_f32",
                  "_attn_fwd", "rotary_heads", "attention_gate", "fmha_cutlassF_f32_aligned_64x64_rf_sm80(int)",
                  "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256"],
    "norm/act": ["rms_norm_f32", "add_norm", "silu_norm", "silu_product",
                 "void k_bin_bcast<&op_add>(float)", "void unary_gated_op_kernel<&op_silu>(int)",
                 "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
                 "triton_poi_fused_add_0", "void at::native::reduce_kernel<512, 1>(int)"],
    "copies": ["q4_rows", "gdn_split", "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
               "at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)> >(int)", "Memcpy HtoD",
               "Memset", "Memcpy DtoH (Device -> Pinned)", "void concat_non_cont<0>(char const*)",
               "void cpy_scalar<float>(char const*)", "void k_set_rows<float>(float const*)",
               "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
               "direct_copy_kernel_cuda(at::TensorIteratorBase&)> >(int)"],
}.items())
def test_the_rules_of_the_package(bucket, names):
    known = rules()
    assert {name: known.bucket(name) for name in names} == dict.fromkeys(names, bucket)


def test_every_kernel_of_the_collection_has_a_bucket():
    files = [path for path in (ROOT / "kernels").glob("*/*.cu") if path.parent.name != "ceilings"]
    pattern = re.compile(r'extern "C" __global__ void (?:OF_CLUSTER )?(?:__launch_bounds__\([^\n]*\)\s+)?(\w+)\(')
    names = {name for path in files for name in pattern.findall(path.read_text())}
    assert len(names) >= len(files) - 2  # two designs of one kernel may share a name
    assert {name for name in names if rules().bucket(name) is None} == set(), "add them to rules.yaml"


def test_no_rule_takes_what_it_does_not_know():
    assert [rules().bucket(name) for name in ("somebody_elses_kernel", "fill_words", "CUDA graph 3", "")] == [None] * 4


def test_the_first_match_wins_and_a_bucket_may_come_twice(tmp_path):
    known = rules(written(tmp_path, "- {bucket: A, patterns: ['^gemm_a']}\n- {bucket: B, patterns: [gemm]}\n"
                                    "- {bucket: A, patterns: [gemm_b, other]}\n"))
    assert [known.bucket(name) for name in ("gemm_a", "gemm_b", "another", "x")] == ["A", "B", "A", None]


@pytest.mark.parametrize("text, line, message", [
    ("- bucket: A\n  patterns: ['(']\n", 2, r"the pattern '\(' of 'A' is no regular expression"),
    ("- bucket: A\n  patterns:\n    - fine\n    - '*'\n", 4, r"no regular expression: nothing to repeat"),
    ("- bucket: A\n  patterns: ['x*']\n", 2, "found in every name"),
    ("- bucket: A\n  pattern: [x]\n", 2, "unknown key 'pattern'"),
    ("- bucket: A\n  bucket: B\n  patterns: [x]\n", 2, "'bucket' stands twice"),
    ("# a comment\n- patterns: [x]\n", 2, "this one has patterns"),
    ("- bucket: A\n  patterns: [x]\n- just text\n", 3, "this one has neither"),
    ("- bucket: A\n  patterns: gemm\n", 2, "must be a list"),
    ("- bucket: A\n  patterns: []\n", 2, "must be a list"),
    ("- bucket: A\n  patterns: [{a: b}]\n", 2, "must be text"),
    ("- bucket: [A]\n  patterns: [x]\n", 1, "must be text"),
    ("- bucket: idle\n  patterns: [x]\n", 1, "'idle' is a line of every breakdown"),
    ("- bucket: A\n  patterns: [*x]\n", 2, "patterns belong in single quotes"),
    ("- bucket: A\n patterns: ['x'\n", 2, "no YAML"),
])
def test_a_fault_is_named_with_its_line(tmp_path, text, line, message):
    with pytest.raises(ValueError, match=rf"rules\.yaml, line {line}: .*{message}"):
        rules(written(tmp_path, text))


@pytest.mark.parametrize("text", ["", "bucket: A\n", "[]", "# nothing but a comment\n"])
def test_a_file_without_rules(tmp_path, text):
    with pytest.raises(ValueError, match="expected a list of rules"):
        rules(written(tmp_path, text))
