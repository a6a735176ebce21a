"""Static evidence: each test plants something in a small kernel and looks for it in the machine code."""

import json
import re
import textwrap
import threading

import pytest

from kernelbook import toolchain
from kernelbook.backends import BackendUnavailable, CompileError, Source

missing = toolchain.targets()
nvidia = pytest.mark.skipif(missing["sm_80"] is not None, reason=str(missing["sm_80"]))
amd = pytest.mark.skipif(missing["gfx942"] is not None, reason=str(missing["gfx942"]))
every_nvidia = pytest.mark.parametrize("arch", toolchain.NVIDIA)
every_amd = pytest.mark.parametrize("arch", toolchain.AMD)


@pytest.fixture(autouse=True, scope="session")
def cold_cache(tmp_path_factory):
    """Compiles happen in the tests, whatever earlier runs have left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def source(tmp_path):
    def write(text, **defines):
        file = tmp_path / "planted.cu"
        file.write_text(textwrap.dedent(text))
        return Source(str(file), defines)
    return write


DOT = """
    #include "gpu.h"
    extern "C" __global__ void dot(const int4 *a, const int4 *b, int *c, int K) {
      int sum = 0;
      for (int k = 0; k < K; ++k) {
        const int4 x = a[k], y = b[k * 64 + threadIdx.x];
        sum = __dp4a(x.x, y.x, sum);
        sum = __dp4a(x.y, y.y, sum);
        sum = __dp4a(x.z, y.z, sum);
        sum = __dp4a(x.w, y.w, sum);
      }
      c[threadIdx.x] = sum;
    }
    GPU_KERNEL(dot)
"""

FLOATS = """
    extern "C" __global__ void floats(const float *a, const float *b, float *c, int K) {
      float sum = 0.f;
      for (int k = 0; k < K; ++k) sum += a[k] * b[k * 64 + threadIdx.x];
      c[threadIdx.x] = sum;
    }
"""

# 96 values that are all alive at the barrier: too many for the 64 registers that 1024 threads leave to each.
WIDE = """
    extern "C" __global__ void BOUNDS wide(float *x) {
      __shared__ float all[1024];
      float v[96];
    #pragma unroll
      for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
      all[threadIdx.x] = v[0];
      __syncthreads();
    #pragma unroll
      for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = v[i] * all[(threadIdx.x + i) % 1024];
    }
    extern "C" __global__ void small(float *x) { x[threadIdx.x] = 1.f; }
"""


# ---------------------------------------------------------------------------------------------- NVIDIA: compiling

@nvidia
@every_nvidia
def test_a_planted_spill_is_reported(source, arch):
    tight = toolchain.resources(toolchain.nvrtc_compile(source(WIDE, BOUNDS="__launch_bounds__(1024)"), arch)[1])
    assert set(tight) == {"wide", "small"}
    assert tight["wide"]["spill_store_bytes"] >= 4 * (96 - 64)
    assert tight["wide"]["spill_load_bytes"] >= 4 * (96 - 64)
    assert tight["wide"]["spill_bytes"] == tight["wide"]["spill_store_bytes"] + tight["wide"]["spill_load_bytes"]
    assert tight["wide"]["registers"] <= 64
    assert tight["small"]["spill_bytes"] == tight["small"]["stack_bytes"] == tight["small"]["shared_bytes"] == 0

    roomy = toolchain.resources(toolchain.nvrtc_compile(source(WIDE, BOUNDS="__launch_bounds__(128)"), arch)[1])
    assert roomy["wide"]["spill_bytes"] == 0
    assert roomy["wide"]["registers"] > 64
    assert roomy["wide"]["shared_bytes"] - 4096 in (0, 1024)      # sm_90 and later may reserve 1 KiB of their own
    assert roomy["wide"]["barriers"] == 1


def test_resources_of_a_kernel_are_not_those_of_a_function_it_calls():
    log = textwrap.dedent("""\
        ptxas info    : 0 bytes gmem
        ptxas info    : Compiling entry function 'first' for 'sm_90a'
        ptxas info    : Function properties for helper
        ptxas         .     64 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
        ptxas info    : Function properties for first
            16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas info    : Used 24 registers, 360 bytes cmem[0]
        """)
    assert toolchain.resources(log) == {"first": {
        "registers": 24, "spill_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 16,
        "shared_bytes": 0, "barriers": 0}}


def test_a_log_without_figures_is_refused():
    with pytest.raises(ValueError, match="kernel first without its registers"):
        toolchain.resources("ptxas info    : Compiling entry function 'first' for 'sm_90a'\n")


@nvidia
def test_a_compile_error_shows_the_source_line(source):
    broken = source("""
        extern "C" __global__ void broken(float *x) {
          x[0] = undeclared + GROUP;
        }
        """, GROUP=32)
    with pytest.raises(CompileError, match="undeclared") as caught:
        toolchain.nvrtc_compile(broken, "90a")
    assert caught.value.line == 3
    assert "line 3: x[0] = undeclared + GROUP;" in str(caught.value)
    assert "NVRTC" in str(caught.value) and "-DGROUP=32" in str(caught.value)


@nvidia
def test_headers_come_from_the_source(tmp_path, source):
    (tmp_path / "one.h").write_text("#include \"two.h\"\n")
    (tmp_path / "two.h").write_text("#define VALUE 1.f\n")
    text = '#include "one.h"\nextern "C" __global__ void use(float *x) { x[0] = VALUE; }\n'
    assert "use" in toolchain.compile_cuda(source(text), "80").kernels


def test_an_edited_source_or_header_is_another_kernel(tmp_path, source):
    header = tmp_path / "one.h"
    header.write_text("#define VALUE 1\n")
    first = source('#include "one.h"\n').hash
    assert source('#include "one.h"\n').hash == first
    header.write_text("#define VALUE 22\n")
    second = source('#include "one.h"\n').hash
    assert len({first, second, source('#include "one.h"\n// more\n').hash}) == 3


@nvidia
def test_toolkit_headers_are_found(source):
    text = """
        #include <cuda_fp16.h>
        extern "C" __global__ void widen(const __half *x, float *y) { y[threadIdx.x] = __half2float(x[threadIdx.x]); }
        """
    kernel = toolchain.compile_cuda(source(text), "90a").kernels["widen"]
    assert kernel.global_loads == {16: 1}
    assert kernel.global_stores == {32: 1}


@nvidia
def test_a_second_compile_comes_from_the_cache(source, monkeypatch):
    from cupy.cuda import nvrtc
    first = toolchain.nvrtc_compile(source(FLOATS), "89")

    def refuse(*_):
        raise AssertionError("compiled again")
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compileProgram", refuse)
        assert toolchain.nvrtc_compile(source(FLOATS), "89") == first
        for other in [(source(FLOATS), "80"), (source(FLOATS), "89", ["--fmad=false"]), (source(FLOATS, A=1), "89"),
                      (source(FLOATS + "\n"), "89")]:
            with pytest.raises(AssertionError, match="compiled again"):
                toolchain.nvrtc_compile(*other)


@nvidia
def test_threads_may_compile_the_same_source(source):
    planted, found = source(FLOATS + "// by several threads\n"), []

    def work():
        found.append(toolchain.compile_cuda(planted, "90a").kernels["floats"].opcodes)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(opcodes == found[0] for opcodes in found)


@nvidia
@pytest.mark.parametrize("arch", ["777", "9", "sm_90", "gfx942", ""])
def test_an_unknown_architecture_is_refused(source, arch):
    with pytest.raises(ValueError, match=f"no architecture '{arch}'; it has .*90"):
        toolchain.nvrtc_compile(source(FLOATS), arch)


@nvidia
def test_a_damaged_cubin_is_refused():
    with pytest.raises(ValueError, match="nvdisasm"):
        toolchain.sass(b"\x7fELF and then nothing")


# ---------------------------------------------------------------------------------------------- NVIDIA: reading

@nvidia
@every_nvidia
def test_vector_loads_are_told_from_scalar_ones(source, arch):
    text = """
        extern "C" __global__ void load(const float4 *a, const float *b, const signed char *c, float *y) {
          const int i = threadIdx.x;
          const float4 v = a[i], w = a[i + 999];
          y[i] = v.x + v.y + v.z + v.w + w.x + w.y + w.z + w.w + b[i] + c[i];
        }
        """
    kernel = toolchain.compile_cuda(source(text), arch).kernels["load"]
    assert kernel.global_loads == {128: 2, 32: 1, 8: 1}
    assert kernel.global_stores == {32: 1}
    assert sum(i.opcode.startswith("LDG.E.128") for i in kernel.instructions) == 2
    assert not kernel.loops and kernel.hot_loop is None


@nvidia
@every_nvidia
def test_contraction_turns_a_multiply_and_an_add_into_one(source, arch):
    fused = toolchain.compile_cuda(source(FLOATS), arch).kernels["floats"]
    apart = toolchain.compile_cuda(source(FLOATS), arch, ["--fmad=false"]).kernels["floats"]
    each, both = toolchain.per_mac(fused), toolchain.per_mac(apart)
    assert each.opcodes["FFMA"] == 1 and "FMUL" not in each.opcodes and "FADD" not in each.opcodes
    assert both.opcodes["FMUL"] == both.opcodes["FADD"] == 1 and "FFMA" not in both.opcodes
    assert both.instructions > each.instructions
    assert each.loads == both.loads == 2 and each.conversions == 0


@nvidia
@every_nvidia
def test_dp4a_is_four_macs(source, arch):
    kernel = toolchain.compile_cuda(source(DOT), arch).kernels["dot"]
    each = toolchain.per_mac(kernel)
    trip = kernel.count(kernel.hot_loop.instructions)
    assert each.macs == 4 * trip["IDP.4A"] and trip["IDP.4A"] % 4 == 0
    assert each.opcodes["IDP.4A"] == 1 / 4
    assert each.loads == 1 / 8                      # two 16-byte loads for 16 MACs
    assert each.instructions == len(kernel.hot_loop.instructions) / each.macs < 1
    assert all(i.opcode.startswith("LDG.E.128") for i in kernel.hot_loop.instructions if i.opcode.startswith("LDG"))


MMA = """
    extern "C" __global__ void int8(const uint4 *a, const uint2 *b, int *d, int K) {
      int c[4] = {0, 0, 0, 0};
      for (int k = 0; k < K; ++k) {
        const uint4 x = a[k * 32 + threadIdx.x];
        const uint2 y = b[k * 32 + threadIdx.x];
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                     : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y));
      }
      for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = c[i];
    }
    extern "C" __global__ void bf16(const uint4 *a, const uint2 *b, float *d, int K) {
      float c[4] = {0, 0, 0, 0};
      for (int k = 0; k < K; ++k) {
        const uint4 x = a[k * 32 + threadIdx.x];
        const uint2 y = b[k * 32 + threadIdx.x];
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y));
      }
      for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = c[i];
    }
"""


@nvidia
@every_nvidia
@pytest.mark.parametrize("name, opcode, macs", [("int8", "IMMA.16832", 128), ("bf16", "HMMA.16816", 64)])
def test_a_matrix_instruction_shares_its_macs_among_the_lanes(source, arch, name, opcode, macs):
    kernel = toolchain.compile_cuda(source(MMA), arch).kernels[name]
    each = toolchain.per_mac(kernel)
    assert each.opcodes[opcode] == 1 / macs
    assert each.loads == 2 / macs


@nvidia
def test_a_warpgroup_instruction_shares_its_macs_among_128_lanes(source):
    text = """
        extern "C" __global__ void wgmma(unsigned long long a, unsigned long long b, int *d, int K) {
          int c[4] = {0, 0, 0, 0};
          for (int k = 0; k < K; ++k) {
            asm volatile("wgmma.fence.sync.aligned;");
            asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
                         "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, %4, %5, p;}"
                         : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "l"(a + k), "l"(b + k));
            asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
          }
          for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = c[i];
        }
        """
    kernel = toolchain.compile_cuda(source(text), "90a").kernels["wgmma"]
    assert toolchain.per_mac(kernel).opcodes["IGMMA.64x8x32"] == 1 / (64 * 8 * 32 / 128)


@nvidia
@every_nvidia
def test_loops_are_found_with_what_belongs_to_each(source, arch):
    text = """
        extern "C" __global__ void nested(const float *a, const float *s, float *y, int groups) {
          float sum = 0.f;
        #pragma unroll 1
          for (int g = 0; g < groups; ++g) {
            float dot = 0.f;
        #pragma unroll 1
            for (int k = 0; k < 32; ++k) dot = fmaf(a[g * 32 + k], a[k * 64 + threadIdx.x], dot);
            sum += sqrtf(dot) * s[g];
          }
          y[threadIdx.x] = sum;
        }
        """
    kernel = toolchain.compile_cuda(source(text), arch).kernels["nested"]
    outer, inner = kernel.loops
    assert outer.span[0] <= inner.span[0] and inner.span[1] < outer.span[1]
    assert not set(outer.instructions) & set(inner.instructions)
    assert kernel.hot_loop is inner and (outer.depth, inner.depth) == (0, 1)
    assert kernel.count(inner.instructions)["FFMA"] == 1 and kernel.count(inner.instructions)["LDG"] == 2
    assert kernel.count(outer.instructions)["LDG"] == 1 and kernel.count(outer.instructions)["MUFU"] == 1
    last = inner.instructions[-1]
    assert last.opcode.startswith("BRA") and kernel.instructions[last.target] == inner.instructions[0]


@nvidia
@every_nvidia
def test_code_moved_out_of_line_is_no_part_of_a_loop(source, arch):
    """A shuffle that diverged lanes may reach has a second form behind the kernel's end, which jumps back."""
    text = """
        extern "C" __global__ void shuffle(const float *a, float *y, int K) {
          float sum = 0.f;
          if (threadIdx.x < K)
            for (int k = 0; k < K; ++k) sum = fmaf(__shfl_xor_sync(~0u, sum, 1), a[k], sum);
          y[threadIdx.x] = sum;
        }
        """
    kernel = toolchain.compile_cuda(source(text), arch).kernels["shuffle"]
    end = next(i.address for i in kernel.instructions if i.opcode == "EXIT" and not i.predicate)
    returning = [i for i in kernel.instructions if i.address > end and i.opcode == "BRA" and i.target is not None
                 and kernel.instructions[i.target].address < end]
    assert returning, "nothing was moved out of line: the test shows nothing"
    assert kernel.loops and all(i.address < end for loop in kernel.loops for i in loop.instructions)


@nvidia
def test_macs_can_be_told_where_they_cannot_be_derived(source):
    text = """
        extern "C" __global__ void bits(const unsigned *a, const unsigned *b, int *y, int K) {
          int sum = 0;
        #pragma unroll 1
          for (int k = 0; k < K; ++k) sum += __popc(a[k] & b[k]);
          y[threadIdx.x] = sum;
        }
        extern "C" __global__ void straight(const float *a, float *y) {
          y[threadIdx.x] = fmaf(a[0], a[1], fmaf(a[2], a[3], a[4]));
        }
        """
    kernels = toolchain.compile_cuda(source(text), "90a").kernels
    assert toolchain.per_mac(kernels["bits"]) is None
    assert toolchain.per_mac(kernels["bits"], 32).opcodes["POPC"] == 1 / 32
    with pytest.raises(ValueError, match="macs_per_iteration is 0"):
        toolchain.per_mac(kernels["bits"], 0)
    straight = toolchain.per_mac(kernels["straight"])       # without a loop the kernel is its own body
    assert straight.macs == 2 and straight.instructions == len(kernels["straight"].instructions) / 2


@nvidia
def test_address_arithmetic_is_no_mac(source):
    text = """
        extern "C" __global__ void scale(const float *a, float *y, int rows, int stride) {
        #pragma unroll 1
          for (int r = 0; r < rows; ++r) y[r * stride + threadIdx.x] = 2.f * a[r * stride * 3 + threadIdx.x];
        }
        """
    assert toolchain.per_mac(toolchain.compile_cuda(source(text), "80").kernels["scale"]) is None


# ---------------------------------------------------------------------------------------------- AMD

@amd
@every_amd
def test_hip_code_objects_carry_their_metadata(source, arch):
    text = """
        #include "gpu.h"
        extern "C" __global__ void __launch_bounds__(256) reverse(const float *a, double *y, int n) {
          __shared__ float all[256];
          all[threadIdx.x] = a[threadIdx.x];
          __syncthreads();
          y[threadIdx.x] = all[n - threadIdx.x];
        }
        GPU_KERNEL(reverse)
        extern "C" __global__ void store(float *y) { y[threadIdx.x] = 1.f; }
        GPU_KERNEL(store)
        """
    built = toolchain.compile_hip(source(text), arch)
    assert built.target == arch and built.binary.startswith(b"\x7fELF")
    assert set(built.resources) == set(built.kernels) == {"reverse", "store"}
    used = built.resources["reverse"]
    assert used["shared_bytes"] == 1024 and used["kernarg_bytes"] == 20 and used["spill_bytes"] == 0
    assert used["block_limit"] == 256
    assert 0 < used["registers"] <= 32 and used["agprs"] == 0 and used["sgprs"] > 0
    assert built.resources["store"]["shared_bytes"] == 0
    reverse = built.kernels["reverse"]
    assert reverse.global_loads == {32: 1} and reverse.global_stores == {64: 1}
    assert reverse.opcodes["ds_read_b32"] == 1 and reverse.instructions[-1].opcode == "s_endpgm"
    assert not reverse.loops


@amd
@every_amd
def test_dp4a_is_dot4_on_amd(source, arch):
    kernel = toolchain.compile_hip(source(DOT), arch).kernels["dot"]
    each = toolchain.per_mac(kernel)
    dots = sum(n for opcode, n in each.opcodes.items() if opcode.startswith("v_dot4"))
    assert dots == 1 / 4
    assert set(kernel.global_loads) == {128}
    assert kernel.instructions[kernel.hot_loop.instructions[-1].target] == kernel.hot_loop.instructions[0]


@amd
@every_amd
def test_amd_spills_are_reported(source, arch):
    text = '#include "gpu.h"\n' + textwrap.dedent(WIDE)
    tight, roomy = "__launch_bounds__(1024)", "__launch_bounds__(64)"
    assert toolchain.compile_hip(source(text, BOUNDS=tight), arch).resources["wide"]["spill_bytes"] > 0
    assert toolchain.compile_hip(source(text, BOUNDS=roomy), arch).resources["wide"]["spill_bytes"] == 0


@amd
@pytest.mark.parametrize("opcode, macs", [
    ("v_mfma_i32_16x16x32_i8", 128), ("v_mfma_i32_16x16x16i8", 64), ("v_mfma_f32_16x16x16_bf16", 64),
    ("v_mfma_f32_4x4x4_16b_f16", 16), ("v_mmac_i32_16x16x32_i8", 128), ("v_mov_b32", 0)])
def test_macs_of_a_matrix_instruction_on_amd(opcode, macs):
    instructions = [toolchain.Instruction(0, opcode, "", "", None)]
    assert toolchain.AMDGCN.macs(instructions) == (macs or None)


@amd
def test_a_compile_error_of_clang_shows_the_source_line(source):
    with pytest.raises(CompileError, match="undeclared") as caught:
        toolchain.compile_hip(source("""\
            #include "gpu.h"
            extern "C" __global__ void broken(float *x) { x[0] = undeclared; }
            """), "gfx942")
    assert caught.value.line == 2


@amd
def test_the_same_source_makes_the_same_code_object(source, monkeypatch, tmp_path):
    first = toolchain.compile_hip(source(DOT), "gfx942").binary
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / "another"))
    assert toolchain.compile_hip(source(DOT), "gfx942").binary == first


@amd
def test_an_architecture_that_clang_does_not_know_is_refused(source):
    with pytest.raises(CompileError, match="gfx9999"):
        toolchain.compile_hip(source(DOT), "gfx9999")


@amd
@every_amd
def test_a_copy_that_may_be_of_zeros_needs_no_stack(source, arch):
    text = """
        #include "gpu.h"
        extern "C" __global__ void copies(const uint4 *x, uint4 *y, int n) {
          __shared__ uint4 tile[2][64];
          for (int step = 0; step < n; ++step) {
            for (int i = 0; i < 2; ++i)
              copy_async(&tile[i][threadIdx.x], x + step + i * 64 + threadIdx.x, threadIdx.x + i < n);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
            y[step * 64 + threadIdx.x] = tile[step % 2][63 - threadIdx.x];
          }
        }
        """
    built = toolchain.compile_hip(source(text), arch)
    assert built.resources["copies"]["stack_bytes"] == 0
    assert not [i for i in built.kernels["copies"].instructions if "scratch" in i.opcode]
    assert set(built.kernels["copies"].global_loads) == {128}


@amd
@every_amd
def test_a_code_object_is_read_back(source, arch):
    built = toolchain.compile_hip(source('#include "gpu.h"\n' + textwrap.dedent(WIDE), BOUNDS=""), arch)
    read = toolchain.read_amd_binary(built.binary)
    assert read.target == arch and read.symbols == {"wide.kd", "small.kd"}
    assert read.resources == {name: {**used, "wave": 64} for name, used in built.resources.items()}


@amd
def test_what_is_no_code_object_is_refused(source):
    binary = toolchain.compile_hip(source(DOT), "gfx942").binary
    for damaged in (b"", b"\x7fELF and then nothing", binary[:200], b"__CLANG_OFFLOAD_BUNDLE__" + binary,
                    binary[:18] + b"\x3e\0" + binary[20:]):
        with pytest.raises(ValueError, match="code object"):
            toolchain.read_amd_binary(damaged)


@pytest.mark.parametrize("packed, value", [
    (b"\x07", 7), (b"\xff", -1), (b"\xc0", None), (b"\xc3", True), (b"\xcd\x01\x00", 256),
    (b"\xd1\xff\xfe", -2), (b"\xce\0\x01\0\0", 65536), (b"\xa2ab", "ab"), (b"\xd9\x03abc", "abc"),
    (b"\x92\x01\xa1x", [1, "x"]), (b"\xdc\0\x01\x05", [5]), (b"\x81\xa1k\x93\x01\x02\x03", {"k": [1, 2, 3]})])
def test_metadata_is_unpacked(packed, value):
    assert toolchain._unpack_message(packed) == (value, len(packed))


MMAC = """
    #include "operands.h"
    extern "C" __global__ void int8(const uint2 *a, const uint2 *b, int *d, int K) {
      int c[4] = {0, 0, 0, 0};
    #pragma unroll 1
      for (int k = 0; k < K; ++k) {
        const uint2 x = a[k * 64 + threadIdx.x], y = b[k * 64 + threadIdx.x];
        const uint32_t A[2] = {x.x, x.y}, B[2] = {y.x, y.y};
        MATRIX::Signed::multiply(c, A, B);
      }
      for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = c[i];
    }
"""


@amd
@pytest.mark.parametrize("arch", toolchain.HYGON)
def test_hygons_targets_end_as_text_with_their_own_instruction(source, arch, monkeypatch):
    monkeypatch.setenv("DTKROOT", "/nowhere")
    built = toolchain.compile_hip(source(MMAC), arch)
    assert (built.target, built.binary) == (arch, b"") and "as for gfx906 and not assembled" in built.compiler
    assert built.resources["int8"]["registers"] is None and built.resources["int8"]["shared_bytes"] == 0
    each = toolchain.per_mac(built.kernels["int8"])
    assert each.opcodes["v_mmac_i32_16x16x32_i8"] == 1 / 128
    assert re.search(r"v_mmac_i32_16x16x32_i8 (v\[\d+:\d+\]), v\[\d+:\d+\], v\[\d+:\d+\], \1$", built.assembly, re.M)


@amd
def test_gfx90a_multiplies_in_two_halves(source):
    counts = {arch: toolchain.compile_hip(source(MMAC), arch).kernels["int8"].opcodes for arch in ("gfx90a", "gfx942")}
    assert counts["gfx90a"]["v_mfma_i32_16x16x16i8"] == 2 and counts["gfx942"]["v_mfma_i32_16x16x32_i8"] == 1


def test_commands_for_hygons_compiler():
    assert toolchain.hip_commands("2_decode.cu", "gfx936", ["-DPV=INT8"], "/opt/dtk/bin/hipcc") == [
        ["/opt/dtk/bin/hipcc", "-x", "hip", "--offload-arch=gfx936", "--offload-device-only", "-Iinclude",
         *toolchain.HIP_OPTIONS, "-DPV=INT8", "-S", "2_decode.cu", "-o", "kernel.s"],
        ["/opt/dtk/bin/hipcc", "-x", "hip", "--offload-arch=gfx936", "--offload-device-only", "-Iinclude",
         *toolchain.HIP_OPTIONS, "-DPV=INT8", "--no-gpu-bundle-output", "-c", "2_decode.cu", "-o", "kernel.hsaco"]]


# ---------------------------------------------------------------------------------------------- evidence

@nvidia
@amd
def test_evidence_has_a_row_for_each_kernel_and_target(source):
    rows = toolchain.evidence(source(DOT, GROUP=32))
    assert [row["target"] for row in rows] == list(toolchain.targets())
    for row in json.loads(json.dumps(rows, allow_nan=False)):
        assert row["kernel"] == "dot" and row["defines"] == {"GROUP": 32} and row["compiler"]
        if row["target"] != "gfx936":
            assert row["spill_bytes"] == 0 and row["registers"] > 0
        assert row["dots_per_mac"] == 1 / 4 and row["matrix"] == {} and row["loops"] >= 1
        assert row["instructions"] > row["hot_loop_instructions"] == sum(row["opcodes"].values())
        assert row["instructions_per_mac"] == row["hot_loop_instructions"] / row["macs"]
        assert row["loads_per_mac"] == 1 / 8 and row["conversions_per_mac"] == 0
        assert set(row["global_loads"]) <= {"128", "64", "32"} and row["global_loads"]["128"] >= 1


@nvidia
def test_the_table_is_markdown_with_a_line_for_each_row(source):
    lines = toolchain.table(toolchain.evidence(source(FLOATS), ["sm_80", "sm_90a"])).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert re.search(r"floats \| sm_90a \| \d+ \| 0 \| 0 \| .*FFMA", lines[3])


@nvidia
@amd
def test_matrix_instructions_and_fused_ones_are_counted(source):
    rows = [*toolchain.evidence(source(MMA), ["sm_90a"]), *toolchain.evidence(source(MMAC), ["gfx942"])]
    found = {name: of["macs"] for row in rows for name, of in row["matrix"].items()}
    assert found == {"IMMA.16832": 16 * 8 * 32, "HMMA.16816": 16 * 8 * 16, "v_mfma_i32_16x16x32_i8": 16 * 16 * 32}
    assert all(of["count"] >= 1 for row in rows for of in row["matrix"].values()) and len(rows) == 3
    fused = toolchain.evidence(source('#include "gpu.h"\n' + textwrap.dedent("""
        extern "C" __global__ void fuse(float *x) { x[threadIdx.x] = fmaf(x[1], x[2], fmaf(x[3], x[4], x[5])); }
        """)), ["sm_90a", "gfx942"])
    assert [row["fused"] for row in fused] == [2, 2]


@nvidia
@amd
def test_a_kernel_that_is_not_for_a_target_says_why_and_is_not_compiled():
    wgmma = Source("prefill_gemm/5_wgmma.cu", {"TILE_TOKENS": 16, "STAGES": 16, "BF16_OUT": 0, "GROUPS": 4, "BANDS": 1})
    assert "which sm_90a alone has" in toolchain.absence(wgmma, "sm_100")
    assert toolchain.absence(wgmma, "sm_90a") is None
    assert toolchain.absence(Source("prefill_gemm/4_tensor_cores.cu"), "gfx942") is None
    assert toolchain.survey([wgmma], ["gfx942", "sm_80"]) == []
    panels = Source("grouped_gemm/5_panels.cu")
    assert "written for mma.sync" in toolchain.absence(panels, "gfx942") and toolchain.absence(panels, "sm_80") is None


@pytest.mark.parametrize("name", ["90a", "sm", "cpu", ""])
def test_an_unknown_target_is_refused(source, name):
    with pytest.raises(ValueError, match="no target"):
        toolchain.evidence(source(FLOATS), [name])


def test_missing_tools_are_named_with_the_way_to_get_them(monkeypatch, source):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", None)
    reasons = toolchain.targets()
    assert "pip install cupy-cuda12x 'nvidia-cuda-nvrtc-cu12==12.9.*'" in reasons["sm_90a"]
    assert "pip install ziglang" in reasons["gfx942"]
    with pytest.raises(BackendUnavailable, match="NVRTC"):
        toolchain.nvrtc_compile(source(FLOATS), "90a")
    with pytest.raises(BackendUnavailable, match="ziglang"):
        toolchain.compile_hip(source(FLOATS), "gfx942")


@nvidia
def test_a_missing_nvdisasm_is_named(monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", "")
    toolchain._nvdisasm.cache_clear()
    try:
        assert "pip install nvidia-cuda-nvdisasm" in toolchain.targets()["sm_80"]
        with pytest.raises(BackendUnavailable, match="nvdisasm"):
            toolchain.sass(b"")
    finally:
        monkeypatch.undo()
        toolchain._nvdisasm.cache_clear()
