"""The file that the oracle reads holds what the quantised one holds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from oracle.float_gguf import write_float_gguf

BLOCK_TYPES = [
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q4_1,
    gguf.GGMLQuantizationType.Q8_0,
]


def small_file(path: Path) -> dict[str, np.ndarray]:
    """A file of one tensor a block type and a float32 one; their values by name."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_rope_freq_base(1e5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_token_list(["a", "b", "ü", ""])
    writer.add_token_types([1, 1, 3, 1])
    writer.add_add_bos_token(False)
    norm = random.standard_normal(64).astype(np.float32)
    writer.add_tensor("norm.weight", norm)
    values = {"norm.weight": norm}
    for kind in BLOCK_TYPES:
        blocks = gguf.quants.quantize(random.standard_normal((3, 64)).astype(np.float32), kind)
        writer.add_tensor(f"{kind.name}.weight", blocks, raw_dtype=kind)
        values[f"{kind.name}.weight"] = gguf.quants.dequantize(blocks, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_values_and_metadata_stay(tmp_path: Path) -> None:
    values = small_file(tmp_path / "small.gguf")
    write_float_gguf(tmp_path / "small.gguf", tmp_path / "float.gguf")
    old, new = (gguf.GGUFReader(tmp_path / name) for name in ("small.gguf", "float.gguf"))
    assert [tensor.name for tensor in new.tensors] == list(values)
    for tensor in new.tensors:
        assert tensor.tensor_type is gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(tensor.data, values[tensor.name])
    assert list(new.fields) == list(old.fields)
    for name, field in old.fields.items():
        if name == gguf.Keys.General.FILE_TYPE:
            assert new.fields[name].contents() == gguf.LlamaFileType.ALL_F32
        else:
            assert new.fields[name].contents() == field.contents()
            assert new.fields[name].types == field.types


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_requantised(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    values = small_file(tmp_path / "small.gguf")
    write_float_gguf(tmp_path / "small.gguf", tmp_path / "other.gguf", kind)
    for tensor in gguf.GGUFReader(tmp_path / "other.gguf").tensors:
        expected = values[tensor.name]
        if tensor.name == "norm.weight":
            np.testing.assert_array_equal(tensor.data, expected)
            continue
        assert tensor.tensor_type is kind
        data = gguf.quants.dequantize(tensor.data, kind)
        np.testing.assert_allclose(data, expected, atol=np.abs(expected).max() / 7)
