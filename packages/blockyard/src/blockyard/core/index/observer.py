"""The interface for code that follows the contents of an index."""

from librt.vecs import vec
from mypy_extensions import i32, i64


class IndexObserver:
    """Receives each change of a `PrefixIndex` after it was made. It must not change the index, nor raise."""

    def indexed(self, blocks: vec[i32], first: i64, last: i64) -> None:
        """Note that `blocks[first:last]`, each under the one before it, are indexed."""
        raise NotImplementedError("IndexObserver must have indexed()")

    def indexed_one(self, block: i64) -> None:
        """Note that a block is indexed."""
        raise NotImplementedError("IndexObserver must have indexed_one()")

    def changed(self, block: i64) -> None:
        """Note that the content of `block` may have become computed, or be represented by a block that is not."""
        raise NotImplementedError("IndexObserver must have changed()")

    def removed(self, content: i64) -> None:
        """Note that no block has this content any longer."""
        raise NotImplementedError("IndexObserver must have removed()")

    def root_made(self, root: i64, keys: tuple[object, ...]) -> None:
        """Note a new root for these extra keys, or for (content, spans)."""
        raise NotImplementedError("IndexObserver must have root_made()")

    def root_lost(self, root: i64) -> None:
        """Note that a root was forgotten."""
        raise NotImplementedError("IndexObserver must have root_lost()")

    def cleared(self) -> None:
        """Note that all contents and roots were removed."""
        raise NotImplementedError("IndexObserver must have cleared()")

    def check(self) -> None:
        """Raise `InvariantError` unless the noted contents agree with the index."""
        raise NotImplementedError("IndexObserver must have check()")
