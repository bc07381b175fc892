"""What a source is made of: samples by number, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Storage(ABC):
    """A run of samples that are read by number: a shard, a part of an image folder. The plan treats it as a shard.

    `url`: what errors and counts call it.  `intact`: False where it breaks off or cannot be read.
    """

    url: str
    intact: bool = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> tuple[str, dict[str, bytes]]:
        """Key of a sample, and its members by extension.

        Raises:
            BadSampleError: this sample cannot be used; the message is the reason under which it is counted.
            DataError: the storage is not what it was.
        """

    def read_ahead(self, first: int, last: int) -> None:  # noqa: B027  a storage that cannot need not
        """Samples first..last-1 come soon."""

    def digest(self) -> str:
        """What the data's fingerprint depends on beside name and length."""
        return ""

    def sampled_hash(self) -> str:
        """What was looked at of the content on the way to the index, hashed; empty where nothing was."""
        return ""

    def content_hash(self) -> str | None:
        """Hash of all of it, where one was recorded; the fingerprint then holds it, too."""
        return None
