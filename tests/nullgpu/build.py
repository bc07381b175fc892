"""Build of the null GPU for the installed torch. `python -m tests.nullgpu.build [COMMAND…]` prints its folder, and runs a command on it.

csrc/*.c define what a program notices. Everything else that torch's libraries need of CUDA is listed with `nm` and
becomes a stub, so another version of torch gets its own list.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# Stubs of these report success.
SUCCEED = ("cuda", "__cuda", "cublas", "cudnn")
# Stubs of these report an error, which torch raises: nothing must look as if it had been computed.
FAIL = ("cusolver", "cusparse", "cufft", "curand", "nccl", "nvml")
RETURNS_TEXT = re.compile(r"(Error|Status)String$|ErrorName$|^ncclGetLastError$")
# Decorations of CUDA's headers that mean nothing to a C compiler; newer wheels do not contain the header that defines them.
DECORATIONS = (
    "__device_builtin__ __builtin_align__(n) __device_builtin_surface_type__ __device_builtin_texture_type__ CUDARTAPI "
    "__align__(n)"
)


class UnavailableError(RuntimeError):
    """The null GPU cannot be built here; the message contains the reason."""


def build(cache: Path | None = None) -> Path:
    """Return the folder of libcuda.so.1, which is built if it does not exist (two to three seconds).

    Args:
        cache: parent folder; by default in the user's cache. Not in /tmp, where another user could put a library that
            is then preloaded.

    Raises:
        UnavailableError: torch has no CUDA code, or there is no compiler.
    """
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        raise UnavailableError(f"{sys.platform} on {os.uname().machine} is not supported")
    torch = _package_folder("torch")
    version, cuda = _torch_versions(torch)
    sources = sorted([*SOURCES.iterdir(), Path(__file__)])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + f"{version} {cuda}".encode())
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparo" / "nullgpu"
    out = (cache or default) / digest.hexdigest()[:12]
    if (out / "libcuda.so.1").exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        folder = Path(temporary) / "lib"
        folder.mkdir()
        _compile(folder, torch, cuda)
        try:
            folder.rename(out)  # complete or absent, because several workers of pytest may build it at once
        except OSError:
            if not (out / "libcuda.so.1").exists():
                raise
    return out


def environment(cache: Path | None = None, **variables: str) -> dict[str, str]:
    """Return the environment of a subprocess on the null GPU. Never use it for the current process.

    Variables that could reach a real device are removed, and compiled kernels are kept apart from those of a real one.
    """
    folder = build(cache)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "NVIDIA_", "NCCL_"))}
    preload = [str(folder / "libcuda.so.1"), *filter(None, [inherited.get("LD_PRELOAD")])]
    paths = [str(folder), *filter(None, [inherited.get("LD_LIBRARY_PATH")])]
    return {
        **inherited,
        "LD_PRELOAD": ":".join(preload),
        "LD_LIBRARY_PATH": ":".join(paths),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "NULLGPU": "1",
        "DS_ACCELERATOR": "cuda",  # the ordinary tests set cpu
        **variables,
    }


def _package_folder(name: str) -> Path:
    # Not imported: in the process of a command, the null GPU must be loaded before torch.
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _torch_versions(torch: Path) -> tuple[str, int]:
    """Return torch's version, and the version of CUDA that it was built for, as in CUDART_VERSION (13.0: 13000)."""
    text = (torch / "version.py").read_text()
    version = re.search(r"^__version__.*?=\s*'([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda.*?=\s*'(\d+)\.(\d+)'", text, re.MULTILINE)
    if cuda is None or not (torch / "lib" / "libtorch_cuda.so").exists():
        raise UnavailableError("torch has no CUDA code (a build for CPUs)")
    return version[1] if version else "unknown", int(cuda[1]) * 1000 + int(cuda[2]) * 10


def _compile(out: Path, torch: Path, cuda: int) -> None:
    site = torch.parent
    headers = sorted({path.parent for path in site.glob("nvidia/*/include/driver_types.h")})
    if not headers and Path("/usr/local/cuda/include/driver_types.h").exists():
        headers = [Path("/usr/local/cuda/include")]
    if not headers:
        raise UnavailableError("driver_types.h is missing; it is a part of the package nvidia-cuda-runtime")
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        raise UnavailableError("there is no C compiler")
    sources = sorted(SOURCES.glob("*.c"))
    defined = {
        name for path in sources for name in re.findall(r"^API [\w *]*?\b(\w+)\(", path.read_text(), re.MULTILINE)
    }
    stubs = sorted((_symbols_of_torch(torch) | _driver_functions(torch, headers)) - defined)
    (out / "stubs.inc").write_text("".join(map(_stub, stubs)))
    (out / "crt").mkdir()
    (out / "crt" / "host_defines.h").write_text("".join(f"#define {word}\n" for word in DECORATIONS.split()))
    versions = [f"-DREPORTED_CUDA_VERSION={cuda}", f"-DREPORTED_CUDNN_VERSION={_cudnn_version(site)}"]
    flags = ["-shared", "-fPIC", "-O1", "-w", "-fno-builtin", "-pthread", "-Wl,-soname,libcuda.so.1"]
    includes = [f"-I{folder}" for folder in (SOURCES, out, *headers)]
    command = [compiler, *flags, *versions, *includes, *map(str, sources), "-o", str(out / "libcuda.so.1"), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"it does not compile against these headers: {done.stderr[-2000:]}")
    (out / "libcuda.so").symlink_to("libcuda.so.1")
    (out / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")


def _symbols_of_torch(torch: Path) -> set[str]:
    """Return the symbols of CUDA that torch's libraries leave undefined."""
    nm = shutil.which("nm")
    if nm is None:
        raise UnavailableError("there is no nm (package binutils)")
    names: set[str] = set()
    for path in (torch / "lib").glob("lib*.so"):
        done = subprocess.run([nm, "-D", "--undefined-only", path], capture_output=True, text=True, check=True)
        names.update(line.split()[-1].partition("@")[0] for line in done.stdout.splitlines())
    return {name for name in names if name.startswith((*SUCCEED, *FAIL))}


def _driver_functions(torch: Path, headers: list[Path]) -> set[str]:
    """Return the functions of the driver and of NVML that their headers, torch or Triton name; they are looked up at run time."""
    paths = [folder / "cuda.h" for folder in headers] + [torch / "include/c10/cuda/driver_api.h"]
    paths += torch.parent.glob("triton/backends/nvidia/driver.*")
    names: set[str] = set()
    for path in filter(Path.exists, paths):
        text = path.read_text(errors="replace")
        names.update(re.findall(r"\b(cu[A-Z]\w+)\s*[(;,]", text))
        names.update(re.findall(r"\b(nvml[A-Z]\w+)\)", text))
        names.update(re.findall(r"#define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+)", text))
    return {name for name in names if not name.startswith(("cuda", "cublas", "cudnn"))}


def _stub(name: str) -> str:
    """Return a stub in C. The calling conventions of x86-64 and aarch64 allow a call with any arguments."""
    if RETURNS_TEXT.search(name):
        return f'API const char *{name}(void) {{ return "null GPU"; }}\n'
    return f"API int {name}(void) {{ return {int(name.startswith(FAIL))}; }}\n"


def _cudnn_version(site: Path) -> int:
    for path in site.glob("nvidia/cudnn/include/cudnn_version*.h"):
        parts = dict(re.findall(r"#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) (\d+)", path.read_text()))
        if len(parts) == 3:
            return int(parts["MAJOR"]) * 10000 + int(parts["MINOR"]) * 100 + int(parts["PATCHLEVEL"])
    return 91900


if __name__ == "__main__":
    print(build(), flush=True)
    if len(sys.argv) > 1:
        os.execvpe(sys.argv[1], sys.argv[1:], environment())
