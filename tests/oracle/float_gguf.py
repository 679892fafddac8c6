"""A quantised GGUF file rewritten in float32: the same weights, no quantised arithmetic.

llama.cpp rounds activations to 8 bits, in groups of 32, wherever a weight is quantised.
That moves a few per cent of the greedy tokens, more than the errors to be measured. On
the very same weights held as float32 it computes in float32 throughout.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

# Written by GGUFWriter itself.
_OWN_FIELDS = frozenset({"general.architecture", "GGUF.version"})


def write_float_gguf(
    source: str | Path,
    target: str | Path,
    block_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Writes `target` with every quantised tensor and all metadata of `source`.

    Tensors that are float32 already (norms, biases) stay as they are. Only one tensor is
    in memory at a time.

    Args:
        block_type: to which quantised tensors are converted: F32 keeps their values
            exactly; another one that `gguf.quants` can write is a new quantisation.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture, endianess=reader.endianess)
    for field in reader.fields.values():
        if field.name in _OWN_FIELDS or field.name.startswith("GGUF."):
            continue
        if field.name == gguf.Keys.General.FILE_TYPE:
            writer.add_file_type(_file_type(block_type))
            continue
        element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        kind = _converted(tensor, block_type)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        size = int(np.prod(gguf.quant_shape_to_byte_shape(shape, kind)))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(_data(tensor, _converted(tensor, block_type)))
    writer.close()


def _file_type(block_type: gguf.GGMLQuantizationType) -> gguf.LlamaFileType:
    prefix = "ALL" if block_type is gguf.GGMLQuantizationType.F32 else "MOSTLY"
    return gguf.LlamaFileType[f"{prefix}_{block_type.name}"]


def _converted(
    tensor: gguf.ReaderTensor, block_type: gguf.GGMLQuantizationType
) -> gguf.GGMLQuantizationType:
    stays = tensor.tensor_type is gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F32 if stays else block_type


def _data(tensor: gguf.ReaderTensor, kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.generic]:
    if tensor.tensor_type is kind:
        return np.asarray(tensor.data)
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return gguf.quants.quantize(values, kind)
