"""GPUs by name, with the memory available to a CUDA program, which is less than data sheets and `nvidia-smi` show.

Each number was read by a program on such a GPU (`torch.cuda.mem_get_info`, or the total in an error of PyTorch's
allocator) and published at the given address. Drivers differ by some tenths of a GiB.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..arguments import require_str
from ..errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: its name.
        memory_gib: memory available to a program.
        source: where that was published.
        has_links: whether servers connect these GPUs by NVLink or Infinity Fabric, whose libraries allocate buffers.
        has_small_step: whether vLLM computes smaller steps on it than its memory suggests (it excepts the A100 by
            name).
        has_shared_memory: whether its memory is the CPU's too; steps are small there as well.
    """

    name: str
    memory_gib: float
    source: str
    has_links: bool = False
    has_small_step: bool = False
    has_shared_memory: bool = False


_GITHUB = "https://github.com/"
_GPUS = (
    Gpu("a10", 21.99, _GITHUB + "zai-org/CogVLM/issues/236"),
    Gpu("a10g", 22.0, _GITHUB + "huggingface/local-gemma/pull/25"),
    Gpu("a30", 23.53, _GITHUB + "google/RB-Modulation/issues/5"),
    Gpu("a100-40gb", 39.50, _GITHUB + "TianheWu/CoSeR/issues/10", has_links=True, has_small_step=True),
    Gpu("a100-80gb", 79.25, _GITHUB + "HiDream-ai/VAREdit/issues/6", has_links=True, has_small_step=True),
    Gpu("a6000", 47.54, _GITHUB + "google-research/semivl/issues/18"),
    Gpu("b200", 178.35, _GITHUB + "pytorch/ao/pull/4002", has_links=True),
    Gpu(
        "gb10",
        121.69,
        _GITHUB + "MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/47",
        has_small_step=True,
        has_shared_memory=True,
    ),
    Gpu("h20", 95.08, _GITHUB + "sgl-project/sglang/issues/10736", has_links=True),
    Gpu("h100", 79.19, _GITHUB + "llm-d-incubation/llm-d-planner/pull/205", has_links=True),
    Gpu("h200", 139.80, _GITHUB + "aimosprite/slime/tree/main/examples/scaffolding", has_links=True),
    Gpu("l4", 22.03, _GITHUB + "ArcInstitute/evo2/issues/190"),
    Gpu("l40", 44.40, _GITHUB + "QwenLM/Qwen3-VL/issues/2097"),
    Gpu("l40s", 44.42, _GITHUB + "stepfun-ai/Step-Video-T2V/issues/8"),
    # Logs of vLLM say 191.69; the address has the data sheet's 192.
    Gpu("mi300x", 191.69, _GITHUB + "ROCm/legacy-rocm-build/pull/3417", has_links=True),
    Gpu("rtx-3090", 23.58, _GITHUB + "vllm-project/vllm/issues/10517"),
    Gpu("rtx-4090", 23.52, _GITHUB + "Soul-AILab/SoulX-FlashTalk/issues/5"),
    Gpu("rtx-5090", 31.40, _GITHUB + "noonghunna/club-3090/issues/1087"),
    Gpu("rtx-6000-ada", 44.43, _GITHUB + "DINGYANB/MTVCrafter/issues/21"),
    Gpu("rtx-pro-6000", 94.97, _GITHUB + "antirez/ds4/issues/431"),
    Gpu("t4", 14.56, _GITHUB + "Zheng-Chong/CatVTON/issues/133"),
)
_BY_NAME = {gpu.name: gpu for gpu in _GPUS}


def known_gpu(name: str) -> Gpu:
    """Return the GPU of this name; case, and spaces instead of hyphens, do not matter. O(1).

    Raises `InvalidArgument` for an unknown name, with the known ones, similar ones first.
    """
    wanted = "-".join(require_str("name", name).lower().split())
    found = _BY_NAME.get(wanted)
    if found is None:
        close = difflib.get_close_matches(wanted, _BY_NAME, n=3, cutoff=0.5)
        names = dict.fromkeys([*close, *gpu_names()])
        raise InvalidArgument(f"gpu is {name!r}; it must be one of {', '.join(names)}; for others, give the memory")
    return found


def gpu_names() -> list[str]:
    """Return the known names, sorted."""
    return sorted(_BY_NAME)
