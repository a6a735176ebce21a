"""Builds llama.cpp's libraries from its source package on PyPI: `make llama.cpp`.

    python -m kernelbook.peers.llama_cpp.build                       # for the GPU of this machine
    python -m kernelbook.peers.llama_cpp.build --architectures 90    # for another, on a machine without a GPU
    python -m kernelbook.peers.llama_cpp.build --cpu                 # without CUDA: to test with, not to time

The package is llama-cpp-python's: it carries the commit of llama.cpp it was tested with, and no git, submodule or
curl is needed. What Q4_0 weights and attention heads of 256 never launch is left out: flash attention for other heads
and products of other formats, two thirds of the compiler's work. A call of it aborts and says so; all else is compiled
as it stands, about 20 minutes of one core. `--everything` leaves nothing out.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from kernelbook.backends.source import BackendUnavailable
from kernelbook.peers.llama_cpp.library import GGML_VERSION, default_folder

PACKAGE = "llama-cpp-python==0.3.36"
NEEDED = ("CMakeLists.txt", "LICENSE", "cmake", "ggml", "include", "src", "vendor")
"""What of llama.cpp's tree its libraries are made from."""

OPTIONS = {"CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "ON",
           "GGML_NATIVE": "OFF",  # AVX2: the CPU only looks embeddings up, and the libraries can be carried elsewhere
           "GGML_OPENMP": "OFF", "GGML_CUDA_NCCL": "OFF", "GGML_CUDA_FA_QUANTS": "f16-f16", "LLAMA_OPENSSL": "OFF",
           **{f"LLAMA_BUILD_{part}": "OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")},
           # libllama.so rather than libllama.so.0.0.1 with two links to it, each finding the others beside itself
           "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",
           "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON", "CMAKE_INSTALL_RPATH": "$ORIGIN"}

EXPORTS = "{ global: llama_*; ggml_*; gguf_*; quantize_*; extern \"C++\" { *ggml*; }; local: *; };"
"""Names the libraries show to others. The C++ library is linked into each and hidden: within PyTorch's process, its
templates would else be taken from whichever library came first, and loading a model crashes."""

KEPT = re.compile(r"MMQ_CASE\(GGML_TYPE_Q[48]_0\)|FATTN_\w+_CASE\(256, 256\b")
"""Explicit instances that Q4_0 (and Q8_0) weights and attention heads of 256 numbers can launch."""

LEFT_OUT = """\
// Written by kernelbook's build: instances that it leaves out, so that the libraries link.
#include "common.cuh"

#define ABORT(what) GGML_ABORT("this build of llama.cpp leaves " what " out; build it with --everything")

struct mmq_args;
template <ggml_type type, ggml_prec prec>
void mul_mat_q_case(ggml_backend_cuda_context &, const mmq_args &, cudaStream_t) {
    ABORT("products of other formats than Q4_0 and Q8_0");
}
template <int DKQ, int DV, int ncols1, int ncols2>
void ggml_cuda_flash_attn_ext_mma_f16_case(ggml_backend_cuda_context &, ggml_tensor *) {
    ABORT("attention with heads other than 256");
}
template <int DKQ, int DV>
void ggml_cuda_flash_attn_ext_tile_case(ggml_backend_cuda_context &, ggml_tensor *) {
    ABORT("attention with heads other than 256");
}

#define DECL_MMQ_CASE(type) \\
    template void mul_mat_q_case<type, GGML_PREC_Q8>(ggml_backend_cuda_context &, const mmq_args &, cudaStream_t)
#define DECL_MMQ_CASE_W4A4(type) \\
    template void mul_mat_q_case<type, GGML_PREC_Q4>(ggml_backend_cuda_context &, const mmq_args &, cudaStream_t)
#define DECL_FATTN_MMA_F16_CASE(DKQ, DV, ncols1, ncols2)                      \\
    template void ggml_cuda_flash_attn_ext_mma_f16_case<DKQ, DV, ncols1, ncols2>( \\
        ggml_backend_cuda_context &, ggml_tensor *)
#define DECL_FATTN_TILE_CASE(DKQ, DV) \\
    template void ggml_cuda_flash_attn_ext_tile_case<DKQ, DV>(ggml_backend_cuda_context &, ggml_tensor *)

"""


def build(folder: Path | None = None, *, cuda: bool = True, architectures: str | None = None,
          jobs: int | None = None, everything: bool = False, package: Path | None = None) -> Path:
    """llama.cpp's libraries, built below `folder` (default: where `library` looks for them); returns their folder.

    architectures: CUDA's, such as "90" or "90;120"; by default that of the GPU present.
    jobs: compilers at a time; by default one a core.
    package: the source package if it has been downloaded already; else pip downloads it.
    A second call goes on where the first was interrupted. Raises BackendUnavailable, naming all that is missing, before
    anything is downloaded; subprocess.CalledProcessError where a tool fails, which has then said why.
    """
    tools = find_tools(cuda)
    if cuda:
        architectures = _real(architectures or _architecture_here())
    folder = (folder or default_folder()).resolve()  # absolute, since the compilers run elsewhere
    folder.mkdir(parents=True, exist_ok=True)
    exports = folder / "exports.map"
    exports.write_text(EXPORTS)
    options = OPTIONS | {"CMAKE_MAKE_PROGRAM": tools["ninja"], "GGML_CUDA": "ON" if cuda else "OFF",
                         "CMAKE_SHARED_LINKER_FLAGS": "-static-libstdc++ -static-libgcc -s -Wl,--no-as-needed "
                                                      f"-Wl,--version-script='{exports}'"}
    if cuda:
        options |= {"CMAKE_CUDA_COMPILER": tools["nvcc"], "CMAKE_CUDA_ARCHITECTURES": architectures,
                    **_what_the_toolkit_lacks(*_toolkit(tools["nvcc"]), tools["c++"], folder / "links")}

    source, libraries = folder / ("source-everything" if everything else "source"), folder / "lib"
    made = folder / f"build-{'cuda' if cuda else 'cpu'}{source.name.removeprefix('source')}"
    if not source.exists():
        _unpack(package or _download(folder), source, everything)
    found = ".".join(re.findall(r"GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)",
                                (source / "ggml" / "CMakeLists.txt").read_text()))
    if found != GGML_VERSION:
        raise ValueError(f"{source} holds ggml {found}; expected {GGML_VERSION}, that of {PACKAGE}, for whose "
                         "structures this collection's calls are written: remove the folder")
    subprocess.run([tools["cmake"], "-S", source, "-B", made, "-G", "Ninja",
                    *(f"-D{name}={value}" for name, value in options.items())], check=True)
    subprocess.run([tools["cmake"], "--build", made, "--parallel", str(jobs or os.cpu_count()), "--target", "llama"],
                   check=True)

    libraries.mkdir(exist_ok=True)
    for file in libraries.glob("*.so"):
        file.unlink()  # a library in use keeps its file; and a CPU build leaves no libggml-cuda.so of another behind
    for file in sorted((made / "bin").glob("*.so")):
        shutil.copy2(file, libraries)
    return libraries


def find_tools(cuda: bool) -> dict[str, str]:
    """Paths of the programs that a build needs. Raises BackendUnavailable, naming all that are not there."""
    beside_python = str(Path(sys.executable).parent)  # where pip puts cmake and ninja
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), beside_python])
    toolkit = os.pathsep.join([path, *(str(Path(home) / "bin") for home in
                                       (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home)])
    tools = {"cmake": shutil.which("cmake", path=path), "ninja": shutil.which("ninja", path=path),
             "c++": shutil.which("c++", path=path)}
    if cuda:
        tools["nvcc"] = shutil.which("nvcc", path=toolkit)
    how = {"cmake": "pip install cmake", "ninja": "pip install ninja",
           "c++": "a C++ compiler, such as g++ from your distribution",
           "nvcc": "NVIDIA's CUDA toolkit, 12 or newer, its bin folder on PATH or CUDA_HOME set; --cpu does without"}
    missing = [f"{tool} ({how[tool]})" for tool, found in tools.items() if not found]
    if missing:
        raise BackendUnavailable(f"llama.cpp cannot be built here without {', '.join(missing)}")
    return tools


def leave_out(cuda_source: Path) -> None:
    """Take the instances that KEPT does not name out of llama.cpp's CUDA files, into one file of calls that abort."""
    left = []
    for file in sorted((cuda_source / "template-instances").glob("*.cu")):
        declared = re.findall(r"^DECL_(?:MMQ|FATTN_MMA|FATTN_TILE)\w*\(.*\);$", text := file.read_text(), re.M)
        dropped = [line for line in declared if not KEPT.search(line)]
        left += dropped
        if declared == dropped and declared:
            file.unlink()
        elif dropped:
            file.write_text("".join(line for line in text.splitlines(True) if line.strip() not in dropped))
    if left:
        (cuda_source / "left-out.cu").write_text(LEFT_OUT + "\n".join(left) + "\n")


def _architecture_here():
    try:
        listed = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
                                capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BackendUnavailable("no NVIDIA GPU here to build llama.cpp for (nvidia-smi does not list one); name its "
                                 "architecture, such as --architectures 90 for an H200, or --cpu") from error
    return ";".join(sorted({line.strip().replace(".", "") for line in listed.split("\n") if line.strip()}))


def _real(architectures):
    """Machine code only, no PTX: half the compiler's work, and what runs is what was compiled."""
    bad = [a for a in architectures.split(";") if not re.fullmatch(r"\d{2,3}[af]?", a)]
    if bad:
        raise ValueError(f"architectures = {architectures!r}; expected CUDA's numbers with ';' between them, such as "
                         "'90' for Hopper or '90;120'")
    return ";".join(f"{a}-real" for a in architectures.split(";"))


def _download(folder):
    print(f"downloading the source package {PACKAGE} (74 MB)", flush=True)
    name = PACKAGE.partition("=")[0]
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name,
                        "--dest", aside, PACKAGE], check=True)
        file, = Path(aside).glob("*.tar.gz")
        return file.replace(folder / file.name)


def _unpack(package, source, everything):
    """The part of the package that the libraries are made from, in one step: `source` is whole or not there."""
    with tempfile.TemporaryDirectory(dir=source.parent) as aside:
        with tarfile.open(package) as archive:
            inner = re.compile(r"[^/]+/vendor/llama\.cpp/(" + "|".join(map(re.escape, NEEDED)) + r")(/|$)")
            archive.extractall(aside, [m for m in archive if inner.match(m.name)], filter="data")
        tree, = Path(aside).glob("*/vendor/llama.cpp")
        if not everything:
            leave_out(tree / "ggml" / "src" / "ggml-cuda")
        tree.replace(source)


def _toolkit(nvcc):
    """The folder of the CUDA toolkit, which an nvcc on PATH may only be a script for, and its major version."""
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=True).stderr
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return Path(re.search(r"^#\$ TOP=(.*)$", said, re.M)[1]).resolve(), re.search(r"release (\d+)", version)[1]


def _what_the_toolkit_lacks(home, major, compiler, links):
    """Options for CMake that make up for a CUDA toolkit without cuBLAS, or without a driver to link with.

    cuBLAS then comes from NVIDIA's wheel, which PyTorch brings along; the driver is only a name until it is loaded.
    """
    options = {}
    links.mkdir(exist_ok=True)
    if not (home / "include" / "cublas_v2.h").exists():
        wheels = [file for path in sys.path for file in Path(path).glob(f"nvidia/*/lib/libcublas.so.{major}")]
        if not wheels:
            package = "nvidia-cublas" if int(major) > 12 else f"nvidia-cublas-cu{major}"
            raise BackendUnavailable(f"the CUDA {major} toolkit in {home} has no cuBLAS; pip install {package}")
        link = links / "libcublas.so"  # the name that linkers look for, which wheels leave out
        link.unlink(missing_ok=True)
        link.symlink_to(wheels[0])
        options |= {"CMAKE_CUDA_FLAGS": f"-I{wheels[0].parent.parent / 'include'}", "CUDA_cublas_LIBRARY": link}
    if not any(home.glob("lib*/stubs/libcuda.so")):
        driver = links / "libcuda.so"
        subprocess.run([compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", driver],
                       check=True)
        options |= {"CUDA_cuda_driver_LIBRARY": driver}
    return options


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernelbook.peers.llama_cpp.build",
                                     description="Build llama.cpp's libraries from its source package on PyPI.")
    parser.add_argument("--folder", type=Path, help="where to (default: .llama.cpp in the checkout)")
    parser.add_argument("--architectures", help="CUDA's, such as 90 or '90;120' (default: the GPU's)")
    parser.add_argument("--cpu", action="store_true", help="without CUDA: to test with, not to time")
    parser.add_argument("--everything", action="store_true", help="leave nothing out; three times the compiler's work")
    parser.add_argument("--package", type=Path, help=f"{PACKAGE} if it has been downloaded already")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: one a core)")
    options = parser.parse_args(arguments)
    try:
        libraries = build(options.folder, cuda=not options.cpu, architectures=options.architectures,
                          jobs=options.jobs, everything=options.everything, package=options.package)
    except (BackendUnavailable, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{Path(str(error.cmd[0])).name} failed; what it said stands above", file=sys.stderr)
        return 1
    sizes = {file.name: file.stat().st_size for file in sorted(libraries.glob("*.so"))}
    print(f"{libraries}: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
