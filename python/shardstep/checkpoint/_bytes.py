"""The memory of tensors, to and from places in files."""

import ctypes
import os

import torch


def content_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which it keeps alive."""
    if tensor.numel() == 0:
        return memoryview(b"")
    buffer = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    buffer.tensor = tensor
    return memoryview(buffer).cast("B")


def write_at(descriptor: int, tensor: torch.Tensor, offset: int) -> None:
    content = content_of(tensor)
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def read_at(descriptor: int, tensor: torch.Tensor, offset: int) -> None:
    """Raises EOFError where the file ends before."""
    content = content_of(tensor)
    while content:
        read = os.preadv(descriptor, [content], offset)
        if read == 0:
            raise EOFError("the file ends in the middle of a tensor")
        content, offset = content[read:], offset + read
