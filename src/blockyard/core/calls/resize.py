"""`resize`: the pool grows or shrinks while sequences run."""

from mypy_extensions import i64

from ...answers import Resize
from ..parts import Parts
from .admission import AdmissionControl


class ResizeCalls:
    """All arrays are made first and then put in place, so that a lack of memory changes nothing."""

    def __init__(self, parts: Parts, admission: AdmissionControl) -> None:
        self.parts = parts
        self.admission = admission

    def resize(self, size: int) -> Resize:
        """Let the pool have `size` blocks."""
        parts = self.parts
        room = parts.kv_pool.make_room(size)
        token_blocks = parts.store.make_room(size)
        watermark = i64(int(parts.config.watermark * size))
        parts.note("resize", "")
        parts.sequences.version += 1
        parts.store.move_into(token_blocks)
        answer = parts.kv_pool.resize(size, room)
        self.admission.watermark = watermark
        return answer
