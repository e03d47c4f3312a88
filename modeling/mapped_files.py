"""Memory of weights that are mapped from a file, on Linux."""

import ctypes
import mmap
import sys

import torch

MADV_DONTNEED = 4


def let_go_of_pages(tensor: torch.Tensor) -> None:
    """Take a tensor that is mapped from a file, and was copied, out of the process's memory; it stays readable.

    Its pages would stay resident for as long as another tensor of the file is in use, that is, as long as the model.
    Does nothing to a tensor that is not mapped from a file, whose values would be lost, nor on other systems.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and _is_mapped_from_a_file(start, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def _is_mapped_from_a_file(start: int, end: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
            first, last = (int(address, 16) for address in addresses.split("-"))
            if first <= start and end <= last:
                return inode != "0"
    return False
